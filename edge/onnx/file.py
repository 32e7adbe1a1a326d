"""ONNX model file, read whole and checked before native code uses it."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from partition.model.onnx_graph import uses
from quant.errors import ModelFileError
from quant.text import first_line

PROTOBUF_LIMIT = (1 << 31) - 1  # bytes of one file; larger models keep their weights in a separate file
_INLINE_LIMIT = 1_900_000_000  # bytes of weights that fit into one file with names, nodes and shapes
_NO_SHAPE = "Field 'shape' of 'type' is required"
_MOST_DIMS = 64  # limit of dimensions of a tensor, as in numpy
_MOST_VALUES = 1 << 48  # limit of values of a tensor
LONGEST_NAME = 200  # limit of characters of a tensor's name in an error
# Temporary domain of operators that the onnx package does not know, while it checks the model.
_UNCHECKED = "edge.unchecked"
_KEEP_INLINE = 1024  # smaller tensors in bytes, such as shapes, stay inside the model for shape inference


@dataclass(frozen=True)
class OnnxFile:
    """An ONNX model in memory, and the files it was read from."""

    path: Path
    model: Any  # onnx.ModelProto with all weights
    data_files: frozenset[Path]  # separate files that held weights
    weight_bytes: int
    size_bytes: int  # bytes of all files

    @property
    def external(self) -> bool:
        """Return whether `save` writes the weights into a separate file."""
        return bool(self.data_files) or self.weight_bytes > _INLINE_LIMIT


def load(path: Path) -> OnnxFile:
    """Return the model in `path` with its weights, which may be in separate files.

    Raises OSError if a file cannot be read. Raises ModelFileError if the file is not a valid and complete ONNX model,
    or if weights are outside the model's folder, missing, or too short; the message names the tensor.
    """
    import onnx

    size = path.stat().st_size
    if size > PROTOBUF_LIMIT:
        raise ModelFileError(f"{path} has {size} bytes; an ONNX file has at most 2 GiB, and more weights beside it")
    model = message_of(path.read_bytes(), f"{path} is not an ONNX model", ", or is cut off; get it again")
    if not model.ir_version or not model.opset_import or not model.graph.output:
        raise ModelFileError(f"{path} is not an ONNX model: it names no version, no operator set or no outputs")
    data_files: set[Path] = set()
    for tensor in tensors(model):
        what = f"{path}: tensor {tensor.name[:LONGEST_NAME]!r}"
        check_dims(tensor, what)
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            data_files.add(data_file_of(path, tensor, what))
    read_weights(path, model)
    constants_not_inputs(model.graph)
    sort_nodes(model.graph)
    model.ir_version = max(model.ir_version, 4)  # older versions require every initializer to be an input
    weights = sum(len(tensor.raw_data) or int(tensor.ByteSize()) for tensor in tensors(model))
    size += sum(data_file.stat().st_size for data_file in data_files)
    file = OnnxFile(path, model, frozenset(data_files), weights, size)
    if weights <= _INLINE_LIMIT:
        check_model(model, str(path))
    return file


def parsed(content: bytes) -> Any:
    """Return the checked model in these bytes. Raises ModelFileError if it is invalid or has weights in separate
    files."""
    import onnx

    model = message_of(content, f"these {len(content)} bytes are no ONNX model", ", or are cut off")
    for tensor in tensors(model):
        check_dims(tensor, f"tensor {tensor.name[:LONGEST_NAME]!r}")
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            raise ModelFileError(f"tensor {tensor.name!r} has its data in a file; give the model as a file, too")
    sort_nodes(model.graph)
    check_model(model, "the model")
    return model


def message_of(content: bytes, refused: str, or_cut_off: str) -> Any:
    """Return the ModelProto in these bytes. Raises ModelFileError with a message that begins with `refused`."""
    import onnx
    from google.protobuf.message import DecodeError

    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError as exc:
        is_gguf = content[:4] == b"GGUF"
        raise ModelFileError(f"{refused}: it is GGUF, for edge chat" if is_gguf else refused + or_cut_off) from exc
    if not _is_text(model):
        raise ModelFileError(f"{refused}: a name in it is not UTF-8")
    return model


def check_model(model: Any, name: str) -> None:
    """Raise ModelFileError if the model breaks the rules of ONNX.

    ONNX Runtime's optimizer writes private operators into the standard domain. Such operators are not checked here,
    because ONNX Runtime refuses unknown operators itself.
    """
    import onnx

    unknown = [node for node in _all_nodes(model.graph) if _is_unknown(node)]
    n_domains = len(model.opset_import)
    if unknown:
        model.opset_import.add(domain=_UNCHECKED, version=1)
    domains = [node.domain for node in unknown]
    for node in unknown:
        node.domain = _UNCHECKED
    try:
        onnx.checker.check_model(model)
    except Exception as exc:  # ValidationError, or another class if the model cannot be serialized
        if _NO_SHAPE not in str(exc):  # an output without a shape is valid for ONNX Runtime
            raise ModelFileError(f"{name} is not a valid ONNX model: {first_line(exc)}") from exc
    finally:
        for node, domain in zip(unknown, domains, strict=True):
            node.domain = domain
        del model.opset_import[n_domains:]


def _is_unknown(node: Any) -> bool:
    """Return whether a node claims a standard operator that no version of the onnx package's standard has."""
    import onnx

    return node.domain in ("", "ai.onnx") and not onnx.defs.has(node.op_type)


