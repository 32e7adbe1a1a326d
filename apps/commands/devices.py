"""`edge devices`: lists workers, their hardware, and whether they answer."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apps import planning
from apps.commands.link import show
from apps.errors import UsageError
from apps.options import add, address, option, refuse
from apps.show.progress import ShownSteps
from apps.show.table import print_columns, print_json, print_note, print_notes, print_table
from edge.units import items
from quant.text import age_text, bytes_text, counted, seconds_text

if TYPE_CHECKING:
    from edge.cluster.roster import Entry, Pair
    from partition.predict.onnx_predict import OnnxDevice
    from partition.predict.speeds import DeviceSpeed

HELP = "List workers: those found on the network, and those whose addresses you give."
COLUMNS = ("name", "address", "what", "threads", "memory", "state")
PROBE = "probe"  # a word instead of addresses: describe this machine itself
PROBE_HELP = "Show the hardware of this machine and its speed; with MODEL, the time devices need for its parts."
LLM_COLUMNS = ("device", "layer", "4 rows", "prompt", "half", "head", "memory", "measured")
ONNX_COLUMNS = ("device", "whole", "parts", "longest part", "memory", "measured")
LINK_COLUMNS = ("from", "to", "latency", "bandwidth", "measured")
_PROMPT_ROWS = 64
EXIT_NO_ANSWER = 7  # the exit code of a failed connection


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "addresses",
        nargs="*",
        type=_addresses,
        metavar="HOST[:PORT]",
        help="workers to ask in addition to those found, by name or address (default port: 7070)",
    )
    words = "seconds to look for workers, and to wait for each worker (default: 3)"
    add(parser, "--timeout", default=3.0, help=words)
    option(
        parser,
        "--discover",
        "look for workers by mDNS (default: yes)",
        action=argparse.BooleanOptionalAction,
        default=True,
    )
    option(parser, "--links", "measure the connection between every pair of devices")
    add(parser, "--insecure", "--json")
    _add_probe(parser)


def _addresses(text: str) -> list[str]:
    return [address(item) for item in items(text)]


def _add_probe(parser: argparse.ArgumentParser) -> None:
    """Give the word `probe` a parser of its own, because argparse allows no subparsers next to a list of addresses."""
    probe = type(parser)(prog=f"{parser.prog} probe", description=PROBE_HELP)
    _add_probe_arguments(probe)
    probe.set_defaults(run=_run_probe, parser=probe)
    parser.epilog = f"{probe.prog}: {PROBE_HELP} See {probe.prog} --help."
    of_addresses = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        if args and PROBE in args:
            args = list(args)
            args.remove(PROBE)
            return probe.parse_known_args(args, namespace)
        return of_addresses(args, namespace)

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def run(args: argparse.Namespace) -> int:
    """Find workers, ask them, and print them; return an error if a worker whose address was given does not answer."""
    from edge.cluster.roster import measure_pairs, roster

    steps = ShownSteps("devices")
    addresses = [address for some in args.addresses for address in some]
    how = {"discover": args.discover, "insecure": args.insecure, "timeout_s": args.timeout, "steps": steps}
    with roster(addresses, **how) as entries:
        if not entries and not args.json:
            print("no workers found; start one with `edge worker`, or give its address: edge devices HOST:PORT")
            return 0
        pairs = measure_pairs(entries, steps) if args.links else []
        _print(entries, pairs, args.json)
    failed = any(entry.error for entry in entries if entry.address in addresses)
    return EXIT_NO_ANSWER if failed or any(pair.error for pair in pairs) else 0


def _print(entries: list[Entry], pairs: list[Pair], as_json: bool) -> None:
    reports = [pair.report for pair in pairs if pair.report]
    failures = [{"a": pair.a, "b": pair.b, "error": pair.error} for pair in pairs if pair.error]
    if as_json:
        links = [report.to_json() for report in reports]
        print_json({"devices": [e.to_json() for e in entries], "links": links, "links_failed": failures})
        return
    whys = (entry.why() for entry in entries if entry.error)
    print_columns(COLUMNS, [_row(entry) for entry in entries], ("name", "address", "threads"), whys)
    for report in reports:
        print()
        show(report)
    for failure in failures:
        print_note(f"{failure['a']} to {failure['b']}: {failure['error']}")


def _row(entry: Entry) -> tuple[str, ...]:
    if entry.profile is None:
        state = entry.membership or ("no answer" if entry.silent else "cannot be used")
        return entry.name or "-", entry.address or "-", "-", "-", "-", state
    profile = entry.profile
    limit = profile["memory_limit_bytes"]
    memory = f"{bytes_text(profile['memory_available_bytes'])} free"
    if limit is not None:
        memory += f", limit {bytes_text(limit)}"
    busy = len(entry.state["sessions"]) if entry.state else 0
    from edge.cluster.roster import JOINED

    in_the_clear = entry.worker is not None and not entry.worker.secure
    # A worker without a certificate has not joined a cluster.
    states = ["" if in_the_clear and entry.membership == JOINED else entry.membership or ""]
    states += [counted(busy, "session") if busy else "", "in the clear" if in_the_clear else ""]
    state = ", ".join(filter(None, states))
    what = f"{profile['cpu']}, {profile['system']}"
    return entry.name or "-", entry.address, what, str(profile["threads"]), memory, state


def _add_probe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="GGUF or ONNX file whose parts are measured")
    group = parser.add_argument_group("with a model")
    add(group, "--cluster", "--workers", "--insecure", "--dim", "--input")
    others = ("transport", "wire", "threads", "concurrency", "limit_divergence", "text", *planning.TEXT_OPTIONS)
    parser.set_defaults(**dict.fromkeys(others), types=())  # options of `edge plan` that `edge devices probe` lacks
    option(parser, "--fresh", "repeat remembered measurements")
    option(parser, "--folder DIR", "measure the disk of this folder (default: the folder of model slices)", Path)
    add(parser, "--json")


def _run_probe(args: argparse.Namespace) -> int:
    """Print the properties of this machine, and measure those that are not known yet.

    Raises UsageError if an option does not apply.
    """
    if args.model is not None:
        if args.folder is not None:
            raise UsageError("--folder is about this machine alone; leave MODEL out")
        return _run_model(args)
    refuse(args, ("cluster", "workers", "insecure", "dim", "input"), "needs a MODEL: name one")
    if args.folder is not None and not args.folder.is_dir():
        raise UsageError(f"--folder {args.folder} is not an existing folder; name one")
    from edge.profiling.machine import machine_rows, this_machine

    machine = this_machine(args.folder, args.fresh)
    if args.json:
        return print_json(machine.to_json())
    missing = [f"{what} not measured: {why}" for what, why in machine.not_measured.items()]
    print_table(machine.profile.name, machine_rows(machine), missing)
    return 0


def _run_model(args: argparse.Namespace) -> int:
    """Print the time that devices need for the parts of one model, and the links between them."""
    from edge.planning.describe import known_json, notes
    from partition.predict.speeds import DeviceSpeed

    with planning.spaces(args) as ((space,), _):
        known = known_json(space)
        if args.json:
            return print_json({"model": str(space.path), "kind": space.kind, **known})
        columns = LLM_COLUMNS if space.kind == "llm" else ONNX_COLUMNS
        rows = [_llm_row(speed) if isinstance(speed, DeviceSpeed) else _onnx_row(speed) for speed in space.known.speeds]
        print_columns(columns, rows, whole=("device",))
        if known["links"]:
            print()
            print_columns(LINK_COLUMNS, [_link_row(link) for link in known["links"]], whole=("from", "to"))
        print_notes(notes(space))
    return 0


def _llm_row(speed: DeviceSpeed) -> tuple[str, ...]:
    """Return the row of a device's layer times. The column `prompt` is the time per token of a long prompt."""
    return (
        speed.name,
        seconds_text(speed.layer_s.at(1)),
        seconds_text(speed.layer_s.at(4)),
        seconds_text(speed.layer_s.at(_PROMPT_ROWS) / _PROMPT_ROWS),
        seconds_text(speed.half_layer_s.at(1)),
        seconds_text(speed.head_s.at(1)),
        bytes_text(speed.memory_bytes) + (f" + {bytes_text(gpu.memory_bytes)} GPU" if (gpu := speed.gpu) else ""),
        _when(speed.estimate, speed.age_s, speed.busy),
    )


def _onnx_row(speed: OnnxDevice) -> tuple[str, ...]:
    return (
        speed.name,
        seconds_text(speed.seconds(0, len(speed.segments_s))),
        str(len(speed.segments_s)),
        seconds_text(max(speed.segments_s)),
        bytes_text(speed.memory_bytes),
        _when(speed.estimate, speed.age_s, speed.busy),
    )


def _link_row(link: dict[str, Any]) -> tuple[str, ...]:
    latency, bandwidth = seconds_text(link["latency_s"]), f"{link['bytes_per_s'] * 8 / 1e6:,.0f} Mbit/s"
    return link["from"], link["to"], latency, bandwidth, _when(link["estimate"], link.get("age_s", 0.0))


def _when(estimate: bool, age_s: float, busy: bool = False) -> str:
    return "estimate" if estimate else age_text(age_s) + (", while busy" if busy else "")
