"""Conversion of an ONNX model from 16-bit to 32-bit floats, which ONNX Runtime's 8-bit quantizer requires.

Weights that the quantizer leaves unchanged are stored in 16 bits again afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from edge.onnx.file import branches, tensors

_SUFFIX = "_float32"
_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "output_datatype")  # attributes that name an element type


def has_halves(model: Any) -> bool:
    """Return whether a ModelProto has weights of 16-bit floats."""
    import onnx

    return any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in tensors(model))


def to_float32(model: Any) -> None:
    """Convert every 16-bit float of a ModelProto to 32 bits. The ModelProto must contain its weights.

    The types of inputs and outputs stay; casts are added after the inputs and before the outputs.
    """
    import onnx

    half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    for tensor in tensors(model):
        if tensor.data_type == half:
            values = onnx.numpy_helper.to_array(tensor).astype("float32")
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    for graph in _graphs(model.graph):
        _change_types(graph.node, half, single)
        inner = () if graph is model.graph else (*graph.input, *graph.output)
        for value in (*graph.value_info, *inner):
            _set_type(value.type, half, single)
    for function in model.functions:
        _change_types(function.node, half, single)
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    half_inputs = [v.name for v in graph.input if v.type.tensor_type.elem_type == half and v.name not in weights]
    half_outputs = [value.name for value in graph.output if value.type.tensor_type.elem_type == half]
    _rename(graph, {name: name + _SUFFIX for name in (*half_inputs, *half_outputs)})
    casts = [
        onnx.helper.make_node("Cast", [name], [name + _SUFFIX], name=f"{name}_cast", to=single) for name in half_inputs
    ]
    nodes = [*casts, *graph.node]
    nodes += [
        onnx.helper.make_node("Cast", [name + _SUFFIX], [name], name=f"{name}_cast_back", to=half)
        for name in half_outputs
        if name not in half_inputs
    ]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def store_halves(model: Any) -> bool:
    """Store each 32-bit float weight in 16 bits if this is exact. Return whether there was any such weight.

    A cast to 32 bits follows the weight. ONNX Runtime computes the cast once, when it loads the model.
    """
    import numpy as np
    import onnx

    stored = False
    for graph in _graphs(model.graph):
        casts = []
        for tensor in graph.initializer:
            if tensor.data_type != onnx.TensorProto.FLOAT or len(tensor.dims) < 2:
                continue
            values = onnx.numpy_helper.to_array(tensor)
            with np.errstate(over="ignore"):
                halves = values.astype(np.float16)
            if np.array_equal(halves.astype(np.float32), values):
                name = tensor.name
                tensor.CopyFrom(onnx.numpy_helper.from_array(halves, f"{name}_float16"))
                to = onnx.TensorProto.FLOAT
                casts.append(onnx.helper.make_node("Cast", [tensor.name], [name], name=f"{name}_cast", to=to))
        if casts:
            nodes = [*casts, *(onnx.NodeProto.FromString(node.SerializeToString()) for node in graph.node)]
            del graph.node[:]
            graph.node.extend(nodes)
            stored = True
    return stored


def _graphs(graph: Any) -> Iterator[Any]:
    yield graph
    for node in graph.node:
        for branch in branches(node):
            yield from _graphs(branch)


def _change_types(nodes: Any, old: int, new: int) -> None:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.name in _TYPE_ATTRIBUTES and attribute.i == old:
                attribute.i = new


def _set_type(type_: Any, old: int, new: int) -> None:
    """Change the element type of a tensor, or of the tensors in a sequence or an optional value."""
    kind = type_.WhichOneof("value")
    if kind == "tensor_type":
        if type_.tensor_type.elem_type == old:
            type_.tensor_type.elem_type = new
    elif kind in ("sequence_type", "optional_type"):
        _set_type(getattr(type_, kind).elem_type, old, new)


def _rename(graph: Any, names: Mapping[str, str]) -> None:
    """Rename tensors in the nodes of a graph and of its subgraphs. A subgraph may define its own tensor of that
    name."""
    for tensor in graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for node in graph.node:
        for places in (node.input, node.output):
            for i, name in enumerate(places):
                places[i] = names.get(name, name)
        for branch in branches(node):
            own = {value.name for value in branch.input} | {tensor.name for tensor in branch.initializer}
            own |= {name for inner in branch.node for name in inner.output}
            outer = {name: new for name, new in names.items() if name not in own}
            _rename(branch, outer)
            for value in branch.output:
                value.name = outer.get(value.name, value.name)
    for value in graph.value_info:
        value.name = names.get(value.name, value.name)
