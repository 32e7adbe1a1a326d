"""An ONNX model in memory without its large weights, and where these are in its files."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from edge.onnx.file import (
    LONGEST_NAME,
    PROTOBUF_LIMIT,
    OnnxFile,
    check_dims,
    check_model,
    constants_not_inputs,
    data_file_of,
    message_of,
    read_weights,
    sort_nodes,
    tensors,
)
from edge.onnx.samples import TYPES
from partition.model.onnx_shapes import type_name
from partition.slices.onnx_recipe import weight_places, without_weights
from quant.errors import ModelFileError

_ALIGNED = 64  # bytes; kernels read this many together
_DTYPES = frozenset(TYPES.values())


@dataclass(frozen=True)
class WeightPlace:
    """A weight in a file."""

    path: Path
    offset: int
    n_bytes: int
    dtype: str  # numpy's name
    shape: tuple[int, ...]

    @property
    def span(self) -> int:
        """Bytes that the weight takes in memory."""
        return -(-self.n_bytes // _ALIGNED) * _ALIGNED


@dataclass(frozen=True)
class LeanFile:
    """A checked model whose large weights have no data."""

    file: OnnxFile
    places: Mapping[str, WeightPlace]  # by name of the weight


def load_lean(path: Path, least: int) -> LeanFile:
    """Return the model in `path` without the data of initializers that have at least `least` bytes.

    Weights of types that numpy does not have stay in the model. Raises the errors of `edge.onnx.file.load`.
    """
    import onnx

    size = path.stat().st_size
    if size > PROTOBUF_LIMIT:
        raise ModelFileError(f"{path} has {size} bytes; an ONNX file has at most 2 GiB, and more weights beside it")
    refused = f"{path} is not an ONNX model"
    if not size:
        raise ModelFileError(f"{refused}, or is cut off; get it again")
    with (
        open(path, "rb") as whole,
        mmap.mmap(whole.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as content,
    ):
        try:
            embedded, lean = weight_places(content), without_weights(content, least)
        except ValueError as error:
            raise ModelFileError(f"{refused}, or is cut off; get it again") from error
    model = message_of(lean, refused, ", or is cut off; get it again")
    if not model.ir_version or not model.opset_import or not model.graph.output:
        raise ModelFileError(f"{refused}: it names no version, no operator set or no outputs")
    places, data_files = dict[str, WeightPlace](), set[Path]()
    large = {tensor.name: tensor for tensor in model.graph.initializer}
    for tensor in tensors(model):
        what = f"{path}: tensor {tensor.name[:LONGEST_NAME]!r}"
        check_dims(tensor, what)
        is_initializer = large.get(tensor.name) is tensor
        dtype = type_name(tensor.data_type)
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            data_file = data_file_of(path, tensor, what)
            data_files.add(data_file)
            fields = {entry.key: entry.value for entry in tensor.external_data}
            start, n_bytes = int(fields.get("offset", "0") or "0"), None
        elif is_initializer and embedded.get(tensor.name, (0, 0))[1] >= least and not tensor.HasField("raw_data"):
            data_file, (start, n_bytes) = path, embedded[tensor.name]
            if dtype not in _DTYPES:
                with open(path, "rb") as whole:
                    whole.seek(start)
                    tensor.raw_data = whole.read(n_bytes)
        else:
            continue
        if dtype not in _DTYPES or not is_initializer:
            continue
        need = prod(tensor.dims) * np.dtype(dtype).itemsize
        if n_bytes not in (None, need):
            raise ModelFileError(f"{what} needs {need} bytes; the file has {n_bytes}")
        if need >= least:
            places[tensor.name] = WeightPlace(data_file, start, need, dtype, tuple(tensor.dims))
            tensor.ClearField("external_data")
            tensor.data_location = onnx.TensorProto.DEFAULT
    read_weights(path, model)  # this reads weights of other types, and small ones
    constants_not_inputs(model.graph)
    sort_nodes(model.graph)
    model.ir_version = max(model.ir_version, 4)  # older versions require every initializer to be an input
    copy = type(model).FromString(model.SerializeToString())
    weights_as_inputs(copy.graph, places)
    check_model(copy, str(path))
    n_bytes = sum(place.n_bytes for place in places.values())
    size += sum(data_file.stat().st_size for data_file in data_files)
    return LeanFile(OnnxFile(path, model, frozenset(data_files), n_bytes, size), places)


def weights_as_inputs(graph: Any, names: Collection[str]) -> list[str]:
    """Turn these initializers of a graph into inputs, and return their names."""
    import onnx

    moved = [tensor for tensor in graph.initializer if tensor.name in names]
    others = [tensor for tensor in graph.initializer if tensor.name not in names]
    others = [type(tensor).FromString(tensor.SerializeToString()) for tensor in others]
    graph.input.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in moved
    )
    del graph.initializer[:]
    graph.initializer.extend(others)
    return [tensor.name for tensor in moved]
