"""`edge model list`, `rm` and `cache`: what is kept on this device of models and of prompts, and removing it."""

from __future__ import annotations

import argparse
import sys
import time

from apps.errors import UsageError
from apps.show.table import print_columns, print_json, print_table
from quant.text import age_text, bytes_text, printable


def run_list(args: argparse.Namespace) -> int:
    """Show all that is kept, or what has a name; the exit code."""
    from edge.models.inventory import inventory

    if args.known:
        return _list_known(args.json)

    found = inventory()
    if args.json:
        print_json({"models": [one.to_json() for one in found], "size_bytes": sum(one.n_bytes for one in found)})
    elif not found:
        print("nothing is kept")
    else:
        now_s = time.time()
        rows = [(one.name, one.kind, bytes_text(one.n_bytes), age_text(now_s - one.used_at_s)) for one in found]
        rows.append((f"{len(found)} in all", "", bytes_text(sum(one.n_bytes for one in found)), ""))
        print_columns(("name", "kind", "size", "used"), rows, whole=("name",))
    return 0


def _list_known(as_json: bool) -> int:
    from edge.models.known import known_models
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


def run_rm(args: argparse.Namespace) -> int:
    """Remove what has a name, after asking; the exit code. UsageError where nobody can be asked."""
    from edge.models.inventory import inventory, matching

    found = matching(args.name, inventory())
    n_bytes = sum(one.n_bytes for one in found)
    if not args.yes:
        if args.json or not sys.stdin.isatty():
            raise UsageError(f"nobody can be asked whether {args.name} is to go; add --yes")
        names = ", ".join(one.name for one in found)
        print(printable(f"Remove {names} ({bytes_text(n_bytes)})? [y/N] "), end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print("nothing was removed", file=sys.stderr)
            return 0
    for one in found:
        one.remove()
    if args.json:
        print_json({"removed": [one.name for one in found], "size_bytes": n_bytes})
    else:
        print(printable(f"removed {', '.join(one.name for one in found)}: {bytes_text(n_bytes)}"))
    return 0


def run_cache(args: argparse.Namespace) -> int:
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
