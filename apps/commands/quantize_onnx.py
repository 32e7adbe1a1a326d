"""`edge quantize IN.onnx OUT.onnx`: weights of 8 or 4 bits, and what they cost and bring."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from apps.errors import UsageError
from apps.options import check_installed, check_output
from apps.show.progress import progress
from apps.show.table import figure, print_columns, print_json, print_note, print_notes, print_table
from quant.text import bytes_text, counted, number_text

if TYPE_CHECKING:
    from edge.quantization.onnx import Quantized
    from edge.quantization.onnx_compare import Comparison

_NEEDED = ("onnx", "onnxruntime")
_NEEDED_INT4 = ("onnx_ir", "ml_dtypes")  # what ONNX Runtime's tool for 4 bits imports, and does not install


def run(args: argparse.Namespace) -> int:
    """Quantize, compare, and say how it went; the exit code. args: model, output, type, calibration, block_size, force,
    json, threads."""
    source = Path(args.model)
    _check(args, source)
    from edge.quantization.onnx import quantize

    start_s = time.monotonic()
    with progress(f"Quantizing {source.name}", unit="steps") as show:
        made = quantize(source, args.output, args.type, args.calibration, args.block_size, args.threads, show)
    duration_s = time.monotonic() - start_s
    if args.json:
        head = {"input": str(args.model), "output": str(args.output), "type": args.type}
        return print_json({**head, **made.to_json(), "duration_s": round(duration_s, 3)})
    _print(args, made, duration_s)
    return 0


def _check(args: argparse.Namespace, source: Path) -> None:
    """UsageError for what cannot be, before anything is loaded."""
    if args.type not in ("int8", "int4"):
        raise UsageError(f"an ONNX model can become int8 or int4, not {args.type}")
    check_installed({name: name for name in (*_NEEDED, *(_NEEDED_INT4 if args.type == "int4" else ()))}, "ONNX models")
    if args.block_size is not None:
        from edge.quantization.onnx import BLOCK_SIZES

        if args.type != "int4":
            raise UsageError("--block-size is for --type int4")
        if args.block_size not in BLOCK_SIZES:
            raise UsageError(f"--block-size needs one of {', '.join(map(str, BLOCK_SIZES))}, got {args.block_size}")
    sources, inputs, target = [source], args.calibration, args.output
    if inputs is not None:
        sources += inputs.glob("*.npz") if inputs.is_dir() else [inputs]
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
                (o.name, figure(o.max_abs, ".4g"), figure(o.relative_l2, ".4f"), figure(o.cosine, ".5f"),
                 figure(o.top1, ".0%"))
                for o in made.comparison.outputs
            ],
        )  # fmt: skip
    print_notes(made.notes)


def _speed_text(compared: Comparison, threads: int) -> str:
    ratio = compared.float_ms / compared.quantized_ms
    return (
        f"{number_text(compared.quantized_ms)} ms, from {number_text(compared.float_ms)} ms ({ratio:.2f} times as"
        f" fast), medians of {compared.rounds} with {counted(threads, 'thread')}"
    )
