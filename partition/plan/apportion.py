"""Division of a layer, and of whole units, among ranks: by their speeds and memory, or by given shares."""

import heapq
from collections.abc import Sequence
from math import isfinite

from partition.errors import PlanError
from partition.plan.plan import MAX_WORLD_SIZE

_LEAST_PART = 0.02  # minimum part of a layer, because every rank must have some
_LEAST = 1e-6  # minimum relative to the largest share; a smaller share gets the minimum number of units anyway


def checked_shares(shares: Sequence[float], ranks: int, first: int = 0) -> list[float]:
    """Return `shares` relative to the largest.

    first: number of the first rank in errors

    Raises PlanError unless there is a finite share above 0 for each of `ranks` ranks.
    """
    if not 0 < ranks <= MAX_WORLD_SIZE:
        raise PlanError(f"{ranks} ranks; expected 1 to {MAX_WORLD_SIZE}")
    if len(shares) != ranks:
        raise PlanError(f"{len(shares)} shares for {ranks} ranks; give one for each")
    for rank, share in enumerate(shares, first):
        if not (isfinite(share) and share > 0):
            raise PlanError(f"the share of rank {rank} is {share}; expected a number above 0")
    largest = max(shares)
    return [max(share / largest, _LEAST) for share in shares]


def apportion(count: int, shares: Sequence[float]) -> list[int]:
    """Return the number of equal units for each rank, at least one each, with the least maximum of units / share.

    A larger share never gets fewer units. Of equal shares the lower rank gets more. `count` must be at least the number
    of ranks.
    """

    # At this level, the units of all ranks, at least one each, are together no more than `count`.
    level = max(0, count - len(shares)) / sum(shares)
    units = [max(1, int(level * share)) for share in shares]

    # The remaining units, at most two per rank, go to the rank that would finish first with one more.
    def with_one_more(rank: int) -> tuple[float, int]:
        return float(f"{(units[rank] + 1) / shares[rank]:.9g}"), rank  # rounding makes equal values equal

    waiting = [with_one_more(rank) for rank in range(len(shares))]
    heapq.heapify(waiting)
    for _ in range(count - sum(units)):
        rank = waiting[0][1]
        units[rank] += 1
        heapq.heapreplace(waiting, with_one_more(rank))
    return units


def parts(constant_s: Sequence[float], slope_s: Sequence[float], most: Sequence[float]) -> list[float]:
    """Return the part of a layer that each rank computes; the sum is 1.

    A rank takes constant + slope * part seconds for a layer. All ranks finish together at the level that solves

        sum over ranks of clamp((level - constant_r) / slope_r, least, most_r) = 1

    The sum grows with the level.

    most: part of the layer that each rank has memory for. If the sum of these is below 1, each rank gets a part in
        proportion to its memory, and must page the rest.
    """
    caps = [max(_LEAST_PART, min(1.0, cap)) for cap in most]
    if sum(caps) <= 1:
        return [cap / sum(caps) for cap in caps]

    # The sum's slope changes where a rank starts to have more than the minimum, and where it reaches its maximum.
    ranks = [(c, max(slope, 1e-12), cap) for c, slope, cap in zip(constant_s, slope_s, caps, strict=True)]
    bends = sorted(
        (c + slope * part, sign / slope) for c, slope, cap in ranks for part, sign in ((_LEAST_PART, 1), (cap, -1))
    )
    level, together, growth = bends[0][0], _LEAST_PART * len(ranks), 0.0
    for bend, change in bends:
        if growth > 0 and together + (bend - level) * growth >= 1:
            break
        together += (bend - level) * growth
        level, growth = bend, growth + change
    level += max(0.0, 1 - together) / max(growth, 1e-12)
    result = [min(cap, max(_LEAST_PART, (level - c) / slope)) for c, slope, cap in ranks]
    total = sum(result)
    return [part / total for part in result]
