"""Hysteresis: the choice in use stays unless another one is clearly better. Each switch threshold is the
least ratio.

Figures are off by some per cent, and a change costs something: a choice that followed every difference would swing
between two that are as good.
"""

from __future__ import annotations

PLAN = 1.05  # a plan: predictions are off by some per cent
BUSY_PLAN = 2.0  # one with a device that was measured while busy: each sum and each hop waits for that device
NEW_PLAN = 1.1  # a plan that replaces the one that runs: devices load and connect
PREFILL = 1.2  # a placement for prompts beside the one that generates: devices hold weights twice, and states move
ENCODER = 1.2  # the encoder of pictures on a worker, against this device: pictures leave it
CHANGED = 1.5  # a rank's steps against what they took until now
LONE_CHANGED = 2.0  # those of the only rank that computes: a long history slows it, too, and no other rank shows that
DRAFT = 1.05  # passes of several rows, or windows over stages, against plain ones
DRAFT_STAYS = 1.02  # the same, where they are in use: what is known of acceptance swings
GPU_LAYERS = 1.25  # other layers on the GPU
BUSY_GPU_LAYERS = 4.0  # likewise, where something else had the processor meanwhile
READS = 1.1  # more threads and larger buffers that read weights
LAID_OUT = 1.05  # reading weights that are laid out already: they take a file
TYPE = 1.02  # a larger type of weights, measured in the same rounds
KERNEL = 1.15  # a type's kernel, measured alone
# Other work only slows a device down. So a figure that was measured while the device was busy is an upper bound of what
# the quiet device takes. The lower bound is what the same device took in a quiet moment, where one is remembered.
MOST_SLOWED = 5.0  # times that other work slowed a device down, at most, where no quiet moment is remembered


def clearly_better(new: float, old: float, *, by: float) -> bool:
    """Return whether a new cost (seconds, bytes) is so low that the old one is more than `by` times as large."""
    return by * new < old


def clearly_faster(new: float, old: float, *, by: float) -> bool:
    """Return whether a new rate is more than `by` times the old one."""
    return new > by * old


def clearly_off(value: float, expected: float, *, by: float) -> bool:
    """Return whether a value differs from the expected one by more than a factor of `by`, either way."""
    return clearly_better(value, expected, by=by) or clearly_better(expected, value, by=by)


def plan_threshold(busy: bool, least: float = PLAN) -> float:
    """Return the threshold of a plan, `least` or more. busy: a device of it was measured while busy."""
    return max(least, BUSY_PLAN) if busy else least


def lower_bound_factor(seconds: float, busy: bool, quiet_s: float | None) -> float:
    """The part of a figure that is its lower bound: 1 if the figure is confirmed.

    seconds: the figure. quiet_s: the same, from a quiet moment; None: none is remembered.
    """
    if not busy:
        return 1.0
    if quiet_s is None or seconds <= 0:
        return 1 / MOST_SLOWED
    return min(1.0, quiet_s / seconds)
