"""The owner's process of bench_sleeping.py: predicts plans of sleeping devices, runs them, and prints both.

It runs on a device of the lab that sleeps, and so it sleeps as well.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from benchmarks.core_waits import CoreWaits, first_of
from devices.catalog import CATALOG
from devices.sleeping import run_first
from edge.cluster.fleet import Fleet
from edge.cluster.llm_ranks import Exchange
from edge.deployment.deploy import deploy
from edge.llm.continuation import Request
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.llm.scheduler import Scheduler
from edge.models.local_slices import OwnSlices
from edge.planning.arrange import work_of
from edge.planning.choice import PlanChoice
from edge.planning.llm_space import LlmSpace
from edge.planning.measure import steady_per_s, token_s
from edge.planning.plan_options import PlanOptions
from edge.profiling.cluster import Cluster
from edge.profiling.llm_survey import SUM_CPU_S
from edge.profiling.profile import ClusterProfile
from edge.profiling.survey import Devices, survey
from edge.tasks import CancelScope
from partition.errors import PlanError
from partition.model.file import ModelFile
from partition.plan.plan import LOCAL
from partition.predict.objectives import OBJECTIVES
from partition.predict.pareto import Point
from partition.predict.prediction import Prediction
from partition.predict.presets import PartSizes, preset_speed
from partition.predict.speeds import DeviceSpeed, Links, speed_of
from partition.search.explain import kind_of
from partition.search.phases import Phases
from partition.search.planner import Placed, Planner
from partition.simulate.arrivals import Arrivals, poisson
from partition.simulate.result import Spread
from partition.simulate.simulate import simulate
from partition.simulate.times import capacity_per_s
from tests.support.measuring import measure_briefly

CONTEXT, PROMPT, DEPTH, REQUESTS = 128, 8, 8, 4
TOKENS, LOAD = 16, 0.7  # of an answer; part of the capacity that requests come at
AXES = ("latency", "throughput")
_FIRST_TOKENS = 2  # measured of each plan
_NEAR = 1.2  # times the best by an objective: what is slower in all of them is no rival


def main() -> None:
    run_first(children=True)  # as ranks of sleeping devices do
    target = json.loads(sys.argv[1])
    patch = pytest.MonkeyPatch()
    patch.setattr("edge.profiling.links._ROUNDS", 1)
    if target["tiny"]:
        measure_briefly(patch)
    for figures in run(target):
        print(json.dumps(figures), flush=True)


def run(target: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Predict and run the best plans and their rivals. Yield what is known of the setting, and then the figures of each
    plan as they come. After `seconds` no plan is begun but the first."""
    began = time.monotonic()
    path = Path(target["model"])
    file, digest = ModelFile.open(path), OwnSlices().model_digest(path)
    prompt = target["prompt"] or PROMPT
    work = work_of(file, EngineOptions(context=CONTEXT + prompt, sequences=REQUESTS), prompt=prompt, depth=DEPTH)
    speeds = device_speeds(target, file)
    links = measured_links(target["workers"], target["kinds"], target["pairs"], speeds)
    space = LlmSpace(file, digest, work, ClusterProfile(tuple(speeds), links, ()), PlanOptions(threads=1))
    waits = CoreWaits(lambda: first_of(target["supervisor"]), time.perf_counter)
    points = rivals(space, phases=target["prompt"] > 0)
    axes = axes_of(target)
    chosen = {axis: min(points, key=lambda point: cost_of(point, axis)) for axis in axes}
    # Those that were chosen first, and then the nearest to them.
    points.sort(
        key=lambda point: (
            point not in chosen.values(), min(cost_of(point, axis) / cost_of(chosen[axis], axis) for axis in axes)
        )
    )  # fmt: skip
    yield {"best": {axis: point.key for axis, point in chosen.items()}, "links": link_figures(links)}
    print(f"  planned after {time.monotonic() - began:.0f} s", file=sys.stderr)
    with Cluster(target["workers"], insecure=True) as cluster:
        for i, point in enumerate(points[:1] if target["tiny"] else points):
            if i and time.monotonic() - began > target["seconds"]:
                print(f"  no time for {len(points) - i} plans", file=sys.stderr)
                return
            row = measured(space, cluster, point, target, waits)
            print(f"  {time.monotonic() - began:.0f} s: {point.label}: {progress_text(row)}", file=sys.stderr)
            yield row


def axes_of(target: dict[str, Any]) -> tuple[str, ...]:
    """Return the objectives by which plans are chosen."""
    return (*AXES, "ttft") if target["prompt"] else AXES


