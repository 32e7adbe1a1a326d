"""Shapes and types of every tensor in an ONNX graph, without its weights' data and without running it,
and the sizes of dimensions that inputs leave open."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from partition.errors import PlanError
from quant.text import first_line

_KEEP = 1024  # bytes: larger weights are known by shape alone; smaller ones, such as target shapes, with their values
_BITS = re.compile(r"[a-z]+(\d+)")  # in the name of a type; bool has none
_STANDARD = ("", "ai.onnx", "ai.onnx.ml")
_CROSSING = {"float32", "float64", "float16", "bool"} | {f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)}
NAMELESS = "", "?"  # names that exporters write where there is none: two dimensions called so need not be equal

Shape = Sequence[int | str]  # of an input; an open dimension is its name


def dim_key(name: str, axis: int, dim: str) -> str:
    """The key of an open dimension in a mapping of sizes: its name, or "input[axis]" where it has none."""
    return f"{name}[{axis}]" if dim in NAMELESS else dim


def dim_keys(shapes: Mapping[str, Shape]) -> dict[str, list[str]]:
    """The open dimensions by key, each with the axes that it is: "input[axis]"."""
    keys: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        for axis, dim in enumerate(shape):
            if isinstance(dim, str):
                keys.setdefault(dim_key(name, axis, dim), []).append(f"{name}[{axis}]")
    return keys


def dim_sizes(shapes: Mapping[str, Shape], sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes by key, where `sizes` may also name one axis of a dimension with a name: "input[axis]".

    PlanError for a dimension that no input leaves open, for one with two sizes, and for a size below 0.
    """
    keys = dim_keys(shapes)
    key_of = {axis: key for key, axes in keys.items() for axis in axes} | {key: key for key in keys}
    by_name: dict[str, int] = {}
    for name, size in sizes.items():
        if name not in key_of:
            there = f"open are {', '.join(keys)}" if keys else "the inputs have no open dimension"
            raise PlanError(f"a size is given for {name!r}, which no input has; {there}")
        if size < 0:
            raise PlanError(f"the size of {name!r} is {size}; needed is 0 or more")
        key = key_of[name]
        if by_name.setdefault(key, size) != size:
            raise PlanError(f"the dimension {key!r} has one size for all inputs; {by_name[key]} and {size} are given")
    return by_name


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of a graph: its shape at the dimensions the graph is looked at with, and what the model leaves open."""

    name: str
    type: str  # as numpy calls it: "float32"; in ONNX's words where numpy has none: "bfloat16"
    shape: tuple[int, ...]
    dims: tuple[int | str, ...]  # as the model has them: a name, or "" for an open dimension without one
    ranked: bool = True  # False: another input may give it another number of dimensions

    @property
    def crosses(self) -> bool:
        """True if it can be sent between stages: numpy has its type."""
        return self.type in _CROSSING

    @property
    def n_bytes(self) -> int:
        """Bytes of its values, packed."""
        return type_bytes(self.type, prod(self.shape))


def type_bytes(type_name: str, values: int) -> int:
    """Bytes of so many values of a type that `type_name` gave a name, packed where a value takes less than one."""
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
    """The element type that `type_name` gave a name."""
    import onnx

    name = {"float32": "float", "float64": "double"}.get(type_name, type_name)
    return int(onnx.TensorProto.DataType.Value(name.upper()))


@dataclass(frozen=True)
class Shapes:
    """Facts about the tensors of a graph."""

    values: dict[str, Value]  # those whose shape is known
    types: dict[str, str]  # element types, also of tensors whose shape is not known
    ranks: dict[str, int] = field(default_factory=dict)  # also of those with open dimensions
    unknown: str = ""  # why some have no shape, in the words of shape inference

    def observed(self, name: str, type_name: str, shape: tuple[int, ...]) -> Value:
        """The value of a tensor whose shape was seen in a run: another run may give it others."""
        return Value(name, type_name, shape, ("",) * len(shape), self.ranks.get(name) == len(shape))


def inferred(model: Any, nodes: Sequence[Any], constants: Iterable[str], dims: Mapping[str, int]) -> Shapes:
    """Infer the shapes of tensors from those of the inputs.

    nodes: of the model, functions inlined. constants: names of what depends on no input. dims: the size of each open
    dimension, by its name, or as "input[axis]". PlanError for an open dimension of an input without a size, and for a
    size that no input asks for.
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
        # Names that shape inference makes up mean nothing to anybody.
        known_dims = tuple(dim if isinstance(dim, int) or dim in symbols else "" for dim in left)
        inferred_shapes.values[name] = Value(name, kind, sized, known_dims)
    fixed = set(constants)
    if all(name in inferred_shapes.values or name in fixed for node in nodes for name in node.output if name):
        return inferred_shapes
    return Shapes(inferred_shapes.values, inferred_shapes.types, inferred_shapes.ranks, unknown or _reason(skeleton))


