"""LoRA adapters that a model is loaded with, and the scales that a request uses them with."""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge.errors import EngineError
from partition.model.check_adapter import adapter_pairs
from quant.gguf.file import GgufFile

MAX_SCALE = 1e6
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?inf|nan", re.IGNORECASE | re.ASCII)

Scales = tuple[float, ...]
"""The scale of each adapter that a model was loaded with, in their order; empty: none is used."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter that a model is loaded with."""

    path: Path
    scale: float  # for requests that do not say

    @classmethod
    def from_text(cls, text: str) -> Adapter:
        """Return the adapter that FILE or FILE:SCALE names; a file of the whole text comes first. EngineError for a
        scale that cannot be."""
        name, _, scale = text.rpartition(":")
        value = parse_scale(scale, text) if name and not os.path.exists(text) else None
        return cls(Path(text), 1.0) if value is None else cls(Path(name), value)

    @property
    def name(self) -> str:
        """The name that requests call it by: its file's, without the ending."""
        return self.path.stem


def adapters_from(texts: Sequence[str], other_names: Collection[str] = ()) -> tuple[Adapter, ...]:
    """Return the adapters that FILE[:SCALE] name. EngineError for a scale that cannot be, and where a name means two,
    or one of `other_names`."""
    adapters = tuple(map(Adapter.from_text, texts))
    names = [*other_names, *(adapter.name for adapter in adapters)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise EngineError(f"{twice!r:.90} is the name of two adapters or models; give one file another name")
    return adapters


def checked_for(model: Path, texts: Sequence[str]) -> list[str]:
    """Return the same FILE[:SCALE] with absolute paths, after a check of each file's header. The errors of
    `adapters_from`; ModelFileError for an adapter of another model."""
    file = GgufFile.open(model) if texts else None
    adapters = adapters_from(texts)
    for adapter in adapters:
        assert file is not None
        adapter_pairs(GgufFile.open(adapter.path), file)
    return [f"{adapter.path.absolute()}:{adapter.scale}" for adapter in adapters]


def scales_by_name(adapters: Sequence[Adapter], scales: Mapping[str, float]) -> Scales:
    """Return the scales of adapters by their names; of those that are not named 0. EngineError for an unknown name."""
    names = [adapter.name for adapter in adapters]
    if unknown := next((name for name in scales if name not in names), None):
        raise EngineError(f"there is no adapter {unknown!r:.90}; there are {', '.join(names) or 'none'}")
    return effective([scales.get(name, 0.0) for name in names])


def parse_scale(text: str, name: str) -> float | None:
    """Return the number that a text is; None for another text. EngineError for a scale that cannot be."""
    if not _NUMBER.fullmatch(text):
        return None
    check_scale(float(text), name)
    return float(text)


def check_scale(scale: float, name: str) -> None:
    """Raise EngineError for a scale that is no number, or absurd."""
    if not (math.isfinite(scale) and abs(scale) <= MAX_SCALE):
        raise EngineError(
            f"the scale of {name!r:.90} is {scale}, needed is a number from -{MAX_SCALE:g} to {MAX_SCALE:g}"
        )


def scales_of(adapters: Sequence[Adapter], scales: Sequence[float] | None) -> Scales:
    """Return the scales of a request, `effective` ones. scales: as it says; None: those of the adapters. EngineError
    unless there is a number for each adapter, or none at all."""
    if scales is None:
        scales = [adapter.scale for adapter in adapters]
    if scales and len(scales) != len(adapters):
        raise EngineError(f"{len(scales)} scales of adapters were given, and the model was loaded with {len(adapters)}")
    for scale in scales:
        check_scale(scale, "an adapter")
    return effective(scales)


def effective(scales: Sequence[float]) -> Scales:
    """Return scales as they are compared: 32-bit numbers, as llama.cpp has them, and none at all where all are 0."""
    rounded = struct.unpack(f"<{len(scales)}f", struct.pack(f"<{len(scales)}f", *scales))
    return rounded if any(rounded) else ()
