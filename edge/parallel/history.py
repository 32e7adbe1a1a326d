"""What the sequences of an engine hold, as tokens, so that another engine can be brought to hold the same."""

from __future__ import annotations

from collections.abc import Sequence

from edge.errors import EngineError

UNKNOWN = -1  # a token whose keys and values came from elsewhere


class History:
    """The token at each position of each sequence. The operations are those of `Engine`, with the same arguments."""

    def __init__(self) -> None:
        self._tokens: dict[int, dict[int, int]] = {}

    def add(self, sequence: int, start: int, tokens: Sequence[int]) -> None:
        """Tokens at start, start + 1, ... of a sequence."""
        held = self._tokens.setdefault(sequence, {})
        held.update(zip(range(start, start + len(tokens)), map(int, tokens), strict=True))

    def remove(self, sequence: int, start: int, end: int = -1) -> None:
        """Positions [start, end) are forgotten; -1: to the end."""
        held = self._tokens.get(sequence, {})
        self._tokens[sequence] = {at: token for at, token in held.items() if not _inside(at, start, end)}

    def copy(self, source: int, target: int, start: int = 0, end: int = -1) -> None:
        """`target` holds positions [start, end) of `source`, too."""
        held = self._tokens.get(source, {})
        shared = {at: token for at, token in held.items() if _inside(at, start, end)}
        self._tokens[target] = {**self._tokens.get(target, {}), **shared}

    def shift(self, sequence: int, start: int, end: int, delta: int) -> None:
        """Positions [start, end) are others by `delta`."""
        held = self._tokens.get(sequence, {})
        self._tokens[sequence] = {at + delta * _inside(at, start, end): token for at, token in held.items()}

    def clear(self) -> None:
        """Nothing is held."""
        self._tokens.clear()

    def sequences(self) -> dict[int, list[int]]:
        """The tokens of each sequence that holds any, from position 0 on. EngineError where there are gaps, or tokens
        that are not known."""
        found = {}
        for sequence, held in sorted(self._tokens.items()):
            tokens = [held[at] for at in sorted(held)]
            if sorted(held) != list(range(len(held))) or UNKNOWN in tokens:
                raise EngineError("what a sequence held is not known token by token, so it cannot be computed again")
            if tokens:
                found[sequence] = tokens
        return found


def _inside(position: int, start: int, end: int) -> bool:
    return start <= position and (end < 0 or position < end)
