"""The work that plans are made for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge.models.paths import PathLike


@dataclass(frozen=True)
class PlanOptions:
    """The work that plans are made for, and what they may use. None is the default of the kind of model."""

    context: int | None = None  # tokens of KV cache; of language models, like the next three
    prompt_tokens: int | None = None  # of a prompt
    depth: int | None = None  # tokens behind one that is decoded, on average
    kv_type: str = "f16"  # of stored keys and values
    concurrency: int | None = None  # requests, or inputs, at once for the throughput
    dims: Mapping[str, int] = field(default_factory=dict)  # sizes of dimensions that an ONNX model leaves open
    inputs: Sequence[str] | Mapping[str, Any] = ()  # of an ONNX model: files, or arrays by name; none: made up
    wire: str = "f32"  # type of floats between devices
    transport: str = "auto"  # of links
    threads: int | None = None  # of this device
    memory: int | None = None  # bytes that a language model may take on this device
    fresh: bool = False  # measure again what was measured in the last day
    draft: PathLike = "off"  # what drafts tokens of a language model for a request that is alone, as `edge.load` has it
    draft_worker: str | None = None  # the address of the one that drafts, by a drafting model; None: this device
    projector: Path | None = None  # of pictures and sounds for a language model, whose encoder is placed, too
    encoder: str = "auto"  # where that is to run, as `edge.planning.encoder_place.encoder_device` has it
    encoder_timed: bool = True  # also on a device that is named
    acceptance: float | None = None  # the part of drafts that is right; None: a published one of such drafts


DEFAULTS = PlanOptions()


def is_onnx(path: Path) -> bool:
    """Return whether a file is a network in ONNX, by its name."""
    return path.suffix.lower() == ".onnx"
