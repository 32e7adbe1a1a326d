"""`edge quantize IN.onnx OUT.onnx`: weights of 8 or 4 bits, and what they cost and bring."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from apps.errors import UsageError
from apps.options import check_installed, check_output
from apps.show.progress import progress
from apps.show.table import print_columns, print_json, print_note, print_table
from quant.text import bytes_text, counted, number_text

if TYPE_CHECKING:
    from edge.quantization.onnx import Quantized
    from edge.quantization.onnx_compare import Comparison

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
    with progress(f"Quantizing {source.name}", unit="steps") as show:
        made = quantize(source, target, args.type, calibration, args.block_size, args.threads, show)
    duration_s = time.monotonic() - start_s
    if args.json:
        head = {"input": str(args.model), "output": str(args.output), "type": args.type}
        return print_json({**head, **made.to_json(), "duration_s": round(duration_s, 3)})
    _print(args, made, duration_s)
    return 0


def _check(args: argparse.Namespace, source: Path, target: Path, calibration: Path | None) -> None:
    """UsageError for what cannot be, before anything is loaded."""
    if args.type not in ("int8", "int4"):
        raise UsageError(f"an ONNX model can become int8 or int4, not {args.type}")
    needed = _NEEDED + (_NEEDED_INT4 if args.type == "int4" else ())
    check_installed(dict(zip(needed, needed, strict=True)), "ONNX models")
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
    for note in made.notes:
        print_note(note)


def _speed_text(compared: Comparison, threads: int) -> str:
    ratio = compared.float_ms / compared.quantized_ms
    return (
        f"{number_text(compared.quantized_ms)} ms, from {number_text(compared.float_ms)} ms ({ratio:.2f} times as"
        f" fast), medians of {compared.rounds} with {counted(threads, 'thread')}"
    )


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
