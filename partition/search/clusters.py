"""Enumerate the clusters that devices of given kinds can form, cheapest first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from math import comb

from partition.errors import PlanError

MOST_CLUSTERS = 1_000_000
_DIGITS = 9  # decimals for the comparison of costs, so that the order of addition does not matter

# Kind of each device, ascending: (0, 0, 2) is two devices of the first kind and one of the third.
Members = tuple[int, ...]
Cost = tuple[float, ...]


def clusters(costs: Sequence[Cost], most: Sequence[int], size: int) -> Iterator[Members]:
    """Yield every cluster of 1 to `size` devices by ascending cost. Of equal costs, lower kinds come first.

    costs: non-negative costs of a device of each kind. The costs of a cluster are sums, compared in order.
    most: number of available devices of each kind.

    Raises PlanError for more than MOST_CLUSTERS clusters.
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
        for kind in range(members[-1], len(costs)):  # ascending kinds, so that each cluster appears once
            if members.count(kind) < most[kind]:
                more = tuple(round(a + b, _DIGITS) for a, b in zip(cost, costs[kind], strict=True))
                heapq.heappush(heap, (more, (*members, kind)))
