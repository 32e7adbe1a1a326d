"""Tensors of a slice: name, shape, and source bytes in the model file."""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from partition.errors import CannotSlice
from partition.plan.plan import Range, Slice
from partition.plan.tensor import kv_heads
from partition.slices.recipe import Copy, Literal, Segment, Zeros
from partition.slices.rules import COMMON, CUTS, HEAD_VECTORS, POSITIONS, Cut
from partition.slices.source import QUERY_NORM, Source
from quant.gguf.file import TensorInfo
from quant.gguf.writer import NewTensor
from quant.types import TYPES

STUB_ROWS = 32  # token table's rows in a slice without head: llama.cpp needs a table, and reserves logits for each row

# A token table that is never read gets the smallest type. The types below are not weight types.
_NOT_TABLES = frozenset(("i8", "i16", "i32", "i64", "f64", "q8_1", "q8_k"))


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor of the slice and its bytes."""

    tensor: NewTensor
    segments: tuple[Segment, ...]


class Piece(NamedTuple):
    """A tensor of a slice that is a part of a tensor of the model."""

    name: str  # name in the slice
    dimension: int  # dimension of the cut: 0 for values of a row, 1 for rows; below 0: uncut
    ranges: Sequence[Range] = ()


def tensors(source: Source, cut: Slice) -> list[Placed]:
    """Return all tensors of a slice, in order. Raises CannotSlice if `cut` is inside quantization blocks."""
    placed = [*_table_and_head(source, cut), *_common(source, cut)]
    scale = source.query_scale(cut)
    for layer in range(cut.layers.start, cut.layers.stop):
        block = source.block(layer)
        ranges = layer_ranges(source, cut, layer)
        if scale != 1.0 and QUERY_NORM not in block:
            raise source.other_scale()
        for name, tensor in block.items():
            new = f"blk.{layer - cut.layers.start}.{name}"
            if name == QUERY_NORM and scale != 1.0:
                placed.append(_scaled(source, tensor, new, scale))
            else:
                placed += [placed_piece(tensor, piece, cut) for piece in pieces_of(source, new, ranges)]
    return placed


def pieces(tensor: TensorInfo, dimension: int, ranges: Sequence[Range]) -> tuple[Segment, ...]:
    """Return parts of a tensor along dimension 0 (values of a row) or 1 (rows), from each of its matrices.

    Raises CannotSlice if a part of a row does not begin and end at quantization blocks.
    """
    row = tensor.type.n_bytes(tensor.shape[0])
    if dimension == 0:
        stride, count = row, prod(tensor.shape[1:])
        bounds = [(_bytes(tensor, part.start), _bytes(tensor, part.stop)) for part in ranges]
    else:
        stride, count = row * tensor.shape[1], prod(tensor.shape[2:])
        bounds = [(row * part.start, row * part.stop) for part in ranges]
    if len(bounds) > 1 and count > 1:
        raise CannotSlice(f"{tensor.name!r} would be put together from several parts of many matrices")
    return tuple(
        Copy(tensor.offset, stride * count)
        if end - start == stride
        else Copy(tensor.offset + start, end - start, stride, count)
        for start, end in bounds
    )


def _bytes(tensor: TensorInfo, values: int) -> int:
    """Return the byte offset of value number `values` in a row."""
    if values % tensor.type.block:
        raise CannotSlice(
            f"{tensor.name!r} is stored in blocks of {tensor.type.block} values ({tensor.type.name}) and cannot be "
            f"cut at value {values}; cut at a multiple, or use another quantization"
        )
    return tensor.type.n_bytes(values)


def _table_and_head(source: Source, cut: Slice) -> Iterator[Placed]:
    """Yield the token table, which no slice reads, and the head's rows, which replace it if the loader permits."""
    embd = source.shape.n_embd
    if not cut.vocab:
        yield _table("token_embd.weight", embd, STUB_ROWS)
        if source.rules.needs_output:
            yield _table("output.weight", embd, STUB_ROWS)
        if source.rules.needs_bias:
            yield _zeros(NewTensor(HEAD_VECTORS[0], (STUB_ROWS,), TYPES["f32"]))
        return
    head = source.head
    name = "token_embd.weight"
    if source.rules.needs_output:
        yield _table(name, embd, len(cut.vocab))
        name = "output.weight"
    yield Placed(NewTensor(name, (embd, len(cut.vocab)), head.type), pieces(head, 1, [cut.vocab]))
    for vector in HEAD_VECTORS:
        bias = source.file.tensors.get(vector)
        if bias is not None:
            yield Placed(NewTensor(vector, (len(cut.vocab),), bias.type), pieces(bias, 0, [cut.vocab]))


def _table(name: str, embd: int, rows: int) -> Placed:
    """Return a table of zeros."""
    fitting = [t for t in TYPES.values() if t.name not in _NOT_TABLES and embd % t.block == 0]
    return _zeros(NewTensor(name, (embd, rows), min(fitting, key=lambda t: t.n_bytes(embd))))


def _zeros(tensor: NewTensor) -> Placed:
    return Placed(tensor, (Zeros(tensor.n_bytes),))


def _common(source: Source, cut: Slice) -> Iterator[Placed]:
    """Yield the tensors of every slice. Slices without head have them, too, because every loader requires
    output_norm."""
    for name in COMMON:
        if name in source.file.tensors:
            yield _whole(source.file.tensors[name], name)
    positions = source.file.tensors.get(POSITIONS)
    if positions:  # they are added before the model's first layer, and later layers do not depend on them
        first = cut.layers.start == 0
        yield _whole(positions, POSITIONS) if first else _table(POSITIONS, *positions.shape)


