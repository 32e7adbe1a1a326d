"""Plans that are made and measured while a neighbour takes both cores in bursts: how much worse is what is chosen?

    python benchmarks/bench_busy_plans.py [--tries 5] [--measure 4] [--model FILE] [--json]
    python benchmarks/bench_busy_plans.py --load 0,1,2 [--tries 5] [--model FILE] [--json]
    python benchmarks/bench_busy_plans.py --made-up 1000 [--json]

Starts two workers on loopback, of one thread each. In bursts of 10 to 500 ms at random, with pauses as long, it runs
`edge pareto --measure` and `edge plan` anew every time, with a cache of their own. Then, without bursts, the plans they
considered are measured again by `edge pareto --measure`, and each choice is put beside the best of them. Asked for is
that none is more than 15 % worse. Takes about two minutes a try; it wants a machine that is quiet otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from bursts import Neighbour, bursts

sys.path.insert(0, str(Path(__file__).parent.parent))
_EDGE = [sys.executable, "-m", "apps.cli"]
_FEW = ["--context", "512", "--prompt-tokens", "16", "--concurrency", "2", "--threads", "1", "--insecure"]
_STARTS_S, _ENDS_S, _RUN_S = 60.0, 10.0, 900.0
_WRONG = 1.15  # times as long as this device alone


@contextmanager
def running(command: list[str], **how: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process until the end of the block."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **how)
    try:
        yield process
    finally:
        process.kill()
        process.wait(_ENDS_S)


@contextmanager
def workers(folder: Path, n: int) -> Iterator[list[str]]:
    """Workers of one thread on loopback: their addresses."""
    with ExitStack() as stack:
        addresses = []
        for i in range(n):
            with socket.socket() as held:
                held.bind(("127.0.0.1", 0))
                address = f"127.0.0.1:{held.getsockname()[1]}"
            command = [*_EDGE, "worker", "--listen", address, "--insecure", "--threads", "1", "--name", f"w{i}"]
            stack.enter_context(running(command, env=_env(folder / f"w{i}")))
            addresses.append(address)
        deadline = time.monotonic() + _STARTS_S
        for address in addresses:
            host, _, port = address.rpartition(":")
            while socket.socket().connect_ex((host, int(port))) and time.monotonic() < deadline:
                time.sleep(0.1)
        yield addresses


def _env(folder: Path) -> dict[str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
    return os.environ | {name: str(folder / name.lower()) for name in names}


def edge(folder: Path, *args: str) -> dict[str, Any]:
    """What a command prints with --json."""
    return _printed(folder, *args, *_FEW, "--json")


def _printed(folder: Path, *args: str) -> dict[str, Any]:
    done = subprocess.run([*_EDGE, *args], env=_env(folder), capture_output=True, timeout=_RUN_S)
    if done.returncode:
        raise SystemExit(done.stderr.decode()[-2000:])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def chosen(points: list[dict[str, Any]], what: str, best: Any) -> dict[str, Any]:
    """What --pick gives by this axis."""
    front = [point for point in points if point["on_front"] and point["measured"]]
    found: dict[str, Any] = best(front, key=lambda point: point["measured"][what])
    return found


def quiet(folder: Path, model: list[str], there: str, n: int) -> dict[str, dict[str, float]]:
    """What plans do without bursts, by plan and microbatches."""
    points = edge(folder, "pareto", *model, "--workers", there, "--measure", str(n), "--fresh")["points"]
    return {_name(point): point["measured"] for point in points if point["measured"]}


def _name(point: dict[str, Any]) -> str:
    return json.dumps([[shard["device"] for shard in stage["shards"]] for stage in point["plan"]["stages"]])


@contextmanager
def loops(n: int) -> Iterator[None]:
    """So many processes that compute without a pause, until the end of the block."""
    loop = f"import time\nend = time.monotonic() + {_RUN_S}\nwhile time.monotonic() < end: pass"
    with ExitStack() as stack:
        for _ in range(n):
            stack.enter_context(running([sys.executable, "-c", loop]))
        yield


def beside_load(folder: Path, model: list[str], there: str, n: int) -> dict[str, Any]:
    """Measure the plan that is found beside so many loops, and this device alone right after."""
    size = ["--context", "256", "--prompt-tokens", "16", "--gen-tokens", "48", "--repeats", "3", "--json"]
    with loops(n):
        several = _printed(folder, "bench", *model, *size, "--workers", there, "--insecure")
        alone = _printed(folder, "bench", *model, *size)
    took = {"auto_ms": several["decode_ms_median"], "alone_ms": alone["decode_ms_median"]}
    devices = {shard["device"] for stage in several["plan"]["stages"] for shard in stage["shards"]}
    return {"loops": n, "devices": len(devices), **took, "why": several["why"]}


def print_loads(rows: list[dict[str, Any]]) -> None:
    """A line for each load: how often the choice was wrong, and by how much."""
    print("| loops | tries | several devices | wrong | the plan, ms a token | this device alone, ms | worst |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for n in sorted({row["loops"] for row in rows}):
        some = [row for row in rows if row["loops"] == n]
        several = [row for row in some if row["devices"] > 1]
        times = [row["auto_ms"] / row["alone_ms"] for row in several]
        wrong, worst = sum(one > _WRONG for one in times), max(times, default=1.0)
        took = (f"{median(row[of] for row in some):.1f}" for of in ("auto_ms", "alone_ms"))
        print(f"| {n} | {len(some)} | {len(several)} | {wrong} | {' | '.join(took)} | {worst:.2f} times |")


def made_up(n: int) -> dict[str, Any]:
    """How often several devices are chosen that are slower than this one alone, of n drawn surveys, and at most by how
    many times: by what was measured with a margin of 20 %, and as edge chooses."""
    from partition.predict.predict import predict
    from partition.predict.speeds import LinkSpeed
    from partition.search.explain import alone, best
    from partition.search.planner import Planner
    from tests.support.planning import MS, device, linked, work

    names, doing, times = ("local", "a:1", "b:1"), work(6), {"margin": [], "edge": []}  # type: ignore[var-annotated]
    for seed in range(n):
        draw = random.Random(seed)
        layers_s = [draw.uniform(0.5, 5) * MS for _ in names]
        true = [device(name, s, half_s=draw.uniform(0.5, 0.9) * s) for name, s in zip(names, layers_s, strict=True)]
        slowed = [draw.choice([1.0, draw.uniform(1.1, 10)]) for _ in names]
        told = [replace(one.times(by), busy=by > 1) for one, by in zip(true, slowed, strict=True)]
        links = linked(names, LinkSpeed(draw.uniform(0.02, 0.5) * MS, 1e8))
        planner = Planner(doing, told, links, "m", "")
        own, first = alone(planner, "latency"), planner.front(("latency",))[0][0]
        assert own is not None
        busy = 1.2 if any(one.busy for one in told) else 1.05
        margin = own if own.objectives[0] <= busy * first.objectives[0] else first
        of = {one.device: one for one in true}
        own_s = predict(own.plan, doing, of, links).latency_s
        for rule, placed in (("margin", margin), ("edge", best(planner, "latency"))):
            times[rule].append(predict(placed.plan, doing, of, links).latency_s / own_s)
    return {
        rule: {"wrong": sum(one > _WRONG for one in all_), "worst": max(all_), "faster": sum(one < 1 for one in all_)}
        for rule, all_ in times.items()
    } | {"surveys": n}


def main() -> None:
    """Print a table: for each try, how much worse the choices are than the best of what was considered."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--measure", type=int, default=4)
    parser.add_argument("--tiny", action="store_true", help="see that it works; the figures mean nothing")
    parser.add_argument("--model", help="default: the bundled one")
    parser.add_argument("--load", help="loops beside which plans are made, such as 0,1,2")
    parser.add_argument("--made-up", type=int, help="surveys to draw; nothing else is done")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.made_up:
        print(json.dumps(made_up(args.made_up)))
        return
    model, n_workers, neighbour, n_calm = [args.model] if args.model else [], 2, Neighbour(), 4 * args.measure
    if args.tiny:  # with one survey for all
        _EDGE[-1] = "tests.support.measuring"
        args.tries, args.measure, n_workers, neighbour, n_calm = 1, 1, 1, Neighbour(0.005, 0.02, 0.5, 1.0), 1
        model += ["--context", "256", "--prompt-tokens", "16", "--concurrency", "1"]
    found: list[list[float]] = []
    with tempfile.TemporaryDirectory(prefix="edge-busy-") as name, workers(Path(name), n_workers) as addresses:
        there = ",".join(addresses)
        folder = Path(name)
        if args.load:
            rows = []
            for n, i in product(map(int, args.load.split(",")), range(args.tries)):
                rows.append(beside_load(folder / f"load{n}-{i}", model, there, n))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            print(json.dumps({"loads": rows})) if args.json else print_loads(rows)
            return
        calm = quiet(folder / ("p0" if args.tiny else "quiet"), model, there, n_calm)
        for i in range(args.tries):
            with bursts(i, neighbour, 2 * _RUN_S):
                front = edge(folder / f"p{i}", "pareto", *model, "--workers", there, "--measure", str(args.measure))
                plan = edge(folder / (f"p{i}" if args.tiny else f"q{i}"), "plan", *model, "--workers", there)
            taken = [point for point in front["points"] if point["measured"]]
            pick = chosen(front["points"], "latency_s", min)
            least_s = min(point["measured"]["latency_s"] for point in taken)
            considered = [calm[_name(point)]["latency_s"] for point in taken if _name(point) in calm]
            rows = [pick["measured"]["latency_s"] / least_s - 1]
            for one in (pick, plan):
                own = calm.get(_name(one))
                rows.append(own["latency_s"] / min(considered) - 1 if own and considered else float("nan"))
            found.append(rows)
            print(f"try {i + 1}: {', '.join(f'{100 * row:+.1f} %' for row in rows)}", file=sys.stderr, flush=True)
    worst = max((row for rows in found for row in rows if row == row), default=float("nan"))
    if args.json:
        print(json.dumps({"plans_without_bursts": len(calm), "worse_by": found, "worst": worst}))
        return
    print("| try | pareto, measured | pareto, without bursts | plan, without bursts |")
    print("| ---: | ---: | ---: | ---: |")
    for i, rows in enumerate(found):
        print(f"| {i + 1} | {' | '.join(f'{100 * row:+.1f} %' for row in rows)} |")
    print(f"worst: {100 * worst:+.1f} % (asked for: at most +15 %)")


if __name__ == "__main__":
    main()
