"""Models that compute embeddings of texts, and do not generate."""

from partition.architectures.table import ASSERTED
from quant.gguf.file import GgufFile


def generates(file: GgufFile) -> bool:
    """Return whether the model generates text: each token attends only to tokens before it."""
    row = ASSERTED.get(file.architecture)
    causal = file.metadata.get(f"{file.architecture}.attention.causal", True)
    return (row is None or row.generates) and causal is not False
