"""A stage of an ONNX model: nodes in a row, as a model of its own, and the recipe that copies its weights.

Both files of a recipe are protobuf messages, in which the bytes of a weight lie in one piece. Where they lie is read
from the wire format itself (protobuf.dev, "Encoding"); the numbers of the fields are those of onnx.proto.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from partition.errors import CannotSlice
from partition.model.onnx_graph import OnnxGraph, flat_nodes, uses
from partition.model.onnx_shapes import Value, elem_type
from partition.plan.onnx_cuts import stage_io
from partition.slices.recipe import Copy, Literal, Recipe, Segment

_GRAPH, _INITIALIZER, _NAME, _RAW_DATA = 7, 5, 8, 9  # of ModelProto, GraphProto, TensorProto, TensorProto
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LEAST_BYTES = 4096  # of a weight that is copied: smaller ones are as well written out

Data = bytes | memoryview


def slice_model(model: Any, graph: OnnxGraph, start: int, stop: int) -> Any:
    """An onnx.ModelProto of the nodes [start, stop) of `graph`, which is the graph of `model`.

    Its inputs and outputs are those that `stage_io` says it takes and makes, with the dimensions that the model leaves
    open, so that one slice serves every size. It holds the weights, and the nodes that make constants, which the stage
    uses. Outputs of the model that depend on no input are made by the last stage. PlanError for a range that is empty
    or outside the graph; CannotSlice for a shape that nobody knows at one of its ends, and for another model's graph.
    """
    import onnx

    io = stage_io(graph, start, stop)
    listed = flat_nodes(model)
    stage = graph.nodes[start:stop]
    if any(node.place >= len(listed) or node.outputs[0] not in listed[node.place].output for node in stage):
        raise CannotSlice("the graph is another model's; look at the model again that is to be cut")
    weights = {tensor.name for tensor in model.graph.initializer}
    fixed = [name for name in io.makes if name not in graph.makers]
    places, needed = _places(listed, {node.place for node in stage}, fixed, io.takes)

    sliced = onnx.ModelProto()
    sliced.ir_version = max(model.ir_version, 4)  # before, every initializer had to be an input
    for field in ("producer_name", "producer_version", "domain", "model_version"):
        setattr(sliced, field, getattr(model, field))
    sliced.opset_import.extend(model.opset_import)
    sliced.metadata_props.extend(model.metadata_props)
    part = sliced.graph
    part.name = f"{model.graph.name or 'graph'}-{start}-{stop}"
    part.node.extend(listed[place] for place in places)
    declared = {value.name: value for value in (*model.graph.input, *model.graph.output) if value.name not in weights}
    values = {value.name: value for value in (*io.tensors_in, *io.tensors_out)}
    part.input.extend(_declared(declared.get(name), values[name]) for name in io.takes)
    part.output.extend(_declared(declared.get(name), values[name]) for name in io.makes)
    part.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in needed)
    part.sparse_initializer.extend(s for s in model.graph.sparse_initializer if s.values.name in needed)
    produced = {name for place in places for name in listed[place].output} - {*io.takes, *io.makes}
    part.value_info.extend(value for value in model.graph.value_info if value.name in produced)
    names = produced | needed | values.keys()
    part.quantization_annotation.extend(a for a in model.graph.quantization_annotation if a.tensor_name in names)
    return sliced


def _places(
    listed: Sequence[Any], places: set[int], fixed: Iterable[str], takes: Iterable[str]
) -> tuple[list[int], set[str]]:
    """The places of a stage's nodes with those that make its constants, in order, and all that these use."""
    needed = {name for place in places for name in uses(listed[place])} | set(fixed)
    available = set(takes)
    for place in range(len(listed) - 1, -1, -1):
        node = listed[place]
        # A node outside the stage that makes something it needs, which does not come in, makes a constant.
        if place not in places and any(name in needed and name not in available for name in node.output):
            places.add(place)
            needed.update(uses(node))
    return sorted(places), needed


def _declared(declared: Any, value: Value) -> Any:
    """A ValueInfoProto: the model's own where it has one with a shape."""
    import onnx

    if declared is not None and declared.type.tensor_type.HasField("shape"):
        return declared
    dims = [None if dim == "" else dim for dim in value.dims] if value.ranked else None
    return onnx.helper.make_tensor_value_info(value.name, elem_type(value.type), dims)


def stage_recipe(stage: Data, model: Data, model_digest: str) -> Recipe:
    """The recipe of `stage`, a serialized ModelProto, by the file that holds `model`, from which it was cut.

    Weights that are not in `model` under their name are written out, so a model with weights in another file is copied
    nowhere.
    """
    there = _weights(model)
    segments: list[Segment] = []
    at = 0
    for name, (offset, length) in sorted(_weights(stage).items(), key=lambda item: item[1]):
        source, size = there.get(name, (0, 0))
        if length < _LEAST_BYTES or size != length:
            continue
        if memoryview(stage)[offset : offset + length] != memoryview(model)[source : source + length]:
            continue
        segments += (Literal(bytes(stage[at:offset])), Copy(source, length))
        at = offset + length
    if at < len(stage):
        segments.append(Literal(bytes(stage[at:])))
    return Recipe(model_digest, len(model), tuple(segments))


def _weights(model: Data) -> dict[str, tuple[int, int]]:
    """Return the location of each initializer's raw data in a serialized ModelProto: its first byte, and how many."""
    places: dict[str, tuple[int, int]] = {}
    for field, start, stop in _fields(model, 0, len(model)):
        if field == _GRAPH:
            for inner, lo, hi in _fields(model, start, stop):
                if inner == _INITIALIZER:
                    parts = {number: (first, end) for number, first, end in _fields(model, lo, hi)}
                    if _NAME in parts and _RAW_DATA in parts:
                        first, end = parts[_NAME]
                        name = bytes(model[first:end]).decode(errors="replace")
                        begin, finish = parts[_RAW_DATA]
                        places[name] = begin, finish - begin
    return places


def _fields(data: Data, at: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The fields of the message in data[at:stop] that have a length: number, first byte, end. ValueError if the
    bytes are none."""
    while at < stop:
        tag, at = _varint(data, at, stop)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(data, at, stop)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        elif kind == _BYTES:
            length, at = _varint(data, at, stop)
            if length > stop - at:
                raise ValueError(f"a field of {length} bytes, where {stop - at} are left")
            yield tag >> 3, at, at + length
            at += length
        else:
            raise ValueError(f"a field of the wire type {kind}, which has no length")


def _varint(data: Data, at: int, stop: int) -> tuple[int, int]:
    value = shift = 0
    while at < stop and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError("a number that does not end")
