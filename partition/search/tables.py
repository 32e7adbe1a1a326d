"""The costs of a search in one array for each kind, without the groups that can be of no use."""

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
MAX_DEVICES = 64  # a set of devices is the bits of one number


class Tables:
    """Costs by the index of a kept group. Measures are in one axis: those that add up, then those that peak."""

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
        # Devices that are in every group that can be first are in no later one.
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
        # Where to find the hop from a group to a group, 0: none is possible. The last is the source, as a group.
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
        """Join measures [D, ...] of two parts: sums are added, of peaks the larger is taken."""
        k = self.adding
        return np.concatenate([a[:k] + b[:k], np.maximum(a[k:], b[k:])])

    def objectives(self, values: Array) -> Array:
        """Return objectives [K, N] of finite measures [D, N], rounded to 12 digits so that rounding errors compare as
        equal."""
        return rounded(self.objectives_of(values))


def rounded(values: Array) -> Array:
    """Round to 12 significant digits. Monotonic; inf stays inf."""
    with np.errstate(divide="ignore"):
        digits = np.clip(np.floor(np.log10(np.abs(values))), -280.0, 280.0)
    scale = 10.0 ** (11 - digits)
    result: Array = np.round(values * scale) / scale
    return result


class _Costs:
    """A group's costs, and its members as bits."""

    def __init__(self, group: Group) -> None:
        self.mask = sum(1 << member for member in group.members)
        self.stage, self.enter, self.leave = group.stage, group.enter, group.leave
        self.sample = self.stage[:, ::7, -1].ravel()  # of many comparisons it settles most

    def no_worse(self, other: _Costs) -> bool:
        """Return whether it has no members but some of the other's, and takes no more for any stage."""
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
    """The groups without those that another, of some of their members, can replace in any solution at no cost."""
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
