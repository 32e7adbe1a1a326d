"""Makes a smaller model from a GGUF file or a folder of safetensors, or one file with several sizes of a model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from devices.files import temporary_beside
from edge.llm.options import EngineOptions
from edge.quantization.fit import FitOptions, Fitted, file_within, fit_file, least_bytes
from edge.quantization.gguf import Outcome, quantize
from edge.quantization.rounds import TimePlan
from edge.tasks import SILENT, ShowStep, Steps
from partition.model.file import ModelFile
from quant.checkpoint.checkpoint import Checkpoint
from quant.checkpoint.convert import convert
from quant.gguf.elastic import plan_elastic, write_elastic
from quant.gguf.file import GgufFile
from quant.mixes import Mix
from quant.text import bytes_text
from quant.whole_file import check_room

_UNITS = {"Quantizing": "bytes", "Reading weights": "tensors", "Calibrating": "chunks", "Checking": "chunks"}

_FITS = 0.95  # share of the time for the sizes; the remaining time is for writing them into one file


@dataclass(frozen=True)
class FittedSizes:
    """A file that contains a model in several sizes."""

    fits: Sequence[Fitted]  # fit of each size, the largest first
    predicted_bytes: int  # size of the file, predicted before it was written
    n_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return plain values in the format of docs/cli/quantize.md."""
        return {
            "type": "elastic",
            "predicted_bytes": self.predicted_bytes,
            "size_bytes": self.n_bytes,
            "sizes": [
                {
                    "size_bytes": fitted.outcome.n_bytes,
                    "expected_divergence": fitted.expected_divergence,
                    "measured_divergence": fitted.measured_divergence,
                    "types": {name: kind.name for name, kind in fitted.outcome.types.items()},
                }
                for fitted in self.fits
            ],
        }


def budgets_between(least: int, most: int, n: int) -> list[int]:
    """Return `n` (2 or more) sizes from `least` to `most` bytes in a geometric series."""
    if least == most:
        return [most]
    return [round(least * (most / least) ** (k / (n - 1))) for k in range(n)]


@dataclass(frozen=True)
class Source:
    """The original of a smaller model, in GGUF."""

    file: ModelFile
    n_bytes: int  # bytes of the GGUF files, or of the safetensors that they were converted from


@dataclass(frozen=True)
class QuantizedModel:
    """A model that was written."""

    source: Source
    outcome: Outcome
    type_name: str  # name of the mix, or "fitted"
    fitted: Fitted | None = None  # result of fitting, if the model was fitted to a size
    budget: int | None = None  # maximum bytes of a fitted model

    def to_json(self) -> dict[str, Any]:
        """Return plain values in the format of docs/cli/quantize.md."""
        tensors, fitted = self.source.file.tensors, self.fitted
        sizes: Counter[str] = Counter()
        for name, kind in self.outcome.types.items():
            sizes[kind.name] += kind.n_bytes(tensors[name].n_values)
        n_values = sum(tensors[name].n_values for name in self.outcome.types)
        return {
            "type": self.type_name,
            "source_bytes": self.source.n_bytes,
            "size_bytes": self.outcome.n_bytes,
            "bits_per_weight": 8 * sum(sizes.values()) / n_values,
            "type_bytes": dict(sizes.most_common()),
            "types": {name: kind.name for name, kind in self.outcome.types.items()},
            "misfits": [
                {"tensor": m.tensor, "columns": m.columns, "wanted": m.requested, "used": m.used}
                for m in self.outcome.misfits
            ],
            "budget_bytes": self.budget,
            "expected_divergence": fitted.expected_divergence if fitted else None,
            "measured_divergence": fitted.measured_divergence if fitted else None,
            "exact_tensors": dict(Counter(fitted.exact.values())) if fitted else {},
            "gap": fitted.gap if fitted and math.isfinite(fitted.gap) else None,
            "slow_types": dict(fitted.slow) if fitted else {},
        }


def model_files(model: Path | ModelFile) -> list[Path]:
    """Return the files of a GGUF model or of a folder of safetensors, which must not be overwritten.

    A GGUF file in a folder of safetensors does not count, because it was made from that folder earlier. Raises
    ModelFileError if the folder has no model.
    """
    if isinstance(model, ModelFile):
        return list(model.paths)
    with Checkpoint.open(model) as checkpoint:
        return [path for path in checkpoint.folder.iterdir() if path.suffix != ".gguf"]


@contextmanager
def as_gguf(model: Path | ModelFile, out: Path, steps: Steps = SILENT) -> Iterator[Source]:
    """Yield the model as GGUF.

    A folder of safetensors is first converted to a temporary file next to `out`, which is removed at the end of the
    block.
    """
    if isinstance(model, ModelFile):
        yield Source(model, model.size_bytes)
        return
    with temporary_beside(out, ".gguf") as temporary:
        yield _converted(model, temporary, None, steps)


