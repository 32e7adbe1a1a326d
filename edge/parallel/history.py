"""What the sequences of an engine hold, as tokens, so that another engine can be brought to hold the same; and what was
done to them, so that it can be done again."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.constraints.constraint import Mask
from edge.errors import EngineError
from edge.llm.interface import TextEngine

UNKNOWN = -1  # a token whose keys and values came from elsewhere


class History:
    """The token at each position of each sequence. The operations are those of `Engine`, with the same arguments."""

    def __init__(self) -> None:
        self._tokens: dict[int, dict[int, int]] = {}
        self._starts: dict[int, set[int]] = {}  # by sequence: the first position of each step

    def add(self, sequence: int, start: int, tokens: Sequence[int]) -> None:
        """Tokens at start, start + 1, ... of a sequence, which one step computed."""
        self._starts.setdefault(sequence, set()).add(start)
        held = self._tokens.setdefault(sequence, {})
        held.update(zip(range(start, start + len(tokens)), map(int, tokens), strict=True))

    def remove(self, sequence: int, start: int, end: int = -1) -> None:
        """Positions [start, end) are forgotten; -1: to the end."""
        held = self._tokens.get(sequence, {})
        self._tokens[sequence] = {at: token for at, token in held.items() if not _inside(at, start, end)}
        self._starts[sequence] = {at for at in self._starts.get(sequence, ()) if not _inside(at, start, end)}

    def copy(self, source: int, target: int, start: int = 0, end: int = -1) -> None:
        """`target` holds positions [start, end) of `source`, too."""
        held = self._tokens.get(source, {})
        shared = {at: token for at, token in held.items() if _inside(at, start, end)}
        self._tokens[target] = {**self._tokens.get(target, {}), **shared}
        starts = {at for at in self._starts.get(source, ()) if _inside(at, start, end)}
        self._starts[target] = self._starts.get(target, set()) | starts

    def shift(self, sequence: int, start: int, end: int, delta: int) -> None:
        """Positions [start, end) are others by `delta`."""
        held = self._tokens.get(sequence, {})
        self._tokens[sequence] = {at + delta * _inside(at, start, end): token for at, token in held.items()}
        starts = self._starts.get(sequence, ())
        self._starts[sequence] = {at + delta * _inside(at, start, end) for at in starts}

    def clear(self) -> None:
        """Nothing is held."""
        self._tokens.clear()
        self._starts.clear()

    def copied(self) -> History:
        """Another one that holds the same."""
        other = History()
        other._tokens = {sequence: dict(held) for sequence, held in self._tokens.items()}
        other._starts = {sequence: set(starts) for sequence, starts in self._starts.items()}
        return other

    def step_at(self, sequence: int, position: int) -> tuple[int, int | None]:
        """The positions [start, end) of the step that computed this one; end: None for the last step."""
        starts = sorted(self._starts.get(sequence, ()))
        after = bisect_right(starts, position)
        return starts[after - 1] if after else 0, starts[after] if after < len(starts) else None

    @contextmanager
    def step(self) -> Iterator[None]:
        """While the engine computes a step, or somebody waits for its logits."""
        yield

    def follow(
        self, engine: TextEngine, ready: Callable[[], None], under_way: int = 0, most_s: float | None = None
    ) -> bool:
        """See to keys and values, too, where anybody does (`edge.parallel.mirror`): whether there may be more.

        ready: called before anything is read, where so many steps are under way. most_s: that it may take while nobody
        asks; None: it is between two steps.
        """
        return False

    def restore(self, engine: TextEngine, sequence: int, tokens: Sequence[int], start: int) -> int:
        """Give a sequence of another engine, which holds the first `start` of these tokens, what is known of the rest:
        how many tokens it holds then."""
        return start

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


@dataclass(frozen=True)
class Rows:
    """A decode of any rows, as `submit` takes it."""

    tokens: NDArray[np.int32]
    positions: NDArray[np.int_]
    sequences: NDArray[np.int_]
    outputs: NDArray[np.int8]
    top: int
    masks: Sequence[Mask | None] = ()

    @property
    def gives(self) -> bool:
        """Whether logits come of it."""
        return bool(self.outputs.any())

    def into(self, history: History) -> None:
        """Do it to a history."""
        breaks = np.flatnonzero((np.diff(self.sequences) != 0) | (np.diff(self.positions) != 1)) + 1
        for rows in np.split(np.arange(len(self.tokens)), breaks):  # of one sequence, at consecutive positions
            first = rows[0]
            history.add(int(self.sequences[first]), int(self.positions[first]), self.tokens[rows].tolist())

    def on(self, engine: TextEngine) -> None:
        """Begin it on an engine."""
        engine.submit(self.tokens, self.positions, self.sequences, self.outputs, top=self.top, masks=self.masks)


@dataclass(frozen=True)
class Change:
    """An operation on the KV cache."""

    name: str  # of the method of History; that of TextEngine has "kv_" before it
    arguments: tuple[int, ...] = ()
    gives: bool = False  # logits

    def into(self, history: History) -> None:
        """Do it to a history."""
        getattr(history, self.name)(*self.arguments)

    def on(self, engine: TextEngine) -> Any:
        """Do it to an engine: what that says."""
        return getattr(engine, f"kv_{self.name}")(*self.arguments)


def _inside(position: int, start: int, end: int) -> bool:
    return start <= position and (end < 0 or position < end)
