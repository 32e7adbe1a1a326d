"""Run plans with replicas and their rivals by `edge serve`, on the owner's device of a lab of sleeping devices.

`benchmarks/replicas_lab.py` starts this in the network of that device.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench_replicas import status_of, wait_for
from benchmarks.core_waits import CoreWaits, first_of
from benchmarks.harness import EDGE
from benchmarks.serve_clients import Heard, ask
from benchmarks.serve_loads import completion
from benchmarks.servers import Server, running
from benchmarks.sleeping_side import cost_of, device_speeds, measured_links
from devices.sleeping import run_first
from edge.llm.options import EngineOptions
from edge.models.local_slices import OwnSlices
from edge.planning.arrange import work_of
from edge.planning.choice import save_plan
from edge.planning.llm_space import LlmSpace
from edge.planning.plan_options import PlanOptions
from edge.profiling.profile import ClusterProfile
from partition.model.file import ModelFile
from partition.plan.plan import Plan
from partition.predict.pareto import Point
from partition.search.replicas import Replicas
from tests.support.measuring import measure_briefly

CONTEXT, PROMPT, DEPTH = 4096, 8, 32
AXES = ("latency", "throughput")
_MOST_PLANS = 4
_NEAR = 1.2  # a plan with less than 1 / 1.2 of the best throughput is no rival
_WARM_UPS = (
    3  # rounds before the measurement, from which the dispatcher learns speeds; each lone answer tries a replica
)
_SETTLED, _LEAST = 3, 8  # tokens of each answer before the window of the measurement begins, and in it
_WINDOW_S = 6.0


def main() -> None:
    run_first(children=True)  # otherwise threads of the servers' processes would delay the ranks
    target = json.loads(sys.argv[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edge.profiling.links._ROUNDS", 1)
        if target["tiny"]:
            measure_briefly(patch)
        for figures in run(target):
            print(json.dumps(figures), flush=True)


def run(target: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the key of the chosen plan, and then the figures of each plan."""
    path = Path(target["model"])
    file, digest, memory = ModelFile.open(path), OwnSlices().model_digest(path), target.pop("memory")
    work = work_of(file, EngineOptions(context=CONTEXT, sequences=target["streams"]), prompt=PROMPT, depth=DEPTH)
    speeds = device_speeds({**target, "memory": 0}, file)
    speeds = [replace(speed, memory_bytes=n_bytes) for speed, n_bytes in zip(speeds, memory, strict=True)]
    links = measured_links(target["workers"], target["kinds"], target["pairs"], speeds)
    profile = ClusterProfile(tuple(speeds), links, ())
    space = LlmSpace(file, digest, work, profile, PlanOptions(threads=1), phases=False)
    points = rivals(space)
    yield {"best": points[0].key}
    waits = CoreWaits(lambda: first_of(target["supervisor"]), time.perf_counter)
    for i, point in enumerate(points[:1] if target["tiny"] else points):
        yield measured(point, target, waits, Path(target["folder"]) / f"plan-{i}")


def rivals(space: LlmSpace) -> list[Point]:
    """Return the plan with the most throughput, the best one without replicas, and others that are near."""
    planner = space.planner()
    plain, _ = planner.front(AXES)
    placed = [*plain, *Replicas(planner).plans(AXES, others=plain)]
    points = [space.point(own.plan, own.microbatches) for own in placed]
    points += [space.point(own) for point in points if isinstance(point.plan, Plan) for own in fewer(point.plan)]
    points = sorted(
        {point.key: point for point in points if runs_asleep(point)}.values(),
        key=lambda point: cost_of(point, "throughput"),
    )
    first = points[0]
    near = [point for point in points if cost_of(point, "throughput") < _NEAR * cost_of(first, "throughput")]
    best_plain = [point for point in points if isinstance(point.plan, Plan) and not point.plan.replicas][:1]
    chosen = {point.key: point for point in (first, *best_plain, *near)}
    return list(chosen.values())[:_MOST_PLANS]


def fewer(plan: Plan) -> list[Plan]:
    """Return a plan without its last copy, and without its first one."""
    if len(plan.copies) < 2:
        return []
    first, *others = plan.copies
    return [replace(first, replicas=tuple(others[:-1])), replace(others[0], replicas=tuple(others[1:]))]


def runs_asleep(point: Point) -> bool:
    """Return False if the owner's device has a whole model, which does not run on a sleeping device."""
    assert isinstance(point.plan, Plan)
    return all(placement.world_size > 1 for copy in point.plan.copies for placement in copy.placements)


