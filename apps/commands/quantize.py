"""`edge quantize`: makes a model smaller, to a type, to a file size, or to the available memory."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from apps.errors import UsageError
from apps.options import (
    ELASTIC_SIZES,
    QUANTIZE_MINUTES,
    add,
    check_installed,
    check_output,
    option,
    refuse,
    set_common,
)
from apps.show.progress import progress
from apps.show.table import figure, print_columns, print_json, print_note, print_notes, print_table
from devices.sizes import parse_bytes
from edge.units import between, items, parse_byte_range, positive_int, whole
from quant.gguf.elastic import MOST_SIZES
from quant.text import bytes_text, counted, number_text

if TYPE_CHECKING:
    from edge.quantization.onnx import Quantized

HELP = "Make a model smaller (to a type, a file size, or a memory limit), and report the loss of quality."

_FOR_GGUF = (
    "size", "fit", "elastic", "sizes", "context", "kv_type", "imatrix", "text", "types", "compare", "png", "minutes",
    "fast", "for", "report",
)  # fmt: skip
_FOR_ONNX = ("calibration", "block_size")
_NEEDED = ("onnx", "onnxruntime")
_NEEDED_INT4 = ("onnx_ir", "ml_dtypes")  # imports of ONNX Runtime's 4-bit tool that its package does not install
_KERNELS = (
    "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "q2_k", "iq3_xxs", "iq3_s", "q3_k", "iq4_xs", "iq4_nl", "q4_0",
    "q4_k", "q4_1", "q5_0", "q5_k", "q5_1", "q6_k", "q8_0", "bf16", "f16", "f32",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    set_common(parser, "--type --size --fit --imatrix --minutes --force --json --compare")
    words = "model to quantize: GGUF file, REPO:FILE, folder of safetensors, or .onnx file"
    parser.add_argument("model", nargs="?", metavar="IN", help=words)
    parser.add_argument("output", nargs="?", type=Path, metavar="OUT", help="file to write")
    words = "type or mix, such as q4_k_m; an unknown name prints the list (default: the type that --kernels recommends)"
    option(parser, "--type T", words)
    option(parser, "--size SIZE", "maximum size of the file, such as 900MiB", parse_bytes)
    option(parser, "--fit SIZE", "memory in which the model must run, such as 2GiB", parse_bytes)
    words = "write several sizes into one file, which switches between them while free memory varies, such as"
    words += " 1.2GiB..4GiB"
    option(parser, "--elastic SIZE..SIZE", words, parse_byte_range)
    words = f"with --elastic: number of sizes (default: {ELASTIC_SIZES})"
    option(parser, "--sizes N", words, whole(2, MOST_SIZES))
    add(parser, "--context", help="with --fit and --elastic: tokens of context (default: 4096)")
    add(parser, "--kv-type", help="with --fit and --elastic: type of the KV cache (default: f16)")
    words = "importance matrix (default: with --size, --fit and --elastic, computed)"
    option(parser, "--imatrix FILE", words, Path)
    option(parser, "--text FILE", "text on which divergence is measured (default: a bundled one)", Path)
    words = "with --size, --fit and --elastic: types to choose from (default: iq2_xxs to q8_0)"
    option(parser, "--types T,T", words, items)
    words = "with --size, --fit and --elastic: avoid types that decode slower here than a larger type"
    option(parser, "--fast", words)
    words = "use only types that this kind of device computes quickly"
    option(parser, "--for", words, choices=("browser",))
    words = f"time limit of --size, --fit and --elastic, in minutes (default: {QUANTIZE_MINUTES:.0f})"
    option(parser, "--minutes N", words, between(0.001, 10_000))
    add(parser, "--threads")
    add(parser, "--force", help="overwrite OUT")
    add(parser, "--json")
    group = parser.add_argument_group("report")
    option(group, "--report", "measure quality and speed of OUT, compared with IN")
    words = "with --report: measure IN in these types, too (in temporary files next to OUT)"
    option(group, "--compare T,T", words, items)
    add(group, "--png", help="with --report: draw size against divergence")
    option(group, "--kernels", "measure how fast this device computes with each type; takes no IN and OUT")
    group = parser.add_argument_group("ONNX")
    option(group, "--calibration FILE", "inputs for static int8: a .npz file, or a folder of them", Path)
    option(group, "--block-size N", "with int4: number of weights that share a scale (default: 32)", positive_int)


def run(args: argparse.Namespace) -> int:
    if args.kernels:
        if args.model is not None:
            raise UsageError("--kernels measures this device and takes no model; leave IN and OUT out")
        refuse(args, ("type", *_FOR_ONNX, *_FOR_GGUF, "force"), "is for a model, but --kernels measures this device")
        return _run_kernels(args)
    if args.model is None or args.output is None:
        raise UsageError("needs IN, the model, and OUT, the file to write; or --kernels")
    if args.model.endswith(".onnx"):
        refuse(args, _FOR_GGUF, "is for GGUF models; an ONNX model takes --type int8 or int4, and always reports")
        if args.type is None:
            raise UsageError("an ONNX model needs --type int8 or int4")
        return run_onnx(args)
    _check(args)
    if getattr(args, "for"):
        _keep_to_browsers(args)
    from apps import quantize_gguf

    return quantize_gguf.run(args)


def _check(args: argparse.Namespace) -> None:
    """Raise UsageError if options contradict each other."""
    chosen = [name for name in ("type", "size", "fit", "elastic") if getattr(args, name)]
    if len(chosen) > 1:
        raise UsageError(f"--{chosen[0]} and --{chosen[1]} contradict each other: give only one")
    fits = args.size or args.fit or args.elastic
    uses = "--size, --fit and --elastic"
    for names, files, use in (
        (("types", "minutes", "fast"), fits, uses),
        (("sizes",), args.elastic, "--elastic"),
        (("context", "kv_type"), args.fit or args.elastic, "--fit and --elastic"),
        (("compare", "png"), args.report, "--report"),
        (("text",), fits or args.report, f"{uses}, and --report"),
        (_FOR_ONNX, None, "ONNX models"),
    ):
        if not files:
            refuse(args, names, f"is for {use}")
    if fits:
        check_installed({"scipy": "scipy"}, uses, "quantize")
    if args.elastic:
        refuse(args, ("report",), "is for one size; use edge evaluate on the file to measure its largest size")


def _keep_to_browsers(args: argparse.Namespace) -> None:
    """Choose only types that browsers compute quickly. Raises UsageError if others are named."""
    from quant.mixes import mix_by_name
    from quant.types import BROWSER_TYPES

    if args.size or args.fit or args.elastic:
        named = args.types = args.types or list(BROWSER_TYPES)
    else:
        args.type = args.type or "q4_k_m"
        named = [mix_by_name(args.type).type.name]
    if slow := [name for name in named if name.lower() not in (*BROWSER_TYPES, "f16", "f32")]:
        raise UsageError(f"browsers compute {', '.join(slow)} slowly; they are fast with {', '.join(BROWSER_TYPES)}")


def _run_kernels(args: argparse.Namespace) -> int:
    """Print how fast this device computes with each type; return the exit code."""
    from devices.probe import default_threads
    from edge.quantization.kernels import COLUMNS, default_mix, measure_kernels, slow_kinds
    from quant.types import TYPES

    threads = args.threads or default_threads()
    kinds = [TYPES[name] for name in _KERNELS]
    with progress("Measuring", unit="rounds") as show:
        speeds = measure_kernels(kinds, COLUMNS, threads, prompts=True, progress=show)
    slow = slow_kinds(speeds)
    default = default_mix(threads, again=True).name
    if args.json:
        types = [{**speed.to_json(), "slower_than": slow.get(speed.type.name)} for speed in speeds]
        return print_json({"threads": threads, "types": types, "default": default})
    rows = [
        [
            speed.type.name,
            f"{speed.type.bits_per_weight:.2f}",
            f"{speed.decode:.1f}",
            f"{speed.prefill:.1f}",
            "repacked" if speed.repacked else "",
            f"{slow[speed.type.name]} is larger and decodes faster" if speed.type.name in slow else "",
        ]
        for speed in speeds
    ]
    print_columns(("type", "bits/weight", "decode", "prefill", "layout", "note"), rows)
    print_note(f"1e9 weights a second, {counted(threads, 'thread')}; without --type, {default} is used on this device")
    return 0


def run_onnx(args: argparse.Namespace) -> int:
    """Quantize an ONNX model, compare it with the original, print the result, and return the exit code.

    args: model, output, type, calibration, block_size, force, json and threads.
    """
    source = Path(args.model)
    _check_onnx(args, source)
    from edge.quantization.onnx import quantize

    start_s = time.monotonic()
    with progress(f"Quantizing {source.name}", unit="steps") as show:
        quantized = quantize(source, args.output, args.type, args.calibration, args.block_size, args.threads, show)
    duration_s = time.monotonic() - start_s
    if args.json:
        head = {"input": str(args.model), "output": str(args.output), "type": args.type}
        return print_json({**head, **quantized.to_json(), "duration_s": round(duration_s, 3)})
    _print_onnx(args, quantized, duration_s)
    return 0


def _check_onnx(args: argparse.Namespace, source: Path) -> None:
    """Raise UsageError for options that cannot work, before anything is loaded."""
    if args.type not in ("int8", "int4"):
        raise UsageError(f"an ONNX model needs --type int8 or int4, got {args.type}")
    check_installed({name: name for name in (*_NEEDED, *(_NEEDED_INT4 if args.type == "int4" else ()))}, "ONNX models")
    if args.block_size is not None:
        from edge.quantization.onnx import BLOCK_SIZES

        if args.type != "int4":
            raise UsageError("--block-size is for --type int4; leave it out")
        if args.block_size not in BLOCK_SIZES:
            raise UsageError(f"--block-size needs one of {', '.join(map(str, BLOCK_SIZES))}, got {args.block_size}")
    sources, inputs, target = [source], args.calibration, args.output
    if inputs is not None:
        sources += inputs.glob("*.npz") if inputs.is_dir() else [inputs]
    for path in (target, target.with_name(f"{target.name}.data")):  # the second file holds weights of a large model
        check_output(path, sources, args.force)


def _print_onnx(args: argparse.Namespace, quantized: Quantized, duration_s: float) -> None:
    share = quantized.size_bytes / quantized.source_bytes
    rows = [
        (
            "type",
            f"{args.type}, {quantized.method}"
            + (f", blocks of {quantized.block_size}" if quantized.block_size else ""),
        ),
        ("weights", f"{quantized.weights_quantized} quantized, {quantized.weights_left} left in floats"),
        ("size", f"{bytes_text(quantized.size_bytes)}, {share:.1%} of {bytes_text(quantized.source_bytes)}"),
    ]
    if compared := quantized.comparison:
        speed = f"{number_text(compared.quantized_ms)} ms, from {number_text(compared.float_ms)} ms"
        ratio, threads = compared.float_ms / compared.quantized_ms, counted(quantized.threads, "thread")
        rows.append(("a run", f"{speed} ({ratio:.2f} times as fast), medians of {compared.rounds} with {threads}"))
    rows.append(("time", f"{duration_s:.1f} s"))
    print_table(str(args.output), rows)
    if compared:
        origin = "made-up" if quantized.samples_made_up else "given"
        print_note(f"Error against the float model, on {compared.samples} {origin} samples:")
        print_columns(
            ("output", "max abs", "relative L2", "cosine", "top-1"),
            [
                (o.name, figure(o.max_abs, ".4g"), figure(o.relative_l2, ".4f"), figure(o.cosine, ".5f"),
                 figure(o.top1, ".0%"))
                for o in compared.outputs
            ],
        )  # fmt: skip
    print_notes(quantized.notes)
