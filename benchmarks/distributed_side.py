"""One side of bench_distributed.py: a process with a whole model, or with rank 0 of one, that measures on command.

    python benchmarks/distributed_side.py SIDE SIDES    (started by bench_distributed.py)

It stays loaded while other sides are measured. Methods are commands; they take and return JSON. Times are of the
monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.processes import serve
from edge.cluster.fleet import Fleet
from edge.cluster.llm_ranks import Exchange, LlmRanks
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.llm.scheduler import Scheduler
from edge.models.local_slices import OwnSlices
from edge.parallel.engine import DistributedEngine
from edge.planning.choose import arrange
from edge.planning.plan_options import PlanOptions
from edge.profiling.cluster import Cluster
from partition.model.file import ModelFile
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan
from partition.slices.gguf_slice import limits

SEED = 0


class Side:
    """Engines by name, and what is measured of them."""

    def __init__(self) -> None:
        self._engines: dict[str, Any] = {}
        self._open: dict[str, ExitStack] = {}  # what ends with each engine

    # --- engines ---

    def pin(self, cores: list[int]) -> None:
        """Keep this whole process, with the threads it has, to these cores. Before anything is loaded."""
        if sys.platform == "linux":
            for thread in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(thread), cores)

    def load(self, name: str, model: str, options: dict[str, Any]) -> None:
        """A whole model in this process."""
        stack = self._open[name] = ExitStack()
        self._engines[name] = stack.enter_context(Engine(model, EngineOptions(**options)))

    def deploy(
        self,
        name: str,
        model: str,
        worker: str,
        core: int,
        options: dict[str, Any],
        parallel: str = "tensor",
        shares: list[float] | None = None,
        measure: bool = False,
        transport: str = "tcp",
        insecure: bool = False,
    ) -> dict[str, Any]:
        """A model on this process and on a worker of this machine, there on the core of that number.

        measure: shares by measured speed. insecure: the worker is one of a lab with links. The answer: what each rank
        holds, as summary and in parts of one.
        """
        file = ModelFile.open(model)
        stack = ExitStack()
        with stack:
            fleet = stack.enter_context(Fleet([worker], insecure=insecure))
            digest = OwnSlices().model_digest(file.path)
            if measure:
                cluster = stack.enter_context(Cluster([worker], needs_all=True))
                work = PlanOptions(concurrency=1, threads=1, transport=transport)
                plan = arrange(file, cluster, work, parallel).plan
            else:
                plan = make_plan(limits(file), file.path.stem, digest, [LOCAL, worker], parallel, shares)
            plan = _on_one_thread(plan, core)
            deployment = stack.enter_context(
                LlmRanks(fleet, plan, file, EngineOptions(**options), Exchange(transport=transport))
            )
            _check_core(deployment, core)
            self._engines[name] = deployment.engine
            self._open[name] = stack.pop_all()
        return {"summary": _summary(plan), "parts": _parts(plan)}

    def drop(self, name: str) -> None:
        """End an engine."""
        del self._engines[name]
        self._open.pop(name).close()

    def close(self) -> None:
        """End all engines."""
        for name in list(self._engines):
            self.drop(name)

    # --- measuring ---

    def speed(self, name: str, prompt: int, steps: int) -> dict[str, float]:
        """Steps of one token after a prompt of `prompt` tokens, and as many tokens at once after the same prompt."""
        engine = self._engines[name]
        tokens = _tokens(engine, prompt)
        engine.kv_clear()
        token, took = int(engine.decode(tokens, 0, top=1).argmax()), []
        for i in range(steps):
            began = time.perf_counter()
            token = int(engine.decode([token], prompt + i, top=1).argmax())
            took.append(time.perf_counter() - began)
        engine.kv_remove(0, prompt)
        began = time.perf_counter()
        engine.decode(tokens, prompt, top=1)
        prefill_s = time.perf_counter() - began
        return {"decode_s": statistics.median(took), "prefill_tokens_per_s": prompt / prefill_s}

    def times(self, name: str) -> list[dict[str, Any]]:
        """Return the times of the steps since the last call, by rank and kind."""
        engine = self._engines[name]
        assert isinstance(engine, DistributedEngine)
        return [{kind: result.to_json() for kind, result in rank.items()} for rank in engine.times(clear=True)]

    def generate(self, name: str, requests: int, prompt: int, tokens: int, one_each: bool, at: float) -> Any:
        """Begin at the time `at` and run requests together: when each token of each request came.

        one_each: every request goes through the ranks in steps of its own, all of them on their way at once.
        """
        engine = self._engines[name]
        stamps: list[list[float]] = [[] for _ in range(requests)]
        target = [Request(_tokens(engine, prompt, i), tokens, ends=False) for i in range(requests)]
        time.sleep(max(0.0, at - time.monotonic()))
        with Scheduler(_OneEach(engine, requests) if one_each else engine) as scheduler:
            for request in target:
                scheduler.add(request)
            while scheduler.busy:
                for event in scheduler.step():
                    if event.token_id is not None:
                        stamps[event.request].append(time.monotonic())
        return stamps

    def bring_up(self, model: str, worker: str, core: int, options: dict[str, Any], plan_file: str) -> dict[str, float]:
        """Seconds from nothing to the first token of a plan, which is written to `plan_file`, and of which parts.

        What goes on at the same time is counted in each of its parts.
        """
        plan_of = make_plan(limits(ModelFile.open(model)), Path(model).stem, "", [LOCAL, worker], "tensor")
        plan = _on_one_thread(replace(plan_of, model_digest=OwnSlices().model_digest(Path(model))), core)
        Path(plan_file).write_text(json.dumps(plan.to_json()))
        began = time.perf_counter()
        file = ModelFile.open(model)
        with Fleet([worker]) as fleet:
            connected = time.perf_counter()
            deployment = _Watched(fleet, plan, file, EngineOptions(**options), Exchange(transport="tcp"))
            with deployment:
                deployed = time.perf_counter()
                deployment.engine.decode([1], 0, top=1)
                ended = time.perf_counter()
        return {
            "in all": ended - began,
            "reach the worker": connected - began,
            "deploy": deployed - connected,
            **deployment.took_s,
            "first token": ended - deployed,
        }


class _OneEach:
    """An engine to a scheduler that makes a group of every request: as if it had a stage for each."""

    def __init__(self, engine: Any, stages: int) -> None:
        self._engine = engine
        self.stages = stages

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class _Watched(LlmRanks):
    """A deployment that notes the seconds of its parts."""

    def __init__(self, *args: Any) -> None:
        self.took_s: dict[str, float] = {}
        super().__init__(*args)

    def _load_here(self, *args: Any) -> Any:
        return self._noted("deploy: load here", super()._load_here, *args)

    def _open(self, *args: Any) -> Any:
        return self._noted("deploy: slice and process there", super()._open, *args)

    def _join(self, *args: Any) -> Any:
        return self._noted("deploy: connect", super()._join, *args)

    def _load(self, *args: Any) -> Any:
        return self._noted("deploy: load there", super()._load, *args)

    def _noted(self, name: str, work: Any, *args: Any) -> Any:
        began = time.perf_counter()
        result = work(*args)
        self.took_s[name] = time.perf_counter() - began
        return result


def _tokens(engine: Any, n: int, seed: int = SEED) -> Sequence[int]:
    result: list[int] = np.random.default_rng(seed).integers(0, engine.model.n_vocab, n).tolist()
    return result


def _on_one_thread(plan: Plan, core: int) -> Plan:
    """Every rank computes with one thread; those of the worker on this core."""
    stages = tuple(
        replace(
            stage,
            shards=tuple(
                replace(shard, threads=1, affinity=() if shard.device == LOCAL else (core,)) for shard in stage.shards
            ),
        )
        for stage in plan.stages
    )
    return replace(plan, stages=stages)


def _check_core(deployment: LlmRanks, core: int) -> None:
    """Raise RuntimeError unless every rank on the worker, which is on this machine, is bound to `core`."""
    if sys.platform == "linux":
        for rank, session in deployment._by_rank.items():
            cores = os.sched_getaffinity(session.pid)
            if cores != {core}:
                raise RuntimeError(f"rank {rank} was to compute on core {core}, it may use {sorted(cores)}")


def _summary(plan: Plan) -> str:
    """One line for each rank."""
    lines = []
    for rank, device in enumerate(plan.devices):
        cut, parts = plan.slice(rank), []
        for name in ("heads", "ff", "vocab"):
            current, total = getattr(cut, name), getattr(plan.sizes, name)
            if current:
                parts.append(f"{name} {current} of {total}" if len(current) < total else f"all {name}")
        lines.append(f"rank {rank}  {device}: {', '.join([f'layers {cut.layers}', *parts])}")
    return "\n".join(lines)


def _parts(plan: Plan) -> list[dict[str, float]]:
    """Return each rank's part of the layers, heads, FFN columns and vocabulary rows."""
    results = []
    for rank in range(plan.world_size):
        cut, sizes = plan.slice(rank), plan.sizes
        current = {"layers": sizes.layers, "heads": sizes.heads, "ff": sizes.ff, "vocab": sizes.vocab}
        results.append({name: len(getattr(cut, name)) / total for name, total in current.items() if total})
    return results


if __name__ == "__main__":
    serve(Side())
