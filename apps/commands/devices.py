"""`edge devices`: the workers there are, what they are, and whether they answer."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from apps.commands import devices_probe
from apps.commands.link import show
from apps.options import add, address, items, quiet_grpc
from apps.show.progress import ShownSteps
from apps.show.table import print_columns, print_json, print_note
from quant.text import bytes_text, counted

if TYPE_CHECKING:
    from edge.cluster.roster import Entry, Pair

HELP = "List the workers there are: found on the network, and those whose addresses you give."
COLUMNS = ("name", "address", "what", "threads", "memory", "state")
PROBE = "probe"  # in place of addresses: look at this machine itself
EXIT_NO_ANSWER = 7  # as for any connection that fails


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to look, and how thoroughly."""
    parser.add_argument(
        "addresses",
        nargs="*",
        type=_addresses,
        metavar="HOST[:PORT]",
        help="workers to ask beside those found; the port is by default 7070",
    )
    add(parser, "--timeout", default=3.0, help="look for so long, and wait so long for each worker (default: 3)")
    parser.add_argument(
        "--discover",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="look for workers by mDNS (default: yes)",
    )
    parser.add_argument("--links", action="store_true", help="measure the connection of every pair")
    add(parser, "--insecure", "--json")
    _add_probe(parser)


def _addresses(text: str) -> list[str]:
    """Return the addresses of the workers in a list."""
    return [address(one) for one in items(text)]


def _add_probe(parser: argparse.ArgumentParser) -> None:
    """Let the word `probe` lead to a parser of its own. Those of argparse cannot be beside a list of addresses."""
    probe = type(parser)(prog=f"{parser.prog} probe", description=devices_probe.HELP)
    devices_probe.add_arguments(probe)
    probe.set_defaults(run=devices_probe.run, parser=probe)
    parser.epilog = f"{probe.prog}: {devices_probe.HELP} See {probe.prog} --help."
    of_addresses = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        if args and PROBE in args:
            args = list(args)
            args.remove(PROBE)
            return probe.parse_known_args(args, namespace)
        return of_addresses(args, namespace)

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def run(args: argparse.Namespace) -> int:
    """Look, ask, print; the exit code tells whether all whose address was given answer."""
    quiet_grpc()
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
        return entry.name or "-", entry.address, "-", "-", "-", state
    profile = entry.profile
    limit = profile["memory_limit_bytes"]
    memory = f"{bytes_text(profile['memory_available_bytes'])} free"
    if limit is not None:
        memory += f", limit {bytes_text(limit)}"
    busy = len(entry.state["sessions"]) if entry.state else 0
    from edge.cluster.roster import JOINED

    in_the_clear = entry.worker is not None and not entry.worker.secure
    # Nobody has joined a cluster who shows no certificate.
    states = ["" if in_the_clear and entry.membership == JOINED else entry.membership or ""]
    states += [counted(busy, "session") if busy else "", "in the clear" if in_the_clear else ""]
    state = ", ".join(filter(None, states))
    what = f"{profile['cpu']}, {profile['system']}"
    return entry.name or "-", entry.address, what, str(profile["threads"]), memory, state
