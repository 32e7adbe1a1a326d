"""Lower bounds of the cost of the remaining layers, measure by measure, on the devices that are still free."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from partition.search.tables import MAX_DEVICES, Tables

Array = NDArray[np.float64]
MAX_CELLS = 30_000_000  # additions and comparisons that filling in the tables may take: some tenths of a second
SIZES = 128  # of peaks, evenly spread by their logarithm


class Bounds:
    """Lower bounds of every measure on its own, from position i to n, with the devices of a set U free.

        start[U, g, i] = min over j > i of  stage g on [i, j)  joined with  rest[U - g, j];  leave of g for j = n
        rest[U, i]     = min over g in U of  the cheapest hop to g at i  joined with  start[U, g, i]

    With many devices U counts only the `tracked` ones; the others are taken as free for ever, which is still a bound.
    Then there is one more for each peak, by what devices can hold without a higher one: blocks have weights w, and

        load[d, t] = max over the groups g of device d, and stages [i, j) with a peak of at most t, of
                     w[i, j) / members of g
        the peak from i on is above t    where the free devices' load[d, t] together are less than w[i, n)

    and one more for all measures: the last stage, with the head, is on some group of free devices.
    """

    def __init__(self, tables: Tables) -> None:
        n, stage = tables.n, tables.stage
        groups = len(tables.masks)
        self._adding = tables.adding
        self._masks = tables.masks
        self._lasts = tables.join(stage[:, :, :-1, -1].min(axis=2), tables.leave)  # [D, G]
        self.tracked = _tracked(tables)
        inside = self.index(tables.masks)  # tracked members of each group
        sets = 1 << len(self.tracked)
        free = (np.arange(sets)[:, None] & inside) == 0
        free[1:, ~_later(tables)] = False
        used, group = np.nonzero(free)
        after = used | inside[group]
        self.row = np.full((sets, groups), -1)  # where to find (tracked devices in use, group)
        self.row[used, group] = np.arange(len(used))
        self.start = np.full((len(stage), len(used), n + 1), np.inf)
        self.rest = np.full((len(stage), sets, n + 1), np.inf)
        self._loads = None if len(self.tracked) == len(_speeds(tables)) else _Loads(tables)
        hop = np.full((len(stage), groups, n + 1), np.inf)
        for g in range(groups):
            hop[:, g] = tables.hop[:, tables.hop_row[:-1, g]].min(axis=1)
        owners, firsts = np.unique(used, return_index=True)
        k = tables.adding
        for i in range(n - 1, -1, -1):
            cost = stage[:, group, i, i + 1 :]
            ahead = self.rest[:, after, i + 1 :]
            ahead[:, :, -1] = tables.leave[:, group]
            np.add(cost[:k], ahead[:k], out=cost[:k])
            np.maximum(cost[k:], ahead[k:], out=cost[k:])
            self.start[:, :, i] = cost.min(axis=2)
            via = tables.join(hop[:, group, i], self.start[:, :, i])
            self.rest[:, owners, i] = np.minimum.reduceat(via, firsts, axis=1)

    def least(self, masks: NDArray[np.uint64], i: int) -> Array:
        """Return a lower bound of each measure from position i on, with the devices of `masks` in use: [D, N]."""
        different, places = np.unique(masks, return_inverse=True)
        result: Array = self.rest[:, self.index(different), i]
        if self._loads is not None:
            free = (different[:, None] & self._masks) == 0
            lasts = np.where(free, self._lasts[:, None, :], np.inf).min(axis=2)
            np.maximum(result, lasts, out=result)
            np.maximum(result[self._adding :], self._loads.peaks(different, i), out=result[self._adding :])
        return result[:, places]

    def index(self, masks: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The sets of devices in use, as the numbers of the rows of `rest`."""
        result = np.zeros(masks.shape, np.int64)
        for bit, device in enumerate(self.tracked):
            result |= ((masks >> np.uint64(device)) & np.uint64(1)).astype(np.int64) << bit
        return result


def _later(tables: Tables) -> NDArray[np.bool_]:
    """The groups that can come after another."""
    result: NDArray[np.bool_] = np.any(tables.hop_row[:-1] > 0, axis=0)
    return result


def _speeds(tables: Tables) -> dict[int, float]:
    """The devices that later stages can use, and what they take for one block at the least."""
    costs = np.diagonal(tables.stage[0], 1, axis1=1, axis2=2).min(axis=1)
    speeds: dict[int, float] = {}
    for g in np.flatnonzero(_later(tables)).tolist():
        for device in _members(tables, g):
            speeds[device] = min(speeds.get(device, np.inf), float(costs[g]))
    return speeds


def _tracked(tables: Tables) -> list[int]:
    """The devices that the sets count: all of those that later stages can use, or as many of the fastest as can be."""
    speeds, later = _speeds(tables), _later(tables)
    order = sorted(speeds, key=lambda device: (speeds[device], device))

    def cells(tracked: list[int]) -> float:
        outside = [len(set(tracked) - set(_members(tables, g))) if later[g] else 0 for g in range(len(later))]
        return len(tables.stage) * sum(1 << count for count in outside) * tables.n**2 / 2

    count = len(order)
    while count and cells(order[:count]) > MAX_CELLS:
        count -= 1
    return sorted(order[:count])


class _Loads:
    """The bound by what devices can hold, for `SIZES` values of t."""

    def __init__(self, tables: Tables) -> None:
        peaks = tables.stage[tables.adding :]  # [P, G, n+1, n+1]
        blocks = np.diagonal(peaks, 1, axis1=2, axis2=3).min(axis=1)  # [P, n]: any weights do; these are near the work
        done = np.cumsum(np.pad(np.where(np.isfinite(blocks), blocks, 0.0), ((0, 0), (1, 0))), axis=1)
        self._left = (done[:, -1:] - done) * (1 - 1e-9)  # [P, n+1]: less what sums are off by
        start, stop = np.triu_indices(tables.n + 1, 1)
        self._sizes: list[Array] = []
        self._load = np.zeros((len(peaks), MAX_DEVICES, SIZES))
        for p, groups in enumerate(peaks[:, :, start, stop]):
            finite = groups[np.isfinite(groups) & (groups > 0)]
            self._sizes.append(np.geomspace(finite.min(initial=1.0), finite.max(initial=1.0), SIZES))
            for g, costs in enumerate(groups):
                order = np.argsort(costs)
                most = np.maximum.accumulate(np.append(0.0, (done[p, stop] - done[p, start])[order]))
                devices = _members(tables, g)
                load = most[np.searchsorted(costs[order], self._sizes[p], side="right")] / len(devices)
                self._load[p, devices] = np.maximum(self._load[p, devices], load)

    def peaks(self, masks: NDArray[np.uint64], i: int) -> Array:
        """Return a lower bound of each peak from position i on, with the devices of `masks` in use: [P, N]."""
        free = (masks[:, None] >> np.arange(MAX_DEVICES, dtype=np.uint64)) & np.uint64(1) == 0
        result = np.zeros((len(self._load), len(masks)))
        for p, load in enumerate(self._load):
            too_small = ((free @ load) < self._left[p, i]).sum(axis=1)
            result[p] = np.append(0.0, self._sizes[p])[too_small]
        return result


def _members(tables: Tables, group: int) -> list[int]:
    """The devices of a group."""
    mask = int(tables.masks[group])
    return [device for device in range(mask.bit_length()) if mask >> device & 1]
