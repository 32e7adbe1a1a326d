"""Search for pairs of placements: placement P prefills, placement D decodes.

The P are searched first, together with their bytes on each device that is short of memory. The time to first token is
then an objective of D like others. It grows with D's step time, with D's link from the owner, and with D's bytes on
those devices, because they leave less room for P.

If bytes count, there are many P, and most of them suit no D. So the D are first searched by their own objectives and
bytes alone. Paired with P from a quick run, they give a bound: a P is dropped if no pair with it can beat the pairs
known so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partition.search.best import Solution
from partition.search.fits import Fits
from partition.search.planner import Planner
from partition.search.prefills import PrefillSearch, PrefillTable, held_of, soonest_s
from partition.search.problem import Array, Objectives, Outdone
from partition.search.search import Prepared
from partition.search.tables import rounded


@dataclass(frozen=True)
class Pair:
    """A decode placement, with the prefill placement that gives the earliest first token next to it."""

    decode: Solution
    microbatches: int
    prefill: Solution
    values: tuple[float, ...]  # objectives, in the order of names passed to `PairSearch`


@dataclass(frozen=True)
class _Decodes:
    """Decode placements with a given number of microbatches in flight."""

    microbatches: int
    prepared: Prepared
    objectives: Objectives  # returns `PairSearch._decode_names`, the transfer time of the KV cache, and bytes


class PairSearch:
    """Search for pairs. Memory is checked on given devices only, as if the others had memory for any pair."""

    def __init__(
        self,
        planner: Planner,
        for_prompts: Planner,
        rooms: Sequence[float],
        devices: Sequence[int],
        names: Sequence[str],
        caps: Sequence[float],
    ) -> None:
        """planner, for_prompts: planners for decode and for prefill placements.
        rooms: available bytes of all devices.
        devices: indices of devices whose bytes count.
        names: objectives; the last one is ttft. "memory" is that of the decode placement.
        caps: largest allowed costs.
        """
        self._names, self._caps = tuple(names), np.array(caps, float)
        self._rooms = np.array([rooms[i] for i in devices], float)
        self._beam = planner.beam(of_memory=False)
        self._prefills = PrefillSearch(for_prompts, devices)
        self._decode_names = tuple(dict.fromkeys(("latency", *names[:-1])))
        self._own = [self._decode_names.index(name) for name in names[:-1]]
        self._decodes = []
        for n_groups in planner.microbatches:
            problem = planner.half_problem(self._decode_names, n_groups, devices)
            self._decodes.append(_Decodes(n_groups, Prepared(problem, devices), problem.objectives))
        self._pairs: list[Pair] = []
        self.exact = True

    def run(self) -> list[Pair]:
        """Return pairs, including all non-dominated ones."""
        table = self._table()
        self.exact &= table.exact
        for decodes in self._decodes:

            def objectives(values: Array, decodes: _Decodes = decodes) -> Array:
                own, from_owner_s, n_bytes = self._split(decodes.objectives(values))
                return self._with_ttft(own, from_owner_s, n_bytes, table)

            front = decodes.prepared.front(objectives, caps=self._caps, outdone=self._outdone(), beam=self._beam)
            self.exact &= front.exact
            self._add(decodes, front.solutions, table)
        return self._pairs

    def _table(self) -> PrefillTable:
        """Return the prefill placements that may be useful."""
        # The prefill placement with the least memory is not determined.
        if not len(self._rooms) or "memory" in self._names:
            return self._prefills.table(self._beam)
        fronts = []
        for decodes in self._decodes:

            def objectives(values: Array, decodes: _Decodes = decodes) -> Array:
                own, _, n_bytes = self._split(decodes.objectives(values))
                return np.concatenate([own, n_bytes])

            front = decodes.prepared.front(objectives, beam=self._beam)
            self.exact &= front.exact
            if front.solutions:
                fronts.append((decodes, front.solutions))
        quick = self._prefills.table(self._beam, only_quick=True)
        for decodes, solutions in fronts:
            self._add(decodes, solutions, quick)
        alone = [solution for _, solutions in fronts for solution in solutions]
        if not alone:
            return PrefillTable((), self.exact)
        n_bytes = np.round(held_of(alone, len(self._rooms)))
        values = np.array([solution.objectives for solution in alone]).T
        least = [Fits(row, n_bytes) for row in values[: len(self._decode_names)]]
        outdone = self._outdone()

        def outdone_of(chunks: int) -> Outdone:
            def outdone_prefills(objectives: Array) -> NDArray[np.bool_]:
                longest_s, sum_s, *needs = objectives
                own = np.array([fits.least(self._rooms[:, None] - np.array(needs)) for fits in least])
                ttft_s = own[0] + soonest_s(longest_s, sum_s, chunks)
                values = np.array([*own[self._own], ttft_s])
                return outdone(values) | (values > self._caps[:, None]).any(axis=0)

            return outdone_prefills

        table = self._prefills.table(self._beam, outdone_of)
        for decodes, solutions in fronts:
            self._add(decodes, solutions, table)
        return table

    def _split(self, objectives: Array) -> tuple[Array, Array, Array]:
        """Split objectives of decode placements into (own objectives, transfer time of the KV cache, bytes)."""
        count = len(self._decode_names)
        return objectives[:count], objectives[count], objectives[count + 1 :]

    def _with_ttft(self, own: Array, from_owner_s: Array, n_bytes: Array, table: PrefillTable) -> Array:
        """Return the objectives of pairs with these decode placements: [names, N]; inf if no prefill placement fits."""
        ttft_s = own[0] + table.least_s(from_owner_s, self._rooms[:, None] - np.round(n_bytes))
        return np.array([*own[self._own], ttft_s])

    def _add(self, decodes: _Decodes, solutions: Sequence[Solution], table: PrefillTable) -> None:
        """Add pairs with these decode placements, unless a known pair is as good."""
        if not solutions:
            return
        measures = np.array([solution.measures for solution in solutions]).T
        own, from_owner_s, n_bytes = self._split(decodes.objectives(measures))
        values = rounded(self._with_ttft(own, from_owner_s, n_bytes, table))
        for i in np.lexsort(values[::-1]):
            if (values[:, i] > self._caps).any() or self._outdone()(values[:, [i]])[0]:
                continue
            best = table.best(float(from_owner_s[i]), self._rooms - np.round(n_bytes[:, i]))
            assert best is not None
            self._pairs.append(Pair(solutions[i], decodes.microbatches, best[1], tuple(values[:, i].tolist())))

    def _outdone(self) -> Outdone:
        """Return a function that marks objectives if a known pair is as good, or if no pair can have them."""
        known = None
        if self._pairs and "memory" not in self._names:
            values = np.array([pair.values for pair in self._pairs]).T
            known = Fits(values[-1], values[:-1])

        def outdone(objectives: Array) -> NDArray[np.bool_]:
            never: NDArray[np.bool_] = np.isinf(objectives[-1])
            return never if known is None else never | (known.least(objectives[:-1]) <= objectives[-1])

        return outdone