def device_speeds(target: dict[str, Any], file: ModelFile) -> list[DeviceSpeed]:
    """Return what the planner knows of each device, the owner first: what it sleeps by."""
    sizes, speeds = PartSizes.from_file(file), []
    for profile, address, name in zip(target["profiles"], [LOCAL, *target["workers"]], target["names"], strict=True):
        if "preset" in profile:
            speed = preset_speed(CATALOG[profile["preset"]], sizes, address, name)
        else:
            speed = speed_of(profile["speed"], address, name, 0.0)
        # The plans of these settings do not page.
        speeds.append(replace(speed, sum_s=SUM_CPU_S, memory_bytes=target["memory"], disk_bytes_per_s=None))
    return speeds


class _NothingToTime:
    """Profiler of devices whose speeds are known."""

    cache, steps, streams = "sleeping", 0, False

    def __init__(self, keys: Any) -> None:
        self.keys = keys

    def read(self, rank: int, values: Any) -> None:
        """Nothing is remembered."""


def measured_links(
    workers: list[str], kinds: list[list[int]], pairs: list[list[int]], speeds: list[DeviceSpeed]
) -> Links:
    """Measure one link of each kind, and give it to all links of that kind. kinds: by device and device; pairs: a link
    of each kind."""
    names = [LOCAL, *workers]
    some = [names[i] for i in sorted({device for pair in pairs for device in pair} - {0})]
    with Fleet(some, insecure=True) as fleet, CancelScope() as closing:
        devices = Devices(fleet, 1)
        known: Any = {speed.device: speed for speed in speeds}
        profiler: Any = _NothingToTime(devices.addresses)
        links = survey(devices, profiler, closing, transport="tcp", known_times=known)[1]
    of_kind = [(links.get(names[a], names[b]), links.get(names[b], names[a])) for a, b in pairs]
    n = range(len(names))
    return Links({(names[i], names[j]): of_kind[kinds[i][j]][i > j] for i in n for j in n if i != j})


def cost_of(point: Point, objective: str) -> float:
    return OBJECTIVES[objective].cost_of(point.predicted)


def rivals(space: LlmSpace, *, phases: bool) -> list[Point]:
    """Return plans over several devices, each once: on the front of latency and throughput, and the best by each of
    these of all plans, of stages of one device each, of all layers shared, and of those in which the owner holds
    layers. Those that are far behind in everything are left out. phases: also the best by first token, and each with
    the best placement for prompts beside it."""
    placed: list[Placed] = []
    limits: list[dict[str, bool]] = [{}, {"tensor": False}, {"pipeline": False}]
    for limit in limits:
        with suppress(PlanError):  # none of this kind has room
            front, _ = space.planner(**limit).front(AXES)
            placed += [*front[:1], *front[-1:]] if limit else thinned(front)  # none of a kind may have room
    with suppress(PlanError):
        planner = space.planner()
        own = Planner(planner.work, planner.speeds, planner.links, space.title, space.digest, thin=False)
        placed += [best for axis in AXES for best in own.front((axis,))[0][:1]]
    if phases:
        planner = space.planner()
        placed += planner.front(("ttft",))[0][:1]
        pairs = Phases(planner)
        placed += [pair for own in tuple(placed) if (pair := pairs.with_prefill(own)) is not None]
    points = {point.key: point for point in (space.point(item.plan, item.microbatches) for item in placed)}
    several = [point for point in points.values() if not is_alone(point.plan)]
    axes = (*AXES, "ttft") if phases else AXES
    return near(several, axes)


def near(points: Sequence[Point], axes: Sequence[str]) -> list[Point]:
    """Return the points that are not far behind the best in all axes."""
    bounds = {axis: _NEAR * min(cost_of(point, axis) for point in points) for axis in axes}
    return [point for point in points if any(cost_of(point, axis) <= most for axis, most in bounds.items())]


def is_alone(plan: Any) -> bool:
    """Return whether the owner has a whole model, which does not run on a device that sleeps."""
    return any(placement.world_size == 1 for placement in plan.placements)


def thinned(front: Sequence[Placed]) -> list[Placed]:
    """Return the ends of a front, and those of other kinds between them."""
    saved = {kind_of(placed.plan): placed for placed in front}
    return list({id(placed): placed for placed in (*front[:1], *front[-1:], *saved.values())}.values())


