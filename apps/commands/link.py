"""`edge link A B`: what the connection between two workers can do, and whether it is the one it should be."""

from __future__ import annotations

import argparse
import contextlib
import json
from typing import TYPE_CHECKING

from apps.options import number, quiet_grpc
from apps.show.format import bytes_text
from apps.show.table import print_note, print_table

if TYPE_CHECKING:
    from edge.cluster.diagnose import LinkReport
    from transport.choice import Choice

HELP = "Measure the connection between two devices: latency, bandwidth, and what it is good for."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which two, how, and for how long."""
    parser.add_argument(
        "a",
        type=lambda text: None if text == "local" else address(text),
        metavar="A",
        help="HOST or HOST:PORT of a worker, the port is by default 7070; or `local`: this device, without a worker",
    )
    parser.add_argument("b", type=address, metavar="B", help="the other one, at an address that A can dial")
    parser.add_argument(
        "--seconds", type=_seconds, default=1.0, metavar="S", help="measure for about so long, 0.1 to 60 (default: 1)"
    )
    parser.add_argument(
        "--transport",
        choices=("auto", "tcp", "grpc"),
        default="auto",
        help="default: auto, tcp unless grpc is clearly faster",
    )
    parser.add_argument(
        "--timeout", type=timeout, default=5.0, metavar="S", help="wait so long for each worker (default: 5)"
    )
    parser.add_argument("--insecure", action="store_true", help="allow workers that run with --insecure")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    quiet_grpc()
    from edge.cluster.connect import reach
    from edge.cluster.diagnose import measure_link

    how = {"insecure": args.insecure, "timeout_s": args.timeout}
    with contextlib.ExitStack() as stack:
        a = stack.enter_context(reach(args.a, **how)) if args.a else None
        b = stack.enter_context(reach(args.b, **how))
        for worker in (a, b):
            if worker is not None:
                worker.describe(args.timeout)  # its name
        report = measure_link(a, b, args.seconds, args.transport)
    if args.json:
        print(json.dumps(report.to_json()))
    else:
        show(report)
    return 0


def address(text: str) -> str:
    """HOST:PORT of a worker, from what may lack the port."""
    from edge.net.channel import join_address, parse_address

    try:
        return join_address(*parse_address(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def timeout(text: str) -> float:
    """How long to wait for a worker."""
    return _between(text, 0.1, 3600)


def show(report: LinkReport) -> None:
    """As a table, what is wrong below it."""
    link = report.profile
    best, median, p99 = map(_time, (link.latency_best_s, link.latency_median_s, link.latency_p99_s))
    rows = [
        ("link", report.why or link.kind),
        ("one way", f"{median} median, {p99} p99, {best} best"),
        ("bandwidth", f"{_rate(link.bandwidth_ab_gbps)} there, {_rate(link.bandwidth_ba_gbps)} back"),
        ("allreduce of 8 KiB", f"{_time(report.allreduce_s)} measured, by mesh"),
    ]
    rows += [(f"allreduce of {bytes_text(n)}", _predicted(choice)) for n, choice in report.choices.items()]
    print_table(f"{link.a} to {link.b}", rows)
    for hint in report.hints:
        print_note(f"hint: {hint}")


def _predicted(choice: Choice) -> str:
    """The cheapest algorithm, and what the next best would take."""
    others = {name: seconds for name, seconds in choice.seconds.items() if name != choice.algorithm}
    second = min(others, key=lambda name: others[name])
    best_s = choice.seconds[choice.algorithm]
    return f"{choice.algorithm}: {_time(best_s)} predicted, {second} {_time(others[second])}"


def _seconds(text: str) -> float:
    """How long to measure."""
    return _between(text, 0.1, 60)


def _between(text: str, least: float, most: float) -> float:
    value = number(text)
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"needs a number from {least:g} to {most:g}, got {text!r}")
    return value


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _rate(gbps: float) -> str:
    return f"{gbps:.2f} Gbit/s" if gbps >= 1 else f"{gbps * 1e3:.0f} Mbit/s"
