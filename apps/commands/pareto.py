"""`edge pareto`: all plans that no other plan beats in latency and throughput, as a table, a picture and a page."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apps import planning
from apps.errors import EXIT_INTERRUPTED, UsageError
from apps.options import add, check_output, option, refuse, set_common
from apps.show.progress import ShownSteps, say
from apps.show.table import print_columns, print_json, print_notes
from edge.units import items, natural
from partition.predict.objectives import AXES, default_axes
from quant.text import printable

if TYPE_CHECKING:
    from edge.cluster.fleet import Fleet
    from edge.pictures.front_points import Result
    from edge.planning.front import Front
    from edge.planning.space import PlanSpace

_WRITING_S = 10.0  # time to write measured plans after a signal
_EXPLORED = (
    "cluster", "transport", "wire", "threads", "context", "concurrency", "prompt_tokens", "depth", "kv_type", "draft",
    "draft_worker", "acceptance", "text",
)  # fmt: skip
_OF_ONE_NETWORK = ("html", "pick", "save", "draft_worker")
HELP = "Explore the trade-off between latency and throughput over all ways to place a model on devices."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common = "--workers --cluster --context --prompt-tokens --concurrency --types --measure --html --png"
    common += " --pick --save --json"
    set_common(parser, common)
    planning.add_arguments(parser)
    planning.add_type_arguments(parser)
    words = f"two or more axes of {','.join(AXES)} (default: latency,throughput; with --types also divergence)"
    option(parser, "--axes A,B", words, _axes)
    words = "plan for each network between the devices: a preset such as lan, wifi or 4g, or RATE/DELAY (100mbit/20ms)"
    option(parser, "--networks N,N", words, items)
    option(parser, "--measure N", "run and measure the N most promising plans", natural, default=0)
    option(parser, "--json FILE", "write one JSON object; without FILE, print it", nargs="?", const="-")
    option(parser, "--html FILE", "write a page for exploring the plans", Path)
    add(parser, "--png", help="write a picture")
    option(parser, "--pick ID", "choose a plan: its id, knee, or an axis, which means the best plan on that axis")
    option(parser, "--save FILE", "with --pick: write that plan, for --plan", Path)
    add(parser, "--force")


def run(args: argparse.Namespace) -> int:
    """Find, measure, print and write plans. An interrupted measurement still writes the plans measured so far."""
    _check(args)
    axes = args.axes or default_axes(args.types)
    from edge.ending import grace
    from edge.planning.front import Front

    with ExitStack() as stack:
        spaces, fleet = stack.enter_context(planning.spaces(args, axes))
        front = Front(spaces, axes, max_divergence=args.limit_divergence)
        if args.networks:
            from edge.planning.over_networks import NetworkFronts

            _write(args, NetworkFronts(front, args.networks, ShownSteps("pareto")).to_json(), spaces)
            return 0
        stack.enter_context(grace(_WRITING_S))
        code = _measure(args, front, fleet)
        result = front.to_json()
        _write(args, result, spaces)
    if args.pick is not None and not code:
        _pick(args, result, front)
    return code


def _measure(args: argparse.Namespace, front: Front, fleet: Fleet | None) -> int:
    """Measure plans; return 0, or the exit code of an interruption."""
    from edge.errors import Interrupted

    try:
        if args.measure:
            front.measure(args.measure, fleet, fresh=args.fresh, steps=ShownSteps("pareto"))
        return 0
    except (KeyboardInterrupt, SystemExit, Interrupted):
        words = f"interrupted after {len(front.measured)} of {args.measure} plans"
        say(f"{words}; run the same command to continue", "pareto")
        return EXIT_INTERRUPTED


def _check(args: argparse.Namespace) -> None:
    """Raise UsageError if a file cannot be written, before anything is measured."""
    from edge.pictures.canvas import check_picture
    from edge.pictures.page import check_page

    if args.networks:
        from edge.planning.over_networks import networks_of

        networks_of(args.networks)
        refuse(args, _OF_ONE_NETWORK, "is for one network: leave out --networks")
        if args.measure:
            raise UsageError("--measure runs plans over the links that are there: leave out --networks")
    files = [Path(args.json)] if args.json not in (None, "-") else []
    files += [file for file in (args.html, args.png, args.save) if file is not None]
    if len({file.absolute() for file in files}) < len(files):
        raise UsageError("--json, --html, --png and --save need different files; two of them name the same one")
    read = planning.sources(args) if files else []
    for file in files:
        check_output(file, read, args.force)
    if args.png is not None:
        check_picture(args.png)
    if args.html is not None:
        check_page(args.html)
    if args.save is not None and args.pick is None:
        raise UsageError("--save writes the plan that --pick chooses: add --pick ID")


def _write(args: argparse.Namespace, result: dict[str, Any], spaces: Sequence[PlanSpace]) -> None:
    from devices.files import write_whole
    from edge.planning.describe import notes

    if args.json == "-":
        print_json(result)
    else:
        (show_networks if args.networks else show)(result, dict.fromkeys(n for space in spaces for n in notes(space)))
        if args.json is not None:
            write_whole(Path(args.json), (json.dumps(result, indent=1) + "\n").encode())
    if args.png is not None:
        from edge.pictures.front import write_picture

        write_picture(result, args.png)
    if args.html is not None:
        from edge.pictures.page import write_page

        write_page(result, args.html, command=_command(args), model=(args.model or "") if not args.types else "")


def show(result: Result, further: Iterable[str] = ()) -> None:
    """Print the plans of a front, the least latency first, then notes.

    A measured figure stands next to the predicted one, with the error of the prediction.

    result: JSON object of `edge pareto --json`.
    further: notes to print after those of the result.
    """
    from edge.pictures.front_points import notes, table, unit

    columns, rows = table(result)
    print_columns(columns, rows, ("id", "latency ms", f"{unit(result)}/s"), [*notes(result), *further])


def show_networks(result: Result, further: Iterable[str] = ()) -> None:
    """Print the best plans for each network, then the nearest values at which they change, then notes.

    result: JSON object of `edge pareto --networks --json`.
    further: notes to print last.
    """
    from edge.pictures.network_fronts import delay_text, network_text, rate_text
    from partition.predict.objectives import OBJECTIVES

    thing = "token" if result["kind"] == "llm" else "input"
    rows, moves = [], []
    for network in result["networks"]:
        for name, best in network["best"].items():
            row = OBJECTIVES[name]
            value = row.describe(row.cost(best[row.key]), thing)
            rows.append([network_text(network), row.label, value, best["label"]])
            for key, text in (("bytes_per_s", rate_text), ("latency_s", delay_text)):
                for move in _nearest(network, name, key):
                    sides = [move["below"]["label"], move["above"]["label"]]
                    moves.append([network["name"], row.label, text(move["at"]), *sides])
    print_columns(["network", "best", "predicted", "plan"], rows, ("best", "predicted"))
    lines = ["The delay of a network is one way."]
    if not all(network["moves_complete"] for network in result["networks"]):
        lines.append("The search for changes was cut short: more may exist.")
    if moves:
        print()
        print_columns(["network", "best", "changes at", "below it", "above it"], moves, ("best", "changes at"))
    else:
        lines.insert(0, "The best plans are the same at every bandwidth and delay.")
    print_notes([*lines, *further])


def _nearest(network: Mapping[str, Any], objective: str, key: str) -> list[Mapping[str, Any]]:
    """Return the last move below a network's own bandwidth or delay, and the first move above it."""
    moves = [move for move in network["moves"] if (move["objective"], move["of"]) == (objective, key)]
    below = [move for move in moves if move["at"] <= network[key]]
    return below[-1:] + [move for move in moves if move["at"] > network[key]][:1]


