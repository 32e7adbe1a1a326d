"""What something takes, measured in short pieces that are spread over time: the best of them counts.

Other work only slows a computation down. So the best piece is nearest to what the device can do, and where no other
comes near it, or something else had the processor even then, the figure is marked: it was measured while busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from devices.busy import Watch
from devices.probe import cpu_quota

PIECE_S = 0.03  # of a piece, at least
_QUOTA_PIECE_S = 0.25  # with a CPU quota: many of its periods, which let single steps pass as if there were none
_PIECES = 4  # of each kind, at least
_MOST_PIECES = 8  # of a kind that is not sure yet
_MOST_S = 3.0  # of a kind; then it has as many pieces as it has, two at least
_LOST = 0.05  # of a piece: more, and something else had the processor
_NEAR = 1.1  # times the best: another undisturbed piece within that confirms it


@dataclass(frozen=True)
class Figure:
    """What one step takes."""

    seconds: float
    busy: bool  # something else kept the processor busy: it may take less

    def or_better(self, other: Figure) -> Figure:
        """Of two figures of the same, measured at different times: the better. Busy only where both are."""
        return Figure(min(self.seconds, other.seconds), self.busy and other.busy)


@dataclass(frozen=True)
class TimedTask:
    """Something to be timed again and again."""

    step: Callable[[], None]
    prepare: Callable[[], None] = lambda: None  # before each piece, not counted


def piece_s(threads: int) -> float:
    """How long a piece is to be, on so many threads."""
    quota = cpu_quota()
    return PIECE_S if quota is None or quota >= threads else _QUOTA_PIECE_S


def best_of(
    kinds: Sequence[TimedTask],
    least_s: float = PIECE_S,
    *,
    least_steps: int = 1,
    pieces: int = _PIECES,
    clock: Callable[[], float] | None = None,
    watch: Callable[[], Callable[[], float]] = lambda: Watch().lost_s,
) -> list[Figure]:
    """Seconds of a step of each kind, in the same order: of the best piece, the mean.

    All kinds have a piece before any has the next, so that a burst of other work meets few of one kind. A piece takes
    least_s and has least_steps at least; the first, and those of short steps, come after one that warms up. There are
    `pieces` of each, and more until the best is sure; of one piece that is wanted nothing can be confirmed. watch:
    makes what tells the seconds lost to others since then.
    """
    clock = clock or time.perf_counter
    took: list[list[tuple[float, bool]]] = [[] for _ in kinds]
    spent = [0.0] * len(kinds)
    for number in range(pieces if pieces == 1 else max(pieces, _MOST_PIECES)):
        for i, kind in enumerate(kinds):
            if number >= 2 and spent[i] >= _MOST_S:
                continue
            if number >= pieces and not _figure(took[i]).busy:
                continue
            kind.prepare()
            if not took[i] or took[i][-1][0] < least_s:  # of a long step little is warming up
                kind.step()
            lost = watch()
            began, steps = clock(), 0
            while (seconds := clock() - began) < least_s or steps < least_steps:
                kind.step()
                steps += 1
            took[i].append((seconds / steps, lost() > _LOST * seconds))
            spent[i] += seconds
    return [_figure(of) for of in took]


def _figure(took: Sequence[tuple[float, bool]]) -> Figure:
    """Of pieces, each with its seconds a step and whether others had the processor."""
    best = min(seconds for seconds, _ in took)
    near = sum(seconds <= _NEAR * best for seconds, busy in took if not busy)
    return Figure(best, near < min(2, len(took)))
