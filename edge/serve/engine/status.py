"""Status of a served model and its parts: plain values for clients and the status page."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import psutil

from edge.cluster.fleet import device
from edge.cluster.llm_ranks import LlmRanks
from edge.deployment.deployed import DeployedModel
from edge.llama.ggml import gpu_bytes
from edge.llama.llama import has_gpu
from edge.llm.info import memory_news
from edge.llm.interface import TextEngine
from edge.parallel.busy import BusyShare
from partition.model.generation import reranks
from partition.plan.plan import LOCAL

_COUNTERS = (
    "prompt_tokens", "cached_tokens", "generated_tokens", "steps", "preemptions", "background_preemptions",
)  # fmt: skip
_RATE_S = 5.0  # time window of the tokens per second


class Statistics:
    """Keys `tokens_per_s` and `counters` of ServedModel.status, updated by the engine thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counters = dict.fromkeys(_COUNTERS, 0)
        self._clock = clock
        self._times: deque[float] = deque()  # times of the latest tokens

    def add_token(self) -> None:
        """Count a generated token."""
        self.counters["generated_tokens"] += 1
        self._times.append(self._clock())

    def to_json(self) -> dict[str, Any]:
        """Return the current figures."""
        now = self._clock()
        while self._times and self._times[0] < now - _RATE_S:
            self._times.popleft()
        return {"tokens_per_s": len(self._times) / _RATE_S, "counters": dict(self.counters)}


