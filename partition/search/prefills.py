"""Placements for prompts: those that may be the best one beside a placement that generates.

With c chunks, p seconds of the prompt, t of its keys and values to the owner and f from there to the placement that
generates, the first token takes, without its row (`cost.pair_ttft_s`)

    max(p, t, f) (1 - 1/c) + (p + t + f) / c

so of a placement for prompts only max(p, t) and p + t count, and what it holds where memory is short.
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

OutdoneOf = Callable[[int], Outdone]  # of the number of chunks


class Prefills:
    """Placements for prompts of one number of chunks, none better than another in all that counts."""

    def __init__(self, solutions: Sequence[Solution], chunks: int, n_bytes: Array) -> None:
        """solutions: with objectives max(p, t) and p + t. n_bytes: bytes on each device that counts, [devices, N]."""
        self._solutions, self._chunks, self._n_bytes = solutions, chunks, n_bytes
        self._longest_s, self._sum_s = np.array([solution.objectives[:2] for solution in solutions]).T
        alone_s = soonest_s(self._longest_s, self._sum_s, chunks)
        self._shorter = Fits(self._sum_s / chunks, np.array([self._longest_s, *self._n_bytes]))  # than the way back
        self._longer = Fits(alone_s, np.array([-self._longest_s, *self._n_bytes]))

    def least_s(self, from_owner_s: Array, free: Array) -> Array:
        """Return the least time to the first token, without its row, beside each of N placements that generate: [N],
        inf without room. from_owner_s: [N]. free: bytes left on each device that counts, [devices, N]."""
        shorter = self._shorter.least(np.array([from_owner_s, *free])) + from_owner_s * (1 - 1 / self._chunks)
        longer = self._longer.least(np.array([-from_owner_s, *free]))
        least: Array = np.minimum(shorter, longer) + from_owner_s / self._chunks
        return least

    def best(self, from_owner_s: float, free: Array) -> tuple[float, Solution]:
        """Return the placement with the least time beside one that generates, and that time."""
        longest_s = np.maximum(self._longest_s, from_owner_s)
        seconds = soonest_s(longest_s, self._sum_s + from_owner_s, self._chunks)
        seconds[(self._n_bytes > free[:, None]).any(axis=0)] = np.inf
        first = int(np.argmin(seconds))
        return float(seconds[first]), self._solutions[first]


def soonest_s(longest_s: Array, sum_s: Array, chunks: int) -> Array:
    """Return the time to the first token, without its row, of parts with this longest one and this sum."""
    seconds: Array = longest_s * (1 - 1 / chunks) + sum_s / chunks
    return seconds


def held_of(solutions: Sequence[Solution], devices: int) -> Array:
    """Return the bytes that solutions of `Planner.half_problem` hold on its devices: [devices, N]."""
    measures = np.array([solution.measures for solution in solutions]).T
    return np.asarray(measures[len(measures) - devices :], float)


class PrefillTable:
    """Placements for prompts of any number of chunks."""

    def __init__(self, kinds: Sequence[Prefills], exact: bool) -> None:
        self._kinds, self.exact = kinds, exact

    def least_s(self, from_owner_s: Array, free: Array) -> Array:
        """Return the same as `Prefills.least_s`."""
        least = np.full(len(from_owner_s), np.inf)
        for kind in self._kinds:
            np.minimum(least, kind.least_s(from_owner_s, free), out=least)
        return least

    def best(self, from_owner_s: float, free: Array) -> tuple[float, Solution] | None:
        """Return the same as `Prefills.best`; None without room for any."""
        best = min((kind.best(from_owner_s, free) for kind in self._kinds), key=lambda pair: pair[0], default=None)
        return None if best is None or np.isinf(best[0]) else best


class PrefillSearch:
    """Search for placements for prompts on all memory there is."""

    def __init__(self, planner: Planner, devices: Sequence[int] = ()) -> None:
        """planner: one for prompts. devices: numbers of those whose bytes count."""
        self._devices, prompt = len(devices), planner.work.prompt
        problem = planner.half_problem(("ttft",), 1, devices)

        def objectives(values: Array) -> Array:
            prompt_s, to_owner_s, *n_bytes = problem.objectives(values)
            return np.array([np.maximum(prompt_s, to_owner_s), prompt_s + to_owner_s, *n_bytes])

        self._objectives = objectives
        self._kinds = [  # one stage alone has fewer chunks than several
            (cost.chunks(prompt, stages), Prepared(kind, devices), Best())
            for stages, kind in ((1, one_stage(problem)), (2, several_stages(problem)))
        ]

    def table(self, beam: int | None, outdone_of: OutdoneOf | None = None, *, only_quick: bool = False) -> PrefillTable:
        """Return those that are not outdone, all of them where `beam` is None. only_quick: some, and soon."""
        exact, kinds = True, []
        for chunks, prepared, best in self._kinds:
            outdone = None if outdone_of is None else outdone_of(chunks)
            front = prepared.front(self._objectives, outdone=outdone, beam=beam, best=best, only_quick=only_quick)
            exact &= front.exact
            if front.solutions:
                kinds.append(Prefills(front.solutions, chunks, held_of(front.solutions, self._devices)))
        return PrefillTable(kinds, exact)
