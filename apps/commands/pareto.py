"""`edge pareto`: all that is worth choosing from between latency and throughput, as a table, a picture and a page."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apps.commands import planning
from apps.commands.options import UsageError, check_output, items, natural
from apps.show.planned import beside, bound_text, known_json

if TYPE_CHECKING:
    from partition.predict.pareto import Point

HELP = "Explore the trade-off between latency and throughput over all ways to place a model."
FORMAT = "edge-pareto-1"
AXES = (
    "latency",
    "throughput",
    "memory",
    "energy",
)  # partition.predict.pareto.AXES, named here so that --help stays quick
_NAMES = {"latency": "latency_s", "throughput": "throughput_per_s", "memory": "memory_bytes", "energy": "energy_j"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The cluster, what to look at, what to measure, and where it goes."""
    planning.add_arguments(parser)
    parser.add_argument("--types", type=_types, metavar="T,T", help="also choose between these types: q4_0,q8_0")
    parser.add_argument(
        "--axes", type=_axes, default=AXES[:2], metavar="A,B", help="of latency,throughput,memory,energy (first two)"
    )
    parser.add_argument(
        "--measure",
        type=natural,
        default=0,
        metavar="N",
        help="run the N most promising plans and measure them",
    )
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write one JSON object; alone: print it")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page to explore")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture")
    parser.add_argument("--pick", metavar="ID", help="choose a plan: its id, knee, or the best of an axis")
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="with --pick: write that plan, to be used with --plan"
    )
    parser.add_argument("--force", action="store_true", help="overwrite files")


def run(args: argparse.Namespace) -> int:
    """Find, measure, show and write."""
    _check(args)
    with planning.spaces(args, args.types or ()) as (spaces, fleet):
        points: list[Point] = []
        of: dict[str, planning.Space] = {}
        for space in spaces:
            found = space.points(args.axes)
            points += found
            of |= {point.key: space for point in found}
        if not points:
            spaces[0].check_feasible()
        measured: dict[str, dict[str, Any]] = {}
        errors: dict[str, str] = {}
        if args.measure:
            from apps.pareto.measure import measure

            measured, errors = measure(args, points, of, fleet)
        result = _result(args, spaces, points, of, measured, errors)
    _write(args, result, spaces)
    if args.pick is not None:
        _pick(args, result, points, of)
    return 0


def _check(args: argparse.Namespace) -> None:
    """UsageError for files that cannot be written, before anything is measured."""
    from apps.pareto.page import check_page
    from apps.show.picture import check_picture

    files = [Path(args.json)] if args.json not in (None, "-") else []
    files += [file for file in (args.html, args.png, args.save) if file is not None]
    if len({file.absolute() for file in files}) < len(files):
        raise UsageError("--json, --html, --png and --save are to be different files")
    read = planning.sources(args) if files else []
    for file in files:
        check_output(file, read, args.force)
    if args.png is not None:
        check_picture(args.png)
    if args.html is not None:
        check_page(args.html)
    if args.save is not None and args.pick is None:
        raise UsageError("--save writes the plan that --pick chooses: give both")


def _result(
    args: argparse.Namespace,
    spaces: Sequence[planning.Space],
    points: Sequence[Point],
    of: dict[str, planning.Space],
    measured: dict[str, dict[str, Any]],
    errors: dict[str, str],
) -> dict[str, Any]:
    from partition.predict.pareto import judged, on_front

    values = [point.objectives(args.axes) for point in points]
    found = [_measured_values(measured[p.key], p, args.axes) if p.key in measured else None for p in points]
    front, middle = judged(values, found)
    taken = [i for i, one in enumerate(found) if one is not None]
    best = on_front([found[i] or () for i in taken])
    on_measured = {i for i, on in zip(taken, best, strict=True) if on}
    as_predicted = on_front(values)

    def place(i: int) -> tuple[bool, tuple[float, ...]]:
        return not front[i], found[i] or values[i]

    order = sorted(range(len(points)), key=place)
    return {
        "format": FORMAT,
        "kind": spaces[0].kind,
        "model": spaces[0].title,
        "objectives": [_NAMES[axis] for axis in args.axes],
        "concurrency": points[0].predicted.in_flight,
        "exact": all(space.exact for space in spaces),
        **known_json(spaces[0]),
        "points": [
            {
                "id": f"p{number}",
                "label": points[i].label,
                "type": points[i].type,
                "model": points[i].model,
                "parallel": points[i].parallel,
                "plan": points[i].plan.to_json(),
                "on_front": front[i],
                "predicted_on_front": as_predicted[i],
                "knee": i == middle,
                "microbatches": points[i].predicted.microbatches,
                "devices": [of[points[i].key].names[device] for device in dict.fromkeys(points[i].plan.devices)],
                "predicted": _predicted(points[i], of[points[i].key]),
                "measured": measured.get(points[i].key),
                "measured_on_front": i in on_measured if points[i].key in measured else None,
                "error": errors.get(points[i].key),
            }
            for number, i in enumerate(order, 1)
        ],
    }


