"""`edge model`: look at a model file, fetch one, list and remove what is kept, or write one with random weights."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apps.commands import model_kept
from apps.errors import UsageError
from apps.options import KV_TYPES, check_output, context_size, model_path, natural, positive_int
from apps.show.format import bytes_text, count_text
from apps.show.progress import progress
from apps.show.table import print_table

if TYPE_CHECKING:
    from edge.models.shapes import Shape
    from edge.paging.memory import MemoryNeed
    from partition.model.model import ModelShape
    from quant.gguf.file import GgufFile

HELP = "Look at a model file, fetch one from the Hugging Face hub, list and remove those kept, or write a random one."

_REQUIRED = ("layers", "embd", "ff", "heads", "vocab")
_FIGURES = (*_REQUIRED, "kv", "head_size", "experts", "experts_used", "expert_ff", "context")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions and their options."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_info(actions.add_parser("info", help="what a model is made of, and the memory it needs"))
    _add_synth(actions.add_parser("synth", help="write a model of a real one's shape with random weights"))
    _add_pull(actions.add_parser("pull", help="fetch a model from the Hugging Face hub and print its path"))
    model_kept.add_list(actions.add_parser("list", help="what is kept here of models, its size, and when it was used"))
    model_kept.add_rm(actions.add_parser("rm", help="remove what is kept of a model"))


def run(args: argparse.Namespace) -> int:
    """Do what was asked; the exit code."""
    actions = {"list": model_kept.run_list, "rm": model_kept.run_rm, "info": _info, "synth": _synth, "pull": _pull}
    return actions[args.action](args)


def _add_info(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="GGUF file or REPO:FILE (default: the bundled model)")
    parser.add_argument(
        "--context", type=context_size, metavar="N", help="tokens to keep room for (default: the model's, at most 4096)"
    )
    parser.add_argument("--kv-type", choices=KV_TYPES, default="f16", help="type of the KV cache (default: f16)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_synth(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT", help="GGUF file to write")
    parser.add_argument("--shape", metavar="NAME", help="a known model: llama-3.1-8b; an unknown name lists all")
    parser.add_argument("--arch", metavar="NAME", help="architecture, without --shape (default: llama)")
    meaning = {
        "kv": "KV heads (default: as many as heads)",
        "head_size": "values of one head (default: embd / heads)",
        "experts_used": "experts a token passes through",
        "expert_ff": "width of one expert",
        "context": "trained context, tokens",
        "vocab": "tokens",
    }
    figures = parser.add_argument_group(
        "figures", "Each replaces the shape's own. Without --shape the first five are needed."
    )
    for name in _FIGURES:
        figures.add_argument(f"--{name.replace('_', '-')}", type=positive_int, metavar="N", help=meaning.get(name))
    figures.add_argument("--tied", action=argparse.BooleanOptionalAction, help="no output head beside the token table")
    parser.add_argument("--type", default="q4_0", metavar="T", help="type of the matrices (default: q4_0)")
    parser.add_argument("--head-type", metavar="T", help="type of the output head (default: q6_k or wider)")
    parser.add_argument("--seed", type=natural, default=0, metavar="N", help="same seed, same weights (default: 0)")
    parser.add_argument("--force", action="store_true", help="overwrite OUT")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_pull(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="REPO:FILE", help="OWNER/NAME:FILE.gguf; or a part of the name, such as q4_k_m")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _info(args: argparse.Namespace) -> int:
    from edge.llama.llama import ContextSizes
    from edge.llm.options import EngineOptions, resolve
    from edge.paging import memory
    from partition.model.check import check_loadable
    from partition.model.model import ModelShape
    from quant.gguf.file import GgufFile

    file = GgufFile.open(model_path(args.model))
    check_loadable(file)
    shape = ModelShape.from_gguf(file)
    context, _, kv = resolve(EngineOptions(context=args.context, kv_type=args.kv_type), shape)
    need = memory.need(file.path, ContextSizes(context, kv))
    if args.json:
        print(json.dumps(_info_json(file, shape, need, context, args.kv_type)))
        return 0
    print_table(str(file.path), _fact_rows(file, shape))
    print_table(
        f"memory at {context} tokens of context, KV cache in {args.kv_type}",
        [*((name, bytes_text(n)) for name, n in need.parts.items()), ("total", bytes_text(need.total))],
    )
    return 0


def _info_json(file: GgufFile, shape: ModelShape, need: MemoryNeed, context: int, kv_type: str) -> dict[str, Any]:
    parts = {f"{name.lower().replace(' ', '_')}_bytes": n for name, n in need.parts.items()}
    return {
        "path": str(file.path),
        "architecture": shape.architecture,
        "name": shape.name,
        "layers": shape.n_layers,
        "embd": shape.n_embd,
        "heads_per_layer": shape.n_heads,
        "kv_heads_per_layer": shape.n_heads_kv,
        "ff_per_layer": shape.n_ff,
        "experts": shape.n_experts,
        "experts_used": shape.n_experts_used,
        "vocab": shape.n_vocab,
        "trained_context": shape.context_length,
        "parameters": shape.n_params,
        "size_bytes": file.size_bytes,
        "bytes_by_type": dict(shape.bytes_by_type),
        "memory": {
            "context": context,
            "kv_type": kv_type,
            **parts,
            "total_bytes": need.total,
            "available_bytes": need.available,
        },
    }


def _fact_rows(file: GgufFile, shape: ModelShape) -> list[tuple[str, str]]:
    rows = [
        ("architecture", shape.architecture),
        ("name", shape.name),
        ("layers", str(shape.n_layers)),
        ("heads", _range(shape.n_heads)),
        ("KV heads", _range(shape.n_heads_kv)),
        ("embd", str(shape.n_embd)),
        ("ff", _range(shape.n_ff)),
        ("vocabulary", f"{shape.n_vocab} tokens"),
        ("trained context", f"{shape.context_length} tokens"),
        ("parameters", count_text(shape.n_params)),
        ("size", bytes_text(file.size_bytes)),
    ]
    if shape.n_experts:
        rows.insert(7, ("experts", f"{shape.n_experts}, {shape.n_experts_used} used for a token"))
    return rows + [(f"  of it {name}", bytes_text(n)) for name, n in shape.bytes_by_type.items()]


def _range(values: tuple[int, ...]) -> str:
    """A figure of all layers, or its range where layers differ."""
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _synth(args: argparse.Namespace) -> int:
    from edge.models import synth

    try:
        shape = _shape(args)
        synth.layout(shape, args.type, args.head_type)  # refuses types before anything is written
    except synth.ShapeError as exc:
        raise UsageError(str(exc)) from exc
    check_output(args.out, (), args.force)
    start_s = time.monotonic()
    with progress(f"writing {args.out.name}") as bar:
        n_bytes = synth.synthesize(args.out, shape, args.type, args.head_type, args.seed, bar.update)
    duration_s = time.monotonic() - start_s
    if args.json:
        result = {
            "path": str(args.out),
            "architecture": shape.arch,
            "parameters": shape.parameters,
            "size_bytes": n_bytes,
            "duration_s": round(duration_s, 3),
        }
        print(json.dumps(result))
    else:
        what = f"{count_text(shape.parameters)} parameters, {bytes_text(n_bytes)}"
        print(f"{args.out}: {shape.arch}, {what}, {duration_s:.1f} s")
    return 0


def _shape(args: argparse.Namespace) -> Shape:
    """The shape the options mean; UsageError or ShapeError where they mean none."""
    from edge.models.presets import SHAPES
    from edge.models.shapes import shape

    given = {name: value for name in (*_FIGURES, "tied") if (value := getattr(args, name)) is not None}
    if args.shape is None:
        missing = [f"--{name}" for name in _REQUIRED if name not in given]
        if missing:
            raise UsageError(f"give --shape NAME, or also {' '.join(missing)}")
        return shape(args.arch or "llama", **given)
    if args.arch is not None:
        raise UsageError("--arch goes with single figures; --shape has an architecture already")
    if args.shape not in SHAPES:
        raise UsageError(f"no shape {args.shape!r}; known: {', '.join(SHAPES)}")
    return dataclasses.replace(SHAPES[args.shape], **given)


def _pull(args: argparse.Namespace) -> int:
    from edge.models import hub
    from quant.gguf.file import GgufFile

    repo, file = hub.parse(args.spec)
    with progress(f"fetching {args.spec}") as bar:
        path = hub.pull(repo, file, progress=bar.update)
    size_bytes = GgufFile.open(path).size_bytes
    if args.json:
        print(json.dumps({"path": str(path), "size_bytes": size_bytes}))
    else:
        print(f"{args.spec}: {bytes_text(size_bytes)}", file=sys.stderr)
        print(path)
    return 0
