"""`edge quantize`: a model in fewer bits, by type, by size of the file, or by the memory there is."""

from __future__ import annotations

import argparse
from pathlib import Path

from apps.errors import UsageError
from apps.options import QUANTIZE_MINUTES, add, between, byte_size, check_installed, items, positive_int, refuse

HELP = "Make a model smaller: to a type, to a size, or to the memory there is; and say what that costs."

_FOR_GGUF = (
    "size", "fit", "context", "kv_type", "imatrix", "text", "types", "compare", "png", "minutes", "fast", "report",
)  # fmt: skip
_FOR_ONNX = ("calibration", "block_size")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options: the model, the result, and how it is made."""
    parser.add_argument("model", nargs="?", metavar="IN", help="GGUF file, REPO:FILE, folder of safetensors, or .onnx")
    parser.add_argument("output", nargs="?", type=Path, metavar="OUT", help="file to write")
    parser.add_argument(
        "--type", metavar="T", help="q4_k_m, q8_0, ...; an unknown one lists all (default: by --kernels)"
    )
    parser.add_argument("--size", type=byte_size, metavar="SIZE", help="a file of at most so much, such as 900MiB")
    parser.add_argument("--fit", type=byte_size, metavar="SIZE", help="a model that runs in so much memory")
    add(parser, "--context", help="with --fit: tokens of context (default: 4096)")
    add(parser, "--kv-type", help="with --fit: type of the KV cache (default: f16)")
    words = "importance matrix (--size and --fit make their own)"
    parser.add_argument("--imatrix", type=Path, metavar="FILE", help=words)
    parser.add_argument("--text", type=Path, metavar="FILE", help="to measure the damage with (default: a bundled one)")
    words = "--size and --fit choose among these (default: iq2_xxs to q8_0)"
    parser.add_argument("--types", type=items, metavar="T,T", help=words)
    words = "and not among those that decode slower here than a larger one, if possible"
    parser.add_argument("--fast", action="store_true", help=words)
    words = f"that --size and --fit may take, all in all (default: {QUANTIZE_MINUTES:.0f})"
    parser.add_argument("--minutes", type=between(0.001, 10_000), metavar="N", help=words)
    add(parser, "--threads")
    add(parser, "--force", help="overwrite OUT")
    add(parser, "--json")
    group = parser.add_argument_group("report")
    group.add_argument("--report", action="store_true", help="measure quality and speed of OUT beside IN")
    words = "and of IN in these types, in temporary files beside OUT"
    group.add_argument("--compare", type=items, metavar="T,T", help=words)
    add(group, "--png")
    words = "how fast this device computes with each type; no IN or OUT"
    group.add_argument("--kernels", action="store_true", help=words)
    group = parser.add_argument_group("ONNX")
    group.add_argument(
        "--calibration", type=Path, metavar="FILE", help="inputs (.npz, or a folder of them) for static int8"
    )
    group.add_argument("--block-size", type=positive_int, metavar="N", help="int4: weights with a scale (default: 32)")


def run(args: argparse.Namespace) -> int:
    """Quantize; the exit code."""
    if args.kernels:
        if args.model is not None:
            raise UsageError("--kernels is about this device; leave IN and OUT out")
        refuse(args, ("type", *_FOR_ONNX, *_FOR_GGUF, "force"), "is of a model; --kernels is about this device")
        from apps.commands import quantize_kernels

        return quantize_kernels.run(args)
    if args.model is None or args.output is None:
        raise UsageError("needs IN, the model, and OUT, the file to write; or --kernels")
    if args.model.endswith(".onnx"):
        refuse(args, _FOR_GGUF, "is for GGUF models; an ONNX model takes --type int8 or int4, and reports by itself")
        if args.type is None:
            raise UsageError("an ONNX model takes --type int8 or int4")
        from apps.commands import quantize_onnx

        return quantize_onnx.run(args)
    _check(args)
    from apps.commands import quantize_gguf

    return quantize_gguf.run(args)


def _check(args: argparse.Namespace) -> None:
    """UsageError for options that do not go together."""
    chosen = [name for name in ("type", "size", "fit") if getattr(args, name)]
    if len(chosen) > 1:
        raise UsageError(f"--{chosen[0]} and --{chosen[1]} do not go together: give one")
    fits = args.size or args.fit
    for names, wanted, use in (
        (("types", "minutes", "fast"), fits, "--size and --fit"),
        (("context", "kv_type"), args.fit, "--fit"),
        (("compare", "png"), args.report, "--report"),
        (("text",), fits or args.report, "--size, --fit and --report"),
        (_FOR_ONNX, None, "ONNX models"),
    ):
        if not wanted:
            refuse(args, names, f"is for {use}")
    if fits:
        check_installed({"scipy": "scipy"}, "--size and --fit", "quantize")
