"""A stage of an ONNX model: nodes in a row, as a model of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from partition.errors import CannotSlice
from partition.model.onnx_graph import OnnxGraph, flat_nodes, uses
from partition.model.onnx_shapes import Value, elem_type
from partition.plan.onnx_cuts import stage_io


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
