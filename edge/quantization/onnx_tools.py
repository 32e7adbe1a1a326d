"""Steps of quantizing an ONNX model with ONNX Runtime's own tools, with the settings that measured best.

Each step reads and writes files. The tools raise exceptions of many classes. edge/quantization/onnx.py therefore runs
the steps inside `quiet_tools` and `refusals`, after `runtime` has configured ONNX Runtime.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from edge.onnx.file import branches, sort_nodes
from edge.onnx.samples import Feeds
from edge.quantization.onnx_float32 import has_halves, store_halves, to_float32

_PER_CHANNEL_OPSET = 13  # first version with scales per channel
_LEAST_OPSET = 11  # the tools convert older models to this version, and fail to convert Upsample
_TURNED, _FLAT = "_transposed", "_flat"
_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM")
# accuracy_level of MatMulNBits: multiply in 8 bits. This measured 3 to 5 times faster than floats, and as accurate.
_INT8_COMPUTE = 4


def prepare(staged: Path, external: bool, eight_bits: bool, fixed: bool) -> Path:
    """Write the model to a new file in its folder, with folded constants and inferred shapes. Return the new path.

    eight_bits: true for 8 bits, false for 4; for 8 bits, 16-bit floats become 32-bit floats first
    fixed: true if the ranges of activations will be fixed
    """
    import onnx
    from onnxruntime.quantization.shape_inference import quant_pre_process

    model = onnx.load(staged, load_external_data=False)
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    if opset < (_PER_CHANNEL_OPSET if fixed else _LEAST_OPSET):
        from onnx import version_converter

        model = version_converter.convert_version(onnx.load(staged), _PER_CHANNEL_OPSET)
        onnx.save_model(model, str(staged := staged.with_name("newer.onnx")))
    halves = has_halves(model)
    if halves and eight_bits:  # the 8-bit tools accept 32-bit floats only
        to_float32(model := onnx.load(staged))
        staged = staged.with_name("float32.onnx")
        onnx.save_model(model, str(staged), save_as_external_data=external, location=f"{staged.name}.data")
    del model
    if eight_bits and not fixed:
        staged = _changed(staged, external, "branches.onnx", _move_into_branches)
    # Symbolic shapes would need another package (sympy); the tools use only known ones.
    quant_pre_process(
        str(staged),
        str(path := staged.with_name("prepared.onnx")),
        skip_symbolic_shape=True,
        # The optimization casts 16-bit weights, and the tools do not find weights behind casts.
        skip_optimization=halves and not eight_bits,
        save_as_external_data=external,
        all_tensors_to_one_file=True,
        external_data_location="prepared.onnx.data",
    )
    return _changed(path, external, "changed.onnx", _flatten_biases if fixed else _transpose_once)


def _changed(path: Path, external: bool, name: str, change: Callable[[Any], bool]) -> Path:
    """Apply `change` to the model's graph. Return the path of the changed model, or the old path if nothing changed."""
    import onnx

    model = onnx.load(path)
    if not change(model.graph):
        return path
    path = path.with_name(name)
    onnx.save_model(model, str(path), save_as_external_data=external, location=f"{name}.data")
    return path


def dynamic(prepared: Path, target: Path, external: bool) -> None:
    """Quantize weights to 8 bits. Every run determines the ranges of activations."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    # Unsigned weights: ConvInteger with signed weights has no fast kernel and measured 3 to 6 times slower than floats.
    # Unsigned products also cannot saturate on processors without 8-bit dot products.
    quantize_dynamic(
        prepared,
        target,
        per_channel=True,
        weight_type=QuantType.QUInt8,
        use_external_data_format=external,
        extra_options={"EnableSubgraph": True},
    )


def static(prepared: Path, target: Path, external: bool, samples: Iterable[Feeds]) -> None:
    """Quantize weights and activations to 8 bits. The samples determine the ranges of activations."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]  # the package ships no types
        def __init__(self) -> None:
            self._left: Iterator[Feeds] = iter(samples)

        def get_next(self) -> Feeds | None:
            return next(self._left, None)

    # Operators between the products stay in floats. If all were quantized, the error was up to twice as large. Of four
    # networks, one then was a fifth faster, two changed by at most 5 %, and one took twice the time.
    quantize_static(
        prepared,
        target,
        Reader(),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=["Conv", "ConvTranspose", "Gemm", "MatMul"],
        per_channel=True,
        reduce_range=_saturates(),
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        use_external_data_format=external,
        extra_options={"MatMulConstBOnly": True},
    )


