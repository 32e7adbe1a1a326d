"""Embeddings and reranking: the hidden states of a text, pooled to one vector or to a score."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edge.errors import ContextFull, EmptyPrompt, EngineError
from edge.llama.llama import Model
from edge.llama.pooled import PooledContext

MOST_TOKENS = 2048  # maximum tokens of a text, which is computed in one pass


class Embedder:
    """Embeds and scores texts with a loaded model, in separate contexts."""

    def __init__(self, model: Model, context: int, threads: int) -> None:
        """context: maximum context in tokens, at most the trained context."""
        self.most_tokens = min(context, MOST_TOKENS)
        self._model, self._threads = model, threads
        self._contexts: dict[bool, PooledContext] = {}  # by `ranks`; created on first use, because they take memory

    def embed(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the embedding [n_embd] of a text, normalized to length 1.

        Raises ContextFull if the text is empty or too long, and EngineError if the model cannot embed.
        """
        vector = self._pooled(tokens, ranks=False)
        return vector / max(float(np.linalg.norm(vector)), 1e-12)

    def score(self, tokens: Sequence[int]) -> float:
        """Return the output of the ranking head for a text. Raises the errors of `embed`, also if there is no head."""
        score = float(self._pooled(tokens, ranks=True)[0])
        if not math.isfinite(score):
            raise EngineError(f"the model's ranking head returned {score} instead of a finite score")
        return score

    def check(self, tokens: Sequence[int]) -> None:
        """Raise ContextFull if a text is empty or too long."""
        if not 0 < len(tokens) <= self.most_tokens:
            kind = ContextFull if tokens else EmptyPrompt
            raise kind(f"a text to embed or score has 1 to {self.most_tokens} tokens, this one {len(tokens)}")

    def _pooled(self, tokens: Sequence[int], *, ranks: bool) -> NDArray[np.float32]:
        self.check(tokens)
        if ranks not in self._contexts:
            self._contexts[ranks] = PooledContext(self._model, self.most_tokens, self._threads, ranks=ranks)
        return self._contexts[ranks].pooled(tokens)

    def close(self) -> None:
        """Free the contexts."""
        for context in self._contexts.values():
            context.close()
