"""Guesses from a smaller model with the same vocabulary, on this device or on a worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edge.errors import EngineError
from edge.llm.interface import Guesser
from quant.gguf.file import GgufFile
from quant.gguf.header import GgufArray

_VOCABULARY = ("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens")


class ModelDrafts:
    """What a smaller model finds the likeliest."""

    free = False

    def __init__(self, guesser: Guesser) -> None:
        """guesser: of a model with the vocabulary of the one that checks."""
        self._guesser = guesser
        self._tokens: list[int] = []

    def begin(self, prompt: Sequence[int]) -> None:
        """Forget what was, and take in a prompt. Nothing is computed before a guess is asked for."""
        self._tokens = list(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in tokens that follow."""
        self._tokens.extend(tokens)

    def draft(self, n: int, assumed: Sequence[int] = ()) -> list[int]:
        """`n` tokens behind the text and then `assumed`, each the likeliest; fewer where the context is too small for
        so many, or the device that guesses is lost."""
        context = self._guesser.context
        n = min(n, context // 2)
        tokens = [*self._tokens, *assumed]
        if n < 1 or not tokens:
            return []
        # Of a long text half a context at a time is left out, so that the rest is seldom computed again.
        half = (context + 1) // 2
        beyond = len(tokens) + n - context
        first = half * (-(-beyond // half)) if beyond > 0 else 0
        return self._guesser.propose(tokens[first:], n)


def check_vocabulary(target: GgufFile, draft: GgufFile) -> None:
    """EngineError, with where they part, unless both models have the same tokens."""
    for key in _VOCABULARY:
        ours, theirs = (_plain(file.metadata.get(key)) for file in (target, draft))
        if ours != theirs:
            raise EngineError(
                f"{draft.path.name} cannot guess for {target.path.name}, as its tokens are others:"
                f" {_difference(key, ours, theirs)}; use a smaller model of the same family, or --draft ngram"
            )


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, GgufArray) else value


def _difference(key: str, ours: Any, theirs: Any) -> str:
    if not (isinstance(ours, tuple) and isinstance(theirs, tuple)):
        return f"{key} is {theirs!r:.60} there and {ours!r:.60} here"
    if len(ours) != len(theirs):
        return f"it has {len(theirs)}, and {len(ours)} are needed"
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    return f"token {at} is {theirs[at]!r:.60} there and {ours[at]!r:.60} here"
