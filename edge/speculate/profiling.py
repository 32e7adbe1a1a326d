"""Measure what passes with drafts cost, before the first answer: a property of machine and model, not of a text."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from edge.llm.interface import TextEngine
from edge.llm.slot import Slot
from edge.speculate.choice import SIZES
from edge.speculate.speculation import Speculation

LIMIT_S = 2.0  # for all of it
_PROMPT = 12  # tokens: as many as a trial takes in
_ROUNDS = (1, *SIZES), SIZES  # the faster of two passes counts, each beside passes of one row that are warm


@dataclass
class RandomText:
    """A request whose text is random, and ends otherwise each time: of it nothing is drafted yet."""

    prompt: list[int]
    tokens: list[int]
    answer: Sequence[int] = ()
    sequence: int = 0


def profile_passes(
    drafter: Speculation, engine: TextEngine, limit_s: float = LIMIT_S, clock: Callable[[], float] = time.perf_counter
) -> None:
    """Let a drafter know what passes of each size take, as far as the limit allows. One pass of a slow model is over
    it: then its first answers tell. The engine's cache is empty afterwards. clock: in seconds."""
    n_vocab, numbers, began = engine.model.n_vocab, count(), clock()
    prompt = np.random.default_rng(0).integers(0, n_vocab, _PROMPT).tolist()
    most = min(engine.outputs, engine.batch, engine.context - _PROMPT - 1)
    if engine.rollback is not None:
        most = min(most, 1 + engine.rollback)
    engine.kv_clear()
    slot = Slot(engine)
    slot.prefill(prompt, top=1)
    plain_s = last_s = clock() - began
    for sizes in _ROUNDS:
        for size in (size for size in sizes if size <= most):
            if clock() - began + 2 * last_s > limit_s:
                break
            text = RandomText(prompt, [*prompt, next(numbers) % n_vocab])
            pass_began = clock()
            drafter.profile_pass(text, size, lambda tokens: slot.decode(tokens, "all", top=1))
            last_s = clock() - pass_began
            slot.forget(len(slot.tokens) - _PROMPT)
            plain_s = last_s if size == 1 else plain_s
            if last_s > size * plain_s:  # it cannot pay, whatever is accepted, and larger ones are seldom cheaper
                break
    engine.kv_clear()