def int4(prepared: Path, target: Path, external: bool, block_size: int) -> None:
    """Quantize weights of matrix products and tables to 4 bits. `block_size` values share a scale."""
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    from onnxruntime.quantization.onnx_model import ONNXModel

    model = onnx.load(prepared)
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    ONNXModel(model).replace_gemm_with_matmul()  # MatMulNBits replaces MatMul only
    for i, node in enumerate(model.graph.node):
        node.name = node.name or f"node_{i}"  # the names identify nodes below
    gathers = {node.name: _is_table(model.graph, node) for node in model.graph.node if node.op_type == "Gather"}
    tool = MatMulNBitsQuantizer(
        model,
        block_size=block_size,
        accuracy_level=_INT8_COMPUTE,
        op_types_to_quantize=("MatMul", "Gather") if any(gathers.values()) else ("MatMul",),
        nodes_to_exclude=[name for name, is_table in gathers.items() if not is_table],
        quant_axes=(("MatMul", 0), ("Gather", -1)),
    )
    tool.process()
    result = tool.model.model
    for entry in result.opset_import:
        # For tables, the tool raises the operator set version without updating the operators.
        entry.version = opsets.get(entry.domain, entry.version)
    _without_repeats(result.graph)
    tool.model.save_model_to_file(str(target), external)


def put_in_order(path: Path) -> None:
    """Put a model's nodes into topological order, which ONNX requires. The tools leave subgraphs unordered."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    if sort_nodes(model.graph):
        onnx.save_model(model, str(path))


def store_left_weights(path: Path, external: bool) -> None:
    """Store weights that were left in floats in 16 bits, as in the source."""
    import onnx

    model = onnx.load(path)
    if store_halves(model):
        data_file = path.with_name(f"{path.name}.data")
        data_file.unlink(missing_ok=True)  # the onnx package would append to it
        onnx.save_model(model, str(path), save_as_external_data=external, location=data_file.name)


def _transpose_once(graph: Any) -> bool:
    """Store transposed copies of constants that a Gemm reads transposed, under new names. Return whether there were
    any.

    The tools turn such a Gemm into a MatMul by transposing its constant in place. If two nodes share the constant, they
    transpose it twice, which also contradicts its inferred shape.
    """
    from onnx import numpy_helper

    initializers = {tensor.name: tensor for tensor in graph.initializer}
    turned: set[str] = set()
    for node in graph.node:
        flag = next((attribute for attribute in node.attribute if attribute.name == "transB" and attribute.i), None)
        if node.op_type == "Gemm" and flag is not None and node.input[1] in initializers:
            flag.i = 0
            turned.add(node.input[1])
            node.input[1] += _TURNED
    used = {name for node in graph.node for name in node.input} | {output.name for output in graph.output}
    for name in sorted(turned):
        graph.initializer.append(
            numpy_helper.from_array(numpy_helper.to_array(initializers[name]).T.copy(), name + _TURNED)
        )
        if name not in used and not any(True for node in graph.node for _ in branches(node)):  # subgraphs may use it
            graph.initializer.remove(initializers[name])
    return bool(turned)


def _move_into_branches(graph: Any) -> bool:
    """Move each weight that only one subgraph uses into that subgraph, recursively. Return whether any weight moved.

    The tool looks for weights in the graph that uses them.
    """
    inside = [branch for node in graph.node for branch in branches(node)]
    used = _names_used(graph) | {value.name for value in graph.output}
    moved = False
    for tensor in list(graph.initializer):
        users = [branch for branch in inside if tensor.name in _all_names_used(branch)]
        if len(users) == 1 and tensor.name not in used and len(tensor.dims) > 1:
            users[0].initializer.append(tensor)
            graph.initializer.remove(tensor)
            moved = True
    # A list, because any() would stop at the first true value.
    further = [_move_into_branches(branch) for branch in inside]
    return moved or any(further)


def _names_used(graph: Any) -> set[str]:
    """Return the inputs of a graph's own nodes, without those of its subgraphs."""
    return {name for node in graph.node for name in node.input}