def _whole(tensor: TensorInfo, name: str) -> Placed:
    return Placed(NewTensor(name, tensor.shape, tensor.type), (Copy(tensor.offset, tensor.n_bytes),))


def _scaled(source: Source, tensor: TensorInfo, name: str, scale: float) -> Placed:
    """Return a vector of 32-bit floats, multiplied by `scale`."""
    layout = struct.Struct(f"<{tensor.n_values}f")
    values = (value * scale for value in layout.unpack(source.file.data(tensor.name)))
    return Placed(NewTensor(name, tensor.shape, tensor.type), (Literal(layout.pack(*values)),))


def layer_ranges(source: Source, cut: Slice, layer: int) -> dict[str, list[Range]]:
    """Return the rank's ranges in a layer for each unit of `Cut`; empty if the rank holds the whole layer."""
    return {} if source.is_whole(cut) else _head_ranges(source, cut) | _column_ranges(source, cut, layer)


def _head_ranges(source: Source, cut: Slice) -> dict[str, list[Range]]:
    """Return the rank's ranges for each unit that is cut by heads."""
    shape = source.shape
    k, v = shape.head_k, shape.head_v
    own = kv_heads(cut.heads, source.heads, source.heads_kv)
    queries = Range(cut.heads.start * k, cut.heads.stop * k)
    keys, values = _joined(own, k), _joined(own, v)
    after_q = source.heads * k
    after_k = after_q + source.heads_kv * k
    return {
        "heads": [cut.heads],
        "q": [queries],
        "k": keys,
        "v": values,
        "qkv": [queries, *_moved(keys, after_q), *_moved(values, after_k)],
        "out": [Range(cut.heads.start * v, cut.heads.stop * v)],
    }


def _column_ranges(source: Source, cut: Slice, layer: int) -> dict[str, list[Range]]:
    """Return the rank's ranges for each unit that is cut by columns of the feed-forward part."""
    columns, part = source.columns(layer), source.part(cut.ff, layer)
    shared = source.block(layer).get("ffn_down_shexp.weight")
    times = shared.shape[0] // columns if shared else 0
    return {
        "ff": [part],
        "gate": [part],
        "up": _moved([part], columns),
        "gate+up": [part, *_moved([part], columns)],
        "shared": [Range(times * part.start, times * part.stop)],
    }


def _joined(heads: Sequence[int], size: int) -> list[Range]:
    """Return the values of these heads. Consecutive heads form one range."""
    ranges: list[Range] = []
    for head in heads:
        if ranges and ranges[-1].stop == head * size:
            ranges[-1] = Range(ranges[-1].start, (head + 1) * size)
        else:
            ranges.append(Range(head * size, (head + 1) * size))
    return ranges


def _moved(ranges: Iterable[Range], by: int) -> list[Range]:
    return [Range(part.start + by, part.stop + by) for part in ranges]


def pieces_of(source: Source, name: str, ranges: dict[str, list[Range]]) -> list[Piece]:
    """Return the slice's pieces of a layer's tensor. There are two if a fused gate and up is separated.

    name: name of the tensor with the layer's number in the slice
    ranges: result of `layer_ranges`
    """
    kind = source.cut_of(name.split(".", 2)[2]) if ranges else None
    if kind is None or kind.dimension < 0:
        return [Piece(name, -1)]
    if source.rules.fused_gate_up and name.endswith("ffn_up.weight"):
        if not source.rules.shards_as:
            return [Piece(name, kind.dimension, ranges["gate+up"])]
        names = {"gate": name.replace("ffn_up", "ffn_gate"), "up": name}
        return [Piece(new, kind.dimension, ranges[part]) for part, new in names.items()]
    return [Piece(name, kind.dimension, ranges[kind.unit])]


def placed_piece(tensor: TensorInfo, piece: Piece, cut: Slice) -> Placed:
    """Return a piece of `tensor` with its bytes. Raises CannotSlice if it does not begin and end at whole blocks."""
    if piece.dimension < 0:
        placed = _whole(tensor, piece.name)
        if CUTS.get(piece.name.split(".", 2)[2]) is Cut.FIRST and not cut.first:
            placed = replace(placed, segments=(Zeros(tensor.n_bytes),))
        return placed
    shape = list(tensor.shape)
    shape[piece.dimension] = sum(map(len, piece.ranges))
    new = NewTensor(piece.name, tuple(shape), tensor.type)
    return Placed(new, pieces(tensor, piece.dimension, piece.ranges))


def merged(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Yield the same bytes in fewer segments. Adjacent pieces of the model file become one copy."""
    last: Segment | None = None
    for segment in segments:
        joined = _joint(last, segment) if last else segment
        if joined is None and last:
            yield last
        last = joined or segment
    if last:
        yield last


def _joint(a: Segment, b: Segment) -> Segment | None:
    """Return `a` and `b` as one segment; None if that is not possible."""
    if isinstance(a, Zeros) and isinstance(b, Zeros):
        return Zeros(a.length + b.length)
    if isinstance(a, Literal) and isinstance(b, Literal):
        return Literal(a.data + b.data)
    if isinstance(a, Copy) and isinstance(b, Copy) and a.count == b.count == 1 and a.end == b.offset:
        return Copy(a.offset, a.length + b.length)
    return None
