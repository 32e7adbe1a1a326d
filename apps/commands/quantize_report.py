"""What `edge quantize` says about types and models: speeds on this device, quality beside the original."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from apps.commands import evaluate as evaluate_command
from apps.show.progress import Progress, progress
from apps.show.table import print_columns, print_note
from devices.files import temporary_beside
from edge.llm.options import EngineOptions
from edge.quantization.compare_speed import Speed, measure_speeds, speed_notes
from edge.quantization.evaluate import Quality, evaluate
from edge.quantization.gguf import quantize
from edge.quantization.text_file import BUNDLED, read_text
from quant.gguf.file import GgufFile
from quant.mixes import Mix


@dataclass(frozen=True)
class Report:
    """Models beside the one they were made from."""

    names: list[str]
    results: list[Quality]
    speeds: list[Speed]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """As docs/cli.md says."""
        models = [
            {**evaluate_command.model_json(result, speed), "model": name}
            for name, result, speed in zip(self.names, self.results, self.speeds, strict=True)
        ]
        return {"scored_tokens": self.results[0].summary.tokens, "models": models, "notes": self.notes}

    def print(self) -> None:
        """The table, and what there is to note."""
        print_columns(
            evaluate_command.COLUMNS, evaluate_command.rows(self.names, self.results, self.speeds), whole=("model",)
        )
        for note in self.notes:
            print_note(note)


def report(args: argparse.Namespace, file: GgufFile, mixes: Sequence[Mix]) -> Report:
    """Evaluate what was written, and the source in `mixes`, made to compare with and removed."""
    options = EngineOptions(threads=args.threads)
    with ExitStack() as stack:
        paths: list[Path] = []
        for mix in mixes:
            path = stack.enter_context(temporary_beside(args.output, f".{mix.name}.gguf"))
            with progress(f"Quantizing to {mix.name}") as bar:
                quantize(file, path, mix, imatrix=args.imatrix, threads=args.threads, progress=bar.update)
            paths.append(path)
        with progress("Evaluating", unit="chunks") as bar:
            text = read_text(args.text or BUNDLED)
            results = evaluate(file.path, [args.output, *paths], text, options, progress=bar.update)
        with progress("Measuring speed", unit="runs") as bar:
            speeds = measure_speeds([file.path, args.output, *paths], options, progress=bar.update)
    names = [Path(args.model).name, args.output.name, *(mix.name for mix in mixes)]
    if args.png:
        from apps.show.picture import Point, size_against_divergence

        points = [
            Point(name.removesuffix(".gguf"), result.size_bytes, result.summary.mean_divergence, uniform=i > 0)
            for i, (name, result) in enumerate(zip(names[1:], results[1:], strict=True))
        ]
        size_against_divergence(points, points[0].label, args.png, reference=names[0].removesuffix(".gguf"))
    return Report(names, results, speeds, speed_notes(names, [r.size_bytes for r in results], speeds))


_UNITS = {"Quantizing": "bytes", "Reading weights": "tensors", "Calibrating": "chunks", "Checking": "chunks"}


class Stages(Protocol):
    """Shows how far each stage of a job is."""

    def __call__(self, stage: str, done: int, total: int, what: str = "") -> None:
        """what: it is at now."""


@contextmanager
def stages() -> Iterator[Stages]:
    """A bar for each stage of a long job, one after the other."""
    with ExitStack() as stack:
        bars: dict[str, Progress] = {}

        def show(stage: str, done: int, total: int, what: str = "") -> None:
            if stage not in bars:
                stack.close()  # of the stage before
                bars[stage] = stack.enter_context(progress(stage, unit=_UNITS.get(stage, "passes")))
            bars[stage].update(done, total, what)

        yield show
