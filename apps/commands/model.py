"""`edge model`: look at a model file, fetch one, list and remove what is kept, or write one with random weights."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from apps.errors import UsageError
from apps.options import add, check_output, given_options, model_path, option
from apps.show.progress import progress
from apps.show.table import print_columns, print_json, print_table
from edge.units import natural, positive_int
from quant.text import age_text, bytes_text, count_text, printable

HELP = "Look at a model file, fetch one, list and remove those kept, or write a random one."

_FIGURES = (
    "layers", "embd", "ff", "heads", "vocab", "kv", "head_size", "experts", "experts_used", "expert_ff", "context",
    "predictors",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    info = actions.add_parser("info", help="what a model is made of, and the memory it needs")
    add(info, "model")
    add(info, "--context", help="tokens to keep room for (default: the model's, at most 4096)")
    add(info, "--kv-type", default="f16")
    synth = actions.add_parser("synth", help="write a model of a real one's shape with random weights")
    _add_synth(synth)
    pull = actions.add_parser("pull", help="fetch a model by its name or from the Hugging Face hub, and print its path")
    words = "a known name; or OWNER/NAME:FILE.gguf, where a part of the file's name will do, such as q4_k_m"
    pull.add_argument("spec", metavar="NAME", help=words)
    listing = actions.add_parser("list", help="what is kept here of models, its size, and when it was used")
    option(listing, "--known", "models that have a name, which can be fetched by it")
    remove = actions.add_parser("rm", help="remove what is kept of a model")
    remove.add_argument("name", metavar="NAME", help="as edge model list shows it, or OWNER/NAME for all of one")
    option(remove, "--yes", "do not ask")
    cache = actions.add_parser("cache", help="what is kept here of prompts; --clear removes it")
    option(cache, "--clear", "remove them all; they are computed again when needed")
    local_actions = ((listing, _list), (remove, _rm), (cache, _cache))
    for action, run in ((info, _info), (pull, _pull), (synth, _synth), *local_actions):
        add(action, "--json")
        action.set_defaults(run=run)


def _add_synth(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT", help="GGUF file to write")
    option(parser, "--shape NAME", "a known model: llama-3.1-8b; an unknown name lists all")
    option(parser, "--arch NAME", "architecture, without --shape (default: llama)")
    meaning = {
        "kv": "KV heads (default: as many as heads)",
        "head_size": "values of one head (default: embd / heads)",
        "experts_used": "experts a token passes through",
        "expert_ff": "width of one expert",
        "context": "trained context, tokens",
        "predictors": "layers behind the last one that predict further tokens (MTP)",
        "vocab": "tokens",
    }
    figures = parser.add_argument_group(
        "figures", "Each replaces the shape's own. Without --shape the first five are needed."
    )
    for name in _FIGURES:
        figures.add_argument(f"--{name.replace('_', '-')}", type=positive_int, metavar="N", help=meaning.get(name))
    option(figures, "--tied", "no output head beside the token table", action=argparse.BooleanOptionalAction)
    option(parser, "--type T", "type of the matrices (default: q4_0)", default="q4_0")
    option(parser, "--head-type T", "type of the output head (default: q6_k or wider)")
    option(parser, "--seed N", "same seed, same weights (default: 0)", natural, default=0)
    add(parser, "--force", help="overwrite OUT")


def _info(args: argparse.Namespace) -> int:
    from edge.llm.info import ModelInfo

    info = ModelInfo.from_file(model_path(args.model), args.context, args.kv_type)
    if args.json:
        return print_json(info.to_json())
    shape = info.shape
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
        ("size", bytes_text(info.file.size_bytes)),
    ]
    if shape.n_experts:
        rows.insert(7, ("experts", f"{shape.n_experts}, {shape.n_experts_used} used for a token"))
    rows += [(f"  of it {name}", bytes_text(n)) for name, n in shape.bytes_by_type.items()]
    if len(info.sizes) > 1:
        rows += [
            (f"  size {bytes_text(size.file_bytes)}", f"{size.divergence:.5f} nats from the original")
            for size in info.sizes
        ]
    print_table(str(info.file.path), rows)
    spread = [(name, f"no: {why}" if why else "yes") for name, why in zip(("stages", "shards"), info.cuts, strict=True)]
    if info.whole_attention:
        spread[1] = ("shards", f"yes, but for attention, which each computes: {info.whole_attention}")
    print_table("spread over devices", spread)
    parts = [(name, bytes_text(n)) for name, n in info.need.parts.items()]
    title = f"memory at {info.context} tokens of context, KV cache in {info.kv_type}"
    print_table(title, [*parts, ("total", bytes_text(info.need.total))])
    return 0


def _range(values: tuple[int, ...]) -> str:
    """A figure of all layers, or its range where layers differ."""
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _synth(args: argparse.Namespace) -> int:
    from edge.models import synth

    shape = synth.shape_of(args.shape, args.arch, given_options(args, (*_FIGURES, "tied")))
    synth.layout(shape, args.type, args.head_type)  # refuses types before anything is written
    check_output(args.out, (), args.force)
    start_s = time.monotonic()
    with progress(f"writing {args.out.name}") as show:
        n_bytes = synth.synthesize(args.out, shape, args.type, args.head_type, args.seed, show)
    duration_s = time.monotonic() - start_s
    if args.json:
        result = {
            "path": str(args.out),
            "architecture": shape.arch,
            "parameters": shape.parameters,
            "size_bytes": n_bytes,
            "duration_s": round(duration_s, 3),
        }
        return print_json(result)
    what = f"{count_text(shape.parameters)} parameters, {bytes_text(n_bytes)}"
    print(printable(f"{args.out}: {shape.arch}, {what}, {duration_s:.1f} s"))
    return 0


def _pull(args: argparse.Namespace) -> int:
    from edge.models import paths
    from quant.gguf.file import GgufFile

    with progress(f"fetching {args.spec}") as show:
        path = paths.pull(args.spec, show)
    size_bytes = GgufFile.open(path).size_bytes
    if args.json:
        return print_json({"path": str(path), "size_bytes": size_bytes})
    print(printable(f"{args.spec}: {bytes_text(size_bytes)}"), file=sys.stderr)
    print(printable(str(path)) if sys.stdout.isatty() else path)
    return 0


def _list(args: argparse.Namespace) -> int:
    """Show all that is kept, or what has a name; the exit code."""
    from edge.models.inventory import inventory

    if args.known:
        return _list_known(args.json)

    models = inventory()
    n_bytes = sum(model.n_bytes for model in models)
    if args.json:
        print_json({"models": [model.to_json() for model in models], "size_bytes": n_bytes})
    elif not models:
        print("nothing is kept")
    else:
        now_s = time.time()
        rows = [
            (model.name, model.kind, bytes_text(model.n_bytes), age_text(now_s - model.used_at_s)) for model in models
        ]
        rows.append((f"{len(models)} in all", "", bytes_text(n_bytes), ""))
        print_columns(("name", "kind", "size", "used"), rows, whole=("name",))
    return 0


def _list_known(as_json: bool) -> int:
    from edge.models.catalog import known_models
    from edge.models.paths import is_here

    models = [(model, is_here(model)) for model in known_models()]
    if as_json:
        return print_json({"known": [{**model.to_json(), "here": here} for model, here in models]})
    rows = [
        (model.name, f"about {bytes_text(model.about_bytes)}", model.licence, "yes" if here else "no", model.source)
        for model, here in models
    ]
    print_columns(("name", "size", "licence", "here", "from"), rows, whole=("name",))
    return 0


def _rm(args: argparse.Namespace) -> int:
    """Remove what has a name, after asking; the exit code. UsageError where nobody can be asked."""
    from edge.models.inventory import inventory, matching

    models = matching(args.name, inventory())
    n_bytes = sum(model.n_bytes for model in models)
    if not args.yes:
        if args.json or not sys.stdin.isatty():
            raise UsageError(f"nobody can be asked whether {args.name} is to go; add --yes")
        names = ", ".join(model.name for model in models)
        print(printable(f"Remove {names} ({bytes_text(n_bytes)})? [y/N] "), end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print("nothing was removed", file=sys.stderr)
            return 0
    for model in models:
        model.remove()
    if args.json:
        print_json({"removed": [model.name for model in models], "size_bytes": n_bytes})
    else:
        print(printable(f"removed {', '.join(model.name for model in models)}: {bytes_text(n_bytes)}"))
    return 0


def _cache(args: argparse.Namespace) -> int:
    """Show what is kept of prompts, or remove it; the exit code."""
    from edge.prefixes.group import count_blocks
    from edge.prefixes.store import DEFAULT_BYTES, PrefixStore, default_folder

    store = PrefixStore(default_folder(), DEFAULT_BYTES)
    n_before = count_blocks(store)
    freed = store.clear() if args.clear else 0
    files, n_bytes, n_blocks = store.files(), store.used_bytes(), 0 if args.clear else n_before
    used_at_s = files[-1].used_ns / 1e9 if files else None
    if args.json:
        values = {"path": str(store.folder), "size_bytes": n_bytes, "limit_bytes": store.max_bytes,
                  "blocks": n_blocks, "used_at_s": used_at_s, "freed_bytes": freed}  # fmt: skip
        print_json(values)
    elif args.clear:
        print(printable(f"removed {n_before:,} blocks of prompts from {store.folder}: {bytes_text(freed)}"))
    else:
        rows = [
            ("size", f"{bytes_text(n_bytes)}, at most {bytes_text(store.max_bytes)}"),
            ("blocks", f"{n_blocks:,}"),
            ("used", "never" if used_at_s is None else age_text(time.time() - used_at_s)),
        ]
        print_table(f"prompts kept in {store.folder}", rows)
    return 0
