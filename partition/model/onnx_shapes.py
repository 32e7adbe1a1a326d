"""Shapes and types of all tensors in an ONNX graph, without the weights' data and without a run.

This module also handles the sizes of open dimensions of inputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from partition.errors import PlanError
from quant.text import first_line

_KEEP = 1024  # bytes; larger weights are used by shape only, smaller ones, such as target shapes, with their values
_BITS = re.compile(r"[a-z]+(\d+)")  # bits in a type's name; bool has none
_STANDARD = ("", "ai.onnx", "ai.onnx.ml")
_CROSSING = {"float32", "float64", "float16", "bool"} | {f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)}
NAMELESS = "", "?"  # names that exporters write for nameless dimensions; two of these need not be equal

Shape = Sequence[int | str]  # shape of an input; an open dimension is given by its name


def dim_key(name: str, axis: int, dim: str) -> str:
    """Return the key of an open dimension in a mapping of sizes: its name, or "input[axis]" if it is nameless."""
    return f"{name}[{axis}]" if dim in NAMELESS else dim


def dim_keys(shapes: Mapping[str, Shape]) -> dict[str, list[str]]:
    """Return the open dimensions by key, with the axes of each as "input[axis]"."""
    keys: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        for axis, dim in enumerate(shape):
            if isinstance(dim, str):
                keys.setdefault(dim_key(name, axis, dim), []).append(f"{name}[{axis}]")
    return keys


def dim_sizes(shapes: Mapping[str, Shape], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes by key. `sizes` may also name one axis of a named dimension as "input[axis]".

    Raises PlanError if no input has such an open dimension, if one dimension has two sizes, or if a size is negative.
    """
    keys = dim_keys(shapes)
    key_of = {axis: key for key, axes in keys.items() for axis in axes} | {key: key for key in keys}
    by_name: dict[str, int] = {}
    for name, size in sizes.items():
        if name not in key_of:
            there = f"open are {', '.join(keys)}" if keys else "the inputs have no open dimension"
            raise PlanError(f"a size is given for {name!r}, which no input has; {there}")
        if size < 0:
            raise PlanError(f"the size of {name!r} is {size}; expected 0 or more")
        key = key_of[name]
        if by_name.setdefault(key, size) != size:
            raise PlanError(f"the dimension {key!r} has one size for all inputs; {by_name[key]} and {size} are given")
    return by_name


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of a graph: its shape for the given dimensions, and the model's open dimensions."""

    name: str
    type: str  # numpy's name, such as "float32", or ONNX's name if numpy has no such type: "bfloat16"
    shape: tuple[int, ...]
    dims: tuple[int | str, ...]  # dimensions as in the model: size, name, or "" for a nameless open dimension
    ranked: bool = True  # false if another input may change the number of dimensions

    @property
    def crosses(self) -> bool:
        """True if stages can exchange it, because numpy has its type."""
        return self.type in _CROSSING

    @property
    def n_bytes(self) -> int:
        """Bytes of its packed values."""
        return type_bytes(self.type, prod(self.shape))


def type_bytes(type_name: str, values: int) -> int:
    """Return the bytes of `values` values of a type, packed if a value takes less than a byte."""
    bits = _BITS.match(type_name)
    return (values * (int(bits[1]) if bits else 8) + 7) // 8


def type_name(elem_type: int) -> str | None:
    """Return numpy's name of an element type of ONNX; None for text and unknown types."""
    import onnx

    if elem_type not in onnx.TensorProto.DataType.values():
        return None
    name = str(onnx.TensorProto.DataType.Name(elem_type)).lower()
    return {"float": "float32", "double": "float64", "string": None, "undefined": None}.get(name, name)


def elem_type(type_name: str) -> int:
    """Return the ONNX element type for a name from `type_name`."""
    import onnx

    name = {"float32": "float", "float64": "double"}.get(type_name, type_name)
    return int(onnx.TensorProto.DataType.Value(name.upper()))


