"""Duration of the planner's search for the whole Pareto front of latency and throughput, for made-up costs.

    python benchmarks/bench_planner.py [--rounds 3] [--tiny] [--json]

The devices are unequal: the fastest is 8 times as fast as the slowest. Links between them have a latency of 0.3 ms or
5 ms. The owner, device 0, must be in the first stage. A language model has equal layers, and the head belongs to the
last one; the blocks of a graph and the payloads at its cuts are unequal. Times are medians of whole searches, with all
preparation, on one core, in processor time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy reads it

import numpy as np

from benchmarks.harness import Section, bench, parser_of, table
from partition.model.model import ModelShape
from partition.plan.plan import LOCAL, Sizes
from partition.plan.tensor import Limits
from partition.predict.cost import Work
from partition.predict.speeds import Curve, DeviceSpeed, Links, LinkSpeed
from partition.search.phases import Phases
from partition.search.planner import Planner
from partition.search.problem import Array, Group, Problem
from partition.search.search import front
from quant.types import cache_type

_LAYER_S, _HEAD_S, _STEP_S = 0.008, 0.02, 0.0003  # on a device of speed 1
_NEAR_S, _FAR_S = 0.0003, 0.005
_BYTES_PER_S, _ACTIVATION_BYTES = 12e6, 8192
_IN_FLIGHT = 16


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Each problem so many times."""
    rounds = 1 if args.tiny else args.rounds
    rows = [measured(*case, rounds) for case in cases(args.tiny)]
    return {"rows": rows + [measured_pairs(*case, rounds) for case in pair_cases(args.tiny)]}


def text(r: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        [row["case"], str(row["groups"]), str(row["points"]), str(row["exact"]), f"{row['seconds']:.2f}"]
        for row in r["rows"]
    ]
    return table(["problem", "groups", "points", "exact", "seconds"], lines)


