"""`edge quantize` for language models: from GGUF or a folder of safetensors to GGUF."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apps.commands import quantize_kernels, quantize_report
from apps.errors import UsageError
from apps.options import QUANTIZE_MINUTES, check_output, model_path
from apps.show.format import bytes_text
from apps.show.progress import progress
from apps.show.table import print_note, print_table
from devices.files import temporary_beside
from edge.quantization.fit import FitOptions, Fitted, file_within, fit_file, least_bytes
from edge.quantization.gguf import Outcome, quantize
from edge.quantization.text_file import BUNDLED, read_text
from quant.checkpoint.checkpoint import Checkpoint
from quant.checkpoint.convert import CONVERTED_TYPES, convert
from quant.gguf.file import GgufFile
from quant.gguf.imatrix import read_imatrix
from quant.mixes import Mix, mix_by_name, weight_type


@dataclass(frozen=True)
class Made:
    """What was written."""

    outcome: Outcome
    word: str  # for its types
    fitted: Fitted | None = None
    budget: int | None = None  # bytes


def run(args: argparse.Namespace) -> int:
    """Quantize, report, and show; the exit code."""
    began = time.monotonic()
    compared = _check(args)
    report = None
    if _is_conversion(args):
        file, source_bytes = _convert(args)
        types = {name: tensor.type for name, tensor in file.tensors.items()}
        made = Made(Outcome(types, file.size_bytes, ()), args.type.lower())
    else:
        with _source(args) as (file, source_bytes):
            made = _fit(args, file) if args.size or args.fit else _to_type(args, file)
            if args.report:
                report = quantize_report.report(args, file, compared)
    values = _as_json(args, file, source_bytes, made, time.monotonic() - began)
    if args.json:
        print(json.dumps(values | {"report": report.to_json() if report else None}))
        return 0
    _print(args, values, made)
    if report is not None:
        report.print()
    return 0


def _check(args: argparse.Namespace) -> list[Mix]:
    """The mixes to compare with. Raises what can be known to be wrong before anything is converted or computed."""
    compared = [mix_by_name(name) for name in args.compare or ()]
    mixes = compared
    if args.type:
        kind = mix_by_name(args.type)
        if Path(args.model).is_dir():  # for other models llama.cpp is asked at once, which knows each tensor
            mixes = [kind, *compared]
        if args.imatrix and kind.name in CONVERTED_TYPES and not compared:
            raise UsageError(f"--imatrix is for types of fewer bits than {kind.name}; leave it out")
    for name in args.types or ():
        weight_type(name)
    if args.imatrix:
        read_imatrix(args.imatrix)
    else:
        for mix in mixes:
            if mix.needs_importance:
                raise UsageError(
                    f"{mix.name} needs an importance matrix; make one with edge imatrix MODEL TEXT and give it with"
                    " --imatrix FILE"
                )
    if args.text:
        read_text(args.text)
    if args.png:
        from apps.show.picture import check_picture

        check_picture(args.png)
    return compared


def _is_conversion(args: argparse.Namespace) -> bool:
    """Whether a folder of safetensors is to become a GGUF, and no more."""
    return Path(args.model).is_dir() and (args.type or "").lower() in CONVERTED_TYPES and not args.report


def _convert(args: argparse.Namespace) -> tuple[GgufFile, int]:
    """Write OUT from a folder of safetensors. What was written, and bytes of the weights in the folder."""
    source_bytes = _check_folder(args)
    with progress(f"Converting {args.model}") as bar:
        convert(Path(args.model), args.output, bar.update, args.type.lower())
    return GgufFile.open(args.output), source_bytes


@contextmanager
def _source(args: argparse.Namespace) -> Iterator[tuple[GgufFile, int]]:
    """The model as GGUF, and bytes of IN. A folder of safetensors is converted first, to a file beside OUT."""
    if not Path(args.model).is_dir():
        file = GgufFile.open(model_path(args.model))
        _check_output(args, file.paths)
        yield file, file.size_bytes
        return
    source_bytes = _check_folder(args)
    with temporary_beside(args.output, ".gguf") as temporary:
        with progress(f"Converting {args.model}") as bar:
            convert(Path(args.model), temporary, bar.update)
        yield GgufFile.open(temporary), source_bytes


def _check_folder(args: argparse.Namespace) -> int:
    """Bytes of the weights in a folder of safetensors. ModelFileError where it is none; UsageError where OUT is a file
    of it, which a GGUF made from it before is not."""
    with Checkpoint.open(Path(args.model)) as checkpoint:
        held = {path for path in checkpoint.folder.iterdir() if path.suffix != ".gguf"}
        _check_output(args, held)
        return sum(path.stat().st_size for path in checkpoint.paths)


def _check_output(args: argparse.Namespace, model: Iterable[Path]) -> None:
    check_output(args.output, (*model, *(path for path in (args.imatrix, args.text) if path)), args.force)


def _to_type(args: argparse.Namespace, file: GgufFile) -> Made:
    mix = mix_by_name(args.type) if args.type else quantize_kernels.default_mix(args.threads)
    _warn_of_loss(file)
    with progress(f"Quantizing to {mix.name}", sum(t.n_bytes for t in file.tensors.values())) as bar:
        outcome = quantize(file, args.output, mix, imatrix=args.imatrix, threads=args.threads, progress=bar.update)
    return Made(outcome, mix.name)


def _fit(args: argparse.Namespace, file: GgufFile) -> Made:
    _warn_of_loss(file)
    kinds = tuple(weight_type(name) for name in args.types or ())
    options = FitOptions(args.imatrix, kinds, args.fast, 60 * (args.minutes or QUANTIZE_MINUTES), args.threads)
    budget = args.size or _budget(args, file, options)
    with quantize_report.stages() as show:
        fitted = fit_file(file, args.output, budget, read_text(args.text or BUNDLED), options, show)
    return Made(fitted.outcome, "fitted", fitted, budget)


def _budget(args: argparse.Namespace, file: GgufFile, options: FitOptions) -> int:
    """Bytes of a file whose weights fit into the memory beside everything else."""
    budget, parts = file_within(file, args.fit, args.context, args.kv_type or "f16", least_bytes(file, options))
    words = ", ".join(f"{name} {bytes_text(n)}" for name, n in parts.items() if n)
    print(f"edge quantize: of {bytes_text(args.fit)}, {bytes_text(budget)} are left: {words}", file=sys.stderr)
    return budget


def _warn_of_loss(file: GgufFile) -> None:
    """A word where weights have lost bits before."""
    lossy = Counter[str]()
    for tensor in file.tensors.values():
        if tensor.type.block > 1:
            lossy[tensor.type.name] += tensor.n_bytes
    if lossy:
        print(
            f"edge quantize: {file.path.name} is quantized already, mostly to {lossy.most_common(1)[0][0]}, and loses"
            " once more; better start from F16, BF16 or F32",
            file=sys.stderr,
        )


def _as_json(
    args: argparse.Namespace, file: GgufFile, source_bytes: int, made: Made, duration_s: float
) -> dict[str, Any]:
    outcome, fitted = made.outcome, made.fitted
    sizes: Counter[str] = Counter()
    values = 0
    for name, kind in outcome.types.items():
        sizes[kind.name] += kind.n_bytes(file.tensors[name].n_values)
        values += file.tensors[name].n_values
    return {
        "input": str(args.model),
        "output": str(args.output),
        "type": made.word,
        "source_bytes": source_bytes,
        "size_bytes": outcome.n_bytes,
        "bits_per_weight": 8 * sum(sizes.values()) / values,
        "type_bytes": dict(sizes.most_common()),
        "types": {name: kind.name for name, kind in outcome.types.items()},
        "misfits": [
            {"tensor": m.tensor, "columns": m.columns, "wanted": m.wanted, "used": m.used} for m in outcome.misfits
        ],
        "imatrix": str(args.imatrix) if args.imatrix else None,
        "budget_bytes": made.budget,
        "expected_divergence": fitted.expected_divergence if fitted else None,
        "measured_divergence": fitted.measured_divergence if fitted else None,
        "gap": fitted.gap if fitted and math.isfinite(fitted.gap) else None,
        "slow_types": dict(fitted.slow) if fitted else {},
        "duration_s": duration_s,
    }


def _print(args: argparse.Namespace, values: dict[str, Any], made: Made) -> None:
    rows = [
        ("size", f"{bytes_text(values['size_bytes'])}, was {bytes_text(values['source_bytes'])}"),
        ("bits a weight", f"{values['bits_per_weight']:.2f}"),
        ("types", ", ".join(f"{name} {bytes_text(n)}" for name, n in values["type_bytes"].items())),
    ]
    if made.fitted and made.budget:
        rows.insert(1, ("of the budget", f"{100 * values['size_bytes'] / made.budget:.2f} %"))
        figures = f"{made.fitted.measured_divergence:.5f} nats a token, expected {made.fitted.expected_divergence:.5f}"
        rows.append(("KL divergence", figures))
    print_table(f"{args.output}: {made.word}", rows)
    if made.outcome.misfits:
        first = made.outcome.misfits[0]
        print_note(
            f"{len(made.outcome.misfits)} tensors do not divide into blocks of the type and have another one:"
            f" {first.tensor} has {first.columns} columns, so {first.used} in place of {first.wanted}"
        )
    if made.fitted and made.fitted.slow:
        words = ", ".join(f"{small} ({large} is faster)" for small, large in made.fitted.slow.items())
        print_note(f"it has types that decode slower on this device than larger ones: {words}; --fast does without")
