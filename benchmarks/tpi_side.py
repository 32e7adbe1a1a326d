"""Sides of bench_tpi.py.

python benchmarks/tpi_side.py JSON          the owner of a lab of sleeping devices: predicts a plan, runs it
python benchmarks/tpi_side.py SIDE SIDES    a process with a model, alone or as rank 0, that measures on command
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.core_waits import CoreWaits, first_of
from benchmarks.processes import serve
from benchmarks.sleeping_side import measured_links
from devices.probe import peak_rss
from devices.sleeping import run_first
from edge.cluster.fleet import Fleet
from edge.cluster.llm_ranks import Exchange, LlmRanks
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.models.local_slices import OwnSlices
from edge.planning.arrange import work_of
from edge.profiling.llm_survey import SUM_CPU_S
from partition.model.file import ModelFile
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL
from partition.predict.cost import GroupCost
from partition.predict.predict import predict
from partition.predict.speeds import speed_of
from partition.search.planner import Planner
from partition.slices.gguf_slice import limits


def main() -> None:
    if len(sys.argv) > 2:
        serve(Side())
    run_first(children=True)
    print(json.dumps(run_lab(json.loads(sys.argv[1]))))


# --- sleeping devices ---


def run_lab(target: dict[str, Any]) -> dict[str, Any]:
    """Predict and run the plan with the fastest tokens in which all devices share every layer."""
    patch = pytest.MonkeyPatch()
    patch.setattr("edge.profiling.links._ROUNDS", 1)
    path = Path(target["model"])
    file = ModelFile.open(path)
    # Hashing an outline of 40 GB takes minutes. No slice has bytes of it.
    digest = hashlib.sha256(path.name.encode()).hexdigest()
    patch.setattr(OwnSlices, "model_digest", lambda *_: digest)
    options = EngineOptions(context=target["context"], threads=1, memory=target["memory"])
    work = work_of(file, options, prompt=target["prompt"], depth=target["prompt"])
    addresses = [LOCAL, *target["workers"]]
    speeds = [
        replace(speed_of(target["profile"]["speed"], address, name, 0.0), sum_s=SUM_CPU_S)
        for address, name in zip(addresses, target["names"], strict=True)
    ]
    n = len(addresses)
    links = measured_links(target["workers"], [[0] * n] * n, [[0, 1]], speeds)
    plan = Planner(work, speeds, links, "model", digest, pipeline=False, thin=False).front(("latency",))[0][0].plan
    predicted = predict(plan, work, {speed.device: speed for speed in speeds}, links)
    group = GroupCost(work, speeds, plan.stages[0].shards, links)
    sizes = len(plan.stages[0].layers), work.weights_before[-1], work.kv_before[-1], 1.0
    waits = CoreWaits(lambda: first_of(target["supervisor"]), time.perf_counter)
    waited: dict[str, float] = {}
    with Fleet(target["workers"], insecure=True) as fleet, LlmRanks(fleet, plan, file, options, Exchange("tcp")) as up:
        measured, waited["all"] = waits.during(lambda: times_of(up.engine, target["prompt"], target["tokens"]))
        resident_bytes = max(up.engine.memory.total, *up.memory_bytes.values())
    return {
        "plan": f"{len(plan.devices)} ranks",
        "paged_bytes": float(max(group.paged(*sizes))),
        "predicted": {
            "ttft_s": predicted.ttft_s,
            "latency_s": predicted.latency_s,
            "memory_bytes": max(predicted.memory_bytes.values()),
        },
        "measured": {"ttft_s": measured["ttft_s"], "latency_s": measured["token_s"], "memory_bytes": resident_bytes},
        "waited": waited,
    }


# --- devices that compute ---


class Side:
    """An engine, alone or with ranks on workers."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._engine: Any = None

    def load(self, model: str, options: dict[str, Any], workers: list[str]) -> dict[str, Any]:
        """Load the model here, or share all its layers equally with workers."""
        began = time.perf_counter()
        own = EngineOptions(**options)
        if not workers:
            self._engine = self._stack.enter_context(Engine(model, own))
        else:
            file = ModelFile.open(model)
            digest = OwnSlices().model_digest(file.path)
            plan = make_plan(limits(file), file.path.stem, digest, [LOCAL, *workers], "tensor")
            fleet = self._stack.enter_context(Fleet(workers))
            ranks = self._stack.enter_context(LlmRanks(fleet, plan, file, own, Exchange("tcp")))
            self._engine = ranks.engine
        pager = self._engine.paging
        return {
            "load_s": time.perf_counter() - began,
            "paged_bytes": 0 if pager is None else pager.plan.streamed_bytes,
        }

    def run(self, prompt: int, tokens: int) -> dict[str, Any]:
        """Return the seconds of the first token and of each token then, and the peak memory of this process."""
        return {**times_of(self._engine, prompt, tokens), "peak_rss_bytes": peak_rss()}

    def close(self) -> None:
        """Free the engine."""
        self._stack.close()


def times_of(engine: Any, prompt: int, tokens: int) -> dict[str, Any]:
    """Return the seconds until the first token of a prompt, and the median of the tokens then. A token before them
    warms up.
    """
    engine.kv_clear()
    engine.decode([1], 0, top=1)
    engine.kv_clear()
    ids = [3 + 97 * i % 1000 for i in range(prompt)]  # library_side.py has the same prompt
    times, answer = [], []
    began = time.perf_counter()
    for position in (0, *range(prompt, prompt + tokens)):
        ids = [int(engine.decode(ids, position, top=1).argmax())]
        times.append(time.perf_counter() - began)
        answer += ids
        began = time.perf_counter()
    return {"ttft_s": times[0], "token_s": statistics.median(times[1:]), "answer": answer}


if __name__ == "__main__":
    main()
