"""`edge simulate`: predicts the latency and throughput of many requests under a plan, without running it."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apps.errors import UsageError
from apps.options import add, option, seed, set_common
from apps.show.table import print_columns, print_json, print_note, print_notes
from edge.units import number, positive_int
from partition.plan.formats import SIMULATED
from quant.text import number_text, seconds_text

if TYPE_CHECKING:
    from partition.predict.prediction import Prediction
    from partition.simulate.arrivals import Arrivals
    from partition.simulate.result import Simulated, Spread, Targets
    from partition.simulate.simulate import Conditions

HELP = "Simulate many requests under a plan: queues, jitter, a device that slows down or leaves."
REQUESTS, GEN_TOKENS = 200, 128  # copies of edge.planning.planned_file, so that --help stays quick
COLUMNS = ("", "mean", "p50", "p90", "p99")
_MOST_RATE = 1e6
_MOST_FACTOR = 1e4
_MOST_TARGET_MS = 1e9
_SLOW = re.compile(r"(.+):([0-9.]+)@([0-9.]+)(?:-([0-9.]+))?")
_LEAVE = re.compile(r"(.+)@([0-9.]+)")
USES = ("stage or link", "busy", "queue", "longest")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    set_common(parser, "--point --arrivals --requests --prompt-tokens --target-ttft --target-itl --json")
    words = "file with a plan, written by edge plan, pareto or simulate"
    parser.add_argument("file", type=Path, metavar="FILE", help=words)
    option(parser, "--point ID", "for a file of edge pareto: id of the plan to simulate (default: the knee)")
    words = "arrivals of requests: poisson:RATE per second, closed:N clients that each wait for an answer before the"
    words += " next request, or trace:FILE"
    option(parser, "--arrivals HOW", words, _arrivals, required=True)
    words = f"number of requests (default: {REQUESTS}, or the whole trace)"
    option(parser, "--requests N", words, positive_int)
    option(parser, "--prompt-tokens N", "tokens in a prompt (default: as planned)", positive_int)
    option(parser, "--gen-tokens N", f"tokens in an answer (default: {GEN_TOKENS})", positive_int)
    words = "standard deviation of all times, in percent (default: 0)"
    option(parser, "--jitter PERCENT", words, _percent, default=0.0)
    words = "make a device FACTOR times slower from second T to T2 (default: to the end); repeatable"
    option(parser, "--slow DEVICE:FACTOR@T[-T2]", words, _slow, action="append", default=[])
    option(parser, "--leave DEVICE@T", "lose a device at second T; repeatable", _leave, action="append", default=[])
    words = (
        "target for the time to the first token (ms); reports the share of requests that meet it, and the arrival rate"
        " up to which 90 percent of the requests do"
    )
    option(parser, "--target-ttft MS", words, _target)
    words = "target for the mean time between later tokens (ms); with --target-ttft, requests must meet both"
    option(parser, "--target-itl MS", words, _target)
    option(parser, "--seed N", "seed of all random numbers (default: 0)", seed, default=0)
    add(parser, "--json")


def run(args: argparse.Namespace) -> int:
    from edge.planning import planned_file
    from partition.simulate.simulate import most_arrivals_per_s, simulate

    planned = planned_file.read_planned(args.file, args.point)
    predicted, names, point = planned.predicted, planned.names, planned.point
    how = {"requests": args.requests, "prompt": args.prompt_tokens, "tokens": args.gen_tokens, "seed": args.seed}
    arrivals = planned_file.arrivals(predicted, *args.arrivals, **how)
    conditions = _conditions(args, names)
    targets, owner = _targets(args, predicted), names.get("local", "local")
    result = simulate(predicted, arrivals, conditions, seed=args.seed, owner=owner, targets=targets)
    if result.goodput is not None and targets is not None:
        most = most_arrivals_per_s(predicted, arrivals, targets, conditions, seed=args.seed, owner=owner)
        result = replace(result, goodput=replace(result.goodput, most_arrivals_per_s=most))
    if args.json:
        head = {
            "format": SIMULATED,
            "planned": planned.known,
            "file": str(args.file),
            "point": point,
            "kind": "llm" if predicted.prompt is not None else "onnx",
        }
        return print_json({**head, "arrivals": arrivals.description, "seed": args.seed, **result.to_json()})
    _show(result, arrivals, point)
    return 0


def _targets(args: argparse.Namespace, predicted: Prediction) -> Targets | None:
    """Return the latency targets, or None if there are none. Raises UsageError for a model without tokens."""
    from partition.simulate.result import Targets

    targets_ms = {"ttft_s": args.target_ttft, "itl_s": args.target_itl}
    limits = {name: ms / 1e3 for name, ms in targets_ms.items() if ms is not None}
    if limits and predicted.prompt is None:
        raise UsageError("--target-ttft and --target-itl are for language models, but this plan is of an ONNX model")
    return Targets(**limits) if limits else None


def _conditions(args: argparse.Namespace, names: dict[str, str]) -> Conditions:
    from partition.simulate.servers import Slow
    from partition.simulate.simulate import Conditions

    slow = tuple(Slow(names.get(device, device), *how) for device, *how in args.slow)
    leave = tuple((names.get(device, device), when) for device, when in args.leave)
    return Conditions(args.jitter, slow, leave)


def _show(result: Simulated, arrivals: Arrivals, point: str | None) -> None:
    prefix = f"{point}: " if point else ""
    failed = f", {result.failed} failed" if result.failed else ""
    print_note(f"{prefix}{result.requests} requests, {arrivals.description}: {result.completed} completed{failed}")
    print()
    times = (
        ("first token", result.ttft_s),
        ("each further token", result.tpot_s),
        ("whole request" if result.ttft_s or result.tpot_s else "one input", result.latency_s),
    )
    rows = [(name, *_spread(spread)) for name, spread in times if spread is not None]
    if rows:
        print_columns(COLUMNS, rows, whole=COLUMNS)
        print()
    uses = [
        (use.name, f"{100 * use.utilization:.1f} %", f"{use.queue_mean:.2f}", str(use.queue_max))
        for use in (*result.stages, *result.links)
    ]
    print_columns(USES, uses, whole=USES[1:])
    print()
    unit = "tokens" if result.of_text else "inputs"
    print_note(f"throughput: {number_text(result.throughput_per_s)} {unit}/s over {result.seconds:.4g} s")
    print_note(
        f"in flight: {number_text(result.in_flight_mean)} of {result.in_flight} at most;"
        f" {number_text(result.waiting_mean)} waiting for a place, {result.waiting_max} at most"
    )
    if (goodput := result.goodput) is not None:
        most = goodput.most_arrivals_per_s
        rate = "at an unknown rate" if most is None else f"up to {number_text(most)} arrivals a second"
        print_note(
            f"goodput: {100 * goodput.within:.1f} % of the requests within the targets,"
            f" {number_text(goodput.requests_per_s)} per second; 90 % are within them {rate}"
        )
    print_note(f"at its limit: {result.saturates or 'nothing'}")
    print_notes(result.notes)


def _spread(spread: Spread) -> list[str]:
    times_s = (spread.mean, spread.p50, spread.p90, spread.p99)
    return [seconds_text(time_s) if time_s < 0.9995 else f"{time_s:.4g} s" for time_s in times_s]


def _arrivals(text: str) -> tuple[str, Any]:
    """Return ("poisson", requests per second), ("closed", clients) or ("trace", file).

    The text is "poisson:0.5", "closed:4" or "trace:FILE".
    """
    kind, colon, value = text.partition(":")
    if kind == "trace" and value:
        return kind, value
    if kind == "closed" and colon:
        return kind, positive_int(value)
    if kind == "poisson" and colon:
        rate = number(value)
        if 1e-9 <= rate <= _MOST_RATE:
            return kind, rate
        raise ValueError(f"needs a rate above 0, at most {_MOST_RATE:g} a second, got {value[:40]}")
    raise ValueError(f"needs poisson:RATE, closed:N or trace:FILE, got {text[:80]!r}")


def _target(text: str) -> float:
    value = number(text)
    if not 0 < value <= _MOST_TARGET_MS:
        raise ValueError(f"needs milliseconds above 0, at most {_MOST_TARGET_MS:g}, got {text[:40]}")
    return value


def _percent(text: str) -> float:
    """Return a share from percent."""
    value = number(text)
    if not 0 <= value <= 1000:
        raise ValueError(f"needs percent, 0 to 1000, got {text[:40]}")
    return value / 100


def _slow(text: str) -> tuple[str, float, float, float]:
    """Return (device, factor, from second, to second) from "DEVICE:FACTOR@T" or "DEVICE:FACTOR@T-T2"."""
    match = _SLOW.fullmatch(text)
    if not match:
        raise ValueError(f"needs DEVICE:FACTOR@T or DEVICE:FACTOR@T-T2, got {text[:80]!r}")
    factor, start = number(match[2]), number(match[3])
    stop = number(match[4]) if match[4] else math.inf
    if not 0 < factor <= _MOST_FACTOR or stop <= start:
        raise ValueError(f"needs a factor above 0, at most {_MOST_FACTOR:g}, and a T2 after T, got {text[:80]!r}")
    return match[1], factor, start, stop


def _leave(text: str) -> tuple[str, float]:
    """Return (device, second) from "DEVICE@T"."""
    match = _LEAVE.fullmatch(text)
    if not match:
        raise ValueError(f"needs DEVICE@T, got {text[:80]!r}")
    return match[1], number(match[2])
