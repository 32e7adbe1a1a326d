"""Lower bounds on the cost of the remaining layers on the free devices, for each measure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from partition.search.tables import MAX_DEVICES, Tables

Array = NDArray[np.float64]
MAX_CELLS = 30_000_000  # limit on table cells to fill, which takes some tenths of a second
SIZES = 128  # number of peak values, in geometric steps


class Bounds:
    """Lower bounds of each measure from position i to n, if the devices of a set U are free.

        start[U, g, i] = min over j > i of stage g on [i, j) joined with rest[U - g, j], or with leave of g for j = n
        rest[U, i]     = min over g in U of the cheapest hop to g at i joined with start[U, g, i]

    With many devices, U contains only the `tracked` ones. The others count as free forever, so the result is still a
    bound. Then there are two additional bounds. The first one limits each peak by the load that devices can take.
    Layers have weights w:

        load[d, t] = max over groups g of device d, and stages [i, j) with a peak of at most t, of
                     w[i, j) / members of g
        The peak from i on exceeds t if the loads [d, t] of the free devices add up to less than w[i, n).

    The second one applies to all measures: the last stage, with the head, is on some group of free devices.
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
        self.row = np.full((sets, groups), -1)  # row of (set of used tracked devices, group) in `start`
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
        """Return a lower bound of each measure from position i on: [D, N]. masks: devices in use, [N]."""
        different, places = np.unique(masks, return_inverse=True)
        result: Array = self.rest[:, self.index(different), i]
        if self._loads is not None:
            free = (different[:, None] & self._masks) == 0
            lasts = np.where(free, self._lasts[:, None, :], np.inf).min(axis=2)
            np.maximum(result, lasts, out=result)
            np.maximum(result[self._adding :], self._loads.peaks(different, i), out=result[self._adding :])
        return result[:, places]

    def index(self, masks: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the row numbers of `rest` for sets of used devices."""
        result = np.zeros(masks.shape, np.int64)
        for bit, device in enumerate(self.tracked):
            result |= ((masks >> np.uint64(device)) & np.uint64(1)).astype(np.int64) << bit
        return result


def _later(tables: Tables) -> NDArray[np.bool_]:
    """Return which groups can come after another group."""
    result: NDArray[np.bool_] = np.any(tables.hop_row[:-1] > 0, axis=0)
    return result


def _speeds(tables: Tables) -> dict[int, float]:
    """Return the devices that later stages can use, each with its least cost of one layer."""
    costs = np.diagonal(tables.stage[0], 1, axis1=1, axis2=2).min(axis=1)
    speeds: dict[int, float] = {}
    for g in np.flatnonzero(_later(tables)).tolist():
        for device in _members(tables, g):
            speeds[device] = min(speeds.get(device, np.inf), float(costs[g]))
    return speeds


def _tracked(tables: Tables) -> list[int]:
    """Return the devices that the sets track: all that later stages can use, or as many of the fastest as the limit
    allows.
    """
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
    """Bound by the load that devices can take, for `SIZES` peak values t."""

    def __init__(self, tables: Tables) -> None:
        peaks = tables.stage[tables.adding :]  # [P, G, n+1, n+1]
        # [P, n]: any weights are valid; these are close to the real work.
        blocks = np.diagonal(peaks, 1, axis1=2, axis2=3).min(axis=1)
        done = np.cumsum(np.pad(np.where(np.isfinite(blocks), blocks, 0.0), ((0, 0), (1, 0))), axis=1)
        self._left = (done[:, -1:] - done) * (1 - 1e-9)  # [P, n+1]; reduced by possible rounding errors
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
        """Return a lower bound of each peak from position i on: [P, N]. masks: devices in use, [N]."""
        free = (masks[:, None] >> np.arange(MAX_DEVICES, dtype=np.uint64)) & np.uint64(1) == 0
        result = np.zeros((len(self._load), len(masks)))
        for p, load in enumerate(self._load):
            too_small = ((free @ load) < self._left[p, i]).sum(axis=1)
            result[p] = np.append(0.0, self._sizes[p])[too_small]
        return result


def _members(tables: Tables, group: int) -> list[int]:
    """Return the devices of a group."""
    mask = int(tables.masks[group])
    return [device for device in range(mask.bit_length()) if mask >> device & 1]
