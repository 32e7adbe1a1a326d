"""Shares of the ranks of a stage: how much of every layer each computes, so that all finish together within their
memory."""

from __future__ import annotations

from collections.abc import Sequence

_LEAST = 0.02  # of a layer: every rank holds something
_HALVINGS = 50


def parts(constant_s: Sequence[float], slope_s: Sequence[float], most: Sequence[float]) -> list[float]:
    """Return the part of a layer that each rank computes; together 1.

    A rank takes constant + slope * part seconds for a layer. The level at which all end together is that of

        sum over ranks of clamp((level - constant_r) / slope_r, least, most_r) = 1

    which grows with the level, so that halving finds it. most: the part each has memory for. Where these together are
    less than 1, each gets its memory's share of the whole, and must page the rest.
    """
    caps = [max(_LEAST, min(1.0, cap)) for cap in most]
    if sum(caps) <= 1:
        return [cap / sum(caps) for cap in caps]

    def at(level: float) -> list[float]:
        ranks = zip(constant_s, slope_s, caps, strict=True)
        return [min(cap, max(_LEAST, (level - constant) / max(slope, 1e-12))) for constant, slope, cap in ranks]

    low, high = 0.0, max(c + s for c, s in zip(constant_s, slope_s, strict=True))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(at(middle)) < 1 else (low, middle)
    result = at(high)
    total = sum(result)
    return [part / total for part in result]
