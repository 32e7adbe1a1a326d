"""Networks to cut: MobileNetV2 and ResNet18 with the published blocks, random weights and the names that PyTorch's
exporter gives; and small handmade networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

# Expansion, output channels, repeats, stride of the first: table 2 of the paper of MobileNetV2.
_MOBILENET = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
_RESNET = (64, 128, 256, 512)  # channels of four layers of two blocks each


def mobilenet_v2(
    batch: str | int = "batch", size: int = 224, classes: int = 1000, seed: int = 0, narrower: int = 1
) -> ModelProto:
    """features.0 to features.18, then the classifier: image (batch, 3, size, size) to logits (batch, classes).
    narrower: by what numbers of channels are divided."""
    net = _Network(seed)
    net.nodes.append(helper.make_node("Constant", [], ["/Constant_output_0"], "/Constant", value_float=0.0))
    net.nodes.append(helper.make_node("Constant", [], ["/Constant_1_output_0"], "/Constant_1", value_float=6.0))
    channels = 32 // narrower
    last = net.relu6(net.conv("image", 3, channels, "/features/features.0/features.0.0", 3, 2))
    child = 1
    for expansion, full, repeats, stride in _MOBILENET:
        width = full // narrower
        for repeat in range(repeats):
            at, x, inner, i = f"/features/features.{child}/conv", last, channels * expansion, 0
            if expansion > 1:
                x, i = net.relu6(net.conv(x, channels, inner, f"{at}/conv.0/conv.0.0")), 1
            step = 1 if repeat else stride
            x = net.relu6(net.conv(x, inner, inner, f"{at}/conv.{i}/conv.{i}.0", 3, step, group=inner))
            x = net.conv(x, inner, width, f"{at}/conv.{i + 1}", gain=1)
            same = step == 1 and channels == width
            last = net.node("Add", [last, x], f"/features/features.{child}") if same else x
            channels, child = width, child + 1
    features = 1280 // narrower
    last = net.relu6(net.conv(last, channels, features, f"/features/features.{child}/features.{child}.0"))
    return net.classifier(last, features, classes, ("", "/classifier/classifier.1"), batch, size)


def resnet18(batch: str | int = "batch", size: int = 224, classes: int = 1000, seed: int = 0) -> ModelProto:
    """layer1.0 to layer4.1, eight residual blocks: image (batch, 3, size, size) to logits (batch, classes)."""
    net = _Network(seed)
    last = net.node("Relu", [net.conv("image", 3, 64, "/conv1", 7, 2)], "/relu")
    last = net.node("MaxPool", [last], "/maxpool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels = 64
    for layer, width in enumerate(_RESNET, 1):
        for block in range(2):
            at, stride = f"/layer{layer}/layer{layer}.{block}", 2 if layer > 1 and not block else 1
            x = net.node("Relu", [net.conv(last, channels, width, f"{at}/conv1", 3, stride)], f"{at}/relu")
            x = net.conv(x, width, width, f"{at}/conv2", 3, gain=0.5)
            if channels != width:
                last = net.conv(last, channels, width, f"{at}/downsample/downsample.0", 1, stride, gain=1)
            last = net.node("Relu", [net.node("Add", [x, last], at)], f"{at}/relu_1")
            channels = width
    return net.classifier(last, channels, classes, ("/avgpool", "/fc"), batch, size)


def model_of(
    nodes: Sequence[NodeProto],
    inputs: dict[str, Sequence[int | str | None]],
    outputs: Sequence[str],
    weights: dict[str, np.typing.NDArray[np.generic]] | None = None,
    opset: int = 17,
) -> ModelProto:
    """A model of float inputs; the outputs are declared without shapes."""
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, list(dims)) for name, dims in inputs.items()],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def chain(*nodes: tuple[str, str], width: int = 4) -> ModelProto:
    """Operators of one input, each by its type and its name, one after another."""
    built = [helper.make_node(op, [f"t{i}"], [f"t{i + 1}"], name) for i, (op, name) in enumerate(nodes)]
    return model_of(built, {"t0": [1, width]}, [f"t{len(nodes)}"])


class _Network:
    """Nodes and weights as they are added; every method returns the name of the tensor that its last node makes."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[NodeProto] = []
        self._weights: list[TensorProto] = []
        self._rng = np.random.default_rng(seed)

    def node(self, op: str, inputs: list[str], scope: str, out: str = "", **attributes: object) -> str:
        name = f"{scope}/{op}"
        out = out or f"{name}_output_0"
        self.nodes.append(helper.make_node(op, inputs, [out], name, **attributes))
        return out

    def conv(
        self, x: str, channels: int, width: int, scope: str, kernel: int = 1, stride: int = 1, group: int = 1,
        gain: float = 2,
    ) -> str:  # fmt: skip
        """A convolution with the bias of a batch normalization that was folded into it."""
        weight = self._weight(scope, (width, channels // group, kernel, kernel), gain)
        kinds = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [kernel // 2] * 4, "group": group}
        return self.node("Conv", [x, *weight], scope, **kinds)

    def relu6(self, x: str) -> str:
        """The activation two places after the convolution that makes `x`, as PyTorch counts."""
        scope = x.rsplit("/", 1)[0].removesuffix(".0") + ".2"
        return self.node("Clip", [x, "/Constant_output_0", "/Constant_1_output_0"], scope)

    def classifier(
        self, x: str, width: int, classes: int, scopes: tuple[str, str], batch: str | int, size: int
    ) -> ModelProto:
        """The whole model, with an average and a matrix product at its end."""
        flat = self.node("Flatten", [self.node("GlobalAveragePool", [x], scopes[0])], "")
        self.node("Gemm", [flat, *self._weight(scopes[1], (classes, width), 1)], scopes[1], "logits", transB=1)
        graph = helper.make_graph(
            self.nodes,
            "main_graph",
            [helper.make_tensor_value_info("image", TensorProto.FLOAT, [batch, 3, size, size])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, classes])],
            self._weights,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.checker.check_model(model)
        return model

    def _weight(self, scope: str, dims: tuple[int, ...], gain: float) -> tuple[str, str]:
        """The names of a weight with a variance of `gain` / fan-in, and of a small bias."""
        name = scope.rsplit("/", 1)[-1] if scope.count("/") < 3 else scope.strip("/").split("/", 1)[1].replace("/", ".")
        weight = self._rng.standard_normal(dims, dtype=np.float32) * np.float32((gain / prod(dims[1:])) ** 0.5)
        bias = 0.1 * self._rng.standard_normal(dims[0], dtype=np.float32)
        self._weights += [
            numpy_helper.from_array(weight, f"{name}.weight"),
            numpy_helper.from_array(bias, f"{name}.bias"),
        ]
        return f"{name}.weight", f"{name}.bias"
