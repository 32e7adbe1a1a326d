"""Guesses from the text itself: what came the last time the same few tokens stood there."""

from __future__ import annotations

from collections.abc import Sequence

LENGTHS = (4, 3, 2)  # tokens that must be the same, the longest first; one alone says too little


class NgramDrafts:
    """What followed the last tokens where they stood before, in the prompt or in the answer."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # of each run of tokens: the place behind the last one before now

    def begin(self, prompt: Sequence[int]) -> None:
        """Forget what was, and take in a prompt."""
        self._tokens, self._ends = [], {}
        self.extend(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in tokens that follow. The run that ends the text is not among those that were seen before."""
        for token in tokens:
            end = len(self._tokens)
            for length in LENGTHS:
                if end >= length:
                    self._ends[tuple(self._tokens[end - length :])] = end
            self._tokens.append(token)

    def draft(self, n: int, assumed: Sequence[int] = ()) -> list[int]:
        """At most `n` tokens behind the text and then `assumed`; none where the last ones are new together."""
        last = [*self._tokens[-LENGTHS[0] :], *assumed]
        n_tokens = len(self._tokens) + len(assumed)
        for length in LENGTHS:
            end = self._ends.get(tuple(last[-length:])) if n_tokens > length else None
            if end is not None:
                return self._repeated(end, n, assumed)
        return []

    def _repeated(self, place: int, n: int, assumed: Sequence[int]) -> list[int]:
        """`n` tokens from a place on; what ends before goes round again."""
        following = [*self._tokens[place : place + n], *assumed]
        return [following[i % len(following)] for i in range(n)]
