"""Comparison of smaller models with their original: quality and speed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from devices.files import temporary_beside
from edge.llama.interrupt import interrupt_stops
from edge.llm.bench import measure
from edge.llm.engine import Engine
from edge.llm.options import DEFAULTS, EngineOptions
from edge.quantization.divergence import CHUNK_TOKENS
from edge.quantization.evaluate import Quality, evaluate
from edge.quantization.gguf import quantize
from edge.tasks import SILENT, Steps
from partition.model.file import ModelFile, ModelLike
from partition.predict.hysteresis import TYPE, clearly_faster
from quant.mixes import Mix
from quant.text import bytes_text

# Columns of the table.
COLUMNS = (
    "model", "size", "bits/weight", "perplexity", "mean KL", "99 % KL", "top-1", "decode tok/s", "prefill tok/s",
)  # fmt: skip
ROUNDS = 3
PROMPT_TOKENS = 128
GEN_TOKENS = 32


@dataclass(frozen=True)
class ModelSpeed:
    """Tokens per second of one model in each round."""

    prefill_rounds: tuple[float, ...]
    decode_rounds: tuple[float, ...]

    @property
    def prefill(self) -> float:
        """The median of the rounds' prefill rates."""
        return statistics.median(self.prefill_rounds)

    @property
    def decode(self) -> float:
        """The median of the rounds' decode rates."""
        return statistics.median(self.decode_rounds)

    def slower_than(self, other: ModelSpeed) -> float | None:
        """Return how many times slower than `other` this model decodes, or None if it is not clearly slower.

        Both must be measured in the same rounds. The model is clearly slower if it is slower in each round and the
        medians differ by more than 2 %.
        """
        always = all(own < others for own, others in zip(self.decode_rounds, other.decode_rounds, strict=True))
        slower = always and clearly_faster(other.decode, self.decode, by=TYPE)
        return other.decode / self.decode if slower else None


def measure_speeds(
    models: Sequence[ModelLike],
    options: EngineOptions = DEFAULTS,
    *,
    rounds: int = ROUNDS,
    prompt_tokens: int = PROMPT_TOKENS,
    gen_tokens: int = GEN_TOKENS,
    progress: Callable[[int, int], None] | None = None,
) -> list[ModelSpeed]:
    """Return the speeds of models on this device, in the order of `models`.

    Each round measures every model once, and every other round goes in reverse order. A device that warms up or gets
    busy therefore slows all models alike. One model is in memory at a time, and each is warm when it is measured.

    options: engine options; the context is replaced by the length of a measurement
    progress: called with (measurements done, measurements in total)

    Raises the errors of Engine, and Interrupted after Ctrl-C.
    """
    options = replace(options, context=prompt_tokens + gen_tokens, sequences=1, outputs=None)
    options = replace(options, batch=min(options.rows, prompt_tokens))
    rates: list[list[tuple[float, float]]] = [[] for _ in models]
    for number in range(rounds):
        order = range(len(models)) if number % 2 == 0 else reversed(range(len(models)))
        for done, i in enumerate(order, start=1):
            with Engine(models[i], options) as engine, interrupt_stops(engine):
                result = measure(engine, prompt_tokens=prompt_tokens, gen_tokens=gen_tokens, repeats=1, alone=False)
            rates[i].append((result.prefill.mean, result.decode.mean))
            if progress:
                progress(number * len(models) + done, rounds * len(models))
    return [ModelSpeed(*map(tuple, zip(*model_rates, strict=True))) for model_rates in rates]


def speed_notes(names: Sequence[str], sizes_bytes: Sequence[int], speeds: Sequence[ModelSpeed]) -> list[str]:
    """Return a sentence for each model that is smaller than another and decodes slower.

    The sentence compares it with the fastest of the larger models.
    """
    notes = []
    for i, name in enumerate(names):
        larger = [j for j in range(len(names)) if sizes_bytes[j] > sizes_bytes[i]]
        slower = {j: ratio for j in larger if (ratio := speeds[i].slower_than(speeds[j]))}
        if slower:
            j = max(slower, key=lambda j: slower[j])
            notes.append(f"{name} is smaller than {names[j]} and decodes slower: {slower[j]:.2f}x")
    return notes


