"""Run one model on the devices you have.

    import edge

    with edge.load("model.gguf", memory="3GiB") as model:
        for response in edge.Chat(model).ask("What is a stage?"):
            print(response.text, end="")

Importing `edge` is fast because each name is loaded on first use. docs/python.md documents the whole interface.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from edge import siblings

if TYPE_CHECKING:
    from devices.errors import ClusterFileError, TrustError
    from edge.api.cluster import deploy, deploy_onnx, pareto, plan
    from edge.api.local import load, quantize
    from edge.api.onnx import OnnxModel
    from edge.cluster.llm_ranks import Exchange
    from edge.errors import (
        ChatFileError,
        ContextFull,
        EdgeError,
        EngineError,
        HubError,
        Interrupted,
        MediaError,
        NotEnoughMemory,
        PictureError,
        SamplingError,
        SizeTooSmall,
        SliceError,
        TemplateError,
        TextError,
        WeightsError,
        WorkerError,
    )
    from edge.llm.chat import Chat
    from edge.llm.generate import Response, Timing, Usage
    from edge.llm.model import Model, RequestStream
    from edge.llm.options import EngineOptions
    from edge.llm.pieces import Pieces
    from edge.llm.requests import Event
    from edge.llm.sampler import SamplingParams
    from edge.onnx.predictions import Prediction, Predictions
    from edge.pictures.front import write_picture
    from edge.pictures.page import write_page
    from edge.planning.choice import PlanChoice
    from edge.planning.front import Front
    from edge.planning.over_networks import NetworkFronts
    from edge.planning.plan_options import PlanOptions
    from edge.profiling.cluster import Cluster
    from edge.tasks import ShowStep, Steps
    from partition.errors import CannotSlice, PlanError
    from quant.errors import ModelFileError, UnknownTypeError
    from transport.errors import TransportError

siblings.import_siblings(*siblings.NEEDED)

_HOMES = {
    "devices.errors": ("ClusterFileError", "TrustError"),
    "edge.api.cluster": ("deploy", "deploy_onnx", "pareto", "plan"),
    "edge.api.local": ("load", "quantize"),
    "edge.api.onnx": ("OnnxModel",),
    "edge.cluster.llm_ranks": ("Exchange",),
    "edge.errors": (
        "ChatFileError", "ContextFull", "EdgeError", "EngineError", "HubError", "Interrupted", "MediaError",
        "NotEnoughMemory", "PictureError", "SamplingError", "SizeTooSmall", "SliceError", "TemplateError", "TextError",
        "WeightsError", "WorkerError",
    ),
    "edge.llm.chat": ("Chat",),
    "edge.llm.generate": ("Response", "Timing", "Usage"),
    "edge.llm.model": ("Model", "RequestStream"),
    "edge.llm.options": ("EngineOptions",),
    "edge.llm.sampler": ("SamplingParams",),
    "edge.llm.pieces": ("Pieces",),
    "edge.llm.requests": ("Event",),
    "edge.onnx.predictions": ("Prediction", "Predictions"),
    "edge.pictures.front": ("write_picture",),
    "edge.pictures.page": ("write_page",),
    "edge.planning.choice": ("PlanChoice",),
    "edge.planning.front": ("Front",),
    "edge.planning.over_networks": ("NetworkFronts",),
    "edge.planning.plan_options": ("PlanOptions",),
    "edge.profiling.cluster": ("Cluster",),
    "edge.tasks": ("ShowStep", "Steps"),
    "partition.errors": ("CannotSlice", "PlanError"),
    "quant.errors": ("ModelFileError", "UnknownTypeError"),
    "transport.errors": ("TransportError",),
}  # fmt: skip
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "CannotSlice", "Chat", "ChatFileError", "Cluster", "ClusterFileError", "ContextFull", "EdgeError",
    "EngineError", "EngineOptions", "Event", "Exchange", "Front", "HubError", "Interrupted", "MediaError", "Model",
    "ModelFileError", "NetworkFronts", "NotEnoughMemory", "OnnxModel", "PictureError", "Pieces", "PlanChoice",
    "PlanError", "PlanOptions", "Prediction", "Predictions", "RequestStream", "Response", "SamplingError",
    "SamplingParams", "ShowStep", "SizeTooSmall", "SliceError", "Steps", "TemplateError", "TextError", "Timing",
    "TransportError", "TrustError", "UnknownTypeError", "Usage", "WeightsError", "WorkerError", "deploy", "deploy_onnx",
    "load", "pareto", "plan", "quantize", "write_page", "write_picture",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from edge.arguments import in_parameters
    from edge.errors import EdgeError

    # Programs use these names. The commands import modules, and their users know options instead of parameters.
    EdgeError.worded = staticmethod(in_parameters)
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