def _predicted(point: Point, space: planning.Space) -> dict[str, Any]:
    """With devices called by their names, as people know them."""
    values, names = point.predicted.to_json(), space.names
    values["memory_bytes"] = _named(values["memory_bytes"], names)
    values["bound"] = bound_text(point.predicted, names)
    for stage in values["stages"]:
        stage["devices"] = [names.get(device, device) for device in stage["devices"]]
        stage["memory_bytes"] = _named(stage["memory_bytes"], names)
    return values


def _named(of: dict[str, int], names: dict[str, str]) -> dict[str, int]:
    return {names.get(device, device): n for device, n in of.items()}


def _measured_values(measured: dict[str, Any], point: Point, axes: Sequence[str]) -> tuple[float, ...]:
    """As `Point.objectives`; energy is not measured, so that it is as predicted."""
    of = {
        "latency": measured["latency_s"],
        "throughput": -measured["throughput_per_s"],
        "memory": float(max(measured["memory_bytes"].values(), default=0)),
        "energy": point.objectives(("energy",))[0],
    }
    return tuple(of[axis] for axis in axes)


def _write(args: argparse.Namespace, result: dict[str, Any], spaces: Sequence[planning.Space]) -> None:
    from apps.pareto.table import print_front
    from apps.show.planned import notes
    from apps.show.table import print_note
    from devices.files import write_whole

    if args.json == "-":
        print(json.dumps(result))
    else:
        print_front(result)
        for note in dict.fromkeys(note for space in spaces for note in notes(space)):
            print_note(note)
        if args.json is not None:
            write_whole(Path(args.json), (json.dumps(result, indent=1) + "\n").encode())
    if args.png is not None:
        from apps.pareto.picture import write_picture

        write_picture(result, args.png)
    if args.html is not None:
        from apps.pareto.page import write_page

        write_page(result, args.html, command=_command(args), model=(args.model or "") if not args.types else "")


def _command(args: argparse.Namespace) -> tuple[str, ...]:
    """What was typed, as far as it says what is explored."""
    words = ["edge", "pareto", *([args.model] if args.model else [])]
    if args.cluster is not None:
        words += ["--cluster", str(args.cluster)]
    if args.workers is not None:
        words += ["--workers", ",".join(args.workers)]
    for name in ("concurrency", "context", "prompt_tokens"):
        if getattr(args, name) is not None:
            words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    words += ["--types", ",".join(args.types)] if args.types else []
    words += ["--axes", ",".join(args.axes)] if tuple(args.axes) != AXES[:2] else []
    return (*words, "--insecure") if args.insecure else tuple(words)


def _pick(
    args: argparse.Namespace, result: dict[str, Any], points: Sequence[Point], of: dict[str, planning.Space]
) -> None:
    from apps.commands.distributed import save_plan
    from apps.pareto.pick import pick, use

    chosen = pick(result, args.pick)
    if args.save is not None:
        point = next(
            one
            for one in points
            if one.plan.to_json() == chosen["plan"] and one.predicted.microbatches == chosen["microbatches"]
        )
        save_plan(args.save, point.plan, beside(of[point.key], point))
    if args.json != "-":
        print(use(result["kind"], chosen, args.save))


def _types(text: str) -> tuple[str, ...]:
    types = tuple(part.lower() for part in items(text))
    if not all(types) or len(set(types)) < len(types):
        raise argparse.ArgumentTypeError(f"needs different types between commas, got {text[:80]!r}")
    return types


def _axes(text: str) -> tuple[str, ...]:
    axes = tuple(items(text))
    if len(axes) < 2 or len(set(axes)) < len(axes) or any(axis not in AXES for axis in axes):
        raise argparse.ArgumentTypeError(f"needs two or more of {', '.join(AXES)}, got {text[:80]!r}")
    return axes
