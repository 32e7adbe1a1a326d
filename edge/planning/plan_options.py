"""Workload for planning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edge.arguments import check_fields
from edge.llm.options import EngineOptions
from edge.models.paths import PathLike
from partition.errors import PlanError

SURVEY_S = 20.0  # default time for measuring
_LEAST = {"context": 1, "prompt_tokens": 1, "depth": 0, "concurrency": 1, "memory": 1, "survey_seconds": 0}


@dataclass(frozen=True)
class PlanOptions:
    """Workload and resources for planning. None is the default of the kind of model."""

    context: int | None = None  # tokens of KV cache; this and the next three options are for language models
    prompt_tokens: int | None = None  # tokens of a prompt
    depth: int | None = None  # average number of tokens before a decoded token
    kv_type: str = "f16"  # cache type of keys and values
    concurrency: int | None = None  # concurrent requests, or inputs, for the throughput
    dims: Mapping[str, int] = field(default_factory=dict)  # sizes of open dimensions of an ONNX model
    inputs: Sequence[str] | Mapping[str, Any] = ()  # inputs of an ONNX model: files, or arrays by name; empty: random
    wire: str = "f32"  # type of floats between devices
    transport: str = "auto"  # transport of links
    threads: int | None = None  # threads of this device
    memory: int | None = None  # bytes that a language model may take on this device
    fresh: bool = False  # ignore remembered measurements
    survey_seconds: float | None = None  # time for measuring; None: SURVEY_S; 0: remembered figures and estimates
    draft: PathLike = "off"  # draft source for a single request, as in `edge.load`
    draft_worker: str | None = None  # address of the worker for a draft model; None: this device
    projector: Path | None = None  # image and audio projector of a language model, whose encoder is placed, too
    encoder: str = "auto"  # place of the encoder, see `edge.planning.encoder_place.encoder_device`
    encoder_timed: bool = True  # also time a device that the user named
    acceptance: float | None = None  # acceptance rate of drafts; None: a published one

    def __post_init__(self) -> None:
        """Raise PlanError, naming the option, if a number is out of range, and TypeError if a type is wrong."""
        check_fields(self)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise PlanError(f"{name} must be {least} or more, got {value}")
        if self.acceptance is not None and not 0 <= self.acceptance <= 1:
            raise PlanError(f"acceptance must be from 0 to 1, got {self.acceptance}")

    @property
    def survey_s(self) -> float:
        """Seconds for measuring devices and links."""
        return SURVEY_S if self.survey_seconds is None else self.survey_seconds


DEFAULTS = PlanOptions()


def engine_options(work: PlanOptions) -> EngineOptions:
    """Return the options of an engine for a workload."""
    sequences = work.concurrency or 1
    return EngineOptions(
        context=work.context, sequences=sequences, threads=work.threads, kv_type=work.kv_type, memory=work.memory
    )


def plan_options(engine: EngineOptions, *, transport: str = "auto", wire: str = "f32") -> PlanOptions:
    """Return the workload of an engine with these options."""
    work = PlanOptions(context=engine.context, concurrency=engine.sequences, transport=transport, wire=wire)
    return replace(work, threads=engine.threads, kv_type=engine.kv_type, memory=engine.memory)


def is_onnx(path: Path) -> bool:
    """Return whether a file is an ONNX model, by its name."""
    return path.suffix.lower() == ".onnx"
