"""Hysteresis: what is in use stays unless another choice is clearly better. Each threshold says by how many times.

Figures are off by some per cent, and a change costs something: a choice that followed every difference would swing
between two that are as good.
"""

from __future__ import annotations

PLAN = 1.05  # a plan: predictions are off by some per cent
BUSY_PLAN = 2.0  # one with a device that was measured while busy: each sum and each hop waits for that device
NEW_PLAN = 1.1  # a plan that replaces the one that runs: devices load and connect
CORRECTION = 1.1  # steps against their prediction
FAR = 1.5  # tokens against their prediction; less is corrected device by device
CHANGED = 1.5  # a rank's steps against what they took until now
LINK = 1.25  # another way for a link, against the usual one
DRAFT = 1.05  # passes of several rows, or windows over stages, against plain ones
THREADS = 1.25  # another number of threads
GPU_LAYERS = 1.25  # other layers on the GPU
BUSY_GPU_LAYERS = 4.0  # likewise, where something else had the processor meanwhile
READS = 1.1  # more threads and larger buffers that read weights
LAID_OUT = 1.05  # reading weights that are laid out already: they take a file
TYPE = 1.02  # a larger type of weights, measured in the same rounds
KERNEL = 1.15  # a type's kernel, measured alone


def clearly_better(new: float, old: float, *, by: float) -> bool:
    """Whether a new choice costs less than the old one, and the old one at least `by` times as much: seconds, bytes."""
    return by * new < old


def clearly_faster(new: float, old: float, *, by: float) -> bool:
    """The same of rates: whether the new one is more than `by` times the old one."""
    return new > by * old


def clearly_off(value: float, expected: float, *, by: float) -> bool:
    """Whether a value is far from what was expected, either way."""
    return clearly_better(value, expected, by=by) or clearly_better(expected, value, by=by)


def of_plan(busy: bool, least: float = PLAN) -> float:
    """The threshold of a plan, `least` or more. busy: a device of it was measured while busy."""
    return max(least, BUSY_PLAN) if busy else least
