"""Label-setting search: partial solutions, position by position, without those that cannot lead to a better one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product

import numpy as np
from numpy.typing import NDArray

from partition.search.best import Best, Solution, no_worse
from partition.search.bounds import Bounds
from partition.search.tables import Tables

Array = NDArray[np.float64]
Numbers = NDArray[np.int64]
MAX_LABELS = 100_000  # kept at a position; while they wait there, at most twice as many and those just made
_TINY = 1e-12  # the logarithm of 0 is not wanted
_CELLS = 1_000_000  # candidates looked at together
_BITS = np.array([value.bit_count() for value in range(256)])
_NEIGHBOURS = 24  # labels before it that each is compared with; more find little more


@dataclass(frozen=True)
class Labels:
    """Partial solutions [0, i): what they cost so far, which devices they use, and which label each continues."""

    values: Array  # [D, N]
    masks: NDArray[np.uint64]
    last: Numbers  # the group of the last stage; -1: nothing has run
    came_at: Numbers  # the position of the label before
    came_from: Numbers  # and its place there

    def __len__(self) -> int:
        return len(self.last)

    def take(self, which: Numbers | NDArray[np.bool_]) -> Labels:
        """Some of them, or in another order."""
        values = self.values[:, which]
        return Labels(values, self.masks[which], self.last[which], self.came_at[which], self.came_from[which])


@dataclass(frozen=True)
class Cases:
    """A tighter bound of what follows where a device is not used yet: that it will be, or not.

    Bounds take each measure on its own. What a device holds is a measure that only its own groups have. A bound on its
    own has all of the device's speed, and none of its bytes. So there are two cases: without the device, or with some
    bytes. Where neither is hopeful, nothing is.
    """

    measure: int
    device: np.uint64  # as a bit
    least: float  # of the measure, where it is not 0


def cases_of(tables: Tables, devices: Sequence[int]) -> list[Cases]:
    """Return the cases of the last measures, peaks that only groups of these devices have: one for each, by number."""
    result = []
    for measure, device in enumerate(devices, len(tables.stage) - len(devices)):
        values = np.where(np.isfinite(tables.stage).all(axis=0), tables.stage[measure], 0.0)
        if (values > 0).any():
            result.append(Cases(measure, np.uint64(1 << device), float(values[values > 0].min())))
    return result


class Search:
    """Label-setting search: one run over all positions.

    A label at position i is extended by every group of free devices to every later position. It is dropped if its
    measures with the bounds of the rest are no better than a known solution, or if another label with the same last
    group and no further devices costs no more.
    """

    def __init__(
        self,
        tables: Tables,
        bounds: Bounds,
        best: Best,
        beam: int | None,
        cases: Sequence[Cases] = (),
        each: int | None = None,
    ) -> None:
        """Keep at most `beam` labels for each position, and at most `each` with the same values of all measures that
        have cases. Solutions are added to `best`."""
        self._cases, self._each = cases, each
        self.tables = tables
        self.bounds = bounds
        self.best = best
        self.most = min(beam or MAX_LABELS, MAX_LABELS)
        self.exact = True  # nothing was left out that could be better
        self.reached: list[list[Labels]] = [[] for _ in range(tables.n)]
        self.labels: list[Labels] = []  # by position

    def run(self) -> bool:
        """Run the search. Return whether it was exact: then `best` has the whole front."""
        nothing = np.zeros(1, np.int64)
        first = Labels(np.zeros((len(self.tables.stage), 1)), np.zeros(1, np.uint64), nothing - 1, nothing, nothing)
        self.reached[0].append(first)
        for i in range(self.tables.n):
            labels = self._pruned(i)
            self.labels.append(labels)
            for part, ends in self._continued(labels, i):
                order = np.argsort(ends, kind="stable")
                for piece in np.split(order, np.flatnonzero(np.diff(ends[order])) + 1):
                    if len(piece):
                        self._arrive(part.take(piece), int(ends[piece[0]]))
        return self.exact

    def _arrive(self, labels: Labels, i: int) -> None:
        """Add labels that end at i."""
        if i == self.tables.n:
            self._complete(labels)
            return
        self.reached[i].append(labels)
        if sum(map(len, self.reached[i])) > 2 * MAX_LABELS:
            self.reached[i] = [self._pruned(i)]

    def _pruned(self, i: int) -> Labels:
        """The labels that have arrived at position i and are worth continuing."""
        parts, self.reached[i] = self.reached[i], []
        if not parts:
            return self.labels[0].take(np.zeros(0, np.int64))
        labels = Labels(*(np.concatenate([getattr(part, f.name) for part in parts], axis=-1) for f in fields(Labels)))
        if not i:
            return labels
        rest = self.bounds.least(labels.masks, i)
        for choose in (self._promising, self._undominated, self._in_some_case, self._spread, self._beam):
            which = choose(labels, rest, i)
            labels, rest = labels.take(which), rest[:, which]
        return labels

    def _in_some_case(self, labels: Labels, _: Array, i: int) -> Numbers:
        """Return which labels are hopeful in some case of each measure that they have nothing of."""
        alive = np.ones(len(labels), bool)
        for cases in self._cases:
            undecided = np.flatnonzero(alive & (labels.values[cases.measure] == 0))
            for used, least in ((np.uint64(0), cases.least), (cases.device, 0.0)):
                masks = labels.masks[undecided]
                rest = self.bounds.least(masks | used, i)
                np.maximum(rest[cases.measure], least, out=rest[cases.measure])
                hopeful = self._hopeful(self.tables.join(labels.values[:, undecided], rest), _count(masks) + 1)
                undecided = np.delete(undecided, hopeful)
            alive[undecided] = False
        return np.flatnonzero(alive)

    def _promising(self, labels: Labels, rest: Array, _: int) -> Numbers:
        """Return which labels can still lead to better solutions than those known."""
        return self._hopeful(self.tables.join(labels.values, rest), _count(labels.masks) + 1)

    def _hopeful(self, values: Array, devices: Numbers) -> Numbers:
        """Return which of these measures [D, N], bounds of whole solutions, are not dominated yet."""
        places = np.flatnonzero(np.isfinite(values).all(axis=0))
        objectives = self.tables.objectives(values[:, places])
        beaten = self.best.beats(objectives, devices[places])
        if self.tables.caps is not None:
            beaten |= (objectives > self.tables.caps[:, None]).any(axis=0)
        if self.tables.outdone is not None:
            beaten |= self.tables.outdone(objectives)
        result: Numbers = places[~beaten]
        return result

    def _continued(self, labels: Labels, i: int) -> Iterator[tuple[Labels, Numbers]]:
        """The labels that continue those at i, and where each ends."""
        tables, bounds, n = self.tables, self.bounds, self.tables.n
        each = max(1, _CELLS // (len(tables.masks) * 8))
        for begin in range(0, len(labels), each):
            masks = labels.masks[begin : begin + each]
            free = (masks[:, None] & tables.masks) == 0
            before, group = np.nonzero(free & (tables.hop_row[labels.last[begin : begin + each]] > 0))
            before += begin
            values = tables.join(labels.values[:, before], tables.hop[:, tables.hop_row[labels.last[before], group], i])
            row = bounds.row[bounds.index(labels.masks[before]), group]
            devices = _count(labels.masks[before]) + tables.sizes[group]
            pairs = self._hopeful(tables.join(values, bounds.start[:, row, i]), devices)
            step = max(1, _CELLS // (n - i))
            for at in range(0, len(pairs), step):
                which = pairs[at : at + step]
                yield self._stages(labels, before[which], group[which], values[:, which], i)

    def _stages(self, labels: Labels, before: Numbers, group: Numbers, values: Array, i: int) -> tuple[Labels, Numbers]:
        """The labels `before` after one more stage from i on, on `group`, to every end; `values` include the hop."""
        tables, bounds, n = self.tables, self.bounds, self.tables.n
        masks = labels.masks[before] | tables.masks[group]
        ahead = bounds.rest[:, bounds.index(masks), i + 1 :]
        ahead[:, :, -1] = tables.leave[:, group]
        done = tables.join(values[:, :, None], tables.stage[:, group, i, i + 1 :])
        hopes = tables.join(done, ahead).reshape(len(done), -1)
        devices = _count(masks)[:, None] + (np.arange(i + 1, n + 1) < n)
        which = self._hopeful(hopes, devices.ravel())
        pair, end = np.divmod(which, n - i)
        end += i + 1
        done = done.reshape(len(done), -1)[:, which]
        done[:, end == n] = hopes[:, which[end == n]]
        return Labels(done, masks[pair], group[pair], np.full(len(pair), i), before[pair]), end

    def _complete(self, labels: Labels) -> None:
        """Add whole solutions."""
        labels = labels.take(self._hopeful(labels.values, _count(labels.masks)))
        objectives = self.tables.objectives(labels.values)
        devices = _count(labels.masks)
        best: list[int] = []
        for k in np.lexsort([devices, *objectives[::-1]]).tolist():  # whoever beats one comes before it
            if not no_worse(objectives[:, best], objectives[:, k, None]).any():
                best.append(k)
        self.best.add([self._solution(labels, objectives[:, k], k) for k in best])

    def _solution(self, labels: Labels, objectives: Array, k: int) -> Solution:
        """Return label `k`, which is whole, as a solution."""
        groups, cuts = [], [self.tables.n]
        at, place, last = int(labels.came_at[k]), int(labels.came_from[k]), int(labels.last[k])
        while last >= 0:
            groups.append(last)
            cuts.append(at)
            level = self.labels[at]
            at, place, last = int(level.came_at[place]), int(level.came_from[place]), int(level.last[place])
        return Solution(
            groups=tuple(self.tables.useful[group] for group in reversed(groups)),
            cuts=tuple(reversed(cuts)),
            measures=tuple(labels.values[:, k].tolist()),
            objectives=tuple(objectives.tolist()),
            devices=int(labels.masks[k]).bit_count(),
        )

    def _undominated(self, labels: Labels, rest: Array, _: int) -> Numbers:
        """Return which labels no other one dominates; some dominated ones may stay. rest: a lower bound of the rest."""
        # A peak below one that comes in any case is as good as that.
        most = labels.values.copy()
        np.maximum(most[self.tables.adding :], rest[self.tables.adding :], out=most[self.tables.adding :])
        candidates = np.lexsort([_count(labels.masks), *most[::-1], labels.masks, labels.last])
        candidates = candidates[_not_after(labels, most, candidates)]
        order = candidates[
            np.lexsort([_count(labels.masks[candidates]), *most[:, candidates][::-1], labels.last[candidates]])
        ]
        result: Numbers = np.sort(order[_not_after(labels, most, order)])
        return result

    def _spread(self, labels: Labels, rest: Array, _: int) -> Numbers:
        """Return the labels that promise most, so many of each combination of values of the measures with cases."""
        if self._each is None or not len(labels):
            return np.arange(len(labels))
        scale = np.log(self.tables.objectives(self.tables.join(labels.values, rest)) + _TINY)
        values = labels.values[[cases.measure for cases in self._cases]]
        order = np.lexsort([scale.sum(axis=0), *values])
        is_first = np.append(True, (np.diff(values[:, order], axis=1) != 0).any(axis=0))
        begins = np.flatnonzero(is_first)
        places = np.arange(len(order)) - begins[np.cumsum(is_first) - 1]
        self.exact &= bool((places < self._each).all())
        result: Numbers = np.sort(order[places < self._each])
        return result

    def _beam(self, labels: Labels, rest: Array, _: int) -> Numbers:
        """The labels that promise most, by several weightings of the objectives; all, where there is room."""
        if len(labels) <= self.most:
            return np.arange(len(labels))
        self.exact = False
        scale = np.log(self.tables.objectives(self.tables.join(labels.values, rest)) + _TINY)
        # Where a peak behind decides, many promise the same: then, what is left for the devices that are left.
        ties = 0.01 * np.log(rest + _TINY).sum(axis=0)
        chosen: set[int] = set()
        weights = _weights(len(scale))
        for weight in weights:
            score = weight @ scale + ties
            chosen |= set(np.argsort(score, kind="stable")[: max(1, self.most // len(weights))].tolist())
        return np.array(sorted(chosen), np.int64)


def _count(masks: NDArray[np.uint64]) -> Numbers:
    """The bits of each."""
    result: Numbers = _BITS[np.ascontiguousarray(masks).view(np.uint8).reshape(-1, 8)].sum(axis=1)
    return result


def _not_after(labels: Labels, most: Array, order: Numbers) -> NDArray[np.bool_]:
    """Return which labels, in this order, are not dominated by one of the few before them."""
    alive = np.ones(len(order), bool)
    masks, last, values, most = labels.masks[order], labels.last[order], labels.values[:, order], most[:, order]
    for step in range(1, min(_NEIGHBOURS, len(order))):
        a, b = slice(None, -step), slice(step, None)
        alive[b] &= ~((last[a] == last[b]) & ((masks[a] & ~masks[b]) == 0) & no_worse(values[:, a], most[:, b]))
    return alive


def _weights(k: int) -> list[Array]:
    """Weightings of `k` objectives that add up to 1, spread evenly."""
    steps = (1, 8, 4, 3)[min(k, 4) - 1]
    parts = product(range(steps + 1), repeat=k)
    return [np.array(each) / steps for each in parts if sum(each) == steps]
