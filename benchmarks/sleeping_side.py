"""The owner's process of bench_sleeping.py: predicts plans of sleeping devices, runs them, and prints both.

It runs on a device of the lab that sleeps, and so it sleeps as well.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

CONTEXT, PROMPT, DEPTH, REQUESTS = 128, 8, 8, 4


def main() -> None:
    import pytest

    from tests.support.measuring import measure_briefly

    asked = json.loads(sys.argv[1])
    pytest.MonkeyPatch().setattr("edge.survey.links._ROUNDS", 1)
    if asked["tiny"]:
        measure_briefly(pytest.MonkeyPatch())
    print(json.dumps(run(asked)))


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Predict and run the best plans of each kind."""
    import time

    from edge.cluster.fleet import Fleet
    from edge.planning.arrange import work_of
    from edge.planning.llm_space import LlmSpace
    from edge.slices.local import OwnSlices
    from edge.survey.profile import ClusterProfile
    from quant.gguf.file import GgufFile

    t0 = time.time()

    def say(*a):
        print(f"{time.time() - t0:.1f}", *a, file=sys.stderr)

    path = Path(asked["model"])
    file, digest = GgufFile.open(path), OwnSlices().model_digest(path)
    work = work_of(file, context=CONTEXT, concurrency=REQUESTS, prompt=PROMPT, depth=DEPTH)
    speeds = device_speeds(asked, file)
    with Fleet(asked["workers"], insecure=True) as fleet:
        links = measured_links(asked["workers"], asked["kinds"], asked["pairs"], speeds)
        say("links")
        space = LlmSpace(path, file, digest, work, ClusterProfile(tuple(speeds), links, ()), threads=1)
        points = chosen(space, asked["tiny"])
        say("points", len(points))
        rows = [measured(space, fleet, key, point) for key, point in points.items()]
    say("measured")
    best = {axis: min(points.values(), key=lambda point: point.objectives((axis,))).key for axis in AXES}
    return {"plans": rows, "best": best, "links": link_figures(links)}


AXES = ("latency", "throughput")


def device_speeds(asked: dict[str, Any], file: Any) -> list[Any]:
    """Return what the planner knows of each device, the owner first: what it sleeps by."""
    from dataclasses import replace

    from devices.catalog import CATALOG
    from edge.survey.llm_survey import _SUM_CPU_S
    from partition.plan.plan import LOCAL
    from partition.predict.presets import PartSizes, preset_speed
    from partition.predict.speeds import speed_of

    sizes, speeds = PartSizes.from_file(file), []
    for profile, address, name in zip(asked["profiles"], [LOCAL, *asked["workers"]], asked["names"], strict=True):
        if "preset" in profile:
            speed = preset_speed(CATALOG[profile["preset"]], sizes, address, name)
        else:
            speed = speed_of(profile["speed"], address, name, 0.0)
        speeds.append(replace(speed, sum_s=_SUM_CPU_S, memory_bytes=asked["memory"]))
    return speeds


class _NothingToTime:
    """Profiler of devices whose speeds are known."""

    cache, steps, streams = "sleeping", 0, False

    def __init__(self, keys: Any) -> None:
        self.keys = keys

    def read(self, rank: int, values: Any) -> None:
        """Nothing is remembered."""


def measured_links(workers: list[str], kinds: list[list[int]], pairs: list[list[int]], speeds: list[Any]) -> Any:
    """Measure one link of each kind, and give it to all links of that kind. kinds: by device and device; pairs: a link
    of each kind."""
    from edge.cluster.fleet import Fleet
    from edge.survey.survey import Devices, survey
    from edge.tasks import CancelScope
    from partition.plan.plan import LOCAL
    from partition.predict.speeds import Links

    names = [LOCAL, *workers]
    needed = sorted({device for pair in pairs for device in pair} - {0})
    some = [names[i] for i in needed]
    with Fleet(some, insecure=True) as fleet, CancelScope() as closing:
        devices = Devices(fleet, some, 1)
        known: Any = {speed.device: speed for speed in speeds}
        profiler: Any = _NothingToTime(devices.addresses)
        links = survey(devices, profiler, closing, transport="tcp", known_times=known)[1]
    of_kind = [(links.get(names[a], names[b]), links.get(names[b], names[a])) for a, b in pairs]
    n = range(len(names))
    return Links({(names[i], names[j]): of_kind[kinds[i][j]][i > j] for i in n for j in n if i != j})


def chosen(space: Any, tiny: bool) -> dict[str, Any]:
    """Return the best plans over several devices: by latency and by throughput, and of stages of one device each."""
    from partition.errors import PlanError

    found = {}
    for pipeline_only, axis in ((False, "latency"), (False, "throughput"), (True, "latency")):
        try:
            [one, *_], _ = space.planner(tensor=not pipeline_only).front((axis,))
        except PlanError:  # none of this kind has room
            continue
        point = space.point(one.plan, one.microbatches)
        found[point.key] = point
    several = {key: point for key, point in found.items() if len(point.plan.devices) > 1}
    return dict(list(several.items())[:1]) if tiny else several


def measured(space: Any, fleet: Any, key: str, point: Any) -> dict[str, Any]:
    """Run a plan, and return its figures beside those that were predicted."""
    import time

    from edge.cluster.deployment import Deployment, Exchange
    from edge.llm.options import EngineOptions
    from edge.planning.measure import steady_per_s, token_s

    t0 = time.time()

    def say(*a):
        print(f"  {time.time() - t0:.1f}", *a, file=sys.stderr)

    options = EngineOptions(context=CONTEXT, sequences=REQUESTS, threads=1)
    with Deployment(fleet, point.plan, space.file, options, Exchange("tcp")) as deployment:
        say("up")
        engine, many = deployment.engine, point.predicted.microbatches
        latency_s = token_s(engine, DEPTH).seconds
        throughput_per_s = steady_per_s(engine, REQUESTS, DEPTH, many)
        say("done")
    predicted = point.predicted.to_json()
    return {
        "key": key,
        "plan": point.label,
        "parallel": point.parallel,
        "widths": [len(stage.shards) for stage in point.plan.stages],
        "predicted": {name: predicted[name] for name in ("latency_s", "throughput_per_s")},
        "measured": {"latency_s": latency_s, "throughput_per_s": throughput_per_s},
    }


def link_figures(links: Any) -> dict[str, float]:
    """Return the median of what was measured of all links."""
    from statistics import median

    ways = list(links.between.values())
    return {
        "latency_ms": 1e3 * median(way.latency_s for way in ways),
        "mbps": median(way.bytes_per_s for way in ways) / 125_000,
    }


if __name__ == "__main__":
    main()
