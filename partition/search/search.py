"""The best ways to run layers or blocks in a row on devices: every non-dominated one, for any costs.

The problem is abstract, numbers only. A solution is a sequence of groups of devices, no device twice, and the cuts
0 = c0 < c1 < ... < ck = n between their stages:

    sums  = enter of the first group + its stages' sums + hops between them + leave of the last
    peaks = the largest of the same, measure by measure

and `objectives` of both are what is to be small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from partition.search.best import Best, Solution
from partition.search.bounds import Bounds
from partition.search.labels import Search, cases_of
from partition.search.problem import Array, Objectives, Outdone, Problem
from partition.search.tables import Tables

QUICK_BEAM = 48  # labels kept at each position by the run that finds solutions to measure others by
QUICK_EACH = 4  # of each case of measures that have cases, by another one
QUICK_EACH_BEAM = 1000  # and at most


@dataclass(frozen=True)
class Front:
    """The non-dominated solutions, by the first objective. Not `exact`: labels were left out, and there may be better.

    Empty: nothing is possible or, where it is not exact, nothing was found.
    """

    solutions: tuple[Solution, ...]
    exact: bool


class Prepared:
    """A problem with what its searches have in common: they may differ in objectives, caps and `outdone`."""

    def __init__(self, problem: Problem, devices: Sequence[int] = ()) -> None:
        """devices: numbers of those whose bytes are the last peaks, which are bounded case by case, as `cases_of`.
        PlanError for a device with a number above 63."""
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
        """Return the front as `front` does, by other objectives, with other caps and `outdone`. None: the problem's
        objectives; no caps; none is outdone. best: solutions that are known, to which all are added. only_quick: do
        only the runs that find such."""
        if self._tables is None or self._bounds is None:
            return Front((), True)
        tables, bounds, best = self._tables, self._bounds, best or Best()
        tables.objectives_of = objectives or self._problem.objectives
        tables.caps, tables.outdone = caps, outdone
        # Solutions found quickly make the bounds of the last run worth having.
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


def front(problem: Problem, *, beam: int | None = None) -> Front:
    """Return all non-dominated solutions; of those with equal objectives, the one with the fewest devices.
    Deterministic.

    `beam`: how many partial solutions are kept for each position; None: all that can lead to a better one, which makes
    the front exact. Memory is bounded: at most `labels.MAX_LABELS` are kept in any case, and a problem that needs more
    is answered as with a beam of that width. Objectives are compared, and given, to 12 digits. PlanError for a device
    with a number above 63.
    """
    return Prepared(problem).front(caps=problem.caps, beam=beam)
