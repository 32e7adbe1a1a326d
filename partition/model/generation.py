"""Models that compute embeddings of texts or ranks of documents, and those that do not generate."""

from partition.architectures.table import ASSERTED
from quant.gguf.file import GgufFile

_RANK = 4  # way of llama.cpp to pool: a score by a head


def generates(file: GgufFile) -> bool:
    """Return whether the model generates text: each token attends only to tokens before it."""
    row = ASSERTED.get(file.architecture)
    causal = file.metadata.get(f"{file.architecture}.attention.causal", True)
    return (row is None or row.generates) and causal is not False


def reranks(file: GgufFile) -> bool:
    """Return whether the model has a head that scores a document for a query."""
    ranks = file.metadata.get(f"{file.architecture}.pooling_type") == _RANK
    return ranks and any(f"cls.{name}weight" in file.tensors for name in ("", "output."))