def _sizes(inputs: Sequence[Any], dims: Mapping[str, int]) -> dict[str, int]:
    """The size of every open dimension, by its key."""
    shapes: dict[str, list[int | str]] = {}
    for value in inputs:
        tensor = value.type.tensor_type  # without dimensions where the model declares no shape
        shapes[value.name] = [str(dim.dim_param) if _is_open(dim) else dim.dim_value for dim in tensor.shape.dim]
    sizes = dim_sizes(shapes, dims)
    for key, axes in dim_keys(shapes).items():
        if key not in sizes:
            name, _, axis = axes[0].removesuffix("]").rpartition("[")
            raise PlanError(f"input {name!r}: dimension {axis} ({key}) is open; needed is a size for {key!r}")
    return sizes


def _is_open(dim: Any) -> bool:
    """Return whether a dimension has no size. Some exporters write -1 for that."""
    return not dim.HasField("dim_value") or dim.dim_value < 0


def _skeleton(model: Any, nodes: Sequence[Any], inputs: Sequence[Any]) -> Any:
    """The model without the data of its weights, which become inputs. What the model says of shapes inside is left out,
    other than for operators that ONNX does not know, because it may hold at other sizes only."""
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
    """The node; for ONNX Runtime's operators with weights packed into 4 bits, the one with whole weights it is for."""
    import onnx

    options = {a.name: a.i for a in node.attribute}
    if node.op_type == "MatMulNBits" and {"K", "N"} <= options.keys() and node.input[2] in weights:
        name = f"{node.output[0]}.unpacked"
        kind = weights[node.input[2]].data_type  # of the scales
        graph.input.append(onnx.helper.make_tensor_value_info(name, kind, [options["K"], options["N"]]))
        graph.node.append(onnx.helper.make_node("MatMul", [node.input[0], name], node.output, node.name))
    elif node.op_type == "GatherBlockQuantized" and node.input[0] in weights and node.input[2] in weights:
        table = weights[node.input[0]]
        shape = list(table.dims)
        if table.data_type == onnx.TensorProto.UINT8:  # two in a byte
            shape[options.get("quantize_axis", len(shape) - 1)] *= 8 // options.get("bits", 4)
        name = f"{node.output[0]}.unpacked"
        graph.input.append(onnx.helper.make_tensor_value_info(name, weights[node.input[2]].data_type, shape))
        axis = options.get("gather_axis", 0)
        graph.node.append(onnx.helper.make_node("Gather", [name, node.input[1]], node.output, node.name, axis=axis))
    else:
        graph.node.append(node)


def _bind(skeleton: Any, sizes: Mapping[str, int]) -> None:
    """Give the open dimensions their sizes."""
    for value in (*skeleton.graph.input, *skeleton.graph.value_info, *skeleton.graph.output):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            key = dim_key(value.name, axis, str(dim.dim_param))
            if _is_open(dim) and key in sizes:
                dim.dim_value = sizes[key]


def _types(skeleton: Any) -> tuple[dict[str, tuple[int, tuple[int | str, ...] | None]], str]:
    """Element type and shape of every tensor; a dimension is its size, its name or "", an unknown shape is None. And
    why nothing but what the model declares is known, where inference fails; else ""."""
    import onnx

    graph, failed = skeleton.graph, ""
    try:
        graph = onnx.shape_inference.infer_shapes(skeleton, data_prop=True).graph
    except Exception as exc:  # InferenceError, and others for what cannot be encoded
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
    """Return why shape inference stopped, in its own words; "" if it found nothing wrong."""
    import onnx

    try:
        onnx.shape_inference.infer_shapes(skeleton, strict_mode=True, data_prop=True)
    except Exception as exc:  # InferenceError, and others for what cannot be encoded
        return first_line(exc)
    return ""
