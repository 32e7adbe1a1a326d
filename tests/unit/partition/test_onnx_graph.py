"""Test ONNX models as graphs: every cut is found, with its payload, its cost and a recognizable name."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, TensorProto, helper, numpy_helper

from partition.errors import CannotSlice, PlanError
from partition.model.onnx_graph import OnnxGraph, uses
from partition.plan import onnx_cuts
from partition.plan.onnx_cuts import StageIO, cut_at, cuts, routes, stage_io
from tests.support.onnx_graphs import light
from tests.support.onnx_networks import chain, mobilenet_v2, model_of, resnet18
from tests.support.thorough import some

# Nodes in the file, nodes that depend on the input, and the most tensors that cross a cut.
LIGHT = {
    "bvlc_alexnet": (40, 24, 1),
    "densenet121": (1746, 668, 2),
    "inception_v1": (237, 143, 4),
    "inception_v2": (916, 371, 4),
    "resnet50": (415, 176, 2),
    "shufflenet": (446, 203, 2),
    "squeezenet": (105, 66, 2),
    "vgg19": (82, 46, 1),
    "zfnet512": (38, 22, 1),
}
MOBILENET = {
    (0,): 12845056, (1,): 6422528, (2, 3): 2408448, (4, 5, 6): 802816, (7, 8, 9, 10): 401408, (11, 12, 13): 602112,
    (14, 15, 16): 250880, (17,): 501760,
}  # fmt: skip


def test_sparse_weights_of_a_branch_are_its_own() -> None:
    sparse = helper.make_sparse_tensor(
        helper.make_tensor("s", TensorProto.FLOAT, [1], [2.0]), helper.make_tensor("", TensorProto.INT64, [1], [0]), [3]
    )
    inner = helper.make_node("Add", ["x", "s"], ["y"])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])
    branch = helper.make_graph([inner], "then", [], [result], sparse_initializer=[sparse])
    node = helper.make_node("If", ["condition"], ["z"], then_branch=branch, else_branch=branch)
    assert set(uses(node)) == {"condition", "x"}


@pytest.mark.parametrize("name", LIGHT)
def test_every_cut_of_a_real_graph_is_found(name: str) -> None:
    model = onnx.load(light(name))
    graph = OnnxGraph.from_model(model)
    result = cuts(graph)
    n, inside = len(graph.nodes), computed_as_one(graph)
    assert (len(model.graph.node), n, max(len(cut.tensors) for cut in result)) == LIGHT[name]
    assert [cut.position for cut in result] == [at for at in range(1, n) if at not in inside]
    assert len({cut.label for cut in result}) == len(result)
    assert any(cut.distinct for cut in result)
    assert {cut.flops[0] + cut.flops[1] for cut in result} == {graph.flops}
    total = graph.stage_weight_bytes(0, n)
    for cut in result:
        assert cut.payload_bytes == sum(value.n_bytes for value in cut.tensors) > 0
        assert cut.weight_bytes == (
            graph.stage_weight_bytes(0, cut.position),
            graph.stage_weight_bytes(cut.position, n),
        )
        assert sum(cut.weight_bytes) >= total


def computed_as_one(graph: OnnxGraph) -> set[int]:
    """The places behind a convolution that is normalized further behind, where what it gives is used nowhere else."""
    users: dict[str, list[int]] = {}
    for place, node in enumerate(graph.nodes):
        for name in set(node.inputs):
            users.setdefault(name, []).append(place)
    inside: set[int] = set()
    for place, node in enumerate(graph.nodes):
        if node.op == "Conv" and [graph.nodes[user].op for user in users.get(node.outputs[0], ())] == [
            "BatchNormalization"
        ]:
            inside.update(range(place + 1, users[node.outputs[0]][0] + 1))
    return inside


def test_a_convolution_and_its_normalization_stay_together() -> None:
    weights = {"w": np.ones((3, 3, 1, 1), np.float32), **{name: np.ones(3, np.float32) for name in "abcd"}}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "filter"),
        helper.make_node("BatchNormalization", ["c", "a", "b", "c_", "d"], ["n"], "scale"),
        helper.make_node("Relu", ["n"], ["y"]),
    ]
    weights["c_"] = weights.pop("c")
    graph = OnnxGraph.from_model(model_of(nodes, {"x": [1, 3, 2, 2]}, ["y"], weights))
    assert [cut.position for cut in cuts(graph)] == [2]
    with pytest.raises(
        CannotSlice, match=r"node 'filter' \(Conv\) and the normalization behind it are computed as one"
    ):
        cut_at(graph, 1)
    for used in (helper.make_node("Exp", ["c"], ["e"]), helper.make_node("Neg", ["n"], ["e"])):
        also = model_of([*nodes[:2], used, *nodes[2:]], {"x": [1, 3, 2, 2]}, ["y", "e"], weights)
        results = [cut.position for cut in cuts(OnnxGraph.from_model(also))]
        assert results == ([1, 2, 3] if used.op_type == "Exp" else [2, 3])  # what others use is computed in any case
    provided = model_of(nodes, {"x": [1, 3, 2, 2]}, ["y", "c"], weights)
    assert [cut.position for cut in cuts(OnnxGraph.from_model(provided))] == [1, 2]


def test_the_payloads_of_mobilenet_v2() -> None:
    graph = OnnxGraph.from_model(mobilenet_v2(), {"batch": 8})
    results = {cut.label: cut for cut in cuts(graph)}
    assert {(child, results[f"features.{child}"].payload_bytes) for child in range(18)} == {
        (child, payload) for children, payload in MOBILENET.items() for child in children
    }
    assert results["features.15"].tensors[0].shape == (8, 160, 7, 7)
    assert results["features.15"].tensors[0].dims == ("batch", 160, 7, 7)
    assert [cut.label for cut in results.values() if cut.block] == [f"features.{child}" for child in range(19)]
    # The paper: 300 million multiply-adds an image, 3.4 million parameters.
    assert graph.flops / 2 / 8 == pytest.approx(300e6, rel=0.02)
    assert graph.stage_weight_bytes(0, len(graph.nodes)) / 4 == pytest.approx(3.4e6, rel=0.03)


def test_the_blocks_of_resnet18() -> None:
    result = cuts(OnnxGraph.from_model(resnet18(batch=1)))
    residual = [f"layer{layer}.{block}" for layer in range(1, 5) for block in range(2)]
    assert [cut.label for cut in result if cut.block] == ["conv1", "relu", "maxpool", *residual, "avgpool"]
    by_label = {cut.label: cut for cut in result}
    assert [len(by_label[label].tensors) for label in residual] == [1] * 8
    # Inside a block, its input crosses, too: in the second one until the sum, in one that halves until that is made.
    inside = [len(by_label[f"layer2.0/{name}"].tensors) for name in ("conv1/Conv", "conv2/Conv", "Add")]
    assert inside == [2, 2, 1]
    # A ReLU after a sum moves as much as the sum: a sweep needs one of the two.
    assert not by_label["layer2.0/Add"].distinct
    assert by_label["layer2.0"].distinct


def test_labels_tell_what_a_person_would() -> None:
    def labels_of(*nodes: tuple[str, str]) -> list[str]:
        return [cut.label for cut in cuts(OnnxGraph.from_model(chain(*nodes, ("Identity", ""))))]

    assert labels_of(("Relu", "n0"), ("Tanh", ""), ("Exp", "Exp_12"), ("Abs", "/Abs")) == [
        "Relu:t1", "Tanh:t2", "Exp_12", "Abs",
    ]  # fmt: skip
    both = [f"/{part}/layers.0/{op}" for part in ("encoder", "decoder") for op in ("Relu", "Exp")]
    assert labels_of(*((name.rsplit("/", 1)[1], name) for name in both)) == [
        "encoder/layers.0/Relu", "encoder/layers.0", "decoder/layers.0/Relu", "decoder/layers.0",
    ]  # fmt: skip
    assert labels_of(("Relu", "/a/Relu"), ("Relu", "/a/Relu"), ("Exp", "/a/Exp")) == ["a/Relu", "a/Relu:t2", "a"]
    within = [("Relu", "net/block_1/Relu"), ("Exp", "net/block_2/Exp"), ("Abs", "net/top/Abs")]
    assert [cut.label for cut in cuts(OnnxGraph.from_model(chain(*within)))] == ["block_1", "block_2"]


def test_labels_from_the_metadata_of_newer_exporters() -> None:
    model = chain(("Relu", "node_relu"), ("Exp", "node_exp"), ("Abs", "node_abs"))
    for node, scopes in zip(model.graph.node, (["layer1", "layer1.0"], ["layer1", "layer1.1"], ["fc"]), strict=True):
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=str(["", *scopes, node.name]))
    assert [cut.label for cut in cuts(OnnxGraph.from_model(model))] == ["layer1.0", "layer1.1"]


def test_operations_of_products() -> None:
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["image", "filter"], ["conv"], pads=[1, 1, 1, 1], strides=[2, 2], group=2),
        helper.make_node("ConvTranspose", ["conv", "up"], ["wide"], strides=[2, 2]),
        helper.make_node("Gemm", ["tall", "b"], ["gemm"], transA=1, transB=1),
        helper.make_node("MatMul", ["many", "c"], ["product"]),
        helper.make_node("LSTM", ["steps", "w", "r"], ["hidden"], hidden_size=8, direction="bidirectional"),
        helper.make_node("Relu", ["product"], ["relu"]),
    ]
    inputs = {"image": [1, 4, 8, 8], "tall": [5, 3], "many": [2, 7, 3, 6], "steps": [10, 2, 6]}
    dims = {"filter": (6, 2, 3, 3), "up": (6, 4, 2, 2), "b": (9, 5), "c": (6, 4), "w": (2, 32, 6), "r": (2, 32, 8)}
    weights = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in dims.items()}
    model = model_of(nodes, inputs, ["wide", "gemm", "hidden", "relu"], weights)
    counted = {node.op: node.flops for node in OnnxGraph.from_model(model).nodes}
    assert counted == {
        "Conv": 2 * (6 * 4 * 4) * (2 * 3 * 3),
        "ConvTranspose": 2 * (6 * 4 * 4) * (4 * 2 * 2),
        "Gemm": 2 * 3 * 9 * 5,
        "MatMul": 2 * (2 * 7 * 3 * 4) * 6,
        "LSTM": 2 * 10 * 2 * (2 * 32 * (6 + 8)),
        "Relu": 2 * 7 * 3 * 4,
    }


def test_weights_go_with_their_stages() -> None:
    table = np.ones((4, 4), np.float32)
    nodes = [
        helper.make_node("Constant", [], ["one"], value=numpy_helper.from_array(np.ones(4, np.float32))),
        helper.make_node("ConstantOfShape", ["size"], ["zeros"]),
        helper.make_node("Transpose", ["w"], ["turned"]),
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Add", ["a", "one"], ["b"]),
        helper.make_node("MatMul", ["b", "turned"], ["c"]),
        helper.make_node("Add", ["c", "zeros"], ["y"]),
        helper.make_node("Relu", ["y"], ["nothing needs this"]),
    ]
    model = model_of(nodes, {"x": [1, 4], "unused": [1]}, ["y"], {"w": table, "size": np.array([1, 4])})
    graph = OnnxGraph.from_model(model)
    assert [(node.op, node.place, node.weight_bytes) for node in graph.nodes] == [
        ("MatMul", 3, 64), ("Add", 4, 16), ("MatMul", 5, 64), ("Add", 6, 16),
    ]  # fmt: skip
    assert graph.inputs == ("x",)
    assert [(cut.weight_bytes, [v.name for v in cut.tensors]) for cut in cuts(graph)] == [
        ((64, 96), ["a"]), ((80, 80), ["b"]), ((80, 16), ["c"]),
    ]  # fmt: skip


def test_cuts_that_do_not_exist() -> None:
    graph = OnnxGraph.from_model(resnet18(batch=1))
    assert cut_at(graph, "layer2.1") == cut_at(graph, 24) == cut_at(graph, "24")
    with pytest.raises(PlanError, match=r"no cut after 'layer2.2'; near ones: layer2\.\d"):
        cut_at(graph, "layer2.2")
    with pytest.raises(PlanError, match="near ones: conv1, relu, maxpool"):
        cut_at(graph, "0" * 5 + "?")
    for where in (0, 49, -1, "49"):
        with pytest.raises(PlanError, match=r"no cut a.*"):
            cut_at(graph, where)
    with pytest.raises(PlanError, match="can be cut in no place, so it runs on at most 1 device: it has 1 node"):
        cut_at(OnnxGraph.from_model(chain(("Relu", ""))), "x")
    for positions in ([0], [49], [5, 5], [9, 5]):
        with pytest.raises(PlanError, match="positions from 1 to 48 that ascend"):
            routes(graph, positions)
    for start, stop in ((0, 0), (5, 3), (-1, 3), (3, 50)):
        with pytest.raises(PlanError, match="expected 0 <= start < stop <= 49"):
            stage_io(graph, start, stop)


def passed_on(io: StageIO) -> tuple[str, ...]:
    """Return the names that come in and go out as they are."""
    return tuple(value.name for value in io.tensors_out if value.name not in io.makes)


def test_what_a_pipeline_passes_on() -> None:
    nodes = [helper.make_node("Relu", ["x"], ["early"]), helper.make_node("Exp", ["x"], ["a"]),
             helper.make_node("Add", ["a", "late"], ["b"]), helper.make_node("Add", ["b", "a"], ["y"])]  # fmt: skip
    graph = OnnxGraph.from_model(model_of(nodes, {"x": [4], "late": [4]}, ["y", "early", "late"]))
    labels_of = [[value.name for value in values] for values in routes(graph, [1, 2, 3])]
    assert labels_of[:3] == [["x", "late"], ["x", "late", "early"], ["late", "early", "a"]]
    assert labels_of[3:] == [["late", "early", "a", "b"], ["y", "early", "late"]]
    second = stage_io(graph, 1, 2)
    assert (second.takes, second.makes, passed_on(second)) == (("x",), ("a",), ("late", "early"))
    last = stage_io(graph, 3, 4)
    assert (last.takes, last.makes, passed_on(last)) == (("a", "b"), ("y",), ("early", "late"))


@st.composite
def graphs(draw: st.DrawFn) -> ModelProto:
    """Up to nine sums of what was made before, some of it weights; some of what they make is an output."""
    n = draw(st.integers(1, 9))
    names, weights, nodes = ["x", "z"], {"w": np.ones(2, np.float32), "v": np.ones(2, np.float32)}, []
    for i in range(n):
        terms = draw(st.lists(st.sampled_from([*names, *weights]), min_size=1, max_size=3))
        nodes.append(helper.make_node("Sum", terms, [f"t{i}"]))
        names.append(f"t{i}")
    outputs = draw(st.lists(st.sampled_from([f"t{i}" for i in range(n)]), min_size=1, max_size=3, unique=True))
    return model_of(nodes, {"x": [2], "z": [2]}, outputs, weights)


@given(graphs(), st.data())
@settings(max_examples=some(25, 100), deadline=None)
def test_stages_tile_the_nodes_and_get_exactly_what_they_need(model: ModelProto, data: st.DataObject) -> None:
    graph = OnnxGraph.from_model(model)
    n = len(graph.nodes)
    if not n:
        return
    result = cuts(graph)
    assert [cut.position for cut in result] == list(range(1, n))
    positions = sorted(
        data.draw(st.sets(st.sampled_from([cut.position for cut in result])) if result else st.just(set()))
    )
    bounds = [0, *positions, n]
    route = routes(graph, positions)
    there = set(graph.inputs)
    for i, (start, stop) in enumerate(pairwise(bounds)):
        io = stage_io(graph, start, stop)
        assert (io.tensors_in, io.tensors_out) == (route[i], route[i + 1])
        built = {name for node in graph.nodes[start:stop] for name in node.outputs}
        used = {name for node in graph.nodes[start:stop] for name in node.inputs}
        assert set(io.takes) == used - built
        if stop == n:
            built |= set(graph.outputs) - set(graph.makers)  # constants
        there |= built
        later = {name for node in graph.nodes[stop:] for name in node.inputs} | set(graph.outputs)
        # What crosses was made before, and something after needs it; nothing that is needed stays behind.
        assert {value.name for value in io.tensors_out} == there & later
        assert set(io.makes) <= built
        assert set(passed_on(io)) <= {value.name for value in io.tensors_in}
        assert io.makes
    assert {value.name for value in route[-1]} == set(graph.outputs)


def test_graphs_without_a_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    constant = OnnxGraph.from_model(
        model_of([helper.make_node("Relu", ["w"], ["y"])], {}, ["y"], {"w": np.ones(2, np.float32)})
    )
    assert (constant.nodes, constant.outputs, cuts(constant)) == ((), ("y",), [])
    monkeypatch.setattr(onnx_cuts, "_MOST", 10)
    with pytest.raises(CannotSlice, match="100 nodes whose tensors wait for each other"):
        cuts(OnnxGraph.from_model(mobilenet_v2(batch=1)))
