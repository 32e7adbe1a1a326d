"""Test stages of ONNX models: one after another, they give the results of the whole model."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from edge.onnx import file
from edge.onnx.file import OnnxFile
from edge.onnx.runtime import runtime
from partition.errors import CannotSlice, PlanError
from partition.model.onnx_graph import OnnxGraph
from partition.plan.onnx_cuts import Cut, cuts, stage_io
from partition.slices.onnx_slice import slice_model
from tests.support.onnx_graphs import (
    TOLERANCES,
    conv_net,
    difference,
    images,
    light,
    mlp,
    run,
    runs,
    with_random_weights,
)
from tests.support.onnx_networks import mobilenet_v2, model_of, resnet18
from tests.support.thorough import thorough

TOLERANCE = TOLERANCES["float32"]

# EDGE_ALL_CUTS=1: all cuts of all graphs, which takes minutes. Otherwise so many of each; the three graphs that are not
# here are chains of few nodes with hundreds of megabytes of weights.
ALL = bool(os.environ.get("EDGE_ALL_CUTS"))
LARGE = ("bvlc_alexnet", "vgg19", "zfnet512")
SMALL = ("squeezenet", "shufflenet")
SAMPLED = {"squeezenet": 65, "shufflenet": 40, "inception_v1": 3}
SLOW = {"densenet121": 2, "inception_v2": 2, "resnet50": 0}  # of operators that the others have, too

Feeds = dict[str, np.typing.NDArray[np.generic]]


def outputs(model: ModelProto, feeds: Mapping[str, Any], optimized: bool = True) -> dict[str, Any]:
    """Return what ONNX Runtime makes of the inputs that the model has, on one thread."""
    ort = runtime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    used = {value.name: feeds[value.name] for value in session.get_inputs()}
    return dict(zip(names, session.run(names, used), strict=True))


def pipeline(model: ModelProto, graph: OnnxGraph, positions: Sequence[int], feeds: Feeds) -> dict[str, Any]:
    """The outputs of the stages that the cuts make, each of which gets only what crosses the cut before it."""
    crossing: dict[str, Any] = dict(feeds)
    for start, stop in pairwise((0, *positions, len(graph.nodes))):
        io = stage_io(graph, start, stop)
        stage = slice_model(model, graph, start, stop)
        onnx.checker.check_model(stage)
        assert [value.name for value in stage.graph.input] == list(io.takes)
        built = outputs(stage, crossing)
        assert tuple(built) == io.makes
        crossing = {value.name: (crossing | built)[value.name] for value in io.tensors_out}
    return crossing


def second_stages(model: ModelProto, graph: OnnxGraph, tried: Sequence[Cut], feeds: Feeds) -> list[dict[str, Any]]:
    """The outputs of the second stage of each cut, on what the whole model, run once, makes before it."""
    if not tried:
        return []
    exposed = ModelProto()
    exposed.CopyFrom(model)
    names = {value.name for cut in tried for value in cut.tensors} - {*graph.inputs, *graph.outputs}
    exposed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(names))
    built = feeds | outputs(exposed, feeds)
    n = len(graph.nodes)
    return [outputs(slice_model(model, graph, cut.position, n), built) for cut in tried]


@pytest.mark.parametrize("name", [*SAMPLED, *thorough(*SLOW), *(LARGE if ALL else ())])
def test_stages_of_real_graphs_equal_the_whole(name: str) -> None:
    model = with_random_weights(light(name))
    graph = OnnxGraph.from_model(model)
    pictures = images(2)
    [expected], [other] = runs(model, (pictures[:1],), (pictures[1:],))
    # A wrong cut would pass where the output does not depend on the input.
    assert difference(expected, other) > 0.01
    feeds: Feeds = {graph.inputs[0]: pictures[:1]}
    [output], n = graph.outputs, len(graph.nodes)
    result = cuts(graph)
    rng = random.Random(name)
    tried = result if ALL else rng.sample(result, min((SAMPLED | SLOW)[name], len(result)))
    worst = max(
        (difference(expected, second_stage[output]) for second_stage in second_stages(model, graph, tried, feeds)),
        default=0,
    )
    # From slices only: where most tensors cross, and three and four stages.
    widest = max(len(cut.tensors) for cut in result)
    plans = [[rng.choice([cut.position for cut in result if len(cut.tensors) == widest])]]
    plans += [sorted(rng.sample([cut.position for cut in result], stages - 1)) for stages in (3, 4)]
    for positions in plans:
        worst = max(worst, difference(expected, pipeline(model, graph, positions, feeds)[output]))
    if ALL:
        print(f"{name}: {n} nodes, {len(tried)} cuts, {widest} tensors, largest difference {worst:.1e}")
    assert worst < TOLERANCE
    if name in SMALL:  # another input goes through to its own output
        built = pipeline(model, graph, plans[-1], {graph.inputs[0]: pictures[1:]})
        assert difference(other, built[output]) < TOLERANCE


@pytest.mark.parametrize("build", [mobilenet_v2, resnet18])
def test_blocks_of_networks_that_people_have(build: Any) -> None:
    model = build(size=96, classes=10)
    graph = OnnxGraph.from_model(model, {"batch": 1})
    picture = images(3, size=96)
    [expected] = run(model, picture)
    assert difference(expected[:1], expected[1:2]) > 0.01
    blocks = [cut.position for cut in cuts(graph) if cut.block]
    for positions in ([blocks[4]], blocks[2::3], blocks):
        built = pipeline(model, graph, positions, {"image": picture})  # a batch of three: dimensions stay open
        assert difference(expected, built["logits"]) < TOLERANCE
    middle = slice_model(model, graph, blocks[3], blocks[5])
    [value] = middle.graph.input
    assert value.type.tensor_type.shape.dim[0].dim_param == "batch"
    assert middle.ByteSize() < model.ByteSize() / 5


@pytest.mark.parametrize("model", [mlp((64, 32, 32, 8)), mlp(gemm=True), conv_net()], ids=["mlp", "gemm", "conv"])
def test_every_cut_of_small_graphs_at_a_batch_that_was_not_planned(model: ModelProto) -> None:
    graph = OnnxGraph.from_model(model, {"batch": 1})
    shape = [dim.dim_value or 5 for dim in model.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(1).standard_normal(shape, dtype=np.float32)
    [expected] = run(model, x)
    every = range(1, len(graph.nodes))
    for positions in ([], *([at] for at in every), list(every)):
        built = pipeline(model, graph, positions, {"x": x})
        assert difference(expected, built["y"]) < TOLERANCE


def test_shared_weights_and_constants_are_in_each_stage_that_uses_them() -> None:
    nodes = [
        helper.make_node("Constant", [], ["one"], value_floats=[1.0] * 4),
        helper.make_node("Transpose", ["w"], ["turned"]),
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Add", ["a", "one"], ["b"]),
        helper.make_node("MatMul", ["b", "turned"], ["c"]),
        helper.make_node("Add", ["c", "one"], ["y"]),
    ]
    rng = np.random.default_rng(0)
    model = model_of(nodes, {"x": [1, 4]}, ["y", "turned"], {"w": rng.standard_normal((4, 4), dtype=np.float32)})
    model.metadata_props.add(key="author", value="somebody")
    graph = OnnxGraph.from_model(model)
    first, second = slice_model(model, graph, 0, 2), slice_model(model, graph, 2, 4)
    assert [node.op_type for node in first.graph.node] == ["Constant", "MatMul", "Add"]
    assert [node.op_type for node in second.graph.node] == ["Constant", "Transpose", "MatMul", "Add"]
    assert [tensor.name for part in (first, second) for tensor in part.graph.initializer] == ["w", "w"]
    assert second.metadata_props[0].value == "somebody"
    assert [entry.version for entry in first.opset_import] == [17]
    x = rng.standard_normal((1, 4), dtype=np.float32)
    expected, built = outputs(model, {"x": x}), pipeline(model, graph, [2], {"x": x})
    assert built.keys() == expected.keys()  # also what depends on no input
    assert all(difference(expected[name], built[name]) < TOLERANCE for name in expected)


def test_outputs_that_are_made_early_and_inputs_that_are_used_late() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["early"]), helper.make_node("Exp", ["x"], ["a"]),
             helper.make_node("Add", ["a", "late"], ["b"]), helper.make_node("Add", ["b", "a"], ["y"])]  # fmt: skip
    model = model_of(nodes, {"x": [4], "late": [4]}, ["y", "early"])
    graph = OnnxGraph.from_model(model)
    rng = np.random.default_rng(0)
    feeds: Feeds = {name: rng.standard_normal(4, dtype=np.float32) for name in ("x", "late")}
    expected = outputs(model, feeds)
    for positions in ([1], [2], [3], [1, 2, 3]):
        built = pipeline(model, graph, positions, feeds)
        assert list(built) == ["y", "early"]
        assert all(difference(expected[name], built[name]) < TOLERANCE for name in expected)


def test_subgraphs_bring_what_they_use_from_outside() -> None:
    def branch(op: str, other: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(f"{op}_out", TensorProto.FLOAT, [4])
        return helper.make_graph([helper.make_node(op, ["a", other], [f"{op}_out"])], op, [], [out])

    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"]),
        helper.make_node("If", ["positive"], ["y"], then_branch=branch("Add", "w"), else_branch=branch("Mul", "x")),
    ]
    weights = {"w": np.arange(4, dtype=np.float32), "zero": np.zeros((), np.float32)}
    model = model_of(nodes, {"x": [4]}, ["y"], weights)
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, [4]))
    graph = OnnxGraph.from_model(model)
    assert [value.name for value in cuts(graph)[-1].tensors] == ["x", "a", "positive"]
    for x in (np.array([3, 1, -1, 2], np.float32), np.array([-3, 1, -1, 2], np.float32)):
        expected = outputs(model, {"x": x})["y"]
        for at in (1, 2, 3):
            assert difference(expected, pipeline(model, graph, [at], {"x": x})["y"]) < TOLERANCE


def test_functions_of_the_model_are_cut_through() -> None:
    body = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Relu", ["p"], ["y"])]
    opset = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    function = helper.make_function("own", "Layer", ["x", "w"], ["y"], body, opset[:1])
    model = model_of(
        [helper.make_node("Layer", ["x", "w0"], ["h"], domain="own"),
         helper.make_node("Layer", ["h", "w1"], ["y"], domain="own")],
        {"x": ["n", 64]}, ["y"],
        {f"w{i}": np.random.default_rng(i).standard_normal((64, 64), dtype=np.float32) for i in range(2)},
    )  # fmt: skip
    model.functions.append(function)
    model.opset_import.append(opset[1])
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 64]))
    graph = OnnxGraph.from_model(model, {"n": 2})
    assert [node.op for node in graph.nodes] == ["MatMul", "Relu", "MatMul", "Relu"]
    x = np.random.default_rng(5).standard_normal((3, 64), dtype=np.float32)
    [expected] = run(model, x)
    for at in (1, 2, 3):
        assert difference(expected, pipeline(model, graph, [at], {"x": x})["y"]) < TOLERANCE


def test_a_slice_is_a_file_like_any_other(tmp_path: Path) -> None:
    model = mlp((64, 256, 64))
    graph = OnnxGraph.from_model(model, {"batch": 1})
    stage = slice_model(model, graph, 0, 3)
    x = np.random.default_rng(0).standard_normal((2, 64), dtype=np.float32)
    [expected] = run(stage, x)
    baseline = tmp_path / "beside.onnx"
    file.save(OnnxFile(baseline, stage, frozenset({Path("was-external")}), 0, 0), baseline)
    assert baseline.stat().st_size < 5000 < (tmp_path / "beside.onnx.data").stat().st_size
    read = file.load(baseline)
    onnx.checker.check_model(read.model, full_check=True)
    assert np.array_equal(run(read.model, x)[0], expected)


def test_slices_that_cannot_be() -> None:
    model = mlp()
    graph = OnnxGraph.from_model(model, {"batch": 1})
    for start, stop in ((0, 0), (2, 1), (-1, 2), (0, 7)):
        with pytest.raises(PlanError, match="expected 0 <= start < stop <= 6"):
            slice_model(model, graph, start, stop)
    with pytest.raises(CannotSlice, match="another model"):
        slice_model(conv_net(), graph, 0, 2)


def test_halves_and_whole_numbers_keep_their_types() -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["half"], to=TensorProto.FLOAT16),
        helper.make_node("Cast", ["half"], ["ids"], to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Cast", ["rows"], ["y"], to=TensorProto.FLOAT),
    ]
    table = numpy_helper.to_array(mlp((8, 4)).graph.initializer[0]).astype(np.float16)
    model = model_of(nodes, {"x": [3]}, ["y"], {"table": table})
    graph = OnnxGraph.from_model(model)
    assert [(cut.tensors[0].type, cut.payload_bytes) for cut in cuts(graph)] == [
        ("float16", 6), ("int64", 24), ("float16", 24),
    ]  # fmt: skip
    x = np.array([7, 0, 3], np.float32)
    expected = outputs(model, {"x": x})["y"]
    assert np.array_equal(pipeline(model, graph, [1, 2, 3], {"x": x})["y"], expected)
