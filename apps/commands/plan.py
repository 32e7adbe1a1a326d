"""`edge plan`: finds the best plan for a model on the devices, and explains what limits it."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from apps import distributed, planning
from apps.options import add, check_output, is_onnx, option, refuse, set_common
from apps.show.table import print_columns, print_json, print_notes
from devices.sizes import parse_bytes
from edge.units import positive
from partition.predict.objectives import OBJECTIVES, SEARCHED, default_axes, searched
from quant.text import printable, seconds_text

if TYPE_CHECKING:
    from edge.planning.space import PlanSpace
    from partition.predict.pareto import Point
    from partition.search.changes import Change

HELP = "Find the best placement of a model: which devices, which layers on each, and why."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common = "--workers --cluster --context --prompt-tokens --objective --max-latency --types --threads"
    common += " --memory --save --json"
    set_common(parser, common)
    planning.add_arguments(parser)
    requirements = parser.add_argument_group("requirements")
    words = "figure to optimize (default: latency)"
    option(requirements, "--objective", words, choices=SEARCHED, default="latency")
    for name in SEARCHED:
        objective = OBJECTIVES[name]
        metavar, words = objective.limit
        kind = parse_bytes if metavar == "SIZE" else positive
        flag = f"--{'min' if objective.rate else 'max'}-{name}"
        requirements.add_argument(flag, type=kind, dest=f"limit_{name}", metavar=metavar, help=words)
    planning.add_type_arguments(parser)
    distributed.add_media_arguments(parser)
    option(parser, "--save FILE", "write the plan, for --plan", Path)
    add(parser, "--force", help="overwrite FILE")
    add(parser, "--json")


def run(args: argparse.Namespace) -> int:
    if args.save is not None:
        check_output(args.save, planning.sources(args), args.force)
    from edge.planning.choose import best_of
    from edge.planning.describe import planned_json, saved_figures
    from edge.planning.encoder_place import place_json, place_text
    from edge.planning.llm_space import LlmSpace

    if is_onnx(args.model):
        refuse(args, ("mmproj", "encoder"), "is for language models; leave it out for an ONNX model")
    with planning.spaces(args, default_axes(args.types)) as (spaces, _):
        caps = _caps(args)
        space, point, why = best_of(spaces, args.objective, caps)
        changes = space.changes(args.objective, {name: caps[name] for name in searched(caps)})
        if args.save is not None:
            from edge.planning.choice import save_plan

            save_plan(args.save, point.plan, saved_figures(space, point))
        placed = space.encoder if isinstance(space, LlmSpace) else None
        first_token_s = (point.predicted.ttft_s or 0.0) + (placed.chosen.total_s if placed else 0.0)
        if args.json:
            encoder = None if placed is None else place_json(placed.times, placed.chosen, first_token_s)
            return print_json(planned_json(space, args.objective, point, why, changes, encoder))
        _show(args, space, point, why, changes)
        if placed is not None:
            print(printable(place_text(placed.times, placed.chosen)))
            print(f"first token of a prompt with one: {seconds_text(first_token_s)}")
            print_notes(placed.times.notes)
    return 0


def _caps(args: argparse.Namespace) -> dict[str, float]:
    """Return the limits that the options set, as costs by objective."""
    limits = {name: getattr(args, f"limit_{name}") for name in OBJECTIVES}
    return {
        name: float(OBJECTIVES[name].cost(limit / OBJECTIVES[name].scale))
        for name, limit in limits.items()
        if limit is not None
    }


def _show(args: argparse.Namespace, space: PlanSpace, point: Point, why: str, changes: list[Change]) -> None:
    from edge.planning.describe import joining_commands, known_json, notes, prediction_rows, stage_rows

    names = space.names
    print(printable(why))
    print()
    columns, rows = stage_rows(point.predicted, names)
    print_columns(columns, rows, whole=("stage", "device"))
    print()
    for name, text in prediction_rows(point.predicted, names):
        print(printable(f"{name}: {text}"))
    thing = "token" if space.kind == "llm" else "input"
    for change in changes:
        value = "no plan either" if change.value is None else OBJECTIVES[args.objective].describe(change.value, thing)
        print(printable(f"with {change.what}: {value}"))
    print_notes(notes(space))
    if args.save is not None:
        used = [names[device] for device in point.plan.all_devices]
        steps = joining_commands(known_json(space), used, args.model)
        command = "chat" if space.kind == "llm" else "run"
        model = planning.typed_model(args, space.path)
        steps = steps or [shlex.join(["edge", command, *model, "--plan", str(args.save)])]
        print(printable(f"saved: {args.save}. Next: {', then '.join(steps)}"))
