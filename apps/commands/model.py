"""`edge model`: describes, downloads, lists and removes models, or writes a model with random weights."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from apps.engine_options import engine_options
from apps.errors import UsageError
from apps.options import add, add_action, check_output, given_options, model_path, option, set_common
from apps.show.progress import progress
from apps.show.table import print_columns, print_json, print_table
from edge.units import natural, positive_int
from quant.text import age_text, bytes_text, count_text, printable

HELP = "Describe, download, list or remove models, or write a model with random weights."

_FIGURES = (
    "layers", "embd", "ff", "heads", "vocab", "kv", "head_size", "experts", "experts_used", "expert_ff", "context",
    "predictors",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    info = add_action(actions, "info", "describe a model and the memory it needs")
    add(info, "model")
    add(info, "--context", help="number of tokens in the context (default: the model's, at most 4096)")
    add(info, "--kv-type", default="f16")
    synth = add_action(actions, "synth", "write a model with random weights in the shape of a real one")
    _add_synth(synth)
    words = "download a model by its known name or from the Hugging Face hub, and print its path"
    pull = add_action(actions, "pull", words)
    words = "a known name, or OWNER/NAME:FILE.gguf; part of the file name is enough, such as OWNER/NAME:q4_k_m"
    pull.add_argument("spec", metavar="NAME", help=words)
    listing = add_action(actions, "list", "list downloaded and converted models, their size, and when they were used")
    option(listing, "--known", "list the models that can be downloaded by a short name")
    remove = add_action(actions, "rm", "remove a model from this device")
    words = "name as `edge model list` prints it, or OWNER/NAME for all files of a repository"
    remove.add_argument("name", metavar="NAME", help=words)
    option(remove, "--yes", "do not ask for confirmation")
    cache = add_action(actions, "cache", "show the disk space of stored prompts (KV cache), or remove them")
    option(cache, "--clear", "remove all stored prompts; they are computed again when needed")
    local_actions = ((listing, _list), (remove, _rm), (cache, _cache))
    for action, run in ((info, _info), (pull, _pull), (synth, _synth), *local_actions):
        add(action, "--json")
        action.set_defaults(run=run)


def _add_synth(parser: argparse.ArgumentParser) -> None:
    set_common(parser, "--shape --arch --layers --embd --ff --heads --vocab --type --seed --force --json")
    parser.add_argument("out", type=Path, metavar="OUT", help="GGUF file to write")
    option(parser, "--shape NAME", "shape of a known model, such as llama-3.1-8b; an unknown name prints the list")
    option(parser, "--arch NAME", "architecture, if --shape is not used (default: llama)")
    meaning = {
        "layers": "number of layers",
        "embd": "embedding length",
        "ff": "feed-forward length",
        "heads": "attention heads",
        "kv": "KV heads (default: as many as attention heads)",
        "head_size": "values in one head (default: embd / heads)",
        "experts": "experts in each layer",
        "experts_used": "experts used for each token",
        "expert_ff": "feed-forward length of one expert",
        "context": "trained context, in tokens",
        "predictors": "extra layers that predict further tokens (MTP)",
        "vocab": "tokens in the vocabulary",
    }
    words = "Each option overrides a figure of --shape. Without --shape the first five are required."
    figures = parser.add_argument_group("figures", words)
    for name in _FIGURES:
        figures.add_argument(f"--{name.replace('_', '-')}", type=positive_int, metavar="N", help=meaning[name])
    words = "use the token embeddings as the output head, too"
    option(figures, "--tied", words, action=argparse.BooleanOptionalAction)
    option(parser, "--type T", "type of the matrices (default: q4_0)", default="q4_0")
    option(parser, "--head-type T", "type of the output head (default: q6_k or wider)")
    option(parser, "--seed N", "seed of the random weights (default: 0)", natural, default=0)
    add(parser, "--force", help="overwrite OUT")


def _info(args: argparse.Namespace) -> int:
    from edge.llm.info import ModelInfo
    from partition.model.file import ModelFile

    info = ModelInfo.from_file(ModelFile.open(model_path(args.model)), engine_options(args))
    if args.json:
        return print_json(info.to_json())
    shape = info.file.shape
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
        rows.insert(7, ("experts", f"{shape.n_experts}, {shape.n_experts_used} used for each token"))
    rows += [(f"  of it {name}", bytes_text(n)) for name, n in shape.bytes_by_type.items()]
    if len(info.sizes) > 1:
        rows += [
            (f"  size {bytes_text(size.file_bytes)}", f"{size.divergence:.5f} nats from the original")
            for size in info.sizes
        ]
    print_table(str(info.file.path), rows)
    spread = [(name, f"no: {why}" if why else "yes") for name, why in zip(("stages", "shards"), info.cuts, strict=True)]
    if info.whole_attention:
        spread[1] = ("shards", f"yes, except attention, which each device computes whole: {info.whole_attention}")
    print_table("spread over devices", spread)
    parts = [(name, bytes_text(n)) for name, n in info.need.parts.items()]
    sizes = info.context_sizes
    title = f"memory at {sizes.context} tokens of context, KV cache in {sizes.kv.name}"
    print_table(title, [*parts, ("total", bytes_text(info.need.total))])
    return 0


def _range(values: tuple[int, ...]) -> str:
    """Return a figure as text, or its range if layers differ."""
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _synth(args: argparse.Namespace) -> int:
    from edge.models import synth

    shape = synth.shape_of(args.shape, args.arch, given_options(args, (*_FIGURES, "tied")))
    synth.layout(shape, args.type, args.head_type)  # rejects unknown types before anything is written
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
    from edge.models.file_kinds import parts

    with progress(f"fetching {args.spec}") as show:
        path = paths.pull(args.spec, show)
    size_bytes = sum(path.with_name(name).stat().st_size for name in parts(path.name))
    if args.json:
        return print_json({"path": str(path), "size_bytes": size_bytes})
    print(printable(f"{args.spec}: {bytes_text(size_bytes)}"), file=sys.stderr)
    print(printable(str(path)) if sys.stdout.isatty() else path)
    return 0


def _list(args: argparse.Namespace) -> int:
    """Print the models on this device, or with --known those that have a short name; return the exit code."""
    from edge.models.inventory import inventory

    if args.known:
        return _list_known(args.json)

    models = inventory()
    n_bytes = sum(model.n_bytes for model in models)
    if args.json:
        print_json({"models": [model.to_json() for model in models], "size_bytes": n_bytes})
    elif not models:
        print("no models are stored; edge model pull NAME downloads one")
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
    """Remove a model after confirmation; return the exit code. Raises UsageError if no terminal can confirm."""
    from edge.models.inventory import inventory, matching

    models = matching(args.name, inventory())
    n_bytes = sum(model.n_bytes for model in models)
    if not args.yes:
        if args.json or not sys.stdin.isatty():
            raise UsageError(f"removing {args.name} needs a confirmation, and there is no terminal to ask; add --yes")
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
    """Print the disk space of stored prompts, or remove them; return the exit code."""
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
        print_table(f"prompts stored in {store.folder}", rows)
    return 0
