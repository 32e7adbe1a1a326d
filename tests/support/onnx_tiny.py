"""ONNX graphs of one or two nodes, for cases that real graphs do not contain."""

from __future__ import annotations

from typing import Any

import onnx
from onnx import TensorProto, helper

Shape = tuple[str | int, ...]
Value = tuple[str, int, Shape | None]  # name, type, shape

F32, F64, I64 = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64


def graph(
    nodes: list[onnx.NodeProto], inputs: list[Value], outputs: list[Value], weights: tuple[TensorProto, ...] = ()
) -> bytes:
    """A model, as bytes; not checked."""
    values = [[helper.make_tensor_value_info(*item) for item in some] for some in (inputs, outputs)]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("my.ops", 1)]
    built = helper.make_model(helper.make_graph(nodes, "g", *values, weights), opset_imports=opsets, ir_version=8)
    return bytes(built.SerializeToString())


def node(op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs, f"my_{op.lower()}", **attributes)


def counting() -> bytes:
    """A loop of n rounds: n to y = n, and as long as n is large."""
    zero = helper.make_tensor("zero", I64, (), [0])
    first = helper.make_tensor("one", I64, (), [1])
    kinds = {"i": I64, "c": TensorProto.BOOL, "c_out": TensorProto.BOOL, "s": I64, "s_out": I64}
    values = {name: helper.make_tensor_value_info(name, kind, ()) for name, kind in kinds.items()}
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["c_out"]), helper.make_node("Add", ["s", "one"], ["s_out"])],
        "body",
        [values["i"], values["c"], values["s"]],
        [values["c_out"], values["s_out"]],
    )
    loop = node("Loop", ["n", "", "zero"], ["y"], body=body)
    return graph([loop], [("n", I64, ())], [("y", I64, ())], (zero, first))
