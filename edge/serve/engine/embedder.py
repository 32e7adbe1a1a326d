"""Embeddings: a model's hidden states of a text, pooled to one vector."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edge.errors import ContextFull
from edge.llama.llama import Model
from edge.llama.pooled import PooledContext

MOST_TOKENS = 2048  # of a text; they are computed in one pass


class Embedder:
    """Embeds texts with a loaded model, in a context of its own."""

    def __init__(self, model: Model, context: int, threads: int) -> None:
        """context: tokens that the model was trained for, or fewer."""
        self.most_tokens = min(context, MOST_TOKENS)
        self._model, self._threads = model, threads
        self._context: PooledContext | None = None  # made for the first text, because it takes memory

    def embed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the embedding [n_embd] of a text, of length 1. ContextFull if it is empty or too long; EngineError if
        the model cannot embed."""
        if not 0 < len(tokens) <= self.most_tokens:
            raise ContextFull(f"a text to embed has 1 to {self.most_tokens} tokens, this one {len(tokens)}")
        if self._context is None:
            self._context = PooledContext(self._model, self.most_tokens, self._threads)
        vector = self._context.pooled(tokens)
        return vector / max(float(np.linalg.norm(vector)), 1e-12)

    def close(self) -> None:
        """Free the context."""
        if self._context is not None:
            self._context.close()