def measured(point: Point, target: dict[str, Any], waits: CoreWaits, plan: Path) -> dict[str, Any]:
    """Serve a plan, and return its predicted and its measured figures."""
    assert isinstance(point.plan, Plan)
    save_plan(plan, point.plan)
    options = ("--context", str(CONTEXT), "--requests", str(target["streams"]), "--threads", "1", "--insecure")
    alone = ("--prefix-cache", "0", "--draft", "off", "--plan", str(plan))
    server = Server(
        point.label,
        lambda port: [*EDGE, "serve", target["model"], "--port", str(port), *options, *alone],
        plan.with_suffix(".log"),
    )
    streams = 2 if target["tiny"] else target["streams"]
    with running({"": server}):
        wait_for(server, len(point.plan.copies))
        for n in (1, streams) * _WARM_UPS:
            asyncio.run(steady(server, n, 0.0))
        (lone, together), waited = waits.during(lambda: [asyncio.run(steady(server, n)) for n in (1, streams)])
    predicted = point.predicted.to_json()
    return {
        "key": point.key,
        "plan": shape_text(point.plan),
        "kind": kind_of(point.plan),
        "predicted": {name: predicted[name] for name in ("latency_s", "throughput_per_s")},
        "measured": {"latency_s": 1 / lone.per_s, "throughput_per_s": together.per_s},
        "requests": {
            "predicted": [copy.in_flight for copy in point.predicted.copies or [point.predicted]],
            "measured": [together.replicas[i] for i in range(len(point.plan.copies))],
        },
        "waited": waited,
    }


def shape_text(plan: Plan) -> str:
    """Return the ranks of each stage of each copy, such as 0+1 | 1+2; a thin owner is 0."""
    copies = [[0] * copy.thin_owner + [len(stage.shards) for stage in copy.computing] for copy in plan.copies]
    return " | ".join("+".join(map(str, widths)) for widths in copies)


def kind_of(plan: Plan) -> str:
    """Return the kind of a plan by the number of copies that have several stages."""
    if not plan.replicas:
        return "no copies"
    pipelines = sum(len(copy.computing) > 1 for copy in plan.copies)
    return {0: "copies of one stage", 1: "one pipeline beside copies"}.get(pipelines, "several pipelines as copies")


def body_of(server: Server, tokens: int) -> dict[str, Any]:
    return completion(server, "Tell me all of it", tokens, ignore_eos=True, temperature=1.0, top_k=40)


@dataclass(frozen=True)
class Steady:
    """Figures of streams while all of them get tokens."""

    per_s: float  # tokens: the sum of the rates of all streams
    replicas: Counter[int]  # requests of each replica


async def steady(server: Server, n: int, window_s: float = _WINDOW_S) -> Steady:
    """Measure n streams while all of them get tokens, for `window_s` or longer."""
    heard = [Heard(time.perf_counter()) for _ in range(n)]
    body = body_of(server, CONTEXT // (2 * n))
    tasks = [asyncio.create_task(ask(server.address, "/v1/completions", body, heard=own)) for own in heard]
    try:
        begin_s = end_s = 0.0
        while not all(len(own.at) > _SETTLED for own in heard):
            await check(tasks)
        begin_s = max(own.at[_SETTLED] for own in heard)
        while end_s - begin_s < window_s or min(count(own.at, begin_s, end_s) for own in heard) < _LEAST:
            await check(tasks)
            end_s = time.perf_counter()
        per_s = sum(rate([at for at in own.at if begin_s <= at <= end_s]) for own in heard)
        while len(slots := (await status_of(server))["slots"]) < n:  # in long steps the status may be the last one
            await check(tasks)
        return Steady(per_s, Counter(slot.get("replica", 0) for slot in slots))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while (await status_of(server))["slots"]:  # otherwise the next streams would be sent away from the last ones
            await asyncio.sleep(0.05)


async def check(tasks: Sequence[asyncio.Task[Heard]]) -> None:
    """Wait shortly. SystemExit if a stream has ended."""
    await asyncio.sleep(0.05)
    for task in tasks:
        if task.done():
            raise SystemExit(f"a stream has ended too soon: {task.result().error or task.result().finish_reason}")


def count(at: Sequence[float], begin_s: float, end_s: float) -> int:
    return sum(begin_s <= when <= end_s for when in at)


def rate(at: Sequence[float]) -> float:
    return (len(at) - 1) / (at[-1] - at[0])


if __name__ == "__main__":
    main()
