"""Costs of a search in arrays, without groups that another group can replace."""

from __future__ import annotations

from functools import reduce
from operator import and_
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from partition.errors import PlanError

if TYPE_CHECKING:
    from partition.search.problem import Group, Outdone, Problem

Array = NDArray[np.float64]
MAX_DEVICES = 64  # a set of devices is a 64-bit mask


class Tables:
    """Costs by the index of a kept group. One axis contains the measures: first sums, then peaks."""

    def __init__(self, problem: Problem) -> None:
        groups = problem.groups
        self.n = problem.n
        self.adding = problem.adding
        self.objectives_of = problem.objectives
        self.caps = problem.caps
        self.outdone: Outdone | None = None
        costs = [_Costs(group) for group in groups]
        if any(group.mask >> MAX_DEVICES for group in costs):
            raise PlanError(f"the devices of a search are numbered below {MAX_DEVICES}; leave some out")
        # A device in every possible first group cannot be in a later group.
        first = [group.mask for group in costs if np.isfinite(group.enter).all()]
        always = reduce(and_, first, -1)
        hops = {
            (a, b): problem.hop(a, b)
            for a, cost in enumerate(costs)
            for b, other in enumerate(costs)
            if not other.mask & (cost.mask | always)
        }
        self.useful = _useful(costs, hops)
        used = [costs[k] for k in self.useful]
        self.masks = np.array([group.mask for group in used], np.uint64)
        self.sizes = np.array([group.mask.bit_count() for group in used], np.int64)
        self.stage = np.array([group.stage for group in used]).swapaxes(0, 1)  # [D, G, n+1, n+1]
        self.leave = np.array([group.leave for group in used]).T  # [D, G]
        # Row of the hop from group to group in `hop`; 0: impossible. The last row index is the source.
        self.hop_row = np.zeros((len(used) + 1, len(used)), np.int64)
        rows = [np.full((len(self.stage), self.n + 1), np.inf)]
        for b, old_b in enumerate(self.useful):
            for a, old_a in enumerate(self.useful):
                if np.isfinite(hops.get((old_a, old_b), np.inf)).any():
                    self.hop_row[a, b] = len(rows)
                    rows.append(hops[old_a, old_b])
            if np.isfinite(used[b].enter).all():
                self.hop_row[-1, b] = len(rows)
                rows.append(np.repeat(used[b].enter[:, None], self.n + 1, axis=1))
        self.hop = np.array(rows).swapaxes(0, 1)  # [D, rows, n+1]

    def join(self, a: Array, b: Array) -> Array:
        """Join the measures [D, ...] of two parts of a solution: sums are added, and of peaks the larger one counts."""
        k = self.adding
        return np.concatenate([a[:k] + b[:k], np.maximum(a[k:], b[k:])])

    def objectives(self, values: Array) -> Array:
        """Convert finite measures [D, N] to objectives [K, N], rounded to 12 digits so that rounding errors do not
        matter.
        """
        return rounded(self.objectives_of(values))


def rounded(values: Array) -> Array:
    """Round to 12 significant digits. The function is monotonic; inf stays inf."""
    with np.errstate(divide="ignore"):
        digits = np.clip(np.floor(np.log10(np.abs(values))), -280.0, 280.0)
    scale = 10.0 ** (11 - digits)
    result: Array = np.round(values * scale) / scale
    return result


class _Costs:
    """A group's costs, and its members as a bit mask."""

    def __init__(self, group: Group) -> None:
        self.mask = sum(1 << member for member in group.members)
        self.stage, self.enter, self.leave = group.stage, group.enter, group.leave
        self.sample = self.stage[:, ::7, -1].ravel()  # this sample decides most comparisons

    def no_worse(self, other: _Costs) -> bool:
        """Return True if the group's members are a subset of the other's, and no cost is higher."""
        return self.mask & other.mask == self.mask and all(
            bool((a <= b).all())
            for a, b in (
                (self.sample, other.sample),
                (self.enter, other.enter),
                (self.leave, other.leave),
                (self.stage, other.stage),
            )
        )


def _useful(costs: list[_Costs], hops: dict[tuple[int, int], Array]) -> list[int]:
    """Return the indices of the groups that no group with a subset of their members can replace at the same or
    lower cost.
    """
    useful: list[int] = []

    def replaces(a: int, b: int) -> bool:
        if not costs[a].no_worse(costs[b]):
            return False
        pairs = [((a, c), (b, c)) for c in range(len(costs))] + [((c, a), (c, b)) for c in range(len(costs))]
        return all(bool((hops[own] <= hops[other]).all()) for own, other in pairs if other in hops)

    for b in sorted(range(len(costs)), key=lambda k: (costs[k].mask.bit_count(), k)):
        if not any(replaces(a, b) for a in useful):
            useful.append(b)
    return sorted(useful)
