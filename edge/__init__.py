"""Run one model on the devices you have.

    import edge

    with edge.load("model.gguf", memory="3GiB") as model:
        for response in edge.Chat(model).ask("What is a stage?"):
            print(response.text, end="")

Names are loaded when they are used: `import edge` itself takes no time. docs/python.md has the rest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge.api.cluster import Cluster, PlanChoice, deploy, pareto, plan
    from edge.api.local import load, quantize
    from edge.api.onnx import OnnxModel
    from edge.cluster.deployment import Exchange
    from edge.errors import (
        ChatFileError,
        ContextFull,
        EdgeError,
        EngineError,
        HubError,
        Interrupted,
        NotEnoughMemory,
        SamplingError,
        TemplateError,
        WorkerError,
    )
    from edge.llm.chat import Chat
    from edge.llm.generate import Response, Timing, Usage
    from edge.llm.model import Model, RequestStream
    from edge.llm.options import EngineOptions
    from edge.llm.sampler import SamplingParams
    from edge.llm.scheduler import Event
    from edge.planning.front import Front
    from edge.planning.spaces import PlanOptions
    from edge.tasks import Steps

_HOMES = {
    "edge.api.cluster": ("Cluster", "PlanChoice", "deploy", "pareto", "plan"),
    "edge.api.local": ("load", "quantize"),
    "edge.api.onnx": ("OnnxModel",),
    "edge.cluster.deployment": ("Exchange",),
    "edge.errors": (
        "ChatFileError",
        "ContextFull",
        "EdgeError",
        "EngineError",
        "HubError",
        "Interrupted",
        "NotEnoughMemory",
        "SamplingError",
        "TemplateError",
        "WorkerError",
    ),
    "edge.llm.chat": ("Chat",),
    "edge.llm.generate": ("Response", "Timing", "Usage"),
    "edge.llm.model": ("Model", "RequestStream"),
    "edge.llm.scheduler": ("Event",),
    "edge.llm.options": ("EngineOptions",),
    "edge.llm.sampler": ("SamplingParams",),
    "edge.planning.front": ("Front",),
    "edge.planning.spaces": ("PlanOptions",),
    "edge.tasks": ("Steps",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Chat",
    "ChatFileError",
    "Cluster",
    "ContextFull",
    "EdgeError",
    "EngineError",
    "EngineOptions",
    "Event",
    "Exchange",
    "Front",
    "HubError",
    "Interrupted",
    "Model",
    "NotEnoughMemory",
    "OnnxModel",
    "PlanChoice",
    "PlanOptions",
    "RequestStream",
    "Response",
    "SamplingError",
    "SamplingParams",
    "Steps",
    "TemplateError",
    "Timing",
    "Usage",
    "WorkerError",
    "deploy",
    "load",
    "pareto",
    "plan",
    "quantize",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
