"""Label-setting search: extend partial solutions position by position, and drop those that cannot improve the
result.
"""

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
MAX_LABELS = 100_000  # labels kept at a position; before pruning, up to twice as many wait there
_TINY = 1e-12  # avoids the logarithm of 0
_CELLS = 1_000_000  # candidates evaluated together
_BITS = np.array([value.bit_count() for value in range(256)])
_NEIGHBOURS = 24  # preceding labels to compare with each label; a larger number finds few more dominated ones


@dataclass(frozen=True)
class Labels:
    """Partial solutions for [0, i): their measures, used devices and predecessors."""

    values: Array  # [D, N]
    masks: NDArray[np.uint64]
    last: Numbers  # group of the last stage; -1: no stage yet
    came_at: Numbers  # position of the predecessor
    came_from: Numbers  # index of the predecessor at this position

    def __len__(self) -> int:
        return len(self.last)

    def take(self, which: Numbers | NDArray[np.bool_]) -> Labels:
        """Return a selection of the labels, in the given order."""
        values = self.values[:, which]
        return Labels(values, self.masks[which], self.last[which], self.came_at[which], self.came_from[which])


@dataclass(frozen=True)
class Cases:
    """Tighter bound for a device that a label does not use yet: either it stays unused, or it will be used.

    Bounds treat each measure separately. For the bytes on a device, the plain bound would assume the full speed of the
    device with none of its bytes. So two cases are distinguished: without the device, or with at least some bytes. If
    both bounds are dominated, the label is pruned.
    """

    measure: int
    device: np.uint64  # bit of the device
    least: float  # smallest non-zero value of the measure


def cases_of(tables: Tables, devices: Sequence[int]) -> list[Cases]:
    """Return the cases for the last measures, one per device: peaks that only groups with this device have."""
    result = []
    for measure, device in enumerate(devices, len(tables.stage) - len(devices)):
        values = np.where(np.isfinite(tables.stage).all(axis=0), tables.stage[measure], 0.0)
        if (values > 0).any():
            result.append(Cases(measure, np.uint64(1 << device), float(values[values > 0].min())))
    return result


class Search:
    """Label-setting search: one run over all positions.

    A label at position i is extended by every group of free devices to every later position. A label is dropped if its
    measures plus the bounds of the rest are no better than a known solution. It is also dropped if another label with
    the same last group and a subset of the devices costs no more.
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
        """Prepare a run that adds solutions to `best`.

        beam: largest number of labels at each position.
        each: largest number of labels with equal values of all measures in `cases`.
        """
        self._cases, self._each = cases, each
        self.tables = tables
        self.bounds = bounds
        self.best = best
        self.most = min(beam or MAX_LABELS, MAX_LABELS)
        self.exact = True  # False once a label was dropped that could have been better
        self.reached: list[list[Labels]] = [[] for _ in range(tables.n)]
        self.labels: list[Labels] = []  # by position

    def run(self) -> bool:
        """Run the search. Return True if it was exact; then `best` is the whole front."""
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
        """Add labels that end at position i."""
        if i == self.tables.n:
            self._complete(labels)
            return
        self.reached[i].append(labels)
        if sum(map(len, self.reached[i])) > 2 * MAX_LABELS:
            self.reached[i] = [self._pruned(i)]

    def _pruned(self, i: int) -> Labels:
        """Return the labels at position i that are worth extending."""
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
        """Return which labels are promising in some case, for each case measure that is still 0."""
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
        """Return which labels can still lead to a solution better than the known ones."""
        return self._hopeful(self.tables.join(labels.values, rest), _count(labels.masks) + 1)

    def _hopeful(self, values: Array, devices: Numbers) -> Numbers:
        """Return which bounds of whole solutions are not dominated. values: measures [D, N]."""
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
        """Yield the extensions of the labels at position i, with the position where each ends."""
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
        """Extend labels by one more stage from position i to every later position.

        before: indices of the labels.
        group: group of the new stage.
        values: measures of the labels, including the hop.
        """
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
        """Add the complete labels to the known solutions."""
        labels = labels.take(self._hopeful(labels.values, _count(labels.masks)))
        objectives = self.tables.objectives(labels.values)
        devices = _count(labels.masks)
        best: list[int] = []
        # A dominating label comes before the labels that it dominates.
        for k in np.lexsort([devices, *objectives[::-1]]).tolist():
            if not no_worse(objectives[:, best], objectives[:, k, None]).any():
                best.append(k)
        self.best.add([self._solution(labels, objectives[:, k], k) for k in best])

    def _solution(self, labels: Labels, objectives: Array, k: int) -> Solution:
        """Return the complete label `k` as a solution."""
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
        """Return which labels are not dominated by another one. Some dominated labels may remain.

        rest: lower bounds of the rest.
        """
        # A peak below the bound of the rest does not matter, so it is raised to this bound.
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
        """Return the most promising labels, up to a limit for each combination of values of the case measures."""
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
        """Return the most promising labels by several weightings of the objectives, or all labels if there are few."""
        if len(labels) <= self.most:
            return np.arange(len(labels))
        self.exact = False
        scale = np.log(self.tables.objectives(self.tables.join(labels.values, rest)) + _TINY)
        # If a later peak decides, many labels look equal. Then the bounds of the rest break ties.
        ties = 0.01 * np.log(rest + _TINY).sum(axis=0)
        chosen: set[int] = set()
        weights = _weights(len(scale))
        for weight in weights:
            score = weight @ scale + ties
            chosen |= set(np.argsort(score, kind="stable")[: max(1, self.most // len(weights))].tolist())
        return np.array(sorted(chosen), np.int64)


def _count(masks: NDArray[np.uint64]) -> Numbers:
    """Return the number of bits of each mask."""
    result: Numbers = _BITS[np.ascontiguousarray(masks).view(np.uint8).reshape(-1, 8)].sum(axis=1)
    return result


def _not_after(labels: Labels, most: Array, order: Numbers) -> NDArray[np.bool_]:
    """Return which labels, in this order, are not dominated by one of the few labels before them."""
    alive = np.ones(len(order), bool)
    masks, last, values, most = labels.masks[order], labels.last[order], labels.values[:, order], most[:, order]
    for step in range(1, min(_NEIGHBOURS, len(order))):
        a, b = slice(None, -step), slice(step, None)
        alive[b] &= ~((last[a] == last[b]) & ((masks[a] & ~masks[b]) == 0) & no_worse(values[:, a], most[:, b]))
    return alive


def _weights(k: int) -> list[Array]:
    """Return evenly spread weightings of `k` objectives, each with sum 1."""
    steps = (1, 8, 4, 3)[min(k, 4) - 1]
    parts = product(range(steps + 1), repeat=k)
    return [np.array(each) / steps for each in parts if sum(each) == steps]