def _command(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the command line without options for output, so that the page can show it."""
    values = {name: getattr(args, name) for name in _EXPLORED}
    values |= {name: ",".join(getattr(args, name) or ()) or None for name in ("workers", "types", "axes")}
    values |= {"memory": args.memory and f"{args.memory}B", "max_divergence": args.limit_divergence}
    words = ["edge", "pareto", *([args.model] if args.model else [])]
    for name, value in values.items():
        words += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
    words += [f"--dim={name}={size}" for name, size in args.dim or ()]
    words += [f"--input={file}" for file in args.input or ()]
    return (*words, "--insecure") if args.insecure else tuple(words)


def _pick(args: argparse.Namespace, result: dict[str, Any], front: Front) -> None:
    from edge.planning.choice import save_plan
    from edge.planning.describe import joining_commands
    from edge.planning.front import pick

    chosen = pick(result, args.pick)
    if args.save is not None:
        save_plan(args.save, *front.plan(chosen))
    if args.json == "-":
        return
    picked = f"picked {chosen['id']}: {chosen['label']}"
    if args.save is None:
        print(printable(f"{picked}; --save FILE writes the plan"))
        return
    command = "chat" if result["kind"] == "llm" else "run"
    draft = ["--draft", str(args.draft)] if chosen["predicted"]["draft"] else []
    draft += ["--draft-worker", args.draft_worker] if draft and args.draft_worker else []
    model = planning.typed_model(args, chosen["model"])
    steps = joining_commands(result, chosen["devices"], args.model)
    steps = steps or [shlex.join(["edge", command, *model, "--plan", str(args.save), *draft])]
    print(printable(f"{picked}; saved: {args.save}. Next: {', then '.join(steps)}"))


def _axes(text: str) -> tuple[str, ...]:
    axes = tuple(items(text))
    if len(axes) < 2 or len(set(axes)) < len(axes) or any(axis not in AXES for axis in axes):
        raise ValueError(f"needs two or more of {', '.join(AXES)}, got {text[:80]!r}")
    return axes
