"""`edge devices`: the workers there are, what they are, and whether they answer."""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from apps.commands import devices_probe
from apps.commands.link import address, show, timeout
from apps.options import items, quiet_grpc
from apps.show.format import bytes_text
from apps.show.progress import progress
from apps.show.table import print_columns, print_note

if TYPE_CHECKING:
    from edge.cluster.client import Remote
    from edge.cluster.diagnose import LinkReport

HELP = "List the workers there are: found on the network, and those whose addresses you give."
AT_ONCE = 16  # workers asked at a time
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
    parser.add_argument(
        "--timeout",
        type=timeout,
        default=3.0,
        metavar="S",
        help="look for so long, and wait so long for each worker (default: 3)",
    )
    parser.add_argument(
        "--discover",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="look for workers by mDNS (default: yes)",
    )
    parser.add_argument("--links", action="store_true", help="measure the connection of every pair")
    parser.add_argument("--insecure", action="store_true", help="allow workers that run with --insecure")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    _add_probe(parser)


def _addresses(text: str) -> list[str]:
    """Of the workers in a list."""
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


@dataclass
class _Entry:
    """A worker that was found or named."""

    address: str
    name: str | None = None  # as announced, then as it says or its certificate does
    worker: Remote | None = None
    profile: dict[str, Any] | None = None
    state: dict[str, Any] | None = None
    error: str | None = None
    silent: bool = False  # the error is that nothing answers

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "address": self.address,
            "answers": self.worker is not None,
            "secure": self.worker.secure if self.worker else None,
            "profile": self.profile,
            **(self.state or {"sessions": None, "slices_bytes": None, "slices_limit_bytes": None}),
            "error": self.error,
        }

    def why(self) -> str:
        """The error, and of whom where it does not say so itself."""
        error = self.error or ""
        said = error.startswith(self.name) if self.name else self.address in error
        return error if said else f"{self.name or self.address}: {error}"


@dataclass
class _Pair:
    """A connection that was measured, or why not."""

    a: Remote
    b: Remote
    report: LinkReport | None = None
    error: str | None = None

    def failure(self) -> dict[str, Any]:
        return {"a": self.a.name, "b": self.b.name, "error": self.error}


def run(args: argparse.Namespace) -> int:
    """Look, ask, print; the exit code tells whether all whose address was given answer."""
    quiet_grpc()
    from edge.cluster.connect import credentials

    credentials()  # whatever is wrong with our own is no fault of any worker
    args.addresses = [one for some in args.addresses for one in some]
    entries = _asked(args)
    if not entries and not args.json:
        print("no workers found; start one with `edge worker`, or give its address: edge devices HOST:PORT")
        return 0
    try:
        pairs = _measure([entry.worker for entry in entries if entry.worker]) if args.links else []
        _print(entries, pairs, args.json)
    finally:
        for entry in entries:
            if entry.worker:
                entry.worker.close()
    failed = any(entry.error for entry in entries if entry.address in args.addresses)
    return EXIT_NO_ANSWER if failed or any(pair.error for pair in pairs) else 0


def _asked(args: argparse.Namespace) -> list[_Entry]:
    """All workers, those found first. The network is searched while those whose address was given are asked."""
    given = [_Entry(named) for named in dict.fromkeys(args.addresses)]
    with ThreadPoolExecutor(AT_ONCE) as pool:

        def ask(entries: list[_Entry]) -> list[Any]:
            return [pool.submit(_ask, entry, args.insecure, args.timeout) for entry in entries]

        asked = ask(given)
        found = _found(args.timeout) if args.discover else []
        names = {entry.address: entry.name for entry in found}
        found = [entry for entry in found if entry.address not in args.addresses]
        for done in [*asked, *ask(found)]:
            done.result()
    for entry in given:
        entry.name = entry.name or names.get(entry.address)
    return [*found, *given]


def _found(timeout_s: float) -> list[_Entry]:
    """Who announces itself. A network that does not allow to ask is no error: addresses can be given."""
    from devices.discovery import browse
    from devices.errors import DiscoveryError
    from edge.net.channel import join_address

    try:
        return [_Entry(join_address(found.addresses[0], found.port), found.name) for found in browse(timeout_s)]
    except DiscoveryError as error:
        print(f"edge devices: {error}", file=sys.stderr)
        return []


def _ask(entry: _Entry, insecure: bool, timeout_s: float) -> None:
    """Fill in what a worker says, or why it says nothing."""
    from devices.errors import TrustError
    from edge.cluster.connect import reach
    from edge.errors import WorkerError
    from transport.errors import LinkClosed, LinkTimeout, TransportError

    worker = None
    try:
        worker = reach(entry.address, insecure=insecure, timeout_s=timeout_s)
        profile, said = worker.describe(timeout_s)
    except (TransportError, TrustError, WorkerError) as error:
        entry.error, entry.silent = str(error), isinstance(error, (LinkClosed, LinkTimeout))
        if worker is not None:
            worker.close()
        return
    entry.worker, entry.name, entry.profile = worker, worker.name, profile.to_json()
    entry.state = {
        "sessions": [
            {"rank": s.rank, "world_size": s.world_size, "slice": s.slice, "memory_bytes": s.memory_bytes}
            for s in said.sessions
        ],
        "slices_bytes": said.slices_bytes,
        "slices_limit_bytes": said.slices_limit_bytes,
    }


def _measure(workers: list[Remote]) -> list[_Pair]:
    """Every pair, one after the other so that they do not disturb each other."""
    from edge.cluster.diagnose import measure_link
    from edge.errors import WorkerError
    from transport.errors import TransportError

    pairs = [_Pair(a, b) for a, b in combinations(workers, 2)]
    with progress("Measuring links", len(pairs), "links") as bar:
        for i, pair in enumerate(pairs):
            try:
                pair.report = measure_link(pair.a, pair.b)
            except (TransportError, WorkerError) as error:
                pair.error = str(error)
            bar.update(i + 1)
    return pairs


def _print(entries: list[_Entry], pairs: list[_Pair], as_json: bool) -> None:
    reports = [pair.report for pair in pairs if pair.report]
    failures = [pair.failure() for pair in pairs if pair.error]
    if as_json:
        links = [report.to_json() for report in reports]
        print(json.dumps({"devices": [e.to_json() for e in entries], "links": links, "links_failed": failures}))
        return
    print_columns(COLUMNS, [_row(entry) for entry in entries], whole=("name", "address", "threads"))
    for entry in entries:
        if entry.error:
            print_note(entry.why())
    for report in reports:
        print()
        show(report)
    for failure in failures:
        print_note(f"{failure['a']} to {failure['b']}: {failure['error']}")


def _row(entry: _Entry) -> tuple[str, ...]:
    if entry.profile is None:
        return entry.name or "-", entry.address, "-", "-", "-", "no answer" if entry.silent else "cannot be used"
    profile = entry.profile
    limit = profile["memory_limit_bytes"]
    memory = f"{bytes_text(profile['memory_available_bytes'])} free"
    if limit is not None:
        memory += f", limit {bytes_text(limit)}"
    busy = len(entry.state["sessions"]) if entry.state else 0
    state = f"answers, {busy} session{'s' if busy != 1 else ''}" if busy else "answers"
    if entry.worker and not entry.worker.secure:
        state += ", in the clear"
    what = f"{profile['cpu']}, {profile['system']}"
    return entry.name or "-", entry.address, what, str(profile["threads"]), memory, state
