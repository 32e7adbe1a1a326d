"""Prefill placements that may be the best next to some decode placement.

With c chunks, p seconds of prefill, t seconds to transfer the KV cache to the owner, and f seconds from the owner to
the decode placement, the time to first token without the last row (`cost.pair_ttft_s`) is

    max(p, t, f) (1 - 1/c) + (p + t + f) / c

So only max(p, t) and p + t of a prefill placement matter, and its bytes on devices short of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from partition.predict import cost
from partition.search.best import Best, Solution
from partition.search.fits import Fits
from partition.search.planner import Planner
from partition.search.problem import Array, Outdone, one_stage, several_stages
from partition.search.search import Prepared

OutdoneOf = Callable[[int], Outdone]  # maps the number of chunks to an `Outdone`


class Prefills:
    """Non-dominated prefill placements with the same number of chunks."""

    def __init__(self, solutions: Sequence[Solution], chunks: int, n_bytes: Array) -> None:
        """solutions: solutions with objectives max(p, t) and p + t.
        n_bytes: bytes on each device whose memory counts, [devices, N].
        """
        self._solutions, self._chunks, self._n_bytes = solutions, chunks, n_bytes
        self._longest_s, self._sum_s = np.array([solution.objectives[:2] for solution in solutions]).T
        alone_s = soonest_s(self._longest_s, self._sum_s, chunks)
        # Placements with max(p, t) below f.
        self._shorter = Fits(self._sum_s / chunks, np.array([self._longest_s, *self._n_bytes]))
        self._longer = Fits(alone_s, np.array([-self._longest_s, *self._n_bytes]))

    def least_s(self, from_owner_s: Array, free: Array) -> Array:
        """Return the least time to first token next to each of N decode placements, without its row: [N], inf if none
        fits.

        from_owner_s: seconds to transfer the KV cache from the owner, [N].
        free: free bytes on each device whose memory counts, [devices, N].
        """
        shorter = self._shorter.least(np.array([from_owner_s, *free])) + from_owner_s * (1 - 1 / self._chunks)
        longer = self._longer.least(np.array([-from_owner_s, *free]))
        least: Array = np.minimum(shorter, longer) + from_owner_s / self._chunks
        return least

    def best(self, from_owner_s: float, free: Array) -> tuple[float, Solution]:
        """Return (least time, its placement) next to one decode placement."""
        longest_s = np.maximum(self._longest_s, from_owner_s)
        seconds = soonest_s(longest_s, self._sum_s + from_owner_s, self._chunks)
        seconds[(self._n_bytes > free[:, None]).any(axis=0)] = np.inf
        first = int(np.argmin(seconds))
        return float(seconds[first]), self._solutions[first]


def soonest_s(longest_s: Array, sum_s: Array, chunks: int) -> Array:
    """Return the time to first token, without its row. longest_s: longest of p, t and f. sum_s: their sum."""
    seconds: Array = longest_s * (1 - 1 / chunks) + sum_s / chunks
    return seconds


def held_of(solutions: Sequence[Solution], devices: int) -> Array:
    """Return the bytes of solutions of `Planner.half_problem` on its devices: [devices, N]."""
    measures = np.array([solution.measures for solution in solutions]).T
    return np.asarray(measures[len(measures) - devices :], float)


class PrefillTable:
    """Prefill placements with any number of chunks."""

    def __init__(self, kinds: Sequence[Prefills], exact: bool) -> None:
        self._kinds, self.exact = kinds, exact

    def least_s(self, from_owner_s: Array, free: Array) -> Array:
        """Return the same as `Prefills.least_s`."""
        least = np.full(len(from_owner_s), np.inf)
        for kind in self._kinds:
            np.minimum(least, kind.least_s(from_owner_s, free), out=least)
        return least

    def best(self, from_owner_s: float, free: Array) -> tuple[float, Solution] | None:
        """Return the same as `Prefills.best`, or None if none fits."""
        best = min((kind.best(from_owner_s, free) for kind in self._kinds), key=lambda pair: pair[0], default=None)
        return None if best is None or np.isinf(best[0]) else best


class PrefillSearch:
    """Search for prefill placements that may use all available memory."""

    def __init__(self, planner: Planner, devices: Sequence[int] = ()) -> None:
        """planner: a planner for prefill.
        devices: indices of devices whose bytes count.
        """
        self._devices, prompt = len(devices), planner.work.prompt
        problem = planner.half_problem(("ttft",), 1, devices)

        def objectives(values: Array) -> Array:
            prompt_s, to_owner_s, *n_bytes = problem.objectives(values)
            return np.array([np.maximum(prompt_s, to_owner_s), prompt_s + to_owner_s, *n_bytes])

        self._objectives = objectives
        self._kinds = [  # a single stage has fewer chunks than several
            (cost.chunks(prompt, stages), Prepared(kind, devices), Best())
            for stages, kind in ((1, one_stage(problem)), (2, several_stages(problem)))
        ]

    def table(self, beam: int | None, outdone_of: OutdoneOf | None = None, *, only_quick: bool = False) -> PrefillTable:
        """Return the prefill placements that are not outdone; all of them if `beam` is None.

        only_quick: return some of them, but fast.
        """
        exact, kinds = True, []
        for chunks, prepared, best in self._kinds:
            outdone = None if outdone_of is None else outdone_of(chunks)
            front = prepared.front(self._objectives, outdone=outdone, beam=beam, best=best, only_quick=only_quick)
            exact &= front.exact
            if front.solutions:
                kinds.append(Prefills(front.solutions, chunks, held_of(front.solutions, self._devices)))
        return PrefillTable(kinds, exact)