def _all_names_used(graph: Any) -> set[str]:
    """Return the inputs of all nodes of a graph and its subgraphs, and their outputs."""
    inside = [_all_names_used(branch) for node in graph.node for branch in branches(node)]
    return _names_used(graph).union({value.name for value in graph.output}, *inside)


def _flatten_biases(graph: Any) -> bool:
    """Store Gemm biases of shape (1, n) as (n), because the tool takes the first axis for channels.

    Return whether there were any.
    """
    from onnx import numpy_helper

    initializers = {tensor.name: tensor for tensor in graph.initializer}
    flat: set[str] = set()
    for node in graph.node:
        if node.op_type == "Gemm" and len(node.input) > 2 and node.input[2] in initializers:
            name, dims = node.input[2], list(initializers[node.input[2]].dims)
            if len(dims) == 2 and dims[0] == 1:
                node.input[2] = name + _FLAT
                flat.add(name)
    for name in sorted(flat):
        graph.initializer.append(numpy_helper.from_array(numpy_helper.to_array(initializers[name])[0], name + _FLAT))
    return bool(flat)


def has_branches(path: Path) -> bool:
    """Return whether a model has weighted products inside an If or a Loop."""
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    return any(_matrix_products(branch) for node in graph.node for branch in branches(node))


def _matrix_products(graph: Any) -> bool:
    return any(
        node.op_type in _PRODUCTS or any(_matrix_products(branch) for branch in branches(node)) for node in graph.node
    )


def count_weights(prepared: Path, target: Path) -> tuple[int, int]:
    """Return the number of quantized tensors and of tensors left in floats. Vectors do not count."""
    (floats, integers), (floats_left, integers_now) = _matrices(prepared), _matrices(target)
    return len(integers_now - integers), len(floats & floats_left)


def _matrices(path: Path) -> tuple[set[str], set[str]]:
    """Return the names of a model's float initializers and of its 8-bit or 4-bit initializers, without vectors."""
    import onnx

    types = onnx.TensorProto
    floats, integers = set(), set()
    for tensor in _initializers(onnx.load(path, load_external_data=False).graph):
        if sum(dim > 1 for dim in tensor.dims) < 2:
            continue  # vectors may have more axes of 1, such as scales of channels
        if tensor.data_type in (types.FLOAT, types.FLOAT16, types.BFLOAT16, types.DOUBLE):
            floats.add(tensor.name)
        elif tensor.data_type in (types.UINT8, types.INT8, types.UINT4, types.INT4):
            integers.add(tensor.name)
    return floats, {name for name in integers if not name.endswith(("_zero_point", "_zero_points"))}


def _initializers(graph: Any) -> Iterator[Any]:
    """Yield the initializers of a graph and of all its subgraphs."""
    yield from graph.initializer
    for node in graph.node:
        for branch in branches(node):
            yield from _initializers(branch)


def _is_table(graph: Any, node: Any) -> bool:
    """Return whether a Gather reads rows of a constant matrix of floats."""
    import onnx

    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
    table = next((tensor for tensor in graph.initializer if tensor.name == node.input[0]), None)
    return table is not None and len(table.dims) == 2 and table.data_type in floats and axis == 0


def _without_repeats(graph: Any) -> None:
    """Remove duplicate initializers. The tool writes a weight that two nodes share twice, which ONNX does not allow."""
    unique = {tensor.name: tensor for tensor in graph.initializer}
    if len(unique) < len(graph.initializer):
        tensors = list(unique.values())
        graph.ClearField("initializer")
        graph.initializer.extend(tensors)


def _saturates() -> bool:
    """Return whether this processor's 8-bit products can saturate: x86 without VNNI. Weights then get 7 bits."""
    if platform.machine().lower() not in ("x86_64", "amd64", "i686"):
        return False
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return True  # true is the safe answer
    return not any(name in flags for name in ("avx512_vnni", "avx_vnni"))
