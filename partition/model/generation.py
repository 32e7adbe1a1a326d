"""Models that make vectors of texts, and do not go on with them."""

from quant.gguf.file import GgufFile

# Encoders, and models that fill in a whole text at once: llama.cpp keeps no keys and values for them, and stops the
# process where they are asked for the next token.
_WITHOUT_NEXT = frozenset((
    "bert", "dream", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "llada", "llada-moe", "modern-bert",
    "neo-bert", "nomic-bert", "nomic-bert-moe", "rnd1", "t5encoder",
))  # fmt: skip


def generates(file: GgufFile) -> bool:
    """Return whether the model generates text: each token attends only to tokens before it."""
    causal = file.metadata.get(f"{file.architecture}.attention.causal", True)
    return file.architecture not in _WITHOUT_NEXT and causal is not False
