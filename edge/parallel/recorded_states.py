"""The states of an engine that may be replaced, with a record of what they brought into its sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from edge.llm.interface import CacheOwner, SequenceStates, TextEngine
from edge.parallel.history import UNKNOWN, History
from partition.plan.plan import Range
from partition.state.sequence import KVBlock

T = TypeVar("T")


class RunOnEngine(Protocol):
    """Has an engine do something: what comes of it."""

    def __call__(self, work: Callable[[TextEngine], T]) -> T: ...


class RecordedStates:
    """The states of whatever engine there is, with a record of what they brought into sequences."""

    def __init__(
        self,
        current: Callable[[], TextEngine],
        do: RunOnEngine,
        alone: Callable[[], AbstractContextManager[None]],
        history: History,
    ) -> None:
        """do: has the engine do something, or the one that takes over. alone: while nothing else is asked."""
        self.owner: CacheOwner | None = None
        self._current, self._do, self._alone, self._history = current, do, alone, history
        self._tokens: dict[bytes, list[int]] = {}  # of blocks, by link, of the last prompt

    @property
    def _of(self) -> SequenceStates:
        return self._current().states

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self._of.block

    @property
    def most_read(self) -> int:
        """Tokens that can be read at once."""
        return self._of.most_read

    @property
    def factors(self) -> str:
        """Which factors turn positions."""
        return self._of.factors

    @property
    def keeps(self) -> bool:
        """Whether blocks are kept."""
        return self._of.keeps

    @property
    def problem(self) -> str | None:
        """As `States.problem`."""
        return self._of.problem

    def describe(self) -> str:
        """How much is kept where."""
        return self._of.describe()

    def read(self, sequence: int, positions: Range) -> KVBlock:
        """As `States.read`."""
        return self._do(lambda engine: engine.states.read(sequence, positions))

    def write(self, sequence: int, block: KVBlock) -> None:
        """As `States.write`. Another engine cannot take over then, as nobody knows what was written."""
        with self._alone():
            self._do(lambda engine: engine.states.write(sequence, block))
            self._history.add(sequence, block.positions.start, [UNKNOWN] * len(block.positions))

    def links(self, tokens: Sequence[int], namespace: str = "") -> list[bytes]:
        """As `States.links`."""
        links = self._of.links(tokens, namespace)
        blocks = (list(tokens[i : i + self.block]) for i in range(0, len(tokens), self.block))
        self._tokens = dict(zip(links, blocks, strict=False))
        return links

    def keep(self, sequence: int, start: int, links: Sequence[bytes]) -> None:
        """As `States.keep`."""
        self._do(lambda engine: engine.states.keep(sequence, start, links))

    def kept(self, links: Sequence[bytes]) -> int:
        """As `States.kept`."""
        return self._do(lambda engine: engine.states.kept(links))

    def restore(self, sequence: int, start: int, links: Sequence[bytes]) -> int:
        """As `States.restore`."""
        with self._alone():
            done = self._do(lambda engine: engine.states.restore(sequence, start, links))
            tokens = [token for link in links[:done] for token in self._tokens.get(link, [UNKNOWN] * self.block)]
            self._history.add(sequence, start, tokens)
        return done
