"""LoRA adapters that a model is loaded with, and the scales that a request uses them with."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from edge.errors import EngineError
from partition.model.check_adapter import adapter_pairs
from quant.gguf.file import GgufFile

if TYPE_CHECKING:  # a server names adapters, and loads nothing of what computes
    pass

_MOST_SCALE = 1e6
_READ_BYTES = 1 << 20

Scales = tuple[float, ...]
"""The scale of each adapter that a model was loaded with, in their order; empty: none is used."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter that a model is loaded with."""

    path: Path
    scale: float = 1.0  # for requests that do not say

    @classmethod
    def from_text(cls, text: str) -> Adapter:
        """Return the adapter that FILE or FILE:SCALE names. EngineError for a scale that cannot be."""
        name, colon, scale = text.rpartition(":")
        try:
            value = float(scale) if colon and name else None
        except ValueError:  # the colon is part of the name
            value = None
        if value is None:
            return cls(Path(text))
        check_scale(value, text)
        return cls(Path(name), value)

    @property
    def name(self) -> str:
        """The name that requests call it by: its file's, without the ending."""
        return self.path.stem

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the file. EngineError if it cannot be read."""
        digest = hashlib.sha256()
        try:
            with self.path.open("rb") as file:
                while data := file.read(_READ_BYTES):
                    digest.update(data)
            return digest.digest()
        except OSError as error:
            raise EngineError(f"the adapter {self.path} cannot be read: {error.strerror or error}") from error


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


def check_scale(scale: float, of: str) -> None:
    """Raise EngineError for a scale that is no number, or absurd."""
    if not (math.isfinite(scale) and abs(scale) <= _MOST_SCALE):
        raise EngineError(
            f"the scale of {of!r:.90} is {scale}, needed is a number from -{_MOST_SCALE:g} to {_MOST_SCALE:g}"
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


def namespace_with(namespace: str, adapters: Sequence[Adapter], scales: Scales) -> str:
    """Return the namespace of keys and values that were computed with adapters: nothing else may share them."""
    if not scales:
        return namespace
    used = [adapter.digest + struct.pack("<f", scale) for adapter, scale in zip(adapters, scales, strict=True) if scale]
    return f"{namespace}\0{hashlib.sha256(b''.join(sorted(used))).hexdigest()}"