def sort_nodes(graph: Any) -> bool:
    """Put the nodes of a graph and of its subgraphs into topological order; return whether any node moved.

    Nodes that are in order keep their places. Unknown inputs and cycles are left for the check of the model.
    """
    moved = [sort_nodes(branch) for node in graph.node for branch in branches(node)]
    makers = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    needs = [{makers[name] for name in uses(node) if name in makers} - {i} for i, node in enumerate(graph.node)]
    if all(place < i for i, places in enumerate(needs) for place in places):
        return any(moved)
    users: list[list[int]] = [[] for _ in needs]
    for i, places in enumerate(needs):
        for place in places:
            users[place].append(i)
    left = [len(places) for places in needs]
    ready = [i for i, n in enumerate(left) if not n]  # heap of places, so that the earliest ready node comes next
    order = []
    while ready:
        order.append(heapq.heappop(ready))
        for user in users[order[-1]]:
            left[user] -= 1
            if not left[user]:
                heapq.heappush(ready, user)
    if len(order) < len(needs):
        return any(moved)  # the graph has a cycle
    nodes = [graph.node[i] for i in order]
    copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
    return True


def keep_outputs(graph: Any, names: Collection[str] = ()) -> None:
    """Remove all other outputs from a graph. Without names, keep the tensors of numbers, which devices can exchange.

    Raises ModelFileError if the graph does not have an output of that name, or if no output remains.
    """
    outputs = {value.name: value for value in graph.output}
    if unknown := sorted(set(names) - outputs.keys()):
        raise ModelFileError(f"the model has no output {unknown[0]!r}; it has {', '.join(map(repr, outputs))}")
    chosen = [value for name, value in outputs.items() if (name in names if names else _is_numbers(value.type))]
    copies = [type(value).FromString(value.SerializeToString()) for value in chosen]
    if not copies:
        raise ModelFileError(f"no output of the model is a tensor of numbers: {', '.join(map(repr, outputs))}")
    del graph.output[:]
    graph.output.extend(copies)


def _is_numbers(type_: Any) -> bool:
    """Return whether a type is a tensor of numbers or undeclared."""
    import onnx

    kind = type_.WhichOneof("value")
    return kind is None or (kind == "tensor_type" and type_.tensor_type.elem_type != onnx.TensorProto.STRING)


