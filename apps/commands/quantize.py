"""`edge quantize`: a model in fewer bits, by type, by size of the file, or by the memory there is."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from apps.errors import UsageError
from apps.options import ELASTIC_SIZES, QUANTIZE_MINUTES, add, check_installed, check_output, option, refuse
from apps.show.progress import progress
from apps.show.table import figure, print_columns, print_json, print_note, print_notes, print_table
from edge.units import between, items, parse_byte_range, parse_bytes, positive_int, whole
from quant.gguf.elastic import MOST_SIZES
from quant.text import bytes_text, counted, number_text

if TYPE_CHECKING:
    from edge.quantization.onnx import Quantized

HELP = "Make a model smaller: to a type, to a size, or to the memory there is; and say what that costs."

_FOR_GGUF = (
    "size", "fit", "elastic", "sizes", "context", "kv_type", "imatrix", "text", "types", "compare", "png", "minutes",
    "fast", "report",
)  # fmt: skip
_FOR_ONNX = ("calibration", "block_size")
_NEEDED = ("onnx", "onnxruntime")
_NEEDED_INT4 = ("onnx_ir", "ml_dtypes")  # what ONNX Runtime's tool for 4 bits imports, and does not install
_KERNELS = (
    "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "q2_k", "iq3_xxs", "iq3_s", "q3_k", "iq4_xs", "iq4_nl", "q4_0",
    "q4_k", "q4_1", "q5_0", "q5_k", "q5_1", "q6_k", "q8_0", "bf16", "f16", "f32",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="IN", help="GGUF file, REPO:FILE, folder of safetensors, or .onnx")
    parser.add_argument("output", nargs="?", type=Path, metavar="OUT", help="file to write")
    option(parser, "--type T", "q4_k_m, q8_0, ...; an unknown one lists all (default: by --kernels)")
    option(parser, "--size SIZE", "a file of at most so much, such as 900MiB", parse_bytes)
    option(parser, "--fit SIZE", "a model that runs in so much memory", parse_bytes)
    words = "several sizes in one file, to run in 1.2GiB..4GiB of memory: more and fewer bits as that changes"
    option(parser, "--elastic SIZE..SIZE", words, parse_byte_range)
    option(parser, "--sizes N", f"with --elastic: how many (default: {ELASTIC_SIZES})", whole(2, MOST_SIZES))
    add(parser, "--context", help="with --fit and --elastic: tokens of context (default: 4096)")
    add(parser, "--kv-type", help="with --fit and --elastic: type of the KV cache (default: f16)")
    option(parser, "--imatrix FILE", "importance matrix (--size, --fit and --elastic make their own)", Path)
    option(parser, "--text FILE", "to measure the damage with (default: a bundled one)", Path)
    option(parser, "--types T,T", "--size, --fit and --elastic choose among these (default: iq2_xxs to q8_0)", items)
    option(parser, "--fast", "and not among those that decode slower here than a larger one, if possible")
    words = f"that --size, --fit and --elastic may take, all in all (default: {QUANTIZE_MINUTES:.0f})"
    option(parser, "--minutes N", words, between(0.001, 10_000))
    add(parser, "--threads")
    add(parser, "--force", help="overwrite OUT")
    add(parser, "--json")
    group = parser.add_argument_group("report")
    option(group, "--report", "measure quality and speed of OUT beside IN")
    option(group, "--compare T,T", "and of IN in these types, in temporary files beside OUT", items)
    add(group, "--png")
    option(group, "--kernels", "how fast this device computes with each type; no IN or OUT")
    group = parser.add_argument_group("ONNX")
    option(group, "--calibration FILE", "inputs (.npz, or a folder of them) for static int8", Path)
    option(group, "--block-size N", "int4: weights with a scale (default: 32)", positive_int)


def run(args: argparse.Namespace) -> int:
    if args.kernels:
        if args.model is not None:
            raise UsageError("--kernels is about this device; leave IN and OUT out")
        refuse(args, ("type", *_FOR_ONNX, *_FOR_GGUF, "force"), "is of a model; --kernels is about this device")
        return _run_kernels(args)
    if args.model is None or args.output is None:
        raise UsageError("needs IN, the model, and OUT, the file to write; or --kernels")
    if args.model.endswith(".onnx"):
        refuse(args, _FOR_GGUF, "is for GGUF models; an ONNX model takes --type int8 or int4, and reports by itself")
        if args.type is None:
            raise UsageError("an ONNX model takes --type int8 or int4")
        return run_onnx(args)
    _check(args)
    from apps import quantize_gguf

    return quantize_gguf.run(args)


def _check(args: argparse.Namespace) -> None:
    """UsageError for options that do not go together."""
    chosen = [name for name in ("type", "size", "fit", "elastic") if getattr(args, name)]
    if len(chosen) > 1:
        raise UsageError(f"--{chosen[0]} and --{chosen[1]} do not go together: give one")
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
        refuse(args, ("report",), "compares one size; use edge evaluate on the file, which is its largest size")


def _run_kernels(args: argparse.Namespace) -> int:
    """Show how fast this device computes with each type; the exit code."""
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
    print_note(f"1e9 weights a second, {counted(threads, 'thread')}; without --type a model becomes {default} here")
    return 0


def run_onnx(args: argparse.Namespace) -> int:
    """Quantize, compare, and say how it went; the exit code. args: model, output, type, calibration, block_size, force,
    json, threads."""
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
