"""Benchmark of speculative decoding: pass times by number of rows, and an answer with and without drafts."""

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

_PASSES = 5  # passes per size


@dataclass(frozen=True)
class SpeculationResult:
    """Measurement of one greedy answer to random tokens, with and without drafts. Acceptance differs for other
    texts."""

    drafter: Speculation
    pass_ms: dict[int, float]  # median milliseconds by rows
    plain_tokens_per_s: float  # 0 if the answer has one token
    tokens_per_s: float

    @classmethod
    def measure(
        cls, engine: TextEngine, draft: Draft, prompt_tokens: int, gen_tokens: int, steps: Steps = SILENT
    ) -> SpeculationResult | None:
        """Measure an engine that was made with `with_room`. Return None if there is no drafter.

        Raises the errors of `speculation`.
        """
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
        """Return the JSON values that docs/cli/bench.md describes."""
        return {
            **self.drafter.to_json(),
            "pass_ms": {str(rows): ms for rows, ms in self.pass_ms.items()},
            "plain_tokens_per_s": self.plain_tokens_per_s,
            "tokens_per_s": self.tokens_per_s,
        }

    def describe(self) -> str:
        """Return a line of text with the figures."""
        passes = ", ".join(f"{ms:.2f} ms for {rows}" for rows, ms in self.pass_ms.items())
        return (
            f"{self.drafter.describe()}; {self.tokens_per_s:.2f} tokens/s, {self.plain_tokens_per_s:.2f} without;"
            f" rows of a pass: {passes}"
        )


def pass_ms(engine: TextEngine, prompt: list[int], clock: Callable[[], float] = time.perf_counter) -> dict[int, float]:
    """Return the milliseconds of a verify pass after a prompt, by number of rows, for each draft size.

    The passes leave no tokens in the cache.
    clock: clock in seconds.
    """
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
    # with recurrent layers this restores a snapshot and recomputes tokens, which is not part of a pass
    slot.forget(size)
    return seconds * 1e3


def _tokens_per_s(engine: TextEngine, prompt: list[int], most: int, drafter: Drafter | None) -> float:
    greedy = SamplingParams(temperature=0, allow_repetition=True)  # also measure the speed of repetitive text
    *_, last = generate(Scheduler(engine, slots=1, drafter=drafter), Request(prompt, most, greedy))
    return last.timing.decode_tokens_per_s
