"""The owner's process of bench_phases.py: runs plans with and without phases, and prints their figures."""

from __future__ import annotations

import json
import secrets
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.cluster.fleet import by_device, device
from edge.deployment.deploy import deploy
from edge.llm.continuation import Request
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.llm.scheduler import Scheduler
from edge.planning.choice import PlanChoice
from edge.planning.choose import arrange, work_options
from edge.profiling.cluster import Cluster
from partition.model.file import ModelFile
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan
from partition.predict.predict import predict
from partition.search.phases import Phases
from partition.search.planner import Planner
from partition.slices.gguf_slice import limits
from quant.gguf.file import GgufFile
from tests.support.measuring import measure_briefly

TOKENS = 17  # of an answer


def main() -> None:
    target = json.loads(sys.argv[1])
    if target["tiny"]:
        measure_briefly(pytest.MonkeyPatch())
    print(json.dumps(run(target)))


def run(target: dict[str, Any]) -> dict[str, Any]:
    """Every plan: one device, that device with prompts elsewhere, and all where prompts are."""
    path = Path(target["model"])
    options = EngineOptions(threads=1, context=target["prompt"] + 64)
    results: dict[str, Any] = {}
    with Cluster([target["worker"]], insecure=True) as cluster:
        file = ModelFile.open(path)
        work = replace(work_options(file, options, "tcp", "f32"), prompt_tokens=target["prompt"])
        planner = arrange(file, cluster, work).planner
        assert planner is not None
        speeds = {device(speed.device): speed for speed in planner.speeds}
        alone = planner.only_own().front(("latency",))[0][0]
        is_planned = Phases(planner).with_prefill(alone) is not None
        for name, plan in plans(planner, alone.plan, path, target).items():
            with deploy(PlanChoice(path, plan, name), cluster, options) as model:
                rounds = [answered(model.engine, target["prompt"]) for _ in range(target["rounds"] + 1)][1:]
            results[name] = {key: statistics.median(times[key] for times in rounds) for key in rounds[0]}
            predicted = predict(plan, planner.work, speeds, planner.links)
            results[name] |= {"predicted_ttft_s": predicted.ttft_s, "predicted_token_s": predicted.latency_s}
            prompts = plan.placements[-1]
            results[name] |= {"layers": [len(stage.layers) for stage in prompts.stages], "is_planned": is_planned}
    return results


def plans(planner: Planner, alone: Plan, path: Path, target: dict[str, Any]) -> dict[str, Plan]:
    """The plans by name. Prompts are computed where the planner finds that their first token is the soonest. A cut by
    bytes would count the head, which a prompt needs for its last token alone."""
    prompts = by_device(planner.front(("ttft",))[0][0].plan)
    if prompts.world_size == 1:  # of a tiny model nothing pays
        there = [LOCAL, device(target["worker"])]
        prompts = make_plan(
            limits(GgufFile.open(path)), alone.model, alone.model_digest, there, "pipeline", target["shares"]
        )
    first = by_device(alone)
    return {"one": first, "phases": replace(first, prefill=prompts, prefill_from=32), "pipeline": prompts}


def answered(engine: TextEngine, n_prompt: int) -> dict[str, float]:
    """Seconds to the first token behind a prompt that nothing is known of, and of each token then."""
    tokens = np.random.default_rng().integers(3, engine.model.n_vocab, n_prompt).tolist()
    times: list[float] = []
    with Scheduler(engine) as scheduler:
        began = time.perf_counter()
        scheduler.add(Request(tokens, TOKENS, ends=False, namespace=secrets.token_hex(8)))
        while scheduler.busy:
            times += [time.perf_counter() for event in scheduler.step() if event.token_id is not None]
    return {"ttft_s": times[0] - began, "token_s": (times[-1] - times[0]) / (TOKENS - 1)}


if __name__ == "__main__":
    main()
