"""How far a measured figure is to be trusted.

Other work only slows a device down. So a figure that was measured while the device was busy is an upper bound of what
the quiet device takes. The lower bound is what the same device took in a quiet moment, where one is remembered.
"""

from __future__ import annotations

MOST_SLOWED = 5.0  # times that other work slowed a device down, at most, where no quiet moment is remembered


def lower_bound_factor(seconds: float, busy: bool, quiet_s: float | None) -> float:
    """The part of a figure that is its lower bound: 1 if the figure is confirmed.

    seconds: the figure. quiet_s: the same, from a quiet moment; None: none is remembered.
    """
    if not busy:
        return 1.0
    if quiet_s is None or seconds <= 0:
        return 1 / MOST_SLOWED
    return min(1.0, quiet_s / seconds)
