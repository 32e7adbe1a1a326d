"""Choose the passes in which the CPU computes streamed layers.

A copy to the GPU takes as long for one row as for a whole batch. The CPU copies nothing, but takes longer for each
additional row. So the CPU may be faster for answers, and the GPU for prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from devices.remembered import Remembered
from partition.predict.hysteresis import GPU_LAYERS

_MOST_ROWS = 16  # for larger passes llama.cpp itself copies the weights to the GPU
_PASSES = 2  # timed passes with each placement; the faster one counts


def processor_rows(
    batch: int,
    a_pass: Callable[[int, int], None],
    key: Callable[[], str],
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Return the largest number of rows at which the CPU computes streamed layers, or 0 if the GPU computes all.

    A pass of one row is timed with both placements, once a day for each device and model. The number of rows follows
    from these times, because an additional row takes the CPU no longer than the first one.

    Args:
        batch: Largest number of rows of a pass.
        a_pass: Computes a pass. The first argument is its number of rows. The CPU computes the streamed layers of
            passes with at most the number of rows in the second argument.
        key: Returns the key under which the result is cached.
    """
    cache, name = Remembered("gpu-rows"), key()
    remembered = cache.get(name)
    if remembered is not None and isinstance(remembered[0], int):
        return remembered[0]
    gpu_s, processor_s = (_fastest(lambda: a_pass(1, most), clock) for most in (0, 1))  # noqa: B023
    rows = min(int(gpu_s / (GPU_LAYERS * processor_s)), _MOST_ROWS, batch // 2)
    cache.put(name, rows)
    return rows


def _fastest(step: Callable[[], None], clock: Callable[[], float]) -> float:
    """Return the seconds of the fastest step, after one step that moves the weights."""
    step()
    times = []
    for _ in range(_PASSES):
        began = clock()
        step()
        times.append(clock() - began)
    return min(times)
