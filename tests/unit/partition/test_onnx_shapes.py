"""Test shapes of ONNX graphs: open dimensions need a size, and unknown ones are named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edge.quantization.onnx import quantize
from partition.errors import CannotSlice, PlanError
from partition.model.onnx_graph import OnnxGraph
from partition.plan.onnx_cuts import check_enough, cut_at, cuts, stage_io
from tests.support.onnx_files import quick, saved  # noqa: F401 (fixture)
from tests.support.onnx_graphs import mlp
from tests.support.onnx_networks import chain, model_of


def test_open_dimensions_need_sizes() -> None:
    model = model_of([helper.make_node("Relu", ["x"], ["y"])], {"x": ["batch", 3, None]}, ["y"])
    assert OnnxGraph.from_model(model, {"batch": 0, "x[2]": 5}).values["y"].shape == (0, 3, 5)
    graph = OnnxGraph.from_model(model, {"batch": 2, "x[2]": 5})
    assert graph.values["y"].shape == (2, 3, 5)
    assert graph.values["y"].dims == ("batch", 3, "")
    for dims, message in (
        ({"x[2]": 5}, r"input 'x': dimension 0 \(batch\) is open; expected a size for 'batch'"),
        ({"batch": 2}, r"input 'x': dimension 2 \(x\[2\]\) is open"),
        ({"batch": 2, "x[2]": 5, "width": 3}, r"'width', which no input has; open are batch, x\[2\]"),
        ({"batch": -1, "x[2]": 5}, "the size of 'batch' is -1; expected 0 or more"),
    ):
        with pytest.raises(PlanError, match=message):
            OnnxGraph.from_model(model, dims)
    with pytest.raises(PlanError, match="the inputs have no open dimension"):
        OnnxGraph.from_model(chain(("Relu", "")), {"batch": 1})
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_value = -1  # as some exporters write it
    assert OnnxGraph.from_model(model, {"batch": 2, "x[2]": 5}).values["y"].dims == ("batch", 3, "")
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "?"
    graph = OnnxGraph.from_model(model, {"x[0]": 2, "x[2]": 5})
    assert (graph.values["y"].shape, graph.values["y"].dims) == ((2, 3, 5), ("batch", 3, ""))
    with pytest.raises(PlanError, match="'batch' has one size for all inputs; 3 and 2 are given"):
        OnnxGraph.from_model(model, {"batch": 3, "x[0]": 2, "x[2]": 5})
    with pytest.raises(PlanError, match=r"for '\?', which no input has; open are batch, x\[2\]"):
        OnnxGraph.from_model(model, {"batch": 3, "?": 5})


def test_shapes_that_are_computed() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "first"], ["n"]),
        helper.make_node("Concat", ["n", "rest"], ["target"], axis=0),
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Reshape", ["r", "target"], ["flat"]),
    ]
    weights = {"first": np.array([0]), "rest": np.array([-1])}
    model = model_of(nodes, {"x": ["batch", 3, 4]}, ["flat"], weights)
    graph = OnnxGraph.from_model(model, {"batch": 5})
    assert (graph.values["flat"].shape, graph.values["flat"].dims) == ((5, 12), ("batch", ""))
    crossing = [[value.name for value in cut.tensors] for cut in cuts(graph)]
    assert crossing == [["x", "shape"], ["x", "n"], ["x", "target"], ["target", "r"]]


def test_nothing_is_cut_where_a_shape_depends_on_data() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("NonZero", ["r"], ["found"], "finder"),
        helper.make_node("Transpose", ["found"], ["turned"]),
        helper.make_node("Cast", ["turned"], ["y"], to=TensorProto.FLOAT),
    ]
    graph = OnnxGraph.from_model(model_of(nodes, {"x": [4]}, ["y"]))
    assert [cut.position for cut in cuts(graph)] == [1]
    with pytest.raises(CannotSlice, match=r"node 'finder' \(NonZero\): the shape of 'found' depends on data"):
        cut_at(graph, 2)
    with pytest.raises(CannotSlice, match="finder"):
        stage_io(graph, 2, 4)
    [last] = stage_io(graph, 1, 4).tensors_out  # nothing is behind it that would have to know
    assert (last.name, last.type, last.ranked) == ("y", "float32", False)
    alone = OnnxGraph.from_model(model_of(nodes[1:], {"r": [4]}, ["y"]))
    assert cuts(alone) == []
    words = r"in no place, so it runs on at most 1 device: node 'finder' \(NonZero\): the shape of 'found' depends"
    with pytest.raises(PlanError, match=words):
        check_enough(alone, [], 2)
    check_enough(alone, [], 1)


def test_shapes_that_were_seen() -> None:
    nodes = [
        helper.make_node("NonZero", ["x"], ["found"]),
        helper.make_node("Squeeze", ["found"], ["less"]),
        helper.make_node("Cast", ["less"], ["y"], to=TensorProto.FLOAT),
    ]
    requests: list[str] = []

    def observe(names: Sequence[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
        requests.extend(names)
        return {"found": ("int64", (2, 5)), "less": ("int64", (5,))}

    graph = OnnxGraph.from_model(model_of(nodes, {"x": [4, 4]}, ["y"]), {}, observe)
    assert requests == ["found", "less", "y"]
    first, second = cuts(graph)
    assert [(v.shape, v.dims, v.ranked, v.n_bytes) for v in first.tensors] == [((2, 5), ("", ""), True, 80)]
    assert [(v.shape, v.dims, v.ranked, v.n_bytes) for v in second.tensors] == [((5,), ("",), False, 40)]


def test_what_numpy_has_no_type_for_does_not_cross() -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["small"], "shrink", to=TensorProto.BFLOAT16),
        helper.make_node("Cast", ["small"], ["again"], to=TensorProto.FLOAT),
        helper.make_node("Relu", ["again"], ["y"]),
    ]
    graph = OnnxGraph.from_model(model_of(nodes, {"x": [4]}, ["y"]))
    assert [cut.position for cut in cuts(graph)] == [2]
    with pytest.raises(CannotSlice, match=r"node 'shrink' \(Cast\): 'small' is of type bfloat16, which does not cross"):
        cut_at(graph, 1)
    with pytest.raises(PlanError, match=r"in 1 place, so it runs on at most 2 devices: node 'shrink'"):
        check_enough(graph, cuts(graph), 3)


def test_why_a_shape_cannot_be_inferred_is_said() -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["bad"], "wrong"), helper.make_node("Relu", ["bad"], ["y"])]
    graph = OnnxGraph.from_model(model_of(nodes, {"x": [1, 4]}, ["y"], {"w": np.ones((3, 3), np.float32)}))
    with pytest.raises(PlanError, match=r"node 'wrong' \(MatMul\): the shape of 'bad'.*[Ii]ncompatible dimensions"):
        check_enough(graph, cuts(graph), 2)


def test_models_that_are_no_graph() -> None:
    late = model_of([helper.make_node("Relu", ["a"], ["b"]), helper.make_node("Exp", ["x"], ["a"])], {"x": [1]}, ["b"])
    with pytest.raises(CannotSlice, match=r"node 'b' \(Relu\) uses 'a', which nothing before it makes"):
        OnnxGraph.from_model(late)
    twice = model_of([helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Exp", ["x"], ["a"])], {"x": [1]}, ["a"])
    with pytest.raises(CannotSlice, match=r"node 'a' \(Exp\) makes 'a', which is there before"):
        OnnxGraph.from_model(twice)
    with pytest.raises(CannotSlice, match="no node makes the output 'y'"):
        OnnxGraph.from_model(model_of([helper.make_node("Relu", ["x"], ["a"])], {"x": [1]}, ["y"]))


def test_weights_of_four_bits(tmp_path: Path) -> None:
    source = saved(mlp((64, 96, 32)), tmp_path / "mlp.onnx")
    quantize(source, tmp_path / "int4.onnx", "int4")
    whole = OnnxGraph.from_model(onnx.load(source), {"batch": 3})
    small = OnnxGraph.from_model(onnx.load(tmp_path / "int4.onnx"), {"batch": 3})
    assert "MatMulNBits" in {node.op for node in small.nodes}
    # An Identity at the end is gone, too.
    assert [cut.payload_bytes for cut in cuts(small)] == [cut.payload_bytes for cut in cuts(whole)][:-1]
    assert small.flops == whole.flops - whole.nodes[-1].flops
    n = len(small.nodes)
    assert small.stage_weight_bytes(0, n) < 0.3 * whole.stage_weight_bytes(0, n)


def test_tables_of_four_bits(tmp_path: Path) -> None:
    weights = {"table": np.ones((100, 64), np.float32), "w": np.ones((64, 32), np.float32)}
    nodes = [helper.make_node("Gather", ["table", "ids"], ["rows"]), helper.make_node("MatMul", ["rows", "w"], ["y"])]
    model = model_of(nodes, {"ids": ["n"]}, ["y"], weights)
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 32]))
    quantize(saved(model, tmp_path / "float.onnx"), tmp_path / "int4.onnx", "int4")
    graph = OnnxGraph.from_model(onnx.load(tmp_path / "int4.onnx"), {"n": 7})
    assert [node.op for node in graph.nodes] == ["GatherBlockQuantized", "MatMulNBits"]
    [cut] = cuts(graph)
    assert [(value.shape, value.dims, value.type) for value in cut.tensors] == [((7, 64), ("n", 64), "float32")]
