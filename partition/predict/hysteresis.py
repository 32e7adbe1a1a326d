"""Hysteresis: the current choice stays unless another one is clearly better. Each threshold is the minimum ratio for a
switch.

Measurements are off by some per cent, and a switch has a cost. Without thresholds, a choice would swing between two
equally good alternatives.
"""

from __future__ import annotations

PLAN = 1.05  # another plan; predictions are off by some per cent
BUSY_PLAN = 2.0  # a plan with a device that was measured while busy; every all-reduce and hop waits for this device
NEW_PLAN = 1.1  # a plan that replaces the running one; devices have to load and connect
PREFILL = 1.2  # an additional prefill placement; devices hold weights twice, and KV cache moves
ENCODER = 1.2  # the image encoder on a worker instead of this device; images leave this device
CHANGED = 1.5  # step times of a rank against its earlier ones
# The same for the only rank that computes; long histories slow it, too, and no other rank reveals that.
LONE_CHANGED = 2.0
DRAFT = 1.05  # passes of several rows, or windows over stages, against plain decoding
DRAFT_STAYS = 1.02  # the same if drafting is in use; estimates of the acceptance fluctuate
GPU_LAYERS = 1.25  # another number of layers on the GPU
BUSY_GPU_LAYERS = 4.0  # the same, if other work used the CPU during the measurement
READS = 1.1  # more threads and larger buffers for reading weights
LAID_OUT = 1.05  # reading repacked weights from a file, which costs disk space
TYPE = 1.02  # a larger quantization type; both types are measured in the same rounds
KERNEL = 1.15  # the kernel of a quantization type, measured alone
# Other work only slows a device down. A time measured while the device was busy is corrected by its load, so it may be
# off in both directions.
MOST_SLOWED = 5.0  # largest slowdown that is assumed to be left in such a time


def clearly_better(new: float, old: float, *, by: float) -> bool:
    """Return True if the old cost (seconds, bytes) is more than `by` times the new cost."""
    return by * new < old


def clearly_faster(new: float, old: float, *, by: float) -> bool:
    """Return True if the new rate is more than `by` times the old rate."""
    return new > by * old


def clearly_off(value: float, expected: float, *, by: float) -> bool:
    """Return True if a value differs from the expected one by more than a factor of `by` in either direction."""
    return clearly_better(value, expected, by=by) or clearly_better(expected, value, by=by)


def plan_threshold(busy: bool, least: float = PLAN) -> float:
    """Return the switch threshold of a plan, at least `least`. busy: a device of the plan was measured while busy."""
    return max(least, BUSY_PLAN) if busy else least


def lower_bound_factor(busy: bool) -> float:
    """Return the factor from a measured time to its lower bound. It is 1 for a time measured in a quiet moment.

    busy: the device was busy during the measurement.
    """
    return 1 / MOST_SLOWED if busy else 1.0
