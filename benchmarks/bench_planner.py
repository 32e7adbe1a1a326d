"""Seconds of the planner's search for the whole front of latency and throughput, on made-up costs of real shape.

    python benchmarks/bench_planner.py [--rounds 3] [--tiny] [--json]

Unequal devices, the fastest 8 times as fast as the slowest; between pairs 0.3 ms or 5 ms. The owner, device 0, has to
be in the first stage. Layers are alike and the head is with the last; the blocks of a graph are not, nor what goes over
its cuts. Medians of whole searches, with all that they prepare, on one core.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy reads it

import numpy as np

from benchmarks.harness import Section, bench, parser_of, table
from partition.search.problem import Array, Group, Problem
from partition.search.search import front

_LAYER_S, _HEAD_S, _STEP_S = 0.008, 0.02, 0.0003  # on a device of speed 1
_NEAR_S, _FAR_S = 0.0003, 0.005
_BYTES_PER_S, _ACTIVATION_BYTES = 12e6, 8192
_IN_FLIGHT = 16


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Each problem so many times."""
    return {"rows": [measured(*case, 1 if args.tiny else args.rounds) for case in cases(args.tiny)]}


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
        began = time.perf_counter()
        found = front(problem, beam=beam)
        took.append(time.perf_counter() - began)
    groups, points = len(problem.groups), len(found.solutions)
    return {"case": name, "groups": groups, "points": points, "exact": found.exact, "seconds": statistics.median(took)}


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
        stage = np.where(possible, _STEP_S + layer_s * (stop - start) + _HEAD_S / speed * (stop == n), np.inf)[None]
        enter = 0.0 if 0 in devices else np.inf
        return Group(
            devices, stage, stage, np.array([enter]), np.zeros(1), np.array([links[devices[0], 0]]), np.zeros(1)
        )

    def hop(a: int, b: int) -> tuple[Array, Array]:
        latency = min(links[x, y] for x in members[a] for y in members[b])
        busy = np.full((1, n + 1), _ACTIVATION_BYTES / _BYTES_PER_S)
        return latency + busy, busy

    return Problem(n, tuple(map(group, members)), hop, _objectives)


def blocks(n: int, many: int) -> Problem:
    """A graph: blocks and payloads of uneven sizes, each device better at some of them than at others."""
    rng = np.random.default_rng(0)
    speeds, links = np.linspace(1, 8, many), _links(rng, many)
    works, payload_s = rng.lognormal(-7, 1, n), rng.lognormal(11, 1.2, n + 1) / _BYTES_PER_S

    def group(device: int) -> Group:
        done = np.cumsum(np.append(0, works / speeds[device] * rng.lognormal(0, 0.3, n)))
        stage = np.where(done > done[:, None], _STEP_S + done - done[:, None], np.inf)[None]
        enter = 0.0 if device == 0 else np.inf
        return Group((device,), stage, stage, np.array([enter]), np.zeros(1), np.array([links[device, 0]]), np.zeros(1))

    def hop(a: int, b: int) -> tuple[Array, Array]:
        return (links[a, b] + payload_s)[None], payload_s[None]

    return Problem(n, tuple(map(group, range(many))), hop, _objectives)


def _links(rng: np.random.Generator, many: int) -> Array:
    """Seconds between each pair, 0 to itself."""
    one_way = np.triu(np.where(rng.random((many, many)) < 0.4, _NEAR_S, _FAR_S), 1)
    both: Array = one_way + one_way.T
    return both


def _objectives(sums: Array, peaks: Array) -> Array:
    """Latency, and seconds a token with so many requests in flight."""
    return np.stack([sums[0], np.maximum(sums[0] / _IN_FLIGHT, peaks[0])])


if __name__ == "__main__":
    bench(parser_of(__doc__, rounds=3), Section(measure, text))
