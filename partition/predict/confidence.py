"""Confidence in measured figures, and the threshold at which one plan is clearly better than another.

Other work only slows a device down. So a figure that was measured while the device was busy is an upper bound of what
the quiet device takes. The lower bound is what the same device took in a quiet moment, where one is remembered.
"""

from __future__ import annotations

CLEARLY = 1.05  # times: predictions are off by some per cent
CLEARLY_BUSY = 2.0  # times, for a plan with a busy device: each sum and each hop waits for the device that is held up
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


def is_clearly_less(new: float, old: float, *, busy: bool, by: float = CLEARLY) -> bool:
    """Return whether a new plan is so much better than the old one that a change pays.

    new, old: predicted times, the old one's by its lower bound. busy: whether a device of the new plan was measured
    while it was busy. by: the least ratio.
    """
    return max(by, CLEARLY_BUSY if busy else by) * new < old
