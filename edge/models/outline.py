"""Outlines: model files of the shape and the types of a published model, with a hole in place of its weights.

A planner, llama.cpp's quantizer on a dry run, and slices of zeros read nothing else of a file, so an outline is planned
and measured as the published file would be. The hole takes no room on a disk, and nothing is downloaded.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge.models.shapes import Shape
from edge.models.synth import layout
from quant.gguf.file import GgufFile
from quant.gguf.writer import NewTensor, encoded, header
from quant.types import TensorType

_KINDS = {bool: "bool", int: "u32", float: "f32", str: "str"}
_FACTORS = "rope_freqs.weight"  # rotation divides by them


def write_outline(path: Path, shape: Shape, name: str, types: Mapping[str, TensorType] | None = None) -> GgufFile:
    """Write the outline of a model and open it. types: by tensor; None: F16, and F32 where quantizers keep that.
    ShapeError for bad figures; OSError if the disk cannot hold such a file."""
    types_by_name = {tensor.name: tensor.type for tensor in layout(shape, "f16", "f16")}
    tensors = [NewTensor(tensor, dims[::-1], (types or types_by_name)[tensor]) for tensor, dims in shape.tensors()]
    metadata = {
        "general.architecture": shape.arch,
        "general.name": name,
        **shape.metadata(),
        "tokenizer.ggml.model": "none",
    }
    head = header({key: _encoded(value) for key, value in metadata.items()}, tensors)
    with path.open("wb") as out:
        out.write(head)
        end = len(head)
        for tensor in tensors:
            if tensor.name == _FACTORS:
                out.seek(end)
                out.write(struct.pack("<f", 1.0) * tensor.shape[0])
            end += tensor.n_bytes + tensor.padding
        out.truncate(end)
    return GgufFile.open(path)


def _encoded(value: Any) -> bytes:
    if isinstance(value, list):
        return encoded("arr[i32]", value)
    return encoded(_KINDS[type(value)], value)
