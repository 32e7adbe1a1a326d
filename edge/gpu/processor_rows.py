"""Passes of few rows: whether the processor computes streamed layers sooner than they arrive on the GPU.

A copy takes as long for one row as for a whole batch. The processor takes longer for each row more, but nothing has to
arrive. So it may be the one for answers, and the GPU for prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from devices.remembered import Remembered
from edge.microbenchmark import BestTime, TimedTask, best_of
from partition.predict.hysteresis import BUSY_GPU_LAYERS, GPU_LAYERS, clearly_better

_ROWS = (1, 4, 16)  # that are tried; llama.cpp copies weights to the GPU itself from 32 on
Pair = tuple[BestTime, BestTime]  # of a pass: with layers that arrive on the GPU, and computed here


def processor_rows(batch: int, a_pass: Callable[[int, int], None], key: Callable[[], str], least_s: float) -> int:
    """Return the number of rows up to which the processor is to compute streamed layers; 0: none.

    batch: most rows of a pass. a_pass: computes so many rows, where the processor has passes of so many or fewer. key:
    of what is remembered. least_s: of a sample. The choice is remembered, unless something else had the processor
    meanwhile.
    """

    def timed(rows: int) -> Pair:
        steps = [partial(a_pass, rows, most) for most in (0, rows)]
        on_gpu, here = best_of(
            [TimedTask(step, prepare=step) for step in steps], least_s
        )  # the first one moves weights
        return on_gpu, here

    cache, name = Remembered("gpu-rows"), key()
    remembered = cache.get(name)
    if remembered is not None and isinstance(remembered[0], int):
        return remembered[0]
    rows, busy = choose_rows([rows for rows in _ROWS if 2 * rows <= batch], timed)
    if not busy:
        cache.put(name, rows)
    return rows


def choose_rows(tried: list[int], timed: Callable[[int], Pair]) -> tuple[int, bool]:
    """Return (the most rows of those tried, up to which the processor is clearly faster; whether the device was busy
    meanwhile)."""
    most, busy = 0, False
    for rows in tried:
        on_gpu, here = timed(rows)
        busy |= on_gpu.busy or here.busy
        if not clearly_better(here.seconds, on_gpu.seconds, by=BUSY_GPU_LAYERS if busy else GPU_LAYERS):
            break
        most = rows
    return most, busy