def cases(tiny: bool) -> list[tuple[str, Problem, int | None]]:
    n, many, beam = (12, 4, 20) if tiny else (80, 8, 300)
    anything = [group for size in range(2, many + 1) for group in combinations(range(many), size)]
    rng = np.random.default_rng(1)
    crowd = many if tiny else 32
    few = [tuple(rng.choice(crowd, int(rng.integers(2, 5)), replace=False).tolist()) for _ in range(60)]
    roomy, tight = [n, n // 2, n // 4, n // 8], [n // 4 + 1, n // 4, n // 4 - 1]
    return [
        (f"{n} layers, {many} devices, pipelines", layers(n, many), None),
        (f"{n} layers, {many} devices, all groups, some hold it all", layers(n, many, anything, roomy), None),
        (f"{n} layers, {many} devices, all groups, 4 needed at least", layers(n, many, anything, tight), None),
        (f"graph of {2 * n} blocks, {many // 2} devices", blocks(2 * n, many // 2), None),
        (f"{n} layers, {crowd} devices, 60 groups, beam {beam}", layers(n, crowd, few, roomy), beam),
    ]


def measured(name: str, problem: Problem, beam: int | None, repeats: int) -> dict[str, object]:
    took = []
    for _ in range(repeats):
        began = time.process_time()
        result = front(problem, beam=beam)
        took.append(time.process_time() - began)
    groups, points = len(problem.groups), len(result.solutions)
    return {"case": name, "groups": groups, "points": points, "exact": result.exact, "seconds": statistics.median(took)}


def pair_cases(tiny: bool) -> list[tuple[str, Planner]]:
    """Devices on which a prompt may be computed elsewhere than its answer: with memory for any two placements, and with
    memory that is short on a quarter of them, where a placement for prompts has what the other one leaves."""
    many = 3 if tiny else 8
    kinds = (("memory for any", (16.0,)), ("a quarter with half the model's memory", (16.0, 16.0, 16.0, 0.5)))
    return [(f"pairs of placements, 22 layers, {many} devices, {name}", planner(many, hold)) for name, hold in kinds]


def planner(many: int, hold: Sequence[float]) -> Planner:
    """A planner of made-up devices. hold: memory of devices in turn, in times of what the model needs."""
    rng, layer_bytes, head_bytes, n = np.random.default_rng(0), 25 << 20, 54 << 20, 22
    names, fast = [LOCAL, *(f"d{i}" for i in range(1, many))], rng.permutation(np.geomspace(1, 8, many))
    shape = ModelShape(
        "llama", "made up", n, 2048, (32,) * n, (4,) * n, 64, 64, (5632,) * n, 0, 0, 32000, 4096, 0,
        n * layer_bytes + head_bytes, {}, (layer_bytes,) * n, head_bytes, head_bytes, True,
    )  # fmt: skip
    limits = Limits(
        Sizes(n, 32, 4, 5632, 32000), 1, 32, 0.2 * layer_bytes / 32, 0.05 * layer_bytes / 4, 0.75 * layer_bytes / 5632,
        head_bytes / 32000, (float(layer_bytes),) * n,
    )  # fmt: skip
    work = Work(shape, limits, 2048, 64, 1000, 1, cache_type("f16"), _all_reduce_s)
    need = work.weights_before[-1] + work.kv_before[-1] + head_bytes
    speeds = []
    for i, (name, times) in enumerate(zip(names, fast, strict=True)):
        layer, rows = _LAYER_S / times, float(rng.uniform(0.5, 2))  # how much a prompt's rows take beside one row
        curve = Curve(((1, layer), (8, 1.5 * layer), (64, 4 * layer * rows), (512, 28 * layer * rows)))
        step, head, memory = Curve(((1, _STEP_S),)), Curve(((1, _HEAD_S / times),)), round(need * hold[i % len(hold)])
        speed = DeviceSpeed(name, name, step, curve, 8e-7 / times, curve.times(0.55), head, memory, 1 << 20)
        speeds.append(replace(speed, sum_s=2e-4 / times))
    seconds = _links(rng, many)
    ways = {
        (names[a], names[b]): LinkSpeed(float(seconds[a, b]), _BYTES_PER_S) for a, b in permutations(range(many), 2)
    }
    return Planner(work, speeds, Links(ways), "made up", "")


def measured_pairs(name: str, planner: Planner, repeats: int) -> dict[str, object]:
    """All best pairs of placements by latency and time to first token, with what their search prepares."""
    took = []
    for _ in range(repeats):
        began = time.process_time()
        phases = Phases(planner.like(planner.speeds, planner.links))
        pairs = phases.pairs(("latency", "ttft"))
        took.append(time.process_time() - began)
    groups, points = (1 << len(planner.speeds)) - 1, len(pairs)
    return {"case": name, "groups": groups, "points": points, "exact": phases.exact, "seconds": statistics.median(took)}


def layers(n: int, many: int, together: Sequence[tuple[int, ...]] = (), hold: Sequence[int] = ()) -> Problem:
    """A language model: `hold` are the layers that devices have memory for, in turn; none: enough for all."""
    rng = np.random.default_rng(0)
    speeds, links = rng.permutation(np.linspace(1, 8, many)), _links(rng, many)
    start, stop = np.indices((n + 1, n + 1))
    members = [(device,) for device in range(many)] + list(together)

    def group(devices: tuple[int, ...]) -> Group:
        speed = sum(speeds[device] for device in devices)
        all_reduce = max(
            (links[pair] + _ACTIVATION_BYTES / _BYTES_PER_S for pair in combinations(devices, 2)), default=0
        )
        layer_s = _LAYER_S / speed + 2 * all_reduce
        room = min(hold[d % len(hold)] * speed / speeds[d] for d in devices) if hold else n
        possible = (stop > start) & (stop - start <= room)
        stage = np.where(possible, _STEP_S + layer_s * (stop - start) + _HEAD_S / speed * (stop == n), np.inf)
        return _group(devices, stage, links)

    def hop(a: int, b: int) -> Array:
        latency = min(links[x, y] for x in members[a] for y in members[b])
        busy = np.full(n + 1, _ACTIVATION_BYTES / _BYTES_PER_S)
        return np.array([latency + busy, busy])

    return Problem(n, 1, tuple(map(group, members)), hop, _objectives)


def blocks(n: int, many: int) -> Problem:
    """A graph: blocks and payloads of uneven sizes, each device better at some of them than at others."""
    rng = np.random.default_rng(0)
    speeds, links = np.linspace(1, 8, many), _links(rng, many)
    works, payload_s = rng.lognormal(-7, 1, n), rng.lognormal(11, 1.2, n + 1) / _BYTES_PER_S

    def group(device: int) -> Group:
        done = np.cumsum(np.append(0, works / speeds[device] * rng.lognormal(0, 0.3, n)))
        return _group((device,), np.where(done > done[:, None], _STEP_S + done - done[:, None], np.inf), links)

    def hop(a: int, b: int) -> Array:
        return np.array([links[a, b] + payload_s, payload_s])

    return Problem(n, 1, tuple(map(group, range(many))), hop, _objectives)


def _group(devices: tuple[int, ...], stage: Array, links: Array) -> Group:
    """Devices whose stages take so long, and are as long busy; the first stage is on the first device."""
    enter = np.array([0.0 if 0 in devices else np.inf, 0.0])
    return Group(devices, np.array([stage, stage]), enter, np.array([links[devices[0], 0], 0.0]))


def _links(rng: np.random.Generator, many: int) -> Array:
    """Seconds between each pair, 0 to itself."""
    one_way = np.triu(np.where(rng.random((many, many)) < 0.4, _NEAR_S, _FAR_S), 1)
    both: Array = one_way + one_way.T
    return both


def _all_reduce_s(_: int, wire_bytes: int, ranks: int, latency_s: float, bytes_per_s: float) -> float:
    """Everybody sends to everybody."""
    return latency_s + (ranks - 1) * wire_bytes / bytes_per_s


def _objectives(values: Array) -> Array:
    """Latency, and seconds a token with so many requests in flight."""
    return np.stack([values[0], np.maximum(values[0] / _IN_FLIGHT, values[1])])


if __name__ == "__main__":
    bench(parser_of(__doc__, rounds=3), Section(measure, text))
