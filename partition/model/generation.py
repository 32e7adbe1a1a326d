"""Kinds of models by their use: text generation, embeddings of texts, or ranking of documents."""

from partition.architectures.table import ASSERTED
from quant.gguf.file import GgufFile

_RANK = 4  # llama.cpp's pooling type of models whose head computes a score


def generates(file: GgufFile) -> bool:
    """Return whether the model generates text, that is, whether each token attends only to earlier tokens."""
    row = ASSERTED.get(file.architecture)
    causal = file.metadata.get(f"{file.architecture}.attention.causal", True)
    return (row is None or row.generates) and causal is not False


def reranks(file: GgufFile) -> bool:
    """Return whether the model has a head that scores a document for a query."""
    ranks = file.metadata.get(f"{file.architecture}.pooling_type") == _RANK
    return ranks and any(f"cls.{name}weight" in file.tensors for name in ("", "output."))
