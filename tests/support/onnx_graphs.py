"""ONNX graphs for tests: real architectures with random weights, and small handmade graphs."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from edge.onnx.runtime import runtime

# How far outputs of stages may be from those of the whole, as parts of an output's largest value (docs/onnx.md,
# "How equal are stages"). What is neither of these types is the same.
TOLERANCES = {"float32": 1e-5, "float16": 2.0**-10}

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"

Array = npt.NDArray[np.float32]

_PASS_ON = {"Reshape", "Unsqueeze", "Transpose", "Identity", "Squeeze"}  # a weight may go through these first


def light(name: str) -> Path:
    """A graph that the onnx package ships: "resnet50", "squeezenet", ..."""
    return LIGHT / f"light_{name}.onnx"


def with_random_weights(path: Path, seed: int = 0) -> ModelProto:
    """The graph in `path` with a random initializer for every weight; the same seed gives the same weights.

    The graphs in `LIGHT` make their weights with ConstantOfShape, all of one value, so that every input has the same
    output. Here matrices and filters are normal with a variance of 2 / fan-in (He), which keeps activations near 1 at
    any depth; scales and variances are near 1, biases and means near 0. Float initializers are replaced, too. No weight
    is an input of the graph afterwards.
    """
    model = onnx.load(path)
    graph = model.graph
    uses: dict[str, list[tuple[NodeProto, int]]] = defaultdict(list)
    for node in graph.node:
        for place, name in enumerate(node.input):
            uses[name].append((node, place))
    dims: dict[str, tuple[int, ...]] = {
        tensor.name: tuple(tensor.dims) for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT
    }
    current = {tensor.name: tensor for tensor in graph.initializer}
    built = [node for node in graph.node if node.op_type == "ConstantOfShape" and node.input[0] in current]
    dims |= {node.output[0]: tuple(numpy_helper.to_array(current[node.input[0]]).tolist()) for node in built}
    rng = np.random.default_rng(seed)
    used = sorted(name for name in dims if name in uses)
    weights = [numpy_helper.from_array(_weight(rng, uses, name, dims[name]), name) for name in used]
    shapes = {node.input[0] for node in built}
    nodes = [node for node in graph.node if node not in built]
    saved = [t for name, t in current.items() if name not in dims and not (name in shapes and len(uses[name]) == 1)]
    saved = [t for t in saved if t.name in uses]
    inputs = [value for value in graph.input if value.name not in current]
    for field, values in (("node", nodes), ("initializer", saved + weights), ("input", inputs)):
        graph.ClearField(field)
        getattr(graph, field).extend(values)
    model.ir_version = max(model.ir_version, 4)  # before, every initializer had to be an input
    onnx.checker.check_model(model)
    _scale_logits(model, seed)
    return model


def _scale_logits(model: ModelProto, seed: int) -> None:
    """Scale the last layer with weights."""
    maker = {output: node for node in model.graph.node for output in node.output}
    last = maker[model.graph.output[0].name]
    logits = last.input[0] if last.op_type == "Softmax" else last.output[0]
    while last.op_type not in ("Conv", "Gemm", "MatMul"):
        last = maker[last.input[0]]
    outputs = list(model.graph.output)
    model.graph.output.append(onnx.ValueInfoProto(name=logits))
    deviation = float(run(model, images(1, seed))[-1].std())
    model.graph.ClearField("output")
    model.graph.output.extend(outputs)
    for tensor in model.graph.initializer:
        if tensor.name in last.input[1:]:
            tensor.CopyFrom(
                numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(2 / deviation), tensor.name)
            )


def _weight(
    rng: np.random.Generator, uses: dict[str, list[tuple[NodeProto, int]]], name: str, dims: tuple[int, ...]
) -> Array:
    """Values of a sensible scale for what the weight is used for."""
    node, place = uses[name][0]
    while node.op_type in _PASS_ON:
        [(node, place), *_] = uses[node.output[0]]
    noise = rng.standard_normal(dims, dtype=np.float32)
    role = (node.op_type, place)
    if role == ("BatchNormalization", 4):  # a variance
        return 0.75 + 0.5 * rng.random(dims, dtype=np.float32)
    if role == ("BatchNormalization", 1) or node.op_type == "Mul":
        return 1 + 0.1 * noise
    if role == ("Conv", 1):
        return noise * np.float32((2 / prod(dims[1:])) ** 0.5)
    if role in (("Gemm", 1), ("MatMul", 1)):
        transposed = any(a.name == "transB" and a.i for a in node.attribute)
        fan_in = prod(dims[1:]) if transposed else dims[0]
        return noise * np.float32((2 / fan_in) ** 0.5)
    return 0.1 * noise


def images(n: int, seed: int = 0, size: int = 224) -> Array:
    """Random pictures, (n, 3, size, size), with patches of every size, so that no two have the same average."""
    rng = np.random.default_rng(seed)
    out = np.zeros((n, 3, size, size), np.float32)
    for cells in (1, 4, 16):
        side = -(-size // cells)
        patches = rng.standard_normal((n, 3, cells, cells), dtype=np.float32)
        out += patches.repeat(side, 2).repeat(side, 3)[..., :size, :size]
    return out + 0.5 * rng.standard_normal(out.shape, dtype=np.float32)


def difference(expected: npt.NDArray[np.generic], result: npt.NDArray[np.generic]) -> float:
    """The largest difference of two values, as a part of the largest value."""
    assert expected.shape == result.shape
    a, b = expected.astype(np.float64), result.astype(np.float64)
    largest = float(np.abs(a).max(initial=0.0))
    return float(np.abs(a - b).max(initial=0.0)) / (largest or 1.0)


def run(model: ModelProto | Path, *inputs: npt.NDArray[np.generic]) -> list[Array]:
    """The outputs for these inputs, in order, on one thread."""
    [outputs] = runs(model, inputs)
    return outputs


def runs(model: ModelProto | Path, *samples: tuple[npt.NDArray[np.generic], ...]) -> list[list[Array]]:
    """The outputs for each of the samples, which are tuples of inputs, on one thread."""
    ort = runtime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    names = [declared.name for declared in session.get_inputs()]
    return [session.run(None, dict(zip(names, inputs, strict=True))) for inputs in samples]


def mlp(
    widths: tuple[int, ...] = (64, 96, 10), seed: int = 0, batch: str | int = "batch", gemm: bool = False
) -> ModelProto:
    """Matrix products with biases and ReLU between: x (batch, widths[0]) to y (batch, widths[-1])."""
    rng = np.random.default_rng(seed)
    nodes, weights, last = [], [], "x"
    for i, (rows, columns) in enumerate(pairwise(widths)):
        matrix = rng.standard_normal((rows, columns), dtype=np.float32) * np.float32((2 / rows) ** 0.5)
        weights.append(numpy_helper.from_array(matrix.T.copy() if gemm else matrix, f"w{i}"))
        weights.append(numpy_helper.from_array(0.1 * rng.standard_normal(columns, dtype=np.float32), f"b{i}"))
        out = "y" if i == len(widths) - 2 else f"h{i}"
        if gemm:
            nodes.append(helper.make_node("Gemm", [last, f"w{i}", f"b{i}"], [f"{out}_sum"], f"gemm{i}", transB=1))
        else:
            nodes.append(helper.make_node("MatMul", [last, f"w{i}"], [f"{out}_product"], f"matmul{i}"))
            nodes.append(helper.make_node("Add", [f"{out}_product", f"b{i}"], [f"{out}_sum"], f"add{i}"))
        nodes.append(helper.make_node("Identity" if out == "y" else "Relu", [f"{out}_sum"], [out], f"act{i}"))
        last = out
    return _model(nodes, [("x", (batch, widths[0]))], [("y", (batch, widths[-1]))], weights)


def conv_net(seed: int = 0, batch: str | int = "batch") -> ModelProto:
    """Two convolutions, the second one grouped by channel, and an average: x (batch, 3, 16, 16) to y (batch, 8)."""
    rng = np.random.default_rng(seed)
    weights = [
        numpy_helper.from_array(rng.standard_normal((8, 3, 3, 3), dtype=np.float32) * np.float32(0.27), "w0"),
        numpy_helper.from_array(0.1 * rng.standard_normal(8, dtype=np.float32), "b0"),
        numpy_helper.from_array(rng.standard_normal((8, 1, 3, 3), dtype=np.float32) * np.float32(0.47), "w1"),
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w0", "b0"], ["c0"], "conv0", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c0"], ["r0"], "relu0"),
        helper.make_node("Conv", ["r0", "w1"], ["c1"], "conv1", pads=[1, 1, 1, 1], group=8),
        helper.make_node("GlobalAveragePool", ["c1"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["y"], "flat"),
    ]
    return _model(nodes, [("x", (batch, 3, 16, 16))], [("y", (batch, 8))], weights)


def _model(
    nodes: list[NodeProto],
    inputs: list[tuple[str, tuple[str | int, ...]]],
    outputs: list[tuple[str, tuple[str | int, ...]]],
    weights: list[TensorProto],
    opset: int = 17,
) -> ModelProto:
    def values(named: list[tuple[str, tuple[str | int, ...]]]) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in named]

    graph = helper.make_graph(nodes, "graph", values(inputs), values(outputs), weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(model)
    return model