@dataclass(frozen=True)
class Shapes:
    """Inferred types and shapes of a graph's tensors."""

    values: dict[str, Value]  # tensors of known shape
    types: dict[str, str]  # element types, including tensors of unknown shape
    ranks: dict[str, int] = field(default_factory=dict)  # number of dimensions, including tensors with open dimensions
    unknown: str = ""  # reason for missing shapes, from shape inference

    def observed(self, name: str, type_name: str, shape: tuple[int, ...]) -> Value:
        """Return a tensor whose shape was observed in a run. Another run may give another shape."""
        return Value(name, type_name, shape, ("",) * len(shape), self.ranks.get(name) == len(shape))


def inferred(model: Any, nodes: Sequence[Any], constants: Iterable[str], dims: Mapping[str, int]) -> Shapes:
    """Infer the shapes of tensors from the shapes of the inputs.

    nodes: nodes of the model, with inlined functions
    constants: names of tensors that depend on no input
    dims: sizes of open dimensions, by name or as "input[axis]"

    Raises PlanError if an open dimension of an input has no size, or if no input has a dimension in `dims`.
    """
    weights = {
        tensor.name for tensor in (*model.graph.initializer, *(s.values for s in model.graph.sparse_initializer))
    }
    inputs = [value for value in model.graph.input if value.name not in weights]
    sizes = _sizes(inputs, dims)
    skeleton = _skeleton(model, nodes, inputs)
    symbols = {key for key in sizes if not key.endswith("]")}
    open_types = _types(skeleton)[0] if sizes else {}
    _bind(skeleton, sizes)
    types, unknown = _types(skeleton)
    inferred_shapes = Shapes({}, {})
    for name, (elem, shape) in types.items():
        kind = type_name(elem)
        if kind is None:
            continue
        inferred_shapes.types[name] = kind
        if shape is None:
            continue
        inferred_shapes.ranks[name] = len(shape)
        if not all(isinstance(dim, int) for dim in shape):
            continue
        sized = tuple(int(dim) for dim in shape)
        left: tuple[int | str, ...] = sized
        if sizes:
            known_dims = open_types.get(name, (0, None))[1]
            left = known_dims if known_dims is not None and len(known_dims) == len(sized) else ("",) * len(sized)
        # Names that shape inference invents are useless outside.
        known_dims = tuple(dim if isinstance(dim, int) or dim in symbols else "" for dim in left)
        inferred_shapes.values[name] = Value(name, kind, sized, known_dims)
    fixed = set(constants)
    if all(name in inferred_shapes.values or name in fixed for node in nodes for name in node.output if name):
        return inferred_shapes
    return Shapes(inferred_shapes.values, inferred_shapes.types, inferred_shapes.ranks, unknown or _reason(skeleton))


def _sizes(inputs: Sequence[Any], dims: Mapping[str, int]) -> dict[str, int]:
    """Return the size of every open dimension by its key."""
    shapes: dict[str, list[int | str]] = {}
    for value in inputs:
        tensor = value.type.tensor_type  # has no dimensions if the model declares no shape
        shapes[value.name] = [str(dim.dim_param) if _is_open(dim) else dim.dim_value for dim in tensor.shape.dim]
    sizes = dim_sizes(shapes, dims)
    for key, axes in dim_keys(shapes).items():
        if key not in sizes:
            name, _, axis = axes[0].removesuffix("]").rpartition("[")
            raise PlanError(f"input {name!r}: dimension {axis} ({key}) is open; expected a size for {key!r}")
    return sizes


def _is_open(dim: Any) -> bool:
    """Return whether a dimension has no size. Some exporters write -1 in this case."""
    return not dim.HasField("dim_value") or dim.dim_value < 0


