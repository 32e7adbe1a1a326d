"""When a request moves between two placements of a model while it is answered, with its keys and values.

The choice knows no clock and no device: loads are measured where they are. A placement with one request more takes as
many times longer for a token as it has more requests, at most. So whoever moved has no reason to move back.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from partition.predict.hysteresis import MIGRATION, clearly_better

LEAST_TOKENS = 32  # of an answer between two of its moves
HEADROOM = 32  # tokens: each answer has room for so many more before another request joins, which else soon waits again
_GAPS = 16  # the last ones count
_LEAST_GAPS = 4  # fewer say nothing


class Pace:
    """Measured time between two tokens of an answer: the median of the last gaps."""

    def __init__(self) -> None:
        self._gaps_s: deque[float] = deque(maxlen=_GAPS)

    def add(self, gap_s: float) -> None:
        """Note a gap."""
        self._gaps_s.append(gap_s)

    def clear(self) -> None:
        """Forget all gaps, because other requests share the steps now."""
        self._gaps_s.clear()

    @property
    def token_s(self) -> float | None:
        """Seconds; None: too few gaps were measured."""
        return statistics.median(self._gaps_s) if len(self._gaps_s) >= _LEAST_GAPS else None


@dataclass(frozen=True)
class PlacementLoad:
    """Load of a placement that answers requests."""

    requests: int  # that it answers
    token_s: float | None  # seconds between two tokens of an answer, with these requests; None: not measured
    room: int = 0  # tokens that another request may have there; 0: all slots are in use
    waiting: int = 0  # requests and prompts that come before another request

    def has_room(self, n_tokens: int) -> bool:
        """Return whether it can take a request with so many tokens now."""
        return not self.waiting and n_tokens + HEADROOM <= self.room

    @property
    def next_token_s(self) -> float | None:
        """Seconds between two tokens with one request more, at most; None: not measured."""
        return None if self.token_s is None else self.token_s * (self.requests + 1) / max(1, self.requests)


@dataclass(frozen=True)
class Migration:
    """A request that may move to another placement."""

    number: int  # of the request
    n_tokens: int  # of its history
    left: int  # tokens that its answer is expected to get
    since_move: int  # tokens of its answer since it moved; LEAST_TOKENS: it did not
    copy_s: float | None  # seconds that its keys and values take to the other placement; None: not measured

    def saved_s(self, source: PlacementLoad, target: PlacementLoad) -> float:
        """Seconds by which its answer is complete sooner, after the copy and one pass there; 0 or less: it stays."""
        before, after = source.token_s, target.next_token_s
        if before is None or after is None or self.copy_s is None or self.since_move < LEAST_TOKENS:
            return 0.0
        if not target.has_room(self.n_tokens) or not clearly_better(after, before, by=MIGRATION):
            return 0.0
        return self.left * (before - after) - self.copy_s - after


def best(migrations: Iterable[Migration], source: PlacementLoad, target: PlacementLoad) -> Migration | None:
    """Return the migration that saves most; None where all stay."""
    saved = ((migration.saved_s(source, target), -migration.number, migration) for migration in migrations)
    most = max(saved, default=None, key=lambda pair: pair[:2])
    return most[2] if most is not None and most[0] > 0 else None
