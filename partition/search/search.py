"""Search for all non-dominated ways to run a sequence of layers on devices, for arbitrary costs.

The problem consists of numbers only. A solution is a sequence of disjoint groups of devices, and the cuts 0 = c0 < c1 <
... < ck = n between their stages:

    sums  = enter of the first group + sums of its stages + hops between them + leave of the last group
    peaks = the maximum of the same, for each measure

The search minimizes `objectives`, which are functions of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partition.search.best import Best, Solution
from partition.search.bounds import Bounds
from partition.search.labels import Search, cases_of
from partition.search.problem import Array, Objectives, Outdone, Problem
from partition.search.tables import Tables

QUICK_BEAM = 48  # beam width of the first run, whose solutions prune later runs
QUICK_EACH = 4  # labels per case in the second run, if there are cases
QUICK_EACH_BEAM = 1000  # beam width of the second run


@dataclass(frozen=True)
class Front:
    """Non-dominated solutions, sorted by the first objective. If not `exact`, labels were dropped, and better solutions
    may exist.

    An empty front means that nothing is possible, or, if not exact, that nothing was found.
    """

    solutions: tuple[Solution, ...]
    exact: bool


class Prepared:
    """A problem with tables that several searches share. The searches may differ in objectives, caps and `outdone`."""

    def __init__(self, problem: Problem, devices: Sequence[int] = ()) -> None:
        """devices: indices of devices whose bytes are the last peaks; they are bounded by cases, see `cases_of`.

        Raises PlanError for a device index above 63.
        """
        self._problem = problem
        self._tables = Tables(problem) if problem.groups else None
        self._bounds = None if self._tables is None else Bounds(self._tables)
        self._cases = [] if self._tables is None else cases_of(self._tables, devices)

    def front(
        self,
        objectives: Objectives | None = None,
        *,
        caps: Array | None = None,
        outdone: Outdone | None = None,
        beam: int | None = None,
        best: Best | None = None,
        only_quick: bool = False,
    ) -> Front:
        """Return the front as the function `front` does.

        objectives: objectives to use; None: those of the problem.
        caps: largest allowed costs; None: no limits.
        outdone: marks unwanted objectives; None: all are wanted.
        best: known solutions; new ones are added to them.
        only_quick: only do the quick runs.
        """
        if self._tables is None or self._bounds is None:
            return Front((), True)
        tables, bounds, best = self._tables, self._bounds, best or Best()
        tables.objectives_of = objectives or self._problem.objectives
        tables.caps, tables.outdone = caps, outdone
        # Quickly found solutions make the last run prune well.
        quick: list[tuple[int, int | None]] = []
        if not best.solutions:
            quick = [(QUICK_BEAM, None), *([(QUICK_EACH_BEAM, QUICK_EACH)] if self._cases else [])]
        worth = [run for run in quick if beam is None or run[0] < beam]
        exact = False
        for most, each in worth if only_quick else [*worth, (beam, None)]:
            exact = Search(tables, bounds, best, most, self._cases, each).run()
            if exact:
                break
        return Front(tuple(best.solutions), exact)


def front(problem: Problem, *, beam: int | None = None, outdone: Outdone | None = None) -> Front:
    """Return all non-dominated solutions. Of equal objectives, the solution with the fewest devices counts. The result
    is deterministic.

    beam: partial solutions kept for each position; None: all that can lead to a better solution, which makes the front
        exact. Memory is limited: at most `labels.MAX_LABELS` are kept in any case, and a larger problem is solved with
        this beam width.
    outdone: marks unwanted objectives; None: all are wanted.

    Objectives are rounded to 12 digits. Raises PlanError for a device index above 63.
    """
    return Prepared(problem).front(caps=problem.caps, outdone=outdone, beam=beam)