def measured(
    space: LlmSpace, cluster: Cluster, point: Point, target: dict[str, Any], waits: CoreWaits
) -> dict[str, Any]:
    """Run a plan, and return its figures beside those that were predicted."""
    plan: Any = point.plan
    options = EngineOptions(context=space.work.context, sequences=REQUESTS, threads=1)
    figures: dict[str, float] = {}
    waited: dict[str, float] = {}
    with ExitStack() as life:
        engine = life.enter_context(deploy(PlanChoice(space.path, plan, ""), cluster, options, Exchange("tcp"))).engine
        microbatches = point.predicted.microbatches
        figures["latency_s"], waited["latency_s"] = waits.during(lambda: token_s(engine, DEPTH).seconds)
        figures["throughput_per_s"], waited["throughput_per_s"] = waits.during(
            lambda: steady_per_s(engine, REQUESTS, DEPTH, microbatches)
        )
        if target["prompt"]:
            first = [waits.during(lambda: first_token_s(engine, space.work.prompt)) for _ in range(_FIRST_TOKENS)]
            figures["ttft_s"], waited["ttft_s"] = median(s for s, _ in first), max(part for _, part in first)
        served = with_requests(engine, point, target["requests"]) if target["requests"] else None
    predicted = point.predicted.to_json()
    return {
        "key": point.key,
        "plan": point.label,
        "parallel": point.parallel,
        "widths": [0] * plan.thin_owner + [len(stage.shards) for stage in plan.computing],
        "prompts": [len(stage.shards) for stage in plan.prefill.computing] if plan.prefill else [],
        "predicted": {name: predicted[name] for name in figures},
        "measured": figures,
        "waited": waited,
        "requests": served,
    }


def progress_text(row: dict[str, Any]) -> str:
    """Return how far off predictions were, and for which part of the time a process waited for a core."""
    return ", ".join(
        f"{name} {row['measured'][name] / row['predicted'][name] - 1:+.1%} (waited {row['waited'][name]:.1%})"
        for name in row["measured"]
    )


def first_token_s(engine: TextEngine, n_tokens: int) -> float:
    """Seconds to the first token behind a prompt that nothing is known of."""
    tokens = np.random.default_rng().integers(3, engine.model.n_vocab, n_tokens).tolist()
    with Scheduler(engine) as scheduler:
        began = time.perf_counter()
        scheduler.add(Request(tokens, 2, ends=False, namespace=secrets.token_hex(8)))
        times = []
        while scheduler.busy:
            times += [time.perf_counter() for event in scheduler.step() if event.token_id is not None]
    return times[0] - began


def with_requests(engine: TextEngine, point: Point, n: int) -> dict[str, Any]:
    """Let requests come at random: percentiles of their times as they were, and as the simulator has them."""
    predicted = point.predicted
    assert isinstance(predicted, Prediction)
    rate = LOAD * capacity_per_s(predicted, PROMPT, TOKENS)
    arrivals = poisson(rate, n, PROMPT, TOKENS, seed=0)
    simulated, times = simulate(predicted, arrivals), token_times(engine, predicted.microbatches, arrivals)
    ttft_s = [tokens[0] - request.arrival_s for request, tokens in zip(arrivals.requests, times, strict=True)]
    tpot_s = [(tokens[-1] - tokens[0]) / (len(tokens) - 1) for tokens in times]
    kinds = (("ttft_s", simulated.ttft_s, ttft_s), ("tpot_s", simulated.tpot_s, tpot_s))
    return {
        "rate_per_s": rate,
        **{
            name: {"simulated": asdict(spread), "measured": asdict(used)}
            for name, spread, values in kinds
            if spread is not None and (used := Spread.from_values(values)) is not None
        },
    }


def token_times(engine: TextEngine, microbatches: int, arrivals: Arrivals) -> list[list[float]]:
    """Return when each request had each of its tokens, in seconds since the first could come."""
    coming, times = deque(arrivals.requests), {}
    began = time.perf_counter()
    with Scheduler(engine, microbatches) as scheduler:
        while coming or scheduler.busy:
            now = time.perf_counter() - began
            while coming and coming[0].arrival_s <= now:
                first = coming.popleft()
                times[scheduler.add(Request([1 + len(times) % 100] * first.prompt, first.tokens, ends=False))] = []
            if not scheduler.busy:
                time.sleep(coming[0].arrival_s - now)
                continue
            for event in scheduler.step():
                if event.token_id is not None:
                    times[event.request].append(time.perf_counter() - began)
    return list(times.values())


def link_figures(links: Links) -> dict[str, float]:
    """Return the median of what was measured of all links."""
    ways = list(links.between.values())
    return {
        "latency_ms": 1e3 * median(way.latency_s for way in ways),
        "mbps": median(way.bytes_per_s for way in ways) / 125_000,
    }


if __name__ == "__main__":
    main()
