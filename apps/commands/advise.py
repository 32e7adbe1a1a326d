"""`edge advise`: which published models run well here and how long an answer takes, before any download."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apps import planning
from apps.engine_options import engine_options
from apps.errors import UsageError
from apps.options import add, check_output, option, set_common
from apps.show.progress import ShownSteps
from apps.show.table import print_columns, print_json, print_note, print_notes
from edge.units import items, positive
from quant.text import bytes_text, count_text, number_text

if TYPE_CHECKING:
    from edge.models.catalog import KnownModel
    from edge.profiling.cluster import Cluster

HELP = "List published models that run well on these devices, without downloading anything."
# A copy of names in edge.planning.advise, so that --help stays quick; a test compares them.
TASKS = ("chat", "code", "long")
_MOST_S = 300.0  # longest answer in the table without --all, in seconds
_COLUMNS = (
    "model", "type", "parameters", "bits", "size", "memory", "tokens/s", "first token", "answer", "weights", "run",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    set_common(parser, "--workers --presets --measure --task --min-speed --models --types --memory --all --json --png")
    group = parser.add_argument_group("devices")
    add(group, "--cluster")
    add(group, "--workers", help="use this device and HOST[:PORT],... (default: the running lab)")
    words = "use device presets instead of real devices: laptop,phone; an unknown name prints the list"
    option(group, "--presets A,B", words, items)
    add(group, "--threads", help="number of threads on this device")
    add(group, "--memory", help="memory limit of a model on this device")
    add(group, "--insecure")
    option(group, "--measure", "measure the devices, which takes minutes (default: estimate them)")
    option(group, "--fresh", "with --measure: repeat remembered measurements")
    requirements = parser.add_argument_group("requirements")
    words = "kind of prompt: chat, a short question; code, a source file; long, a document (default: chat)"
    option(requirements, "--task", words, choices=TASKS, default="chat")
    option(requirements, "--min-speed N", "minimum decode speed, in tokens per second", positive)
    option(
        requirements,
        "--models A,B",
        "list only these models; with --measure, measure each of them",
        items,
    )
    option(requirements, "--types T,T", "weight types to consider (default: the published types of each model)", items)
    add(requirements, "--kv-type", help="type of the KV cache (default: f16)")
    option(requirements, "--catalog FILE", "file with more models, which replace known ones of the same name", Path)
    option(parser, "--all", "show all models (default: only those that no other model beats)")
    add(parser, "--json")
    add(parser, "--png", help="draw model size against the time of an answer")
    add(parser, "--force", help="overwrite FILE")


def run(args: argparse.Namespace) -> int:
    if args.png is not None:
        from edge.pictures.canvas import check_picture

        check_picture(args.png)
        check_output(args.png, [path for path in (args.catalog, args.cluster) if path], args.force)
    models = _models(args)
    from edge.planning.advise import AdviceOptions, advise

    options = AdviceOptions(
        task=args.task,
        types=args.types or (),
        min_tokens_per_s=args.min_speed or 0.0,
        measure=args.measure or args.fresh,
        every=args.models is not None,
        engine=engine_options(args),
        fresh=args.fresh,
    )
    with _cluster(args) as cluster:
        result = advise(models, cluster, options, ShownSteps("advise")).to_json()
    if args.json:
        print_json(result)
    else:
        _show(result, args.all)
    if args.png is not None:
        from edge.pictures.advice import write_picture

        write_picture(result, args.png)
    return 0


def _models(args: argparse.Namespace) -> list[KnownModel]:
    """Return the models of --models, or all known models, including those of --catalog."""
    from edge.models.catalog import known_models, read_catalog

    by_name = {model.name: model for model in known_models()}
    if args.catalog is not None:
        by_name |= {model.name: model for model in read_catalog(args.catalog)}
    if args.models is None:
        return list(by_name.values())
    for name in args.models:
        if by_name.get(name.lower()) is None or by_name[name.lower()].shape is None:
            shaped = ", ".join(name for name, model in by_name.items() if model.shape is not None)
            raise UsageError(f"--models names {name!r}, but the catalog has no shape of it; it has {shaped}")
    return [by_name[name.lower()] for name in dict.fromkeys(args.models)]


def _cluster(args: argparse.Namespace) -> Cluster:
    from edge.profiling.cluster import Cluster

    if args.presets is None:
        return planning.cluster_of(args)
    for name in ("cluster", "workers", "threads", "memory", "measure", "fresh"):
        if getattr(args, name):
            raise UsageError(f"--presets are devices that are not measured: leave --{name} or --presets out")
    return Cluster.of_presets(args.presets)


def _show(result: dict[str, Any], every: bool) -> None:
    """Print a table, the quickest answer first, with a line wherever answers become slow."""
    worthwhile = [row for row in result["rows"] if row["on_front"]]
    soon = [row for row in worthwhile if row["answer_s"] <= _MOST_S] or worthwhile[:1]
    rows = result["rows"] if every else soon
    names = ", ".join("this device" if name == "local" else name for name in result["devices"])
    print_note(
        f"an answer of {result['answer_tokens']} tokens to a prompt of {result['prompt_tokens']} tokens, on"
        f" {names}; larger models usually answer better (only size is known)"
    )
    print()
    print_columns(_COLUMNS, list(_lines(rows)), whole=("model", "type", "run"))
    notes = []
    if left := len(result["rows"]) - len(rows):
        why = f"not larger than a model that answers sooner, take more than {_MOST_S / 60:g} minutes, or do not fit"
        notes.append(f"{left} others are {why}: --all shows them")
    figures = sorted({row["figures"] for row in rows})
    times = f"times are {' or '.join(figures)}{'; --measure measures' if figures == ['estimated'] else ''}"
    print_notes([*notes, f"{times}; nothing was downloaded", *result["notes"]])


def _lines(rows: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield the cells of all rows, with a separator before answers that take longer than 10 s and 30 s."""
    from edge.planning.advise import LINES_S

    lines = list(LINES_S)
    for row in rows:
        above_s = None
        while lines and row["answer_s"] is not None and row["answer_s"] > lines[0]:
            above_s = lines.pop(0)
        if above_s is not None:
            yield [f"-- above {above_s:g} s --", *[""] * (len(_COLUMNS) - 1)]
        yield _cells(row)


def _cells(row: dict[str, Any]) -> list[str]:
    fits = row["answer_s"] is not None
    return [
        row["model"],
        row["type"],
        count_text(row["parameters"]),
        f"{row['bits_per_weight']:.1f}",
        bytes_text(row["size_bytes"]),
        bytes_text(sum(row["memory_bytes"].values())) if fits else "-",
        number_text(row["tokens_per_s"]) if fits else "-",
        f"{number_text(row['ttft_s'])} s" if fits else "-",
        f"{number_text(row['answer_s'])} s" if fits else "-",
        row["placement"] if fits else "do not fit",
        row["command"],
    ]