def convert_checkpoint(model: Path, out: Path, type_: str, steps: Steps = SILENT) -> QuantizedModel:
    """Convert a folder of safetensors to GGUF, in one of CONVERTED_TYPES."""
    source = _converted(model, out, type_, steps)
    types = {name: tensor.type for name, tensor in source.file.tensors.items()}
    return QuantizedModel(source, Outcome(types, source.file.size_bytes, ()), type_)


def quantize_to_type(
    source: Source, out: Path, mix: Mix, *, imatrix: Path | None, threads: int | None, steps: Steps = SILENT
) -> QuantizedModel:
    """Quantize the model to a mix. Raises the errors of `quantize`."""
    _warn_of_loss(source.file, steps)
    n_bytes = sum(tensor.n_bytes for tensor in source.file.tensors.values())
    with steps.step(f"Quantizing to {mix.name}", n_bytes) as show:
        return QuantizedModel(
            source, quantize(source.file, out, mix, imatrix=imatrix, threads=threads, progress=show), mix.name
        )


def quantize_to_size(
    source: Source, out: Path, budget: int, text: str, options: FitOptions, steps: Steps = SILENT
) -> QuantizedModel:
    """Quantize the model to a file of at most `budget` bytes. Raises the errors of `fit_file`."""
    _warn_of_loss(source.file, steps)
    with _stages(steps) as show:
        fitted = fit_file(source.file, out, budget, text, replace(options, say=steps.say), show)
    return QuantizedModel(source, fitted.outcome, "fitted", fitted, budget)


def quantize_to_sizes(
    source: Source, out: Path, budgets: Sequence[int], text: str, options: FitOptions, steps: Steps = SILENT
) -> FittedSizes:
    """Quantize the model to several sizes in one file. Each size is what `fit_file` writes for one of `budgets`, in
    bytes.

    Until the file is complete, each size is also a temporary file next to it. Raises the errors of `fit_file`.
    """
    _warn_of_loss(source.file, steps)
    check_room(out, 2 * sum(min(budget, source.file.size_bytes) for budget in budgets))
    plan = TimePlan(_FITS * options.within_s, options.clock)
    with ExitStack() as stack:
        show = stack.enter_context(_stages(steps))
        fits: list[tuple[Fitted, Path]] = []
        for n, budget in enumerate(sorted(budgets)):  # the smallest budget comes first because it may be too small
            path = stack.enter_context(temporary_beside(out, ".gguf"))
            each_s = min(plan.within_s / len(budgets), plan.left_s() / (len(budgets) - n))
            own = replace(options, within_s=each_s, say=steps.say)
            fitted = fit_file(source.file, path, budget, text, own, show)
            if not fits or fitted.outcome.types != fits[-1][0].outcome.types:
                fits.append((fitted, path))
        fits.reverse()
        together = plan_elastic(
            [ModelFile.open(path) for _, path in fits], [fit.measured_divergence for fit, _ in fits]
        )
        steps.say(f"all sizes in one file will have {together.n_bytes:,} bytes ({bytes_text(together.n_bytes)})")
        write_elastic(together, out)
    return FittedSizes([fitted for fitted, _ in fits], together.n_bytes, out.stat().st_size)


def budget_within(
    source: Source, memory: int, engine: EngineOptions, options: FitOptions, steps: Steps = SILENT
) -> int:
    """Return the maximum bytes of a file whose weights fit into `memory` bytes, for an engine with these options.

    Raises the errors of `file_within`.
    """
    budget, parts = file_within(source.file, memory, engine, least_bytes(source.file, options))
    parts_text = ", ".join(f"{name} {bytes_text(n)}" for name, n in parts.items() if n)
    steps.say(f"of {bytes_text(memory)}, {bytes_text(budget)} are left: {parts_text}")
    return budget


def _converted(folder: Path, out: Path, type_: str | None, steps: Steps) -> Source:
    with Checkpoint.open(folder) as checkpoint:
        n_bytes = sum(path.stat().st_size for path in checkpoint.paths)
    with steps.step(f"Converting {folder}") as show:
        convert(folder, out, show, type_)
    return Source(ModelFile.open(out), n_bytes)


def _warn_of_loss(file: GgufFile, steps: Steps) -> None:
    """Warn if the weights are already quantized."""
    lossy = Counter[str]()
    for tensor in file.tensors.values():
        if tensor.type.block > 1:
            lossy[tensor.type.name] += tensor.n_bytes
    if lossy:
        steps.say(
            f"{file.path.name} is quantized already, mostly to {lossy.most_common(1)[0][0]}, and loses once more;"
            " better start from F16, BF16 or F32"
        )


@contextmanager
def _stages(steps: Steps) -> Iterator[Any]:
    """Yield a callback that shows one step at a time, one for each stage of fitting."""
    with ExitStack() as stack:
        shown: dict[str, ShowStep] = {}

        def show(stage: str, done: int, total: int, what: str = "") -> None:
            if stage not in shown:
                stack.close()  # close the step of the previous stage
                shown[stage] = stack.enter_context(steps.step(stage, unit=_UNITS.get(stage, "passes")))
            shown[stage](done, total, what)

        yield show
