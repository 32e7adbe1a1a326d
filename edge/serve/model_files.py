"""Facts about model files, cached until a file changes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from edge.errors import EdgeError
from edge.media.projector import encoders, open_projector
from partition.model.generation import generates
from partition.model.model import ModelShape
from quant.gguf.file import GgufFile
from quant.mixes import MIXES

_TYPES = {mix.id: mix.name.upper() for mix in MIXES.values()}  # by `general.file_type`


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a file and, if it is readable, its model."""

    created: int  # modification time in seconds since 1970; 0: there is no file
    size_bytes: int = 0
    trained_context: int | None = None  # tokens
    vocabulary: int | None = None
    embedding: int | None = None  # dimensions of a hidden state
    parameters: int | None = None
    generates: bool = True  # False for models that only make embeddings or scores
    metadata: Mapping[str, Any] = field(default_factory=dict)  # metadata of the header, without arrays
    encoders: tuple[str, ...] = ()  # encoders of its projector: vision, audio

    @property
    def quantization(self) -> str:
        """Name of the type of most weights, such as "Q4_K_M", or "unknown"."""
        return _TYPES.get(self.metadata.get("general.file_type", -1), "unknown")


def model_file(path: str, projector: str | None = None) -> ModelFacts:
    """Return the facts about a file and its projector.

    Facts are cached until the file changes: a header takes some milliseconds to read, and clients list all models.
    """
    try:
        status = os.stat(path)
    except OSError:
        return ModelFacts(0)
    file = _read(path, status.st_mtime_ns, status.st_size)
    return file if projector is None else replace(file, encoders=_encoders(projector))


@lru_cache(1024)
def _read(path: str, changed_ns: int, size_bytes: int) -> ModelFacts:
    created = changed_ns // 10**9
    with suppress(EdgeError, OSError):  # a request for this model gets the error
        file = GgufFile.open(path)
        shape = ModelShape.from_gguf(file)
        sizes = shape.context_length or None, shape.n_vocab, shape.n_embd, shape.n_params
        plain = {key: value for key, value in file.metadata.items() if isinstance(value, bool | int | float | str)}
        return ModelFacts(created, size_bytes, *sizes, generates(file), plain)
    return ModelFacts(created, size_bytes)


@lru_cache(64)
def _encoders(path: str) -> tuple[str, ...]:
    with suppress(EdgeError, OSError):  # a request for this model gets the error
        return encoders(open_projector(Path(path)))
    return ()
