"""The owner's process of bench_plans.py: surveys devices, predicts plans, runs them, and prints both.

It is a process of its own so that it can run in the network of a lab's device, and in a control group with its share of
a core.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

_CONTEXT, _PROMPT, _DEPTH, _REQUESTS = 1024, 64, 48, 4


def main() -> None:
    import pytest

    from devices.lab.control_group import ControlGroup
    from tests.support.measuring import measure_briefly

    target = json.loads(sys.argv[1])
    group = ControlGroup(f"edge-plans-{os.getpid()}", cores=target["cores"]) if target["cores"] else None
    if group is not None:
        group.add()
    if target["tiny"]:
        measure_briefly(pytest.MonkeyPatch())
    run = {"llm": _llm, "onnx": _onnx, "alone": _alone}[target["kind"]]
    print(json.dumps(run(target)))
    # The group cannot be closed from within; bench_plans.py removes what is left.


def _llm(target: dict[str, Any]) -> dict[str, Any]:
    from devices.cluster_file import Cluster
    from edge.llm.options import EngineOptions
    from edge.models.local_slices import OwnSlices
    from edge.planning.arrange import work_of
    from edge.planning.llm_space import LlmSpace
    from edge.planning.plan_options import PlanOptions
    from edge.profiling.llm_survey import llm_speeds
    from edge.profiling.profile import reachable
    from partition.model.file import ModelFile

    path = Path(target["model"])
    file, digest = ModelFile.open(path), OwnSlices().model_digest(path)
    depth = 8 if target["tiny"] else _DEPTH
    engine = EngineOptions(context=256 if target["tiny"] else _CONTEXT, sequences=_REQUESTS)
    work = work_of(file, engine, prompt=_PROMPT, depth=depth)
    cluster = Cluster.of_addresses(target["workers"])
    with reachable(cluster, insecure=True) as (fleet, notes):
        assert not notes, notes
        known = llm_speeds(cluster, fleet, notes, file, digest, threads=1, fresh=True)
        return _measured(LlmSpace(file, digest, work, known, PlanOptions(threads=1)), fleet, target)


def _onnx(target: dict[str, Any]) -> dict[str, Any]:
    from devices.cluster_file import Cluster
    from edge.onnx.file import load
    from edge.onnx.model import OnnxSource
    from edge.planning.onnx_space import OnnxSpace
    from edge.planning.plan_options import PlanOptions
    from edge.profiling.onnx_survey import onnx_speeds
    from edge.profiling.profile import reachable

    model = OnnxSource.from_file(load(Path(target["model"])), {})
    cluster = Cluster.of_addresses(target["workers"])
    with reachable(cluster, insecure=True) as (fleet, notes):
        assert not notes, notes
        known, cuts = onnx_speeds(model, cluster, fleet, notes, threads=1, fresh=True)
        return _measured(OnnxSpace(model, known, cuts, PlanOptions(threads=1)), fleet, target)


def _measured(space: Any, fleet: Any, target: dict[str, Any]) -> dict[str, Any]:
    """The best plan of each kind, by latency and by throughput, and what `best` takes: predicted and measured."""
    points = space.points(("latency", "throughput"))
    chosen, why = space.best("latency", {})
    expected = {chosen.key: chosen}
    for kind in ("single", "tensor", "pipeline", "hybrid"):
        total = [point for point in points if point.parallel == kind]
        for axis in ("latency", "throughput"):
            if total:
                best = min(total, key=lambda point: point.objectives((axis,)))
                expected[best.key] = best
    if target["tiny"]:
        several = [key for key, point in expected.items() if len(point.plan.devices) > 1]
        expected = {key: expected[key] for key in dict.fromkeys((chosen.key, *several[:1]))}
    rounds: list[dict[str, dict[str, Any]]] = []
    for _ in range(target["rounds"]):
        rounds.append({key: space.measure(point, fleet).to_json() for key, point in expected.items()})
    rows = []
    for key, point in expected.items():
        predicted = point.predicted.to_json()
        rows.append(
            {
                "plan": point.label,
                "parallel": point.parallel,
                "chosen": key == chosen.key,
                "predicted": {name: predicted[name] for name in ("latency_s", "throughput_per_s", "ttft_s")},
                "measured": [item[key] for item in rounds],
            }
        )
    return {"why": why, "plans": rows}


def _alone(target: dict[str, Any]) -> dict[str, Any]:
    """The whole model within one device's share of a core, nothing else: what the best single device does."""
    if target["model"].endswith(".onnx"):
        return {"latency_s": [_onnx_alone(target) for _ in range(target["rounds"])]}
    from edge.llm.engine import Engine
    from edge.llm.options import EngineOptions
    from edge.planning.measure import token_s

    options = EngineOptions(context=256 if target["tiny"] else _CONTEXT, threads=1)
    with Engine(Path(target["model"]), options) as engine:
        depth = 8 if target["tiny"] else _DEPTH
        return {"latency_s": [token_s(engine, depth).seconds for _ in range(target["rounds"])]}


def _onnx_alone(target: dict[str, Any]) -> float:
    from edge.onnx.bench import measure, sequential
    from edge.onnx.engine import OnnxEngine
    from edge.onnx.file import load
    from edge.onnx.model import OnnxSource

    model = OnnxSource.from_file(load(Path(target["model"])), {})
    with OnnxEngine(Path(target["model"]), 1) as engine:
        return measure(sequential(engine.run), model.sample, 6, 1).latency_ms_median / 1e3


if __name__ == "__main__":
    main()
