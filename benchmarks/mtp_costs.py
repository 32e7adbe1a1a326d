"""Measure the costs in the formula for drafts by a model's own layers, and compute the gain that it predicts.

With r rows a pass takes the time of r rows of the answer, of r - 1 drafts, and of what the layer that drafts has to
take in of the pass before. It gives 1 + a + ... + a^(r - 1) tokens where a is the acceptance
(`partition.predict.drafts`). The best r counts, if that is 1.05 times as fast as no drafts, as
`edge/speculate/choice.py` has it; windows over stages, if they are better: the first stage also drafts, and is the
busiest where that takes it longer than the other one computes.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np

from edge.llm.interface import TextEngine
from edge.llm.slot import Slot
from edge.parallel.engine import DistributedEngine
from edge.speculate.mtp import Predictor
from partition.predict.drafts import MTP, ROWS, WINDOWS, Draft, most_windows
from partition.predict.hysteresis import DRAFT, clearly_faster

_PASSES = 3  # of drafts
_WALK = 48  # tokens of the answer, for each size of passes
_STRETCHES = _WALK // ROWS[-1]


def pass_s(engine: TextEngine, prompt: list[int], answer: list[int]) -> dict[int, float]:
    """Seconds of a pass of each size along the answer, each of whose tokens has experts of its own: the mean, as those
    that are not in memory count, too. The sizes take turns, each with tokens that the one before did not have."""
    engine.kv_clear()
    slot, sizes = Slot(engine), [size for size in ROWS if size <= engine.outputs]
    slot.prefill(prompt, top=1)
    starts = range(0, len(answer) - ROWS[-1] + 1, ROWS[-1])
    took = dict.fromkeys(sizes, 0.0)
    for number, size in enumerate(sizes * _STRETCHES):
        at = starts[(number + number // len(sizes)) % len(starts)]  # not the same for a size each time
        slot.forget(len(slot.tokens) - len(prompt) - at)
        began = time.perf_counter()
        for first in range(at, at + ROWS[-1], size):
            slot.decode(answer[first : first + size], "all", top=1)
        took[size] += time.perf_counter() - began
    return {size: seconds * size / (ROWS[-1] * _STRETCHES) for size, seconds in took.items()}


def busy_ms(engine: DistributedEngine, prompt: list[int], answer: list[int]) -> dict[int, float]:
    """Milliseconds that a pass of each size along the answer keeps the busiest stage, the median. Another pass is at
    the other stage meanwhile, as both share the memory of this machine."""
    engine.kv_clear()
    Slot(engine).prefill(prompt, top=1)
    busy = {}
    for size in ROWS:
        if size <= min(engine.outputs, len(answer)):
            engine.times(clear=True)
            for at in range(0, min(_WALK, len(answer)) // size * size, size):
                positions = np.arange(len(prompt) + at, len(prompt) + at + size)
                engine.submit(answer[at : at + size], positions, np.zeros(size, int), np.ones(size, np.int8), top=1)
                if engine.uncollected > 1:
                    engine.collect()
            while engine.uncollected:
                engine.collect()
            busy[size] = max(summary.compute_ms.median for times in engine.times() for summary in times.values())
            engine.kv_remove(0, len(prompt))
    return busy


def draft_s(engine: TextEngine, predictor: Predictor, prompt: list[int], answer: list[int]) -> tuple[float, float]:
    """Seconds of one draft, and of each further token that the pass before gave: medians of four drafts along the
    answer, behind one token more and behind four."""
    engine.kv_clear()
    slot, text, took = Slot(engine), [*prompt, answer[0]], {1: list[float](), 4: list[float]()}
    slot.prefill(prompt, top=1)
    predictor.take_in(0, np.array(text, np.int32), 0, whole=True)
    for n in (1, 4) * (_PASSES + 1):
        new = answer[len(text) - len(prompt) :][:n]
        slot.decode([text[-1], *new[:-1]], "all", top=1)
        text += new
        began = time.perf_counter()
        predictor.propose(0, np.array(text, np.int32), 0, 4)
        took[n].append(time.perf_counter() - began)
    behind_one, behind_four = (median(seconds[1:]) for seconds in took.values())
    return behind_one / 4, max(0.0, behind_four - behind_one) / 3


def predicted(
    right: float,
    passes: dict[int, float],
    drafted_s: float,
    busy: dict[int, float],
    stages: int,
    taken_in_s: float = 0.0,
) -> dict[str, float | int]:
    """The gain that the formula gives, and the rows and windows that bring it."""
    times = {(1, 1): passes[1]}
    for rows in passes:
        for windows in WINDOWS:
            if windows <= most_windows(stages) and rows * windows > 1:
                draft = Draft(MTP, right, rows, drafted_s, windows=windows)
                pass_s = passes[rows] + (taken_in_s * (draft.tokens - 1) if windows == 1 else 0.0)
                times[rows, windows] = float(draft.token_s(pass_s, busy_s(rows, busy, drafted_s)))
    best = min(times, key=times.__getitem__)
    if not clearly_faster(passes[1] / times[best], 1.0, by=DRAFT):
        best = 1, 1
    return {"predicted_ratio": passes[1] / times[best], "predicted_rows": best[0], "predicted_windows": best[1]}


def busy_s(rows: int, busy: dict[int, float], drafted_s: float) -> float:
    """Seconds that windows of so many rows keep the busiest stage. The stages are alike, and the first one drafts."""
    return busy.get(rows, 0.0) / 1e3 + rows * drafted_s