def _skeleton(model: Any, nodes: Sequence[Any], inputs: Sequence[Any]) -> Any:
    """Return the model without its weights' data; the weights become inputs.

    Declared shapes of inner tensors are left out, because they may hold for other sizes only. They are kept for
    operators that ONNX does not know.
    """
    import onnx

    bare = onnx.ModelProto(ir_version=max(model.ir_version, 4))
    bare.opset_import.extend(model.opset_import)
    bare.graph.name = "shapes"
    bare.graph.input.extend(inputs)
    for tensor in model.graph.initializer:
        if tensor.ByteSize() <= _KEEP:
            bare.graph.initializer.append(tensor)
        else:
            bare.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    for sparse in model.graph.sparse_initializer:
        kind = sparse.values.data_type
        bare.graph.input.append(onnx.helper.make_tensor_value_info(sparse.values.name, kind, sparse.dims))
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in nodes:
        large = node.op_type == "Constant" and node.ByteSize() > _KEEP
        value = next((a.t for a in node.attribute if a.name == "value" and large), None)
        if value is None:
            _add_node(bare.graph, node, weights)
        else:
            name = node.output[0]
            bare.graph.input.append(onnx.helper.make_tensor_value_info(name, value.data_type, value.dims))
    foreign = {name for node in nodes if node.domain not in _STANDARD for name in node.output}
    bare.graph.value_info.extend(value for value in model.graph.value_info if value.name in foreign)
    for output in model.graph.output:
        copy = bare.graph.output.add(name=output.name)
        if output.name in foreign or not output.type.HasField("tensor_type"):
            copy.CopyFrom(output)
        else:
            copy.type.tensor_type.elem_type = output.type.tensor_type.elem_type
    return bare


def _add_node(graph: Any, node: Any, weights: Mapping[str, Any]) -> None:
    """Add a node. ONNX Runtime's operators with packed weights become their standard operators with whole weights."""
    import onnx

    options = {a.name: a.i for a in node.attribute}
    if node.op_type == "MatMulNBits" and {"K", "N"} <= options.keys() and node.input[2] in weights:
        name = f"{node.output[0]}.unpacked"
        kind = weights[node.input[2]].data_type  # type of the scales
        graph.input.append(onnx.helper.make_tensor_value_info(name, kind, [options["K"], options["N"]]))
        graph.node.append(onnx.helper.make_node("MatMul", [node.input[0], name], node.output, node.name))
    elif node.op_type == "GatherBlockQuantized" and node.input[0] in weights and node.input[2] in weights:
        table = weights[node.input[0]]
        shape = list(table.dims)
        if table.data_type == onnx.TensorProto.UINT8:  # a byte holds two values
            shape[options.get("quantize_axis", len(shape) - 1)] *= 8 // options.get("bits", 4)
        name = f"{node.output[0]}.unpacked"
        graph.input.append(onnx.helper.make_tensor_value_info(name, weights[node.input[2]].data_type, shape))
        axis = options.get("gather_axis", 0)
        graph.node.append(onnx.helper.make_node("Gather", [name, node.input[1]], node.output, node.name, axis=axis))
    else:
        graph.node.append(node)


def _bind(skeleton: Any, sizes: Mapping[str, int]) -> None:
    """Set the sizes of the open dimensions."""
    for value in (*skeleton.graph.input, *skeleton.graph.value_info, *skeleton.graph.output):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            key = dim_key(value.name, axis, str(dim.dim_param))
            if _is_open(dim) and key in sizes:
                dim.dim_value = sizes[key]


def _types(skeleton: Any) -> tuple[dict[str, tuple[int, tuple[int | str, ...] | None]], str]:
    """Return element type and shape of every tensor, and the reason if inference failed ("" otherwise).

    A dimension is a size, a name or ""; an unknown shape is None. If inference fails, only declared shapes are known.
    """
    import onnx

    graph, failed = skeleton.graph, ""
    try:
        graph = onnx.shape_inference.infer_shapes(skeleton, data_prop=True).graph
    except Exception as exc:  # InferenceError, or another class if the model cannot be serialized
        failed = first_line(exc)
    types: dict[str, tuple[int, tuple[int | str, ...] | None]] = {}
    for value in (*graph.value_info, *graph.input, *graph.output):
        tensor = value.type.tensor_type
        if value.type.HasField("tensor_type"):
            dims = tuple(str(d.dim_param) if _is_open(d) else d.dim_value for d in tensor.shape.dim)
            types[value.name] = (tensor.elem_type, dims if tensor.HasField("shape") else None)
    for weight in graph.initializer:
        types[weight.name] = (weight.data_type, tuple(weight.dims))
    return types, failed


def _reason(skeleton: Any) -> str:
    """Return the reason why shape inference stopped, in its own words; "" if it reports no error."""
    import onnx

    try:
        onnx.shape_inference.infer_shapes(skeleton, strict_mode=True, data_prop=True)
    except Exception as exc:  # InferenceError, or another class if the model cannot be serialized
        return first_line(exc)
    return ""
