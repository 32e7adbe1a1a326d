"""LoRA adapters that a model is loaded with, and their scales in a request."""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge.errors import EngineError
from partition.model.check_adapter import open_adapter
from partition.model.file import ModelFile

MAX_SCALE = 1e6
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?inf|nan", re.IGNORECASE | re.ASCII)

Scales = tuple[float, ...]
"""The scale of each loaded adapter, in their order; empty if no adapter is used."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter that a model is loaded with."""

    path: Path
    scale: float  # scale for requests that specify none

    @classmethod
    def from_text(cls, text: str) -> Adapter:
        """Return the adapter in FILE or FILE:SCALE. The name of an existing file is never split.

        Raises EngineError if the scale is invalid.
        """
        name, _, scale = text.rpartition(":")
        value = parse_scale(scale, text) if name and not os.path.exists(text) else None
        return cls(Path(text), 1.0) if value is None else cls(Path(name), value)

    @property
    def name(self) -> str:
        """Name of the adapter in requests: the file name without its suffix."""
        return self.path.stem


def adapters_from(texts: Sequence[str], other_names: Collection[str] = ()) -> tuple[Adapter, ...]:
    """Return the adapters in FILE[:SCALE] texts.

    Raises EngineError for an invalid scale, or if two adapters, or an adapter and one of `other_names`, have the same
    name.
    """
    adapters = tuple(map(Adapter.from_text, texts))
    names = [*other_names, *(adapter.name for adapter in adapters)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise EngineError(f"{twice!r:.90} is the name of two adapters or models; give one file another name")
    return adapters


def checked_for(model: Path, texts: Sequence[str]) -> list[str]:
    """Return the FILE[:SCALE] texts with absolute paths, after a check of each file's header.

    Raises the errors of `adapters_from`, and ModelFileError if an adapter belongs to another model.
    """
    file, adapters = ModelFile.open(model), adapters_from(texts)
    for adapter in adapters:
        open_adapter(adapter.path, file)
    return [f"{adapter.path.absolute()}:{adapter.scale}" for adapter in adapters]


def scales_by_name(adapters: Sequence[Adapter], scales: Mapping[str, float]) -> Scales:
    """Return the effective scale of each adapter, in the order of `adapters`.

    scales: scale by adapter name. Adapters without an entry get scale 0.
    Raises EngineError if a name is unknown.
    """
    names = [adapter.name for adapter in adapters]
    if unknown := next((name for name in scales if name not in names), None):
        raise EngineError(f"there is no adapter {unknown!r:.90}; there are {', '.join(names) or 'none'}")
    return effective([scales.get(name, 0.0) for name in names])


def parse_scale(text: str, name: str) -> float | None:
    """Return the number in a text; None if the text is not a number. Raises EngineError for an invalid scale."""
    if not _NUMBER.fullmatch(text):
        return None
    check_scale(float(text), name)
    return float(text)


def check_scale(scale: float, name: str) -> None:
    """Raise EngineError if a scale is not finite, or if its absolute value exceeds MAX_SCALE.

    name: name of the adapter, for the error message.
    """
    if not (math.isfinite(scale) and abs(scale) <= MAX_SCALE):
        raise EngineError(
            f"the scale of {name!r:.90} is {scale}, expected a number from -{MAX_SCALE:g} to {MAX_SCALE:g}"
        )


def scales_of(adapters: Sequence[Adapter], scales: Sequence[float] | None) -> Scales:
    """Return the effective scales of a request.

    scales: scales in the request, in the order of `adapters`; None: the default scale of each adapter; empty: no
    adapter is used.
    Raises EngineError if the number of scales differs from the number of adapters.
    """
    if scales is None:
        scales = [adapter.scale for adapter in adapters]
    if scales and len(scales) != len(adapters):
        raise EngineError(f"{len(scales)} scales of adapters were given, and the model was loaded with {len(adapters)}")
    for scale in scales:
        check_scale(scale, "an adapter")
    return effective(scales)


def effective(scales: Sequence[float]) -> Scales:
    """Return scales in the form in which they are compared: rounded to 32 bits as in llama.cpp, and empty if all are
    0."""
    rounded = struct.unpack(f"<{len(scales)}f", struct.pack(f"<{len(scales)}f", *scales))
    return rounded if any(rounded) else ()
