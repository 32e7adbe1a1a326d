"""`edge quantize` for language models: from GGUF or a folder of safetensors to GGUF."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from apps.engine_options import engine_options
from apps.errors import UsageError
from apps.options import ELASTIC_SIZES, QUANTIZE_MINUTES, check_output, model_path
from apps.show.progress import ShownSteps
from apps.show.table import print_columns, print_json, print_note, print_table
from devices.probe import default_threads
from edge.pictures.canvas import check_picture
from edge.pictures.quality import draw_evaluation
from edge.quantization import make
from edge.quantization.comparison import COLUMNS, compare_mixes
from edge.quantization.fit import FitOptions
from edge.quantization.kernels import default_mix
from edge.quantization.make import QuantizedModel, Source, budgets_between
from edge.quantization.text_file import BUNDLED, read_text
from partition.model.file import ModelFile
from quant.checkpoint.convert import CONVERTED_TYPES
from quant.gguf.imatrix import read_imatrix
from quant.mixes import Mix, mix_by_name, weight_type
from quant.text import bytes_text


def run(args: argparse.Namespace) -> int:
    began = time.monotonic()
    compared = _check(args)
    steps, is_folder = ShownSteps("quantize"), Path(args.model).is_dir()
    model = Path(args.model) if is_folder else ModelFile.open(model_path(args.model))
    read = [path for path in (args.imatrix, args.text) if path]
    check_output(args.output, [*make.model_files(model), *read], args.force)
    if args.elastic:
        return _make_elastic(args, model, steps, began)
    evaluation = None
    if not isinstance(model, ModelFile) and (args.type or "").lower() in CONVERTED_TYPES and not args.report:
        quantized = make.convert_checkpoint(model, args.output, args.type.lower(), steps)
    else:
        with make.as_gguf(model, args.output, steps) as source:
            quantized = _make(args, source, steps, began)
            if args.report:
                text, name = read_text(args.text or BUNDLED), Path(args.model).name
                how = {"imatrix": args.imatrix, "threads": args.threads, "steps": steps}
                evaluation = compare_mixes(source.file, name, args.output, compared, text, **how)
    if evaluation and args.png:
        draw_evaluation(evaluation, args.png, like=args.output.name)
    if args.json:
        return print_json(
            {
                "input": str(args.model),
                "output": str(args.output),
                **quantized.to_json(),
                "imatrix": str(args.imatrix) if args.imatrix else None,
                "duration_s": time.monotonic() - began,
                "report": evaluation.to_json() if evaluation else None,
            }
        )
    _print(args, quantized)
    if evaluation is not None:
        print_columns(COLUMNS, evaluation.rows(), ("model",), evaluation.notes)
    return 0


def _check(args: argparse.Namespace) -> list[Mix]:
    """Return the mixes to compare with.

    Raises an error for every mistake that can be known before a conversion or computation starts.
    """
    compared = [mix_by_name(name) for name in args.compare or ()]
    mixes = compared
    if args.type:
        kind = mix_by_name(args.type)
        if Path(args.model).is_dir():  # a GGUF file is checked by llama.cpp, which knows each tensor
            mixes = [kind, *compared]
        if args.imatrix and kind.name in CONVERTED_TYPES and not compared:
            raise UsageError(f"--imatrix is for types of fewer bits than {kind.name}; leave it out")
    for name in args.types or ():
        weight_type(name)
    if args.imatrix:
        read_imatrix(args.imatrix)
    elif mix := next((mix for mix in mixes if mix.needs_importance), None):
        raise UsageError(
            f"{mix.name} needs an importance matrix; make one with edge imatrix MODEL TEXT and give it with"
            " --imatrix FILE"
        )
    if args.text:
        read_text(args.text)
    if args.png:
        check_picture(args.png)
    return compared


def _make(args: argparse.Namespace, source: Source, steps: ShownSteps, began: float) -> QuantizedModel:
    """Write OUT as --type, --size or --fit state. began: start of the command, by `time.monotonic`"""
    if not (args.size or args.fit):
        mix = mix_by_name(args.type) if args.type else default_mix(args.threads or default_threads())
        return make.quantize_to_type(source, args.output, mix, imatrix=args.imatrix, threads=args.threads, steps=steps)
    options = _fit_options(args, began)
    size = args.size or make.budget_within(source, args.fit, engine_options(args), options, steps)
    return make.quantize_to_size(source, args.output, size, read_text(args.text or BUNDLED), options, steps)


def _fit_options(args: argparse.Namespace, began: float) -> FitOptions:
    """Return the options of a fit, which gets the time that the command has left."""
    kinds = tuple(weight_type(name) for name in args.types or ())
    left_s = 60 * (args.minutes or QUANTIZE_MINUTES) - (time.monotonic() - began)
    return FitOptions(args.imatrix, kinds, args.fast, max(0.0, left_s), args.threads)


def _make_elastic(args: argparse.Namespace, model: Path | ModelFile, steps: ShownSteps, began: float) -> int:
    """Write OUT with several sizes, print them, and return the exit code."""
    with make.as_gguf(model, args.output, steps) as source:
        options = _fit_options(args, began)
        engine = engine_options(args)
        ends = [make.budget_within(source, memory, engine, options, steps) for memory in args.elastic]
        budgets = budgets_between(ends[0], min(ends[1], source.file.size_bytes), args.sizes or ELASTIC_SIZES)
        text = read_text(args.text or BUNDLED)
        fitted = make.quantize_to_sizes(source, args.output, budgets, text, options, steps)
    if args.json:
        paths = {"input": str(args.model), "output": str(args.output)}
        return print_json({**paths, **fitted.to_json(), "duration_s": time.monotonic() - began})
    sizes = [(bytes_text(fit.outcome.n_bytes), f"{fit.measured_divergence:.5f}") for fit in fitted.fits]
    print_columns(("size", "KL divergence"), [list(row) for row in sizes])
    alone = sum(fit.outcome.n_bytes for fit in fitted.fits)
    print_note(f"{args.output}: {bytes_text(fitted.n_bytes)}; separate files would have {bytes_text(alone)}")
    return 0


def _print(args: argparse.Namespace, quantized: QuantizedModel) -> None:
    values = quantized.to_json()
    rows = [
        ("size", f"{bytes_text(values['size_bytes'])}, was {bytes_text(values['source_bytes'])}"),
        ("bits per weight", f"{values['bits_per_weight']:.2f}"),
        ("types", ", ".join(f"{name} {bytes_text(n)}" for name, n in values["type_bytes"].items())),
    ]
    if quantized.fitted and quantized.budget:
        rows.insert(1, ("share of budget", f"{100 * values['size_bytes'] / quantized.budget:.2f} %"))
        fitted = quantized.fitted
        figures = f"{fitted.measured_divergence:.5f} nats per token, expected {fitted.expected_divergence:.5f}"
        rows.append(("KL divergence", figures))
        if exact := values["exact_tensors"]:
            rows.append(("without loss", ", ".join(f"{n} tensors stored in {kind}" for kind, n in exact.items())))
    print_table(f"{args.output}: {quantized.type_name}", rows)
    if quantized.outcome.misfits:
        misfits = quantized.outcome.misfits
        first = misfits[0]
        print_note(
            f"tensors that do not divide into blocks of the type and use another type: {len(misfits)};"
            f" {first.tensor} has {first.columns} columns and uses {first.used} instead of {first.requested}"
        )
    if quantized.fitted and quantized.fitted.slow:
        words = ", ".join(f"{small} ({large} is faster)" for small, large in quantized.fitted.slow.items())
        print_note(f"some types decode slower on this device than larger ones: {words}; --fast avoids them")
