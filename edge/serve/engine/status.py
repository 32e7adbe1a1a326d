"""Status of a served model and its parts: plain values for clients and the status page."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import psutil

from edge.deployment.deployed import DeployedModel
from edge.llm.info import memory_news
from edge.llm.interface import TextEngine
from partition.model.generation import reranks

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
        self._left: dict[str, float] = {}  # time at which a device's use ended, by its name
        self._said_problem = False

    def news(self) -> list[str]:
        """Return new lines for users, each once: memory changes, and the reason why prompts are not cached."""
        problem = None if self._said_problem else self._engine.states.problem
        self._said_problem |= problem is not None
        return [*memory_news(self._engine), *([] if problem is None else [problem])]

    def to_json(self) -> dict[str, Any]:
        """Return the current status."""
        deployed = self._deployed
        if deployed is None:
            devices, why = [self._own()], "one device"
        else:
            if deployed.plan is not self._plan:  # a device was lost or has come back
                self._plan, self._plan_json = deployed.plan, deployed.plan.to_json()
                self._left |= dict.fromkeys(set(self._names) - set(deployed.names), time.monotonic())
                self._names = tuple(deployed.names)
            devices, why = self._devices(deployed), deployed.why
        return {"model": self._model, "devices": devices, "plan": self._plan_json, "why": why}

    def _own(self) -> dict[str, Any]:
        shape = self._engine.shape
        heads, layers = max(shape.n_heads, default=0), [0, shape.n_layers]
        own = {"name": "this device", "rank": 0, "layers": layers, "heads": [0, heads]}
        return {**own, "memory_bytes": self._memory_bytes(), "link": None}

    def _devices(self, deployed: DeployedModel) -> list[dict[str, Any]]:
        """Return the slice of each rank, and the link to it."""
        devices = []
        for rank, name in enumerate(deployed.names):
            slice_ = deployed.plan.slice(rank)
            devices.append(
                {
                    "name": name,
                    "rank": rank,
                    "layers": [slice_.layers.start, slice_.layers.stop],
                    "heads": [slice_.heads.start, slice_.heads.stop],
                    "memory_bytes": self._memory_bytes() if rank == 0 else None,
                    "link": deployed.links.get(rank),
                }
            )
        now = time.monotonic()
        return devices + [
            {"name": name, "rank": None, "layers": None, "heads": None, "memory_bytes": None, "link": None}
            | {"left_s": now - at}
            for name, at in self._left.items()
            if name not in self._names
        ]

    def _memory_bytes(self) -> int:
        n_bytes: int = self._process.memory_info().rss
        return n_bytes
