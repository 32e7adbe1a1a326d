"""`edge simulate`: what becomes of many requests, by a plan, before anybody runs it."""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apps.commands.simulate_plan import read_planned, read_text
from apps.errors import UsageError
from apps.options import number, positive_int, seed
from apps.show.format import ms_text
from edge.planning.formats import SIMULATED

if TYPE_CHECKING:
    from partition.predict.prediction import Prediction
    from partition.simulate.arrivals import Arrivals
    from partition.simulate.result import Simulated, Spread
    from partition.simulate.simulate import Conditions

HELP = "Simulate a plan with many requests: queues, jitter, a device that slows down or leaves."
REQUESTS, GEN_TOKENS = 200, 128
MOST_RATE = 1e6
MOST_FACTOR = 1e4
COLUMNS = ("", "mean", "p50", "p90", "p99")
USES = ("stage or link", "busy", "queue", "longest")
_SLOW = re.compile(r"(.+):([0-9.]+)@([0-9.]+)(?:-([0-9.]+))?")
_LEAVE = re.compile(r"(.+)@([0-9.]+)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The plan, the requests, and what goes wrong."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a plan: what edge plan, pareto or simulate wrote")
    parser.add_argument("--point", metavar="ID", help="of edge pareto: the plan to simulate (default: the knee)")
    parser.add_argument(
        "--arrivals",
        type=_arrivals,
        required=True,
        metavar="HOW",
        help="poisson:RATE a second, closed:N clients that wait for their answers, or trace:FILE",
    )
    parser.add_argument("--requests", type=positive_int, metavar="N", help=f"default: {REQUESTS}, or the whole trace")
    parser.add_argument("--prompt-tokens", type=positive_int, metavar="N", help="default: those it was planned for")
    parser.add_argument("--gen-tokens", type=positive_int, metavar="N", help=f"default: {GEN_TOKENS}")
    parser.add_argument(
        "--jitter", type=_percent, default=0.0, metavar="PERCENT", help="standard deviation of every time (default: 0)"
    )
    parser.add_argument(
        "--slow",
        type=_slow,
        action="append",
        default=[],
        metavar="DEVICE:FACTOR@T[-T2]",
        help="a device takes FACTOR times as long, from second T to T2",
    )
    parser.add_argument(
        "--leave", type=_leave, action="append", default=[], metavar="DEVICE@T", help="a device is lost at second T"
    )
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of everything random (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Read, simulate and show."""
    from partition.simulate.simulate import simulate

    planned = read_planned(args.file, args.point)
    predicted, names, point = planned.predicted, planned.names, planned.point
    arrivals = _requests(args, predicted)
    conditions = _conditions(args, names)
    result = simulate(predicted, arrivals, conditions, seed=args.seed, owner=names.get("local", "local"))
    if args.json:
        head = {
            "format": SIMULATED,
            "planned": planned.known,
            "file": str(args.file),
            "point": point,
            "kind": "llm" if predicted.prompt is not None else "onnx",
        }
        print(json.dumps({**head, "arrivals": arrivals.told, "seed": args.seed, **result.to_json()}))
    else:
        _show(result, arrivals, point)
    return 0


def _requests(args: argparse.Namespace, predicted: Prediction) -> Arrivals:
    from partition.simulate.arrivals import MOST_REQUESTS, TraceError, closed, poisson, trace

    kind, value = args.arrivals
    if predicted.prompt is None:
        given = next((name for name in ("prompt_tokens", "gen_tokens") if getattr(args, name) is not None), None)
        if given:
            raise UsageError(f"--{given.replace('_', '-')} is of language models; this plan is of an ONNX model")
    if max(args.requests or 0, value if kind == "closed" else 0) > MOST_REQUESTS:
        raise UsageError(f"{MOST_REQUESTS:,} requests or clients are the most")
    prompt = args.prompt_tokens or predicted.prompt or 1
    tokens = 1 if predicted.prompt is None else args.gen_tokens or GEN_TOKENS
    if kind == "poisson":
        return poisson(value, args.requests or REQUESTS, prompt, tokens, args.seed)
    if kind == "closed":
        return closed(value, args.requests or max(REQUESTS, value), prompt, tokens)
    path = Path(value)
    try:
        found = trace(read_text(path).splitlines(), prompt, tokens, args.requests or MOST_REQUESTS)
        if predicted.prompt is None and any((one.prompt, one.tokens) != (1, 1) for one in found.requests):
            raise TraceError("tokens are of language models; for an ONNX model give the seconds alone")
        return found
    except ValueError as error:
        raise TraceError(f"{path} cannot be used as a trace: {error}") from None


def _conditions(args: argparse.Namespace, names: dict[str, str]) -> Conditions:
    from partition.simulate.servers import Slow
    from partition.simulate.simulate import Conditions

    slow = tuple(Slow(names.get(device, device), *how) for device, *how in args.slow)
    leave = tuple((names.get(device, device), when) for device, when in args.leave)
    return Conditions(args.jitter, slow, leave)


def _show(result: Simulated, arrivals: Arrivals, point: str | None) -> None:
    from apps.show.table import print_columns, print_note

    of = f"{point}: " if point else ""
    failed = f", {result.failed} failed" if result.failed else ""
    print_note(f"{of}{result.requests} requests, {arrivals.told}: {result.completed} completed{failed}")
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
    print_note(f"throughput: {result.throughput_per_s:.3g} {unit}/s over {result.seconds:.4g} s")
    print_note(
        f"in flight: {result.in_flight_mean:.3g} of {result.in_flight} at most;"
        f" {result.waiting_mean:.3g} wait for a place, {result.waiting_max} at most"
    )
    print_note(f"at its limit: {result.saturates or 'nothing'}")
    for note in result.notes:
        print_note(note)


def _spread(spread: Spread) -> list[str]:
    return [_time_text(value) for value in (spread.mean, spread.p50, spread.p90, spread.p99)]


def _time_text(seconds: float) -> str:
    return f"{ms_text(1e3 * seconds)} ms" if seconds < 0.9995 else f"{seconds:.4g} s"


def _arrivals(text: str) -> tuple[str, Any]:
    kind, colon, value = text.partition(":")
    if kind == "trace" and value:
        return kind, value
    if kind == "closed" and colon:
        return kind, positive_int(value)
    if kind == "poisson" and colon:
        rate = number(value)
        if 1e-9 <= rate <= MOST_RATE:
            return kind, rate
        raise argparse.ArgumentTypeError(f"needs a rate above 0, at most {MOST_RATE:g} a second, got {value[:40]}")
    raise argparse.ArgumentTypeError(f"needs poisson:RATE, closed:N or trace:FILE, got {text[:80]!r}")


def _percent(text: str) -> float:
    value = number(text)
    if not 0 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"needs per cent, 0 to 1000, got {text[:40]}")
    return value / 100


def _slow(text: str) -> tuple[str, float, float, float]:
    match = _SLOW.fullmatch(text)
    if not match:
        raise argparse.ArgumentTypeError(f"needs DEVICE:FACTOR@T or DEVICE:FACTOR@T-T2, got {text[:80]!r}")
    factor, start = number(match[2]), number(match[3])
    stop = number(match[4]) if match[4] else math.inf
    if not 0 < factor <= MOST_FACTOR or stop <= start:
        raise argparse.ArgumentTypeError(
            f"needs a factor above 0, at most {MOST_FACTOR:g}, and a T2 after T, got {text[:80]!r}"
        )
    return match[1], factor, start, stop


def _leave(text: str) -> tuple[str, float]:
    match = _LEAVE.fullmatch(text)
    if not match:
        raise argparse.ArgumentTypeError(f"needs DEVICE@T, got {text[:80]!r}")
    return match[1], number(match[2])
