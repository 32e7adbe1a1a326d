"""The owner of the section "moves" of bench_phases.py: many requests on a plan with phases, and their tail."""

from __future__ import annotations

import json
import secrets
import sys
import time
from contextlib import nullcontext
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
from edge.llm.slots import AwayRequests
from edge.planning.choice import PlanChoice
from edge.survey.cluster import Cluster
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL
from partition.slices.gguf_slice import limits
from quant.gguf.file import GgufFile


def main() -> None:
    work = json.loads(sys.argv[1])
    print(json.dumps(run(work)))


def run(work: dict[str, Any]) -> dict[str, Any]:
    """With moves and without: this device generates, the worker computes prompts."""
    path = Path(work["model"])
    n_tokens = work["prompt"] + work["tokens"]
    options = EngineOptions(threads=1, context=work["requests"] * (n_tokens + 32), sequences=4)
    result: dict[str, Any] = {}
    with Cluster([work["worker"]], insecure=True) as cluster:
        cut, there = limits(GgufFile.open(path)), [LOCAL, device(work["worker"])]
        prompts = by_device(make_plan(cut, path.name, "", there, "pipeline", [0, 1]))
        plan = replace(by_device(make_plan(cut, path.name, "", [LOCAL])), prefill=prompts, prefill_from=32)
        with deploy(PlanChoice(path, plan, "phases"), cluster, options) as model:
            for name in ("the device that generates", "both"):
                with nullcontext() if name == "both" else pytest.MonkeyPatch.context() as patch:
                    if patch is not None:
                        patch.setattr(AwayRequests, "_may_leave", lambda away, running: False)
                    result[name] = answered(model.engine, work)
    return result


def answered(engine: TextEngine, work: dict[str, Any]) -> dict[str, Any]:
    """Percentiles (50, 95, 99) of seconds to first tokens, between tokens, and to complete answers."""
    generator, times = np.random.default_rng(3), dict[int, list[float]]()
    with Scheduler(engine, keep=True) as scheduler:
        began = time.perf_counter()
        for _ in range(work["requests"]):
            tokens = generator.integers(3, engine.model.n_vocab, work["prompt"]).tolist()
            request = Request(tokens, work["tokens"], ends=False, namespace=secrets.token_hex(8))
            times[scheduler.add(request)] = []
        while scheduler.busy:
            for event in scheduler.step():
                if event.token_id is not None:
                    times[event.request].append(time.perf_counter())
        migrations = scheduler.slots.away.migrations
    figures: dict[str, list[float]] = {
        "first_s": [own[0] - began for own in times.values()],
        "gap_s": [gap_s for own in times.values() for gap_s in np.diff(own)],
        "answer_s": [own[-1] - began for own in times.values()],
    }
    percentiles = {key: np.percentile(values, (50, 95, 99)).tolist() for key, values in figures.items()}
    return {**percentiles, "migrations": migrations}


if __name__ == "__main__":
    main()
