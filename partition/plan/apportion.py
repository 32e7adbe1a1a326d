"""Division of whole units among ranks in proportion to their shares."""

import heapq
from collections.abc import Sequence
from math import isfinite

from partition.errors import PlanError
from partition.plan.plan import MAX_WORLD_SIZE

_LEAST = 1e-6  # least part of the largest share: a rank below it gets the minimum either way


def checked_shares(shares: Sequence[float], ranks: int) -> list[float]:
    """`shares` as parts of the largest. PlanError unless there is a finite one above 0 for each rank."""
    if not 0 < ranks <= MAX_WORLD_SIZE:
        raise PlanError(f"{ranks} ranks; needed are 1 to {MAX_WORLD_SIZE}")
    if len(shares) != ranks:
        raise PlanError(f"{len(shares)} shares for {ranks} ranks; give one for each")
    for rank, share in enumerate(shares):
        if not (isfinite(share) and share > 0):
            raise PlanError(f"the share of rank {rank} is {share}; needed is a number above 0")
    largest = max(shares)
    return [max(share / largest, _LEAST) for share in shares]


def apportion(count: int, shares: Sequence[float]) -> list[int]:
    """Return how many of `count` equal units each rank gets: at least one, and so that the largest units / share is
    minimal.

    A larger share never gets fewer units. Among equals the lower rank gets more. `count` must be at least the number of
    ranks.
    """

    def up_to(level: float) -> list[int]:
        """Return the most units of each rank so that none exceeds `level` times its share; at least one."""
        return [max(1, int(level * share)) for share in shares]

    low, high = 0.0, count / min(shares)
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(up_to(middle)) <= count else (low, middle)
    units = up_to(low * (1 - 1e-8))  # a little less, so that what comes out equal is left to be decided below

    # What is left, a few for each at most, goes to whoever ends first with one more.
    def with_one_more(rank: int) -> tuple[float, int]:
        return float(f"{(units[rank] + 1) / shares[rank]:.9g}"), rank  # rounded, so that equals are equal

    waiting = [with_one_more(rank) for rank in range(len(shares))]
    heapq.heapify(waiting)
    for _ in range(count - sum(units)):
        rank = waiting[0][1]
        units[rank] += 1
        heapq.heapreplace(waiting, with_one_more(rank))
    return units
