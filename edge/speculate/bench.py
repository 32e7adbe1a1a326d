"""Benchmark of speculative decoding: passes of several rows, and an answer with drafts beside one without."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from edge.llm.continuation import Request
from edge.llm.generate import generate
from edge.llm.interface import Drafter, TextEngine
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.llm.slot import Slot
from edge.speculate.choice import SIZES
from edge.speculate.factory import Draft, speculation
from edge.speculate.speculation import Speculation
from edge.tasks import SILENT, Steps

_PASSES = 5  # of each size


@dataclass(frozen=True)
class SpeculationResult:
    """One greedy answer to random tokens, with drafts and without. Other texts can be drafted better, or worse."""

    drafter: Speculation
    pass_ms: dict[int, float]  # by rows: the median
    plain_tokens_per_s: float  # 0 where the answer has one token
    tokens_per_s: float

    @classmethod
    def measure(
        cls, engine: TextEngine, draft: Draft, prompt_tokens: int, gen_tokens: int, steps: Steps = SILENT
    ) -> SpeculationResult | None:
        """Measure it; None where nothing drafts. engine: made with `with_room`. The errors of `speculation`."""
        with ExitStack() as stack:
            drafter = speculation(draft, engine, stack.enter_context, steps)
            if drafter is None:
                return None
            prompt = np.random.default_rng(0).integers(0, engine.model.n_vocab, prompt_tokens).tolist()
            passes = pass_ms(engine, prompt)
            plain, drafted = (
                _tokens_per_s(engine, prompt, gen_tokens, draft_source) for draft_source in (None, drafter)
            )
            return cls(drafter, passes, plain, drafted)

    def to_json(self) -> dict[str, Any]:
        """Plain values, as docs/cli/bench.md says."""
        return {
            **self.drafter.to_json(),
            "pass_ms": {str(rows): ms for rows, ms in self.pass_ms.items()},
            "plain_tokens_per_s": self.plain_tokens_per_s,
            "tokens_per_s": self.tokens_per_s,
        }

    def describe(self) -> str:
        """The same in a line for people."""
        passes = ", ".join(f"{ms:.2f} ms for {rows}" for rows, ms in self.pass_ms.items())
        return (
            f"{self.drafter.describe()}; {self.tokens_per_s:.2f} tokens/s, {self.plain_tokens_per_s:.2f} without;"
            f" rows of a pass: {passes}"
        )


def pass_ms(engine: TextEngine, prompt: list[int], clock: Callable[[], float] = time.perf_counter) -> dict[int, float]:
    """Milliseconds of a pass of each size that drafts may have, behind a prompt, by rows. What they computed is
    forgotten. clock: in seconds."""
    engine.kv_clear()
    slot = Slot(engine)
    slot.prefill(prompt, top=1)
    most = min(engine.outputs, engine.batch, engine.context - len(prompt))
    if engine.rollback is not None:
        most = min(most, 1 + engine.rollback)
    return {size: median(_milliseconds(slot, size, clock) for _ in range(_PASSES)) for size in SIZES if size <= most}


def _milliseconds(slot: Slot, size: int, clock: Callable[[], float]) -> float:
    began = clock()
    slot.decode([0] * size, "all", top=1)
    seconds = clock() - began
    slot.forget(size)  # with recurrent layers, by a snapshot and the tokens behind it: no part of a pass
    return seconds * 1e3


def _tokens_per_s(engine: TextEngine, prompt: list[int], most: int, drafter: Drafter | None) -> float:
    greedy = SamplingParams(temperature=0, allow_repetition=True)  # the speed of loops counts as well
    *_, last = generate(Scheduler(engine, slots=1, drafter=drafter), Request(prompt, most, greedy))
    return last.timing.decode_tokens_per_s
