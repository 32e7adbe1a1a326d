"""Clusters that devices of some kinds can form, the cheapest first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from math import comb

from partition.errors import PlanError

MOST_CLUSTERS = 1_000_000
_DIGITS = 9  # costs are compared to so many decimals: the order in which they are added does not matter

Members = tuple[int, ...]  # the kind of each device, ascending: (0, 0, 2) is two of the first kind and one of the third
Cost = tuple[float, ...]


def clusters(costs: Sequence[Cost], most: Sequence[int], size: int) -> Iterator[Members]:
    """Yield every cluster of 1 to `size` devices, in the order of its cost, and of equals those of the first kinds.

    costs: of a device of each kind, none below 0. A cluster's are their sums, compared in order. most: devices that
    there are of each kind. PlanError for more than MOST_CLUSTERS clusters.
    """
    if comb(len(costs) + size, size) > MOST_CLUSTERS:
        raise PlanError(
            f"{len(costs)} kinds form more than {MOST_CLUSTERS:,} clusters of up to {size} devices; use fewer kinds, or"
            " fewer devices"
        )
    heap: list[tuple[Cost, Members]] = [(cost, (kind,)) for kind, cost in enumerate(costs)]
    heapq.heapify(heap)
    while heap:
        cost, members = heapq.heappop(heap)
        yield members
        if len(members) == size:
            continue
        for kind in range(members[-1], len(costs)):  # so that each cluster is made once
            if members.count(kind) < most[kind]:
                more = tuple(round(a + b, _DIGITS) for a, b in zip(cost, costs[kind], strict=True))
                heapq.heappush(heap, (more, (*members, kind)))