def branches(node: Any) -> Iterator[Any]:
    """Yield the subgraphs of a node: branches of an If, bodies of a Loop or a Scan."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _all_nodes(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        yield node
        for branch in branches(node):
            yield from _all_nodes(branch)


def _is_text(message: Any) -> bool:
    """Return whether all strings are UTF-8. ONNX's protobuf version does not check this and returns other strings as
    bytes.
    """
    for field, value in message.ListFields():
        values = [value] if isinstance(value, (str, bytes)) or hasattr(value, "ListFields") else value
        if field.type == field.TYPE_STRING and not all(isinstance(item, str) for item in values):
            return False
        if field.type == field.TYPE_MESSAGE and not all(map(_is_text, values)):
            return False
    return True


def save(file: OnnxFile, path: Path) -> None:
    """Write the model to `path`. If the weights are external, write them to PATH.data and drop them from memory.

    Raises OSError if writing fails.
    """
    import onnx

    onnx.save_model(
        file.model,
        str(path),
        save_as_external_data=file.external,
        location=f"{path.name}.data",
        size_threshold=_KEEP_INLINE,
    )


def tensors(model: Any) -> Iterator[Any]:
    """Yield every TensorProto of a ModelProto: initializers and constants, also those of subgraphs and functions."""
    yield from _graph_tensors(model.graph)
    for function in model.functions:
        yield from _node_tensors(function.node)
    for training in model.training_info:
        yield from _graph_tensors(training.initialization)
        yield from _graph_tensors(training.algorithm)


def _graph_tensors(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: Any) -> Iterator[Any]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for sparse in (*((attribute.sparse_tensor,) if attribute.HasField("sparse_tensor") else ()),
                           *attribute.sparse_tensors):  # fmt: skip
                yield from (sparse.values, sparse.indices)
            if attribute.HasField("g"):
                yield from _graph_tensors(attribute.g)
            for graph in attribute.graphs:
                yield from _graph_tensors(graph)


def data_file_of(path: Path, tensor: Any, what: str) -> Path:
    """Return the file that holds an external tensor, after checking that the file holds all its bytes."""
    fields = {entry.key: entry.value for entry in tensor.external_data}
    location = str(fields.get("location", ""))
    parts = (*PurePosixPath(location).parts, *PureWindowsPath(location).parts)
    absolute = PurePosixPath(location).is_absolute() or PureWindowsPath(location).anchor
    if not location or "\0" in location or absolute or ".." in parts:
        raise ModelFileError(f"{what} has its data in {location!r}; only files in the model's own folder are read")
    data_file = path.parent / location
    if not data_file.exists():
        raise ModelFileError(
            f"{what} has its data in {location!r}, which does not exist; put it into the model's folder"
        )
    if not data_file.resolve().is_relative_to(path.parent.resolve()) or data_file.is_symlink():
        raise ModelFileError(f"{what} has its data in {location!r}, which is a link; put the file itself there")
    if not data_file.is_file():
        raise ModelFileError(f"{what} has its data in {location!r}, which is not a file")
    need = _dense_bytes(tensor, what)
    try:
        offset = int(fields.get("offset", "0") or "0")
        length = int(fields.get("length", "") or need)
    except ValueError as exc:
        raise ModelFileError(f"{what} has an offset or a length that is not a number") from exc
    have = data_file.stat().st_size
    if offset < 0 or length != need:
        raise ModelFileError(f"{what} needs {need} bytes; {length} at offset {offset} of {location!r} are named")
    if offset + length > have:
        raise ModelFileError(f"{what} ends at byte {offset + length} of {location!r}, which has {have}; get it again")
    return data_file


def check_dims(tensor: Any, what: str) -> None:
    """Raise ModelFileError if the tensor has too many dimensions, a negative dimension, or too many values."""
    if len(tensor.dims) > _MOST_DIMS:
        raise ModelFileError(f"{what} has {len(tensor.dims)} dimensions; at most {_MOST_DIMS} are possible")
    if least := next((dim for dim in tensor.dims if dim < 0), None):
        raise ModelFileError(f"{what} has a negative dimension, {least}")
    if 0 not in tensor.dims and prod(tensor.dims) > _MOST_VALUES:
        dims = " x ".join(map(str, tensor.dims[:8])) + (" x ..." if len(tensor.dims) > 8 else "")
        raise ModelFileError(f"{what} has {dims} values, more than any memory holds")


def _dense_bytes(tensor: Any, what: str) -> int:
    """Return the size of a tensor's values in bytes."""
    import onnx

    values = prod(tensor.dims)
    halves = (onnx.TensorProto.INT4, onnx.TensorProto.UINT4, getattr(onnx.TensorProto, "FLOAT4E2M1", -1))
    if tensor.data_type in halves:
        return int(values + 1) // 2
    try:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    except (KeyError, ValueError, TypeError) as exc:
        raise ModelFileError(f"{what} has an unknown type, {tensor.data_type}") from exc
    if dtype.kind == "O" or tensor.data_type == onnx.TensorProto.STRING:
        raise ModelFileError(f"{what} has strings outside the model, which ONNX does not allow")
    return int(values) * int(dtype.itemsize)


def read_weights(path: Path, model: Any) -> None:
    """Read the external weights into the model. Their files have been checked."""
    from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

    for tensor in tensors(model):
        if uses_external_data(tensor):
            try:
                load_external_data_for_tensor(tensor, str(path.parent))
            except OSError:
                raise
            except Exception as exc:  # the onnx package has more checks, and no common class for their errors
                raise ModelFileError(f"{path}: tensor {tensor.name!r}: {first_line(exc)}") from exc
            tensor.data_location = 0  # DEFAULT
            tensor.ClearField("external_data")


def constants_not_inputs(graph: Any) -> None:
    """Remove weights from the inputs, where old models list them, too. A weight that is also an input is not constant,
    and would not be quantized.
    """
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in weights]
    graph.ClearField("input")
    graph.input.extend(inputs)
