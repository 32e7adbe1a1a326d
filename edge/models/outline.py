"""Outlines: model files of the shape and the types of a published model, with a hole in place of its weights.

A planner, llama.cpp's quantizer on a dry run, and slices of zeros read nothing else of a file, so an outline is planned
and measured as the published file would be. The hole takes no room on a disk, and nothing is downloaded.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

from edge.models.shapes import Shape
from edge.models.synth import layout, metadata_pairs
from quant.gguf.file import GgufFile
from quant.gguf.writer import NewTensor, header
from quant.types import TensorType

_FACTORS = "rope_freqs.weight"  # rotation divides by them


def write_outline(path: Path, shape: Shape, name: str, types: Mapping[str, TensorType] | None = None) -> GgufFile:
    """Write the outline of a model and open it. types: by tensor; None: F16, and F32 where quantizers keep that.
    ShapeError for bad figures; OSError if the disk cannot hold such a file."""
    tensors = layout(shape, "f16", "f16")
    if types:
        tensors = [NewTensor(tensor.name, tensor.shape, types[tensor.name]) for tensor in tensors]
    metadata = {
        "general.architecture": shape.arch,
        "general.name": name,
        **shape.metadata(),
        "tokenizer.ggml.model": "none",
    }
    head = header(metadata_pairs(metadata), tensors)
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
