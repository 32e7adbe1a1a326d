"""Passes of few rows: whether the processor computes streamed layers sooner than they arrive on the GPU.

A copy takes as long for one row as for a whole batch. The processor takes longer for each row more, but nothing has to
arrive. So it may be the one for answers, and the GPU for prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from devices.remembered import Remembered
from edge.microbenchmark import BestTime, TimedTask, best_of
from partition.predict.hysteresis import BUSY_GPU_LAYERS, GPU_LAYERS, clearly_better

_ROWS = (1, 4, 16)  # that are tried; llama.cpp copies weights to the GPU itself from 32 on
CHOICE_S = 20.0  # of passes for the choice, and the last of them: on a slow GPU each takes seconds, and somebody waits
Pair = tuple[BestTime, BestTime]  # of a pass: with layers that arrive on the GPU, and computed here


class _TimeIsOver(Exception):
    """No further pass may begin."""


def processor_rows(
    batch: int,
    a_pass: Callable[[int, int], None],
    key: Callable[[], str],
    least_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Return the number of rows up to which the processor is to compute streamed layers; 0: none.

    batch: most rows of a pass. a_pass: computes so many rows, where the processor has passes of so many or fewer. key:
    of what is remembered. least_s: of a sample. The choice is remembered, unless something else had the processor
    meanwhile, or CHOICE_S were over before it was made: then the GPU has what was not measured.
    """
    cache, name = Remembered("gpu-rows"), key()
    remembered = cache.get(name)
    if remembered is not None and isinstance(remembered[0], int):
        return remembered[0]
    ends_at = clock() + CHOICE_S

    def timed_pass(rows: int, most: int) -> None:
        if clock() >= ends_at:
            raise _TimeIsOver
        a_pass(rows, most)

    def timed(rows: int) -> Pair | None:
        steps = [partial(timed_pass, rows, most) for most in (0, rows)]
        tasks = [TimedTask(step, prepare=step) for step in steps]  # the first one moves weights
        try:
            on_gpu, here = best_of(tasks, least_s, clock=clock)
        except _TimeIsOver:
            return None
        return on_gpu, here

    rows, is_sure = choose_rows([rows for rows in _ROWS if 2 * rows <= batch], timed)
    if is_sure:
        cache.put(name, rows)
    return rows


def choose_rows(tried: list[int], timed: Callable[[int], Pair | None]) -> tuple[int, bool]:
    """Return (the most rows of those tried, up to which the processor is clearly faster; whether a quiet device said
    so). timed: None where there is no time left."""
    most, busy = 0, False
    for rows in tried:
        if (pair := timed(rows)) is None:
            return most, False
        on_gpu, here = pair
        busy |= on_gpu.busy or here.busy
        if not clearly_better(here.seconds, on_gpu.seconds, by=BUSY_GPU_LAYERS if busy else GPU_LAYERS):
            break
        most = rows
    return most, not busy
