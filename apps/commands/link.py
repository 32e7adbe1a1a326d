"""`edge link A B`: measures the connection between two workers and explains what may limit it."""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING

from apps.options import add, address, option
from apps.show.table import print_json, print_table
from edge.units import between
from quant.text import bytes_text

if TYPE_CHECKING:
    from edge.cluster.diagnose import LinkReport
    from transport.choice import Choice

HELP = "Measure the connection between two devices: latency, bandwidth, and the best all-reduce algorithm."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "a",
        type=lambda text: None if text == "local" else address(text),
        metavar="A",
        help="name, HOST or HOST:PORT of a worker (default port: 7070), or `local`: this device, without a worker",
    )
    parser.add_argument("b", type=address, metavar="B", help="name, HOST or HOST:PORT of a worker, as A can reach it")
    words = "duration of the measurement in seconds, 0.1 to 60 (default: 1)"
    option(parser, "--seconds S", words, between(0.1, 60), default=1.0)
    add(parser, "--transport", default="auto")
    add(parser, "--timeout", default=5.0, help="seconds to wait for each worker (default: 5)")
    add(parser, "--insecure", "--json")


def run(args: argparse.Namespace) -> int:
    from edge.cluster.connect import reach
    from edge.cluster.diagnose import measure_link

    how = {"insecure": args.insecure, "timeout_s": args.timeout}
    with contextlib.ExitStack() as stack:
        a = stack.enter_context(reach(args.a, **how)) if args.a else None
        b = stack.enter_context(reach(args.b, **how))
        for worker in (a, b):
            if worker is not None:
                worker.describe(args.timeout)  # asks for its name, which the report prints
        report = measure_link(a, b, args.seconds, args.transport)
    if args.json:
        return print_json(report.to_json())
    show(report)
    return 0


def show(report: LinkReport) -> None:
    """Print the report of a link as a table, with hints below it."""
    link = report.profile
    best, median, p99 = map(_time, (link.latency_best_s, link.latency_median_s, link.latency_p99_s))
    rows = [
        ("link", report.why or link.kind),
        ("one way", f"{median} median, {p99} p99, {best} best"),
        ("bandwidth", f"{_rate(link.bandwidth_ab_gbps)} there, {_rate(link.bandwidth_ba_gbps)} back"),
        ("allreduce of 8 KiB", f"{_time(report.allreduce_s)} measured, by mesh"),
    ]
    rows += [(f"allreduce of {bytes_text(n)}", _predicted(choice)) for n, choice in report.choices.items()]
    print_table(f"{link.a} to {link.b}", rows, (f"hint: {hint}" for hint in report.hints))


def _predicted(choice: Choice) -> str:
    """Return the cheapest algorithm and the second cheapest, each with its predicted time."""
    others = {name: seconds for name, seconds in choice.seconds.items() if name != choice.algorithm}
    second = min(others, key=lambda name: others[name])
    best_s = choice.seconds[choice.algorithm]
    return f"{choice.algorithm}: {_time(best_s)} predicted, {second} {_time(others[second])}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _rate(gbps: float) -> str:
    return f"{gbps:.2f} Gbit/s" if gbps >= 1 else f"{gbps * 1e3:.0f} Mbit/s"
