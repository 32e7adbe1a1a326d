"""Test a profiled run of a whole network: it gives the shapes that cannot be inferred, and the time of each node."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edge.onnx import observed
from edge.onnx.file import OnnxFile, load
from edge.onnx.model import OnnxSource
from edge.onnx.observed import ObservedRun, kernel_seconds
from partition.errors import PlanError
from partition.plan.onnx_cuts import cuts
from tests.support.onnx_files import saved
from tests.support.onnx_graphs import mlp
from tests.support.onnx_networks import mobilenet_v2, model_of

F32 = TensorProto.FLOAT


def branching(folder: Path, **how: Any) -> OnnxFile:
    """x -> Relu -> If (its branches give other shapes) -> NonZero -> Cast, and a sequence that goes nowhere far."""

    def branch(name: str, op: str) -> onnx.GraphProto:
        built = helper.make_tensor_value_info(name, F32, None)
        return helper.make_graph([helper.make_node(op, ["r", "axes"], [name])], name, [], [built])

    nodes = [
        helper.make_node("Relu", ["x"], ["r"], "first"),
        helper.make_node("ReduceSum", ["r"], ["total"], "second", keepdims=0),
        helper.make_node("Greater", ["total", "zero"], ["some"]),
        helper.make_node(
            "If", ["some"], ["z"], then_branch=branch("deep", "Unsqueeze"), else_branch=branch("flat", "ReduceMax")
        ),
        helper.make_node("SplitToSequence", ["z"], ["parts"], axis=0),
        helper.make_node("ConcatFromSequence", ["parts"], ["joined"], axis=0),
        helper.make_node("NonZero", ["joined"], ["found"]),
        helper.make_node("Cast", ["found"], ["y"], to=F32),
    ]
    weights = {"axes": np.array([0], np.int64), "zero": np.array(0.0, np.float32), "w": np.ones((3, 3), np.float32)}
    nodes.insert(1, helper.make_node("MatMul", ["r", "w"], ["unused"]))
    model = model_of(nodes, {"x": ["n", 3]}, ["y"], weights)
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", F32, None))
    model.opset_import[0].version = 18
    return load(saved(model, folder / "branching.onnx", **how))


@pytest.mark.parametrize("external", [False, True], ids=["one file", "weights beside"])
def test_shapes_that_only_a_run_tells(tmp_path: Path, external: bool) -> None:
    how = {"save_as_external_data": True, "size_threshold": 60, "location": "weights"} if external else {}
    file = branching(tmp_path, **how)
    assert file.external == external
    x = np.array([[1, 0, 2], [0, 0, 3]], np.float32)
    source = OnnxSource.from_file(file, {}, {"x": x})
    values = source.graph.values
    assert {name: (values[name].type, values[name].shape) for name in ("z", "found", "y")} == {
        "z": ("float32", (1, 2, 3)), "found": ("int64", (3, 3)), "y": ("float32", (3, 3)),
    }  # fmt: skip
    assert not values["z"].ranked
    assert "parts" not in values  # a sequence does not cross
    assert [cut.position for cut in cuts(source.graph)] == [1, 2, 3, 4, 6, 7]
    assert not source.unrun
    nothing = OnnxSource.from_file(file, {}, {"x": np.zeros((2, 3), np.float32)})
    assert nothing.graph.values["z"].shape == (1, 3)
    assert nothing.graph.values["found"].shape == (2, 0)


def test_a_network_that_does_not_run_on_what_is_made_up(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["a"]),
        helper.make_node("Squeeze", ["a"], ["b"]),
        helper.make_node("Neg", ["b"], ["y"]),
    ]
    model = model_of(nodes, {"x": [6]}, ["y"])
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", F32, None))
    model.graph.input.append(helper.make_tensor_value_info("shape", TensorProto.INT64, [3]))
    file = load(saved(model, tmp_path / "reshape.onnx"))
    source = OnnxSource.from_file(file, {})
    assert [cut.position for cut in cuts(source.graph)] == []
    with pytest.raises(
        PlanError, match=r"in no place.*node 'a' \(Reshape\).*an input that it takes would tell more.*run"
    ):
        source.check_places(2)
    assert source.node_seconds(1) is None
    provided = {"x": np.ones(6, np.float32), "shape": np.array([1, 2, 3])}
    known = OnnxSource.from_file(file, {}, provided)
    assert known.graph.values["y"].shape == (2, 3)
    known.check_places(3)
    seconds = known.node_seconds(1)
    assert seconds is not None
    assert len(seconds) == 3


def test_a_network_without_room_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = branching(tmp_path)
    monkeypatch.setattr(observed, "available_memory", lambda: 4 * file.weight_bytes - 1)
    source = OnnxSource.from_file(file, {})
    assert "to run branching.onnx once needs about" in source.unrun
    assert source.node_seconds(1) is None
    assert not source.graph.values["y"].ranked  # what leaves at last may be anything
    assert [cut.position for cut in cuts(source.graph)] == [1, 2, 3]


def test_a_run_that_infers_all_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observed, "runtime", lambda: pytest.fail("it runs"))
    source = OnnxSource.from_file(load(saved(mlp(), tmp_path / "mlp.onnx")), {"batch": 2})
    assert source.graph.values["y"].shape == (2, 10)


def test_seconds_of_nodes() -> None:
    def kernel(name: str, ts: int, dur: int, cat: str = "Node") -> dict[str, Any]:
        return {"name": f"{name}_kernel_time", "cat": cat, "ts": ts, "dur": dur}

    events = [
        kernel("@0@", 0, 5),
        kernel("reorder", 5, 2),  # made by ONNX Runtime, for the next one
        kernel("features.0_nchwc", 7, 10),
        kernel("@4@@inner@0", 20, 30),  # a part of @4@
        kernel("@4@", 19, 60),
        kernel("@0@", 100, 7),  # the second run, other events out of order
        kernel("@4@", 130, 40),
        kernel("features.0_nchwc", 110, 8),
        {"name": "@3@_fence_before", "cat": "Node", "ts": 109, "dur": 900},
        kernel("@3@", 111, 1, "Session"),
        {"name": "model_run", "cat": "Session", "ts": 0, "dur": 1000},
    ]
    assert kernel_seconds(events, {"features.0": 3, "reordered": 4}) == pytest.approx({0: 5e-6, 3: 8e-6, 4: 40e-6})


def test_each_node_is_timed_once(tmp_path: Path) -> None:
    """Nodes of one name are told apart, and what is inside an If is not counted beside it."""
    file = branching(tmp_path)
    source = OnnxSource.from_file(file, {}, {"x": np.ones((2, 3), np.float32)})
    run = ObservedRun(file, source.sample)
    places = [node.place for node in source.graph.nodes]
    seconds = run.node_seconds(places, 1)
    timed = {node.op for node, took in zip(source.graph.nodes, seconds, strict=True) if took > 0}
    assert {"Relu", "ReduceSum", "If", "NonZero"} <= timed
    assert file.model.graph.node[0].name == "first"  # it is a copy that was renamed


def test_convolutions_are_timed(tmp_path: Path) -> None:
    """Whatever ONNX Runtime makes of them on this processor, and calls them."""
    source = OnnxSource.from_file(load(saved(mobilenet_v2(1, 32), tmp_path / "net.onnx")), {})
    seconds = source.node_seconds(1)
    assert seconds is not None
    blocks = [cut.position for cut in cuts(source.graph) if cut.block]
    used = [sum(seconds[start:stop]) for start, stop in pairwise([0, *blocks, len(seconds)])]
    assert all(item > 0 for item in used)
