"""`edge quantize IN.onnx OUT.onnx`: weights of 8 or 4 bits, and what they cost and bring."""

from __future__ import annotations

import argparse
import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apps.errors import UsageError
from apps.options import check_output
from apps.show.format import bytes_text, counted, ms_text
from apps.show.progress import progress
from apps.show.table import print_columns, print_note, print_table

if TYPE_CHECKING:
    from edge.quantization.onnx import Quantized
    from edge.quantization.onnx_compare import Comparison, OutputError

_NEEDED = ("onnx", "onnxruntime")
_NEEDED_INT4 = ("onnx_ir", "ml_dtypes")  # what ONNX Runtime's tool for 4 bits imports, and does not install


def run(args: argparse.Namespace) -> int:
    """Quantize, compare, and say how it went; the exit code. args: model, output, type, calibration, block_size, force,
    json, threads."""
    source, target = Path(args.model), Path(args.output)
    calibration = Path(args.calibration) if args.calibration is not None else None
    _check(args, source, target, calibration)
    from edge.quantization.onnx import quantize

    start_s = time.monotonic()
    with progress(f"Quantizing {source.name}", unit="steps") as bar:
        made = quantize(source, target, args.type, calibration, args.block_size, args.threads, bar.update)
    duration_s = time.monotonic() - start_s
    if args.json:
        print(json.dumps(_as_json(args, made, duration_s)))
    else:
        _print(args, made, duration_s)
    return 0


def _check(args: argparse.Namespace, source: Path, target: Path, calibration: Path | None) -> None:
    """UsageError for what cannot be, before anything is loaded."""
    if args.type not in ("int8", "int4"):
        raise UsageError(f"an ONNX model can become int8 or int4, not {args.type}")
    lacking = [name for name in _NEEDED + (_NEEDED_INT4 if args.type == "int4" else ()) if find_spec(name) is None]
    if lacking:
        raise UsageError(f'{", ".join(lacking)} needed for ONNX models: pip install "edge-runtime[onnx]"')
    if args.block_size is not None:
        from edge.quantization.onnx import BLOCK_SIZES

        if args.type != "int4":
            raise UsageError("--block-size is for --type int4")
        if args.block_size not in BLOCK_SIZES:
            raise UsageError(f"--block-size needs one of {', '.join(map(str, BLOCK_SIZES))}, got {args.block_size}")
    sources = [source]
    if calibration is not None:
        sources += calibration.glob("*.npz") if calibration.is_dir() else [calibration]
    for path in (target, target.with_name(f"{target.name}.data")):  # the second one, where weights go beside the model
        check_output(path, sources, args.force)


def _as_json(args: argparse.Namespace, made: Quantized, duration_s: float) -> dict[str, Any]:
    compared = made.comparison
    return {
        "input": str(args.model),
        "output": str(args.output),
        "data_path": str(made.data_file) if made.data_file else None,
        "type": args.type,
        "method": made.method,
        "block_size": made.block_size,
        "source_bytes": made.source_bytes,
        "size_bytes": made.size_bytes,
        "weights_quantized": made.weights_quantized,
        "weights_left": made.weights_left,
        "samples": compared.samples if compared else 0,
        "samples_made_up": made.samples_made_up,
        "open_dimensions": {name: list(dims) for name, dims in made.open_dims.items()},
        "outputs": [_output_json(output) for output in compared.outputs] if compared else [],
        "not_compared": made.not_compared,
        "threads": made.threads,
        "float_ms": compared.float_ms if compared else None,
        "quantized_ms": compared.quantized_ms if compared else None,
        "speed_ratio": compared.float_ms / compared.quantized_ms if compared else None,
        "rounds": compared.rounds if compared else 0,
        "notes": _notes(made),
        "duration_s": round(duration_s, 3),
    }


def _output_json(output: OutputError) -> dict[str, Any]:
    return {
        "name": output.name,
        "max_abs_error": output.max_abs,
        "relative_l2_error": output.relative_l2,
        "cosine": output.cosine,
        "top1_agreement": output.top1,
    }


def _print(args: argparse.Namespace, made: Quantized, duration_s: float) -> None:
    share = made.size_bytes / made.source_bytes
    rows = [
        ("type", f"{args.type}, {made.method}" + (f", blocks of {made.block_size}" if made.block_size else "")),
        ("weights", f"{made.weights_quantized} quantized, {made.weights_left} left in floats"),
        ("size", f"{bytes_text(made.size_bytes)}, {share:.1%} of {bytes_text(made.source_bytes)}"),
    ]
    if made.comparison:
        rows.append(("a run", _speed_text(made.comparison, made.threads)))
    rows.append(("time", f"{duration_s:.1f} s"))
    print_table(str(args.output), rows)
    if made.comparison:
        origin = "made-up" if made.samples_made_up else "given"
        print_note(f"Error against the float model, on {made.comparison.samples} {origin} samples:")
        print_columns(
            ("output", "max abs", "relative L2", "cosine", "top-1"),
            [
                (o.name, _figure(o.max_abs, ".4g"), _figure(o.relative_l2, ".4f"), _figure(o.cosine, ".5f"),
                 _figure(o.top1, ".0%"))
                for o in made.comparison.outputs
            ],
        )  # fmt: skip
    for note in _notes(made):
        print_note(note)


def _speed_text(compared: Comparison, threads: int) -> str:
    ratio = compared.float_ms / compared.quantized_ms
    return (
        f"{ms_text(compared.quantized_ms)} ms, from {ms_text(compared.float_ms)} ms ({ratio:.2f} times as fast),"
        f" medians of {compared.rounds} with {counted(threads, 'thread')}"
    )


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _notes(made: Quantized) -> list[str]:
    """What a reader should know beside the figures."""
    notes = []
    compared = made.comparison
    if compared and compared.slower:
        notes.append(
            "The quantized model is slower than the float one on this device:"
            f" {ms_text(compared.quantized_ms)} ms instead of {ms_text(compared.float_ms)}."
            + (" With --calibration ranges are fixed, which is often faster." if made.method == "dynamic" else "")
        )
    if made.samples_made_up and compared:
        notes.append("Made-up samples are random; give real ones with --calibration for an error that counts.")
        if made.open_dims:
            dims = "; ".join(f"{name}: {', '.join(dims)}" for name, dims in made.open_dims.items())
            notes.append(f"Dimensions that the model leaves open were 1 in them ({dims}).")
    if made.not_compared:
        notes.append(f"Not compared: {made.not_compared}.")
    if compared and any(output.max_abs is None for output in compared.outputs):
        notes.append("An output without figures has another shape after quantization, or is not all finite numbers.")
    return notes
