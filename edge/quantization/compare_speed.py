"""Speed of several models compared with each other, and which of them are slower than a larger one."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edge.llama.interrupt import interrupt_stops
from edge.llm.bench import measure
from edge.llm.engine import Engine
from edge.llm.options import DEFAULTS, EngineOptions
from partition.predict.hysteresis import TYPE, clearly_faster

ROUNDS = 3
PROMPT_TOKENS = 128
GEN_TOKENS = 32


@dataclass(frozen=True)
class ModelSpeed:
    """Tokens per second of one model, round by round."""

    prefill_rounds: tuple[float, ...]
    decode_rounds: tuple[float, ...]

    @property
    def prefill(self) -> float:
        """The median round's prefill rate."""
        return statistics.median(self.prefill_rounds)

    @property
    def decode(self) -> float:
        """The median round's decode rate."""
        return statistics.median(self.decode_rounds)

    def slower_than(self, other: ModelSpeed) -> float | None:
        """Return how many times slower than `other`, measured in the same rounds, this model decodes; None unless it is
        slower in each round, and by more than 2 % in the median."""
        always = all(own < others for own, others in zip(self.decode_rounds, other.decode_rounds, strict=True))
        slower = always and clearly_faster(other.decode, self.decode, by=TYPE)
        return other.decode / self.decode if slower else None


def measure_speeds(
    paths: Sequence[str | os.PathLike[str]],
    options: EngineOptions = DEFAULTS,
    *,
    rounds: int = ROUNDS,
    prompt_tokens: int = PROMPT_TOKENS,
    gen_tokens: int = GEN_TOKENS,
    progress: Callable[[int, int], None] | None = None,
) -> list[ModelSpeed]:
    """Return the speeds of models on this device, in the order of `paths`.

    All are measured once before any is measured again, every other round in reverse, so that a device that gets warm or
    busy slows no model more than others. One model is in memory at a time; each is warm when it is measured. The
    context of `options` is replaced by the length of a measurement. progress(measurements done, in total). Raises the
    errors of Engine; Interrupted after Ctrl-C.
    """
    options = replace(options, context=prompt_tokens + gen_tokens, sequences=1, outputs=None)
    options = replace(options, batch=min(options.rows, prompt_tokens))
    rates: list[list[tuple[float, float]]] = [[] for _ in paths]
    for number in range(rounds):
        order = range(len(paths)) if number % 2 == 0 else reversed(range(len(paths)))
        for done, i in enumerate(order, start=1):
            with Engine(Path(paths[i]), options) as engine, interrupt_stops(engine):
                result = measure(engine, prompt_tokens=prompt_tokens, gen_tokens=gen_tokens, repeats=1, alone=False)
            rates[i].append((result.prefill.mean, result.decode.mean))
            if progress:
                progress(number * len(paths) + done, rounds * len(paths))
    return [ModelSpeed(*map(tuple, zip(*model, strict=True))) for model in rates]


def speed_notes(names: Sequence[str], sizes_bytes: Sequence[int], speeds: Sequence[ModelSpeed]) -> list[str]:
    """Return a sentence for each model that is smaller than another and decodes slower: against the fastest such
    one."""
    notes = []
    for i, name in enumerate(names):
        larger = [j for j in range(len(names)) if sizes_bytes[j] > sizes_bytes[i]]
        slower = {j: ratio for j in larger if (ratio := speeds[i].slower_than(speeds[j]))}
        if slower:
            j = max(slower, key=lambda j: slower[j])
            notes.append(f"{name} is smaller than {names[j]} and decodes slower: {slower[j]:.2f}x")
    return notes
