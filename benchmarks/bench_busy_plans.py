"""Plans that are made on busy devices: how often does the planner choose several devices that are slower than one?

    python benchmarks/bench_busy_plans.py [--only made-up|load] [--surveys 300] [--loops 0,1,2] [--rounds 5]
        [--model FILE] [--json [FILE]] [--tiny]

| section | method                                                                                                  |
| made-up | draw random surveys of three devices; half of the figures are too slow and marked as busy               |
| load    | run `edge bench --workers` with two workers on loopback while a number of loops keeps the processor     |
|         | busy, then measure this device alone                                                                    |

A choice is wrong if it takes at least 1.15 times as long as this device alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import EDGE, ROOT, Section, bench, parser_of, table
from benchmarks.lent_device import worker
from benchmarks.processes import loops
from edge.models.demo import MODEL_PATH
from partition.predict.predict import predict
from partition.predict.speeds import LinkSpeed
from partition.search.explain import alone, best
from partition.search.planner import Planner
from tests.support.planning import MS, device, linked, work

_RUN_S = 900.0
_WRONG = 1.15  # times as long as this device alone
_SIZE = ["--context", "256", "--prompt-tokens", "16", "--gen-tokens", "48", "--repeats", "3", "--json"]


def main() -> None:
    parser = parser_of(__doc__, SECTIONS, rounds=5)
    parser.add_argument("--surveys", type=int, default=300, help="that are drawn (default: 300)")
    parser.add_argument("--loops", default="0,1,2", help="beside which plans are made (default: 0,1,2)")
    parser.add_argument("--model", type=Path, default=MODEL_PATH, help="GGUF file (default: the bundled one)")
    bench(parser, SECTIONS, prepare)


def prepare(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    args.edge = EDGE
    if args.tiny:
        args.surveys, args.loops, args.rounds, args.edge = 20, "0", 1, [*EDGE[:-1], "tests.support.measuring"]
    return {}


def made_up(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Choices by what was measured with a margin of 20 %, and as edge chooses. The same on any machine."""
    names, task = ("local", "a:1", "b:1"), work(6)
    times: dict[str, list[float]] = {"margin": [], "edge": []}
    for seed in range(args.surveys):
        draw = random.Random(seed)
        layers_s = [draw.uniform(0.5, 5) * MS for _ in names]
        true = [device(name, s, half_s=draw.uniform(0.5, 0.9) * s) for name, s in zip(names, layers_s, strict=True)]
        slowed = [draw.choice([1.0, draw.uniform(1.1, 10)]) for _ in names]
        surveyed = [replace(item.times(by), busy=by > 1) for item, by in zip(true, slowed, strict=True)]
        links = linked(names, LinkSpeed(draw.uniform(0.02, 0.5) * MS, 1e8))
        planner = Planner(task, surveyed, links, "m", "")
        own, first = alone(planner, "latency"), planner.front(("latency",))[0][0]
        assert own is not None
        margin = 1.2 if any(item.busy for item in surveyed) else 1.05
        by_margin = own if own.objectives[0] <= margin * first.objectives[0] else first
        truly = {item.device: item for item in true}
        own_s = predict(own.plan, task, truly, links).latency_s
        for rule, placed in (("margin", by_margin), ("edge", best(planner, "latency"))):
            times[rule].append(predict(placed.plan, task, truly, links).latency_s / own_s)
    return {
        rule: {
            "wrong": sum(item > _WRONG for item in all_),
            "worst": max(all_),
            "faster": sum(item < 1 for item in all_),
        }
        for rule, all_ in times.items()
    } | {"surveys": args.surveys}


def made_up_text(r: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        [words, f"{r[rule]['wrong']} of {r['surveys']}", f"{r[rule]['worst']:.1f} times", str(r[rule]["faster"])]
        for rule, words in (("margin", "by the figures, with a margin of 20 %"), ("edge", "as edge chooses"))
    ]
    return table(["choice", "several devices, wrong", "worst", "several devices, faster"], lines)


def load(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Each number of loops so many times, with nothing remembered."""
    rows = []
    with worker(folder / "one") as (first, _), worker(folder / "two") as (two, _):
        for n in map(int, args.loops.split(",")):
            for i in range(args.rounds):
                state = {**os.environ, "XDG_STATE_HOME": str(folder / f"state-{n}-{i}")}
                with loops(n, 2 * _RUN_S):
                    several = edge_bench(args, state, "--workers", f"{first},{two}", "--insecure")
                    own = edge_bench(args, state)
                devices = {shard["device"] for stage in several["plan"]["stages"] for shard in stage["shards"]}
                took = {"auto_ms": several["decode_ms_median"], "alone_ms": own["decode_ms_median"]}
                rows.append({"loops": n, "devices": len(devices), **took, "why": several["why"]})
    return {"rows": rows}


def edge_bench(args: argparse.Namespace, env: dict[str, str], *more: str) -> dict[str, Any]:
    """Return the JSON object that `edge bench` prints."""
    command = [*args.edge, "bench", str(args.model), *_SIZE, *more]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=_RUN_S)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def load_text(r: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = []
    for n in sorted({row["loops"] for row in r["rows"]}):
        some = [row for row in r["rows"] if row["loops"] == n]
        times = [row["auto_ms"] / row["alone_ms"] for row in some if row["devices"] > 1]
        took = [f"{median(row[key] for row in some):.1f}" for key in ("auto_ms", "alone_ms")]
        wrong = str(sum(time > _WRONG for time in times))
        lines.append([str(n), str(len(some)), str(len(times)), wrong, *took, f"{max(times, default=1.0):.2f} times"])
    header = ["loops", "tries", "several devices", "wrong", "the plan, ms a token", "this device alone, ms", "worst"]
    return table(header, lines)


SECTIONS = {"made-up": Section(made_up, made_up_text), "load": Section(load, load_text)}

if __name__ == "__main__":
    main()