@dataclass(frozen=True)
class Evaluation:
    """Figures of several models. The first model is the reference."""

    names: Sequence[str]  # distinct names
    results: Sequence[Quality]
    speeds: Sequence[ModelSpeed] | None  # None if speeds were not measured
    notes: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        """Return plain values in the format of docs/cli/evaluate.md."""
        return {
            "scored_tokens": self.results[0].summary.tokens,
            "models": [_model_json(*model) for model in self._models()],
            "notes": list(self.notes),
        }

    def rows(self) -> list[list[str]]:
        """Return the values of COLUMNS for each model."""
        return [
            [
                name,
                bytes_text(result.size_bytes),
                f"{result.bits_per_weight:.2f}",
                f"{result.summary.perplexity:.3f} ± {result.summary.perplexity_error:.3f}",
                f"{result.summary.mean_divergence:.5f}",
                f"{result.summary.divergence_99:.4f}",
                f"{100 * result.summary.top_1_agreement:.2f} %",
                f"{speed.decode:.1f}" if speed else "-",
                f"{speed.prefill:.1f}" if speed else "-",
            ]
            for name, result, speed in self._models()
        ]

    def _models(self) -> Iterator[tuple[str, Quality, ModelSpeed | None]]:
        speeds: Sequence[ModelSpeed | None] = self.speeds or [None] * len(self.names)
        return zip(self.names, self.results, speeds, strict=True)


def compare(
    models: Sequence[ModelLike],
    names: Sequence[str],
    text: str,
    options: EngineOptions = DEFAULTS,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    most: int | None = None,
    speed: bool = True,
    steps: Steps = SILENT,
) -> Evaluation:
    """Compare models in quality and, if `speed` is set, in speed. The first of `models` is the reference.

    Raises the errors of `evaluate` and `measure_speeds`.
    """
    files = [ModelFile.open(model) for model in models]
    with steps.step("Evaluating", unit="chunks") as show:
        results = evaluate(files[0], files[1:], text, options, chunk_tokens=chunk_tokens, most=most, progress=show)
    if not speed:
        return Evaluation(names, results, None, ())
    with steps.step("Measuring speed", unit="runs") as show:
        speeds = measure_speeds(files, options, progress=show)
    return Evaluation(names, results, speeds, speed_notes(names, [result.size_bytes for result in results], speeds))


def compare_mixes(
    file: ModelFile,
    name: str,
    out: Path,
    mixes: Sequence[Mix],
    text: str,
    *,
    imatrix: Path | None = None,
    threads: int | None = None,
    steps: Steps = SILENT,
) -> Evaluation:
    """Compare `out` with its original, and with the original quantized to each of `mixes`.

    name: name of the original

    The quantized files of the mixes are temporary.
    """
    with ExitStack() as stack:
        models: list[ModelLike] = [file, out]
        for mix in mixes:
            path = stack.enter_context(temporary_beside(out, f".{mix.name}.gguf"))
            models.append(path)
            with steps.step(f"Quantizing to {mix.name}") as show:
                quantize(file, path, mix, imatrix=imatrix, threads=threads, progress=show)
        names = [name, out.name, *(mix.name for mix in mixes)]
        return compare(models, names, text, EngineOptions(threads=threads), steps=steps)


def _model_json(name: str, result: Quality, speed: ModelSpeed | None) -> dict[str, Any]:
    figures = {key: value for key, value in asdict(result.summary).items() if key != "tokens"}
    return {
        "model": name,
        "size_bytes": result.size_bytes,
        "bits_per_weight": result.bits_per_weight,
        **{key: value if math.isfinite(value) else None for key, value in figures.items()},  # JSON has no infinity
        "decode_tokens_per_s": speed.decode if speed else None,
        "prefill_tokens_per_s": speed.prefill if speed else None,
    }