class EngineStatus:
    """Keys `model`, `devices`, `plan` and `why` of ServedModel.status.

    Constant values are computed once, because the status page polls every second and the engine thread answers.
    """

    def __init__(
        self, engine: TextEngine, deployed: DeployedModel | None, template: str, *, takes_media: bool = False
    ) -> None:
        """template: Jinja source of the chat template. takes_media: prompts may have pictures or sounds."""
        self._engine, self._deployed, self._process = engine, deployed, psutil.Process()
        shape = engine.shape
        self._model = {
            "name": shape.name or engine.path.stem,
            "path": engine.path.name,
            "architecture": shape.architecture,
            "context": engine.context,
            "trained_context": shape.context_length,
            "sequences": engine.sequences,
            "vocabulary": engine.model.n_vocab,
            "parameters": shape.n_params,
            "size_bytes": engine.file.size_bytes,
            "chat_template": template,
            "embeds": deployed is None and engine.paging is None,
            "takes_media": takes_media,
            "reranks": deployed is None and engine.paging is None and reranks(engine.file),
        }
        self._plan = deployed.plan if deployed else None
        self._plan_json = self._plan.to_json() if self._plan else None
        self._names: tuple[str, ...] = tuple(deployed.names) if deployed else ()
        self._addresses = _addresses(deployed) if deployed else {}
        # By the name of a device that is not used any more: its address, and the time at which its use ended.
        self._left: dict[str, tuple[str, float]] = {}
        self._said_problem = False
        self._busy = BusyShare()
        self.computed_s = 0.0  # seconds of the engine's steps so far
        self._recoveries = 0

    def news(self) -> list[str]:
        """Return new lines for users, each once: memory changes, and the reason why prompts are not cached."""
        problem = None if self._said_problem else self._engine.states.problem
        self._said_problem |= problem is not None
        return [*memory_news(self._engine), *([] if problem is None else [problem])]

    def recovery_news(self, n_running: int) -> list[str]:
        """Return a line after each loss of a device. n_running: number of running answers."""
        recoveries = getattr(getattr(self._engine, "replacements", None), "recoveries", 0)
        before, self._recoveries = self._recoveries, recoveries
        if recoveries == before or not n_running:
            return []
        if n_running == 1:
            return ["1 answer goes on from the tokens that it had"]
        return [f"{n_running} answers go on from the tokens that they had"]

    def to_json(self) -> dict[str, Any]:
        """Return the current status."""
        deployed = self._deployed
        if deployed is None:
            devices, why = [self._own()], "one device"
        else:
            if deployed.plan is not self._plan:  # a device was lost or has come back
                self._plan, self._plan_json = deployed.plan, deployed.plan.to_json()
                left = {*self._names} - {*deployed.names}
                self._left |= {name: (self._addresses[name], time.monotonic()) for name in left}
                self._names, self._addresses = tuple(deployed.names), _addresses(deployed)
            devices, why = self._devices(deployed), deployed.why
        about = {"model": self._model, "devices": devices, "plan": self._plan_json, "why": why}
        return {**about, "links": [] if deployed is None else _links(deployed)}

    def _own_figures(self) -> dict[str, Any]:
        """Return the keys of this device that its process knows."""
        computed_s = self.computed_s if self._deployed is None else self._deployed.computed_s
        self._busy.add(self.computed_s if computed_s is None else computed_s)
        gpu = gpu_bytes() if has_gpu() else None
        figures = {"memory_bytes": self._memory_bytes(), "busy": self._busy.share, "gpu_bytes": _total_and_free(gpu)}
        return {"address": LOCAL, **figures}

    def _own(self) -> dict[str, Any]:
        shape = self._engine.shape
        heads, layers = max(shape.n_heads, default=0), [0, shape.n_layers]
        own = {"name": "this device", "rank": 0, "layers": layers, "heads": [0, heads]}
        return {**own, **self._own_figures(), "link": None}

    def _devices(self, deployed: DeployedModel) -> list[dict[str, Any]]:
        """Return the slice of each rank, and the link to it."""
        devices = []
        ranks = deployed.running.ranks
        figures = {} if ranks is None else ranks.figures()
        granted = ranks.memory_bytes if isinstance(ranks, LlmRanks) else {}
        addresses = deployed.plan.devices
        for rank, name in enumerate(deployed.names):
            busy, gpu = figures.get(rank, (0.0, None))
            n_bytes = granted.get(addresses[rank])  # of all ranks on this device
            other = {
                "address": device(addresses[rank]),
                "memory_bytes": None if n_bytes is None else n_bytes // addresses.count(addresses[rank]),
                "busy": busy,
                "gpu_bytes": _total_and_free(gpu),
            }
            slice_ = deployed.plan.slice(rank)
            devices.append(
                {
                    "name": name,
                    "rank": rank,
                    "layers": [slice_.layers.start, slice_.layers.stop],
                    "heads": [slice_.heads.start, slice_.heads.stop],
                    **(self._own_figures() if addresses[rank] == LOCAL else other),
                    "link": deployed.links.get(rank),
                }
            )
        now = time.monotonic()
        unused: dict[str, Any] = {"rank": None, "layers": None, "heads": None, "memory_bytes": None, "link": None}
        unused |= {"busy": 0.0, "gpu_bytes": None}
        return devices + [
            {"name": name, "address": address, **unused, "left_s": now - at}
            for name, (address, at) in self._left.items()
            if name not in self._names
        ]

    def _memory_bytes(self) -> int:
        n_bytes: int = self._process.memory_info().rss
        return n_bytes


def _addresses(deployed: DeployedModel) -> dict[str, str]:
    return dict(zip(deployed.names, map(device, deployed.plan.devices), strict=True))


def _links(deployed: DeployedModel) -> list[dict[str, Any]]:
    """Return the links between the ranks, with figures of the short measurement at the start."""
    links: list[dict[str, Any]] = [
        {
            "from": deployed.names[state.ranks[0]],
            "to": deployed.names[state.ranks[1]],
            "kind": state.kind,
            "latency_s": state.round_trip_s / 2 or None,
            "bytes_per_s": state.bytes_per_s or None,
        }
        for state in deployed.link_states
        if state.ranks[1] < len(deployed.names)
    ]
    return links


def _total_and_free(n_bytes: tuple[int, int] | None) -> dict[str, int] | None:
    return None if n_bytes is None else {"total": n_bytes[0], "free": n_bytes[1]}
