"""Cost of the nodes of an ONNX graph, in floating-point operations."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from partition.model.onnx_shapes import Value

# Index of the filter among the inputs.
_FILTER = {"Conv": 1, "FusedConv": 1, "ConvInteger": 1, "QLinearConv": 3, "ConvTranspose": 1}
_PRODUCTS = {"MatMul", "FusedMatMul", "MatMulInteger", "QLinearMatMul", "MatMulNBits", "DynamicQuantizeMatMul"}
_RECURRENT = {"RNN", "GRU", "LSTM"}


def flops(node: Any, values: Mapping[str, Value]) -> int:
    """Return the floating-point operations of one run of a NodeProto; a multiply-add counts as two.

        Conv                2 x output values x input channels of a group x filter size
        ConvTranspose       2 x input values x output channels of a group x filter size
        Gemm, MatMul        2 x output values x inner dimension
        RNN, GRU, LSTM      2 x steps x batch x values of both weight matrices
        others              1 x output values; nodes inside If, Loop and Scan are not counted

    Biases are not counted. Integer products count like float products. The result is 0 if no shape is known.
    """
    outputs = sum(prod(values[name].shape) for name in node.output if name in values)
    try:
        return _products(node, values, outputs)
    except (KeyError, IndexError):  # a shape is unknown or does not fit
        return outputs


def _products(node: Any, values: Mapping[str, Value], outputs: int) -> int:
    op = node.op_type
    if op in _FILTER:
        kernel = prod(values[node.input[_FILTER[op]]].shape[1:])
        return 2 * kernel * (prod(values[node.input[0]].shape) if op == "ConvTranspose" else outputs)
    if op == "Gemm":
        transposed = any(a.name == "transA" and a.i for a in node.attribute)
        return 2 * outputs * values[node.input[0]].shape[0 if transposed else 1]
    if op in _PRODUCTS:
        transposed = any(a.name == "transA" and a.i for a in node.attribute)
        return 2 * outputs * values[node.input[0]].shape[-2 if transposed else -1]
    if op in _RECURRENT:
        steps, batch = values[node.input[0]].shape[:2]
        return 2 * steps * batch * sum(prod(values[name].shape) for name in node.input[1:3])
    return outputs
