"""Stage of an ONNX model: consecutive nodes as a separate model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from partition.errors import CannotSlice
from partition.model.onnx_graph import OnnxGraph, flat_nodes, uses
from partition.model.onnx_shapes import Value, elem_type
from partition.plan.onnx_cuts import stage_io


def slice_model(model: Any, graph: OnnxGraph, start: int, stop: int) -> Any:
    """Return an onnx.ModelProto of the nodes [start, stop) of `graph`, which must be the graph of `model`.

    Its inputs and outputs are those of `stage_io`, with the model's open dimensions, so that one slice serves every
    size. It contains the weights that the stage uses, and the nodes that make its constants. The last stage makes
    outputs that depend on no input. Raises PlanError if the range is empty or outside the graph. Raises CannotSlice if
    a shape at one of its ends is unknown, or if the graph is another model's.
    """
    import onnx

    io = stage_io(graph, start, stop)
    listed = flat_nodes(model)
    stage = graph.nodes[start:stop]
    if any(node.place >= len(listed) or node.outputs[0] not in listed[node.place].output for node in stage):
        raise CannotSlice("the graph belongs to another model; read the model that is to be cut again")
    weights = {tensor.name for tensor in model.graph.initializer}
    fixed = [name for name in io.makes if name not in graph.makers]
    places, needed = _places(listed, {node.place for node in stage}, fixed, io.takes)

    sliced = onnx.ModelProto()
    sliced.ir_version = max(model.ir_version, 4)  # older versions require every initializer to be an input
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
    """Return the indexes of a stage's nodes and of the nodes that make its constants, and the names that all these
    use."""
    needed = {name for place in places for name in uses(listed[place])} | set(fixed)
    available = set(takes)
    for place in range(len(listed) - 1, -1, -1):
        node = listed[place]
        # A node outside the stage, whose output the stage needs but does not receive, makes a constant.
        if place not in places and any(name in needed and name not in available for name in node.output):
            places.add(place)
            needed.update(uses(node))
    return sorted(places), needed


def _declared(declared: Any, value: Value) -> Any:
    """Return a ValueInfoProto: the model's own if it has a shape, or else a new one."""
    import onnx

    if declared is not None and declared.type.tensor_type.HasField("shape"):
        return declared
    dims = [None if dim == "" else dim for dim in value.dims] if value.ranked else None
    return onnx.helper.make_tensor_value_info(value.name, elem_type(value.type), dims)
