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

from edge.cluster.fleet import device
from edge.deployment.deploy import deploy
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.llm.requests import Request
from edge.llm.scheduler import Scheduler
from edge.planning.choice import PlanChoice
from edge.planning.choose import arrange, work_options
from edge.survey.cluster import Cluster
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan
from partition.predict.predict import predict
from partition.slices.gguf_slice import limits
from quant.gguf.file import GgufFile
from tests.support.measuring import measure_briefly

TOKENS = 17  # of an answer


def main() -> None:
    asked = json.loads(sys.argv[1])
    if asked["tiny"]:
        measure_briefly(pytest.MonkeyPatch())
    print(json.dumps(run(asked)))


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Every plan: one device, both as a pipeline, and one whose prompts both compute."""
    path = Path(asked["model"])
    options = EngineOptions(threads=1, context=asked["prompt"] + 64)
    found: dict[str, Any] = {}
    with Cluster([asked["worker"]], insecure=True) as cluster:
        work = replace(work_options(path, options, "tcp", "f32"), prompt_tokens=asked["prompt"])
        planner = arrange(path, cluster, work).planner
        assert planner is not None
        speeds = {device(speed.device): speed for speed in planner.speeds}
        for name, plan in plans(path, asked).items():
            with deploy(PlanChoice(path, plan, name), cluster, options) as model:
                rounds = [answered(model.engine, asked["prompt"]) for _ in range(asked["rounds"] + 1)][1:]
            found[name] = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
            predicted = predict(plan, planner.work, speeds, planner.links)
            found[name] |= {"predicted_ttft_s": predicted.ttft_s, "predicted_token_s": predicted.latency_s}
    return found


def plans(path: Path, asked: dict[str, Any]) -> dict[str, Plan]:
    """The plans by name."""
    cut, there = limits(GgufFile.open(path)), [LOCAL, device(asked["worker"])]
    one, both = make_plan(cut, "model", "", there[:1]), make_plan(cut, "model", "", there, "pipeline", asked["shares"])
    return {"one": one, "phases": replace(one, prefill=both, prefill_from=32), "pipeline": both}


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
