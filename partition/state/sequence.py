"""KV cache that llama.cpp writes for a range of a sequence, as arrays. The bytes are untrusted and therefore checked.

    u32 magic | i32 sequence | one cache, or two if some layers have attention windows:
    u32 streams (1) | u32 cells | each cell: i32 position, u32 sequences (1), i32 sequence
    (if positions have sections, before the sequence: the position twice, as i32, and the i32 id of the token)
    u32 1 if values are transposed, else 0 | u32 layers
    each layer's keys: i32 type | u64 bytes a cell | the cells
    each layer's values: i32 type | u64 bytes a cell | the cells
    or, transposed: i32 type | u32 bytes a value | u32 values a cell | each value: the cells

All fields are little-endian. A cache without cells ends after the number of cells.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from partition.errors import StateError
from partition.plan.plan import Range
from partition.state.shape import LayerShape, StateShape

Bytes = NDArray[np.uint8]

_MAGIC = 0xAF143CD8


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Keys and values of one layer, with one row of bytes per token."""

    keys: Bytes  # [tokens, key_bytes]
    values: Bytes  # [tokens, value_bytes]


@dataclass(frozen=True, slots=True)
class KVBlock:
    """Keys and values of consecutive positions of a sequence, in the layers and heads of a slice."""

    positions: Range
    layers: tuple[LayerRows, ...]  # in the order of the slice's StateShape

    @property
    def n_bytes(self) -> int:
        """Bytes of the keys and values."""
        return sum(rows.keys.nbytes + rows.values.nbytes for rows in self.layers)


def decode(data: bytes | memoryview | Bytes, shape: StateShape, positions: Range) -> KVBlock:
    """Return the keys and values in llama.cpp's data for these positions. Raises StateError for other data.

    The arrays are views of `data` if its cells are in order.
    """
    reader = _Reader(data)
    reader.expect("magic", "<I", _MAGIC)
    sequence = reader.take("<i")
    transposed: int | None = None
    rows: dict[int, LayerRows] = {}
    for number in range(shape.caches):
        layers = shape.in_cache(number)
        reader.expect("streams", "<I", 1)
        reader.expect("cells", "<I", len(positions))
        order = _order(reader, positions, sequence, shape)
        transposed = reader.take_transposed(transposed)
        reader.expect("layers", "<I", len(layers))
        keys = [reader.rows(shape.key_type, layer.key_bytes, len(positions))[order] for layer in layers]
        for layer, key in zip(layers, keys, strict=True):
            value = (
                reader.columns(shape, layer, len(positions))
                if transposed
                else reader.rows(shape.value_type, layer.value_bytes, len(positions))
            )
            rows[layer.layer] = LayerRows(key, value[order])
    reader.end()
    return KVBlock(positions, tuple(rows[layer.layer] for layer in shape.layers))


def encode(block: KVBlock, shape: StateShape, *, transposed: bool = False) -> Bytes:
    """Return the block as llama.cpp's state of sequence 0. Raises StateError if the block does not have this shape."""
    check(block, shape)
    parts: list[bytes | Bytes] = [struct.pack("<Ii", _MAGIC, 0)]
    twice = (lambda at: (at, at, 0)) if shape.sections else lambda at: ()  # the token ID is not used
    cells = b"".join(shape.cell.pack(at, 1, *twice(at), 0) for at in range(block.positions.start, block.positions.stop))
    rows = {layer.layer: rows for layer, rows in zip(shape.layers, block.layers, strict=True)}
    for number in range(shape.caches):
        layers = shape.in_cache(number)
        parts += [struct.pack("<II", 1, len(block.positions)), cells, struct.pack("<II", transposed, len(layers))]
        for layer in layers:
            parts += [struct.pack("<iQ", shape.key_type, layer.key_bytes), rows[layer.layer].keys.reshape(-1)]
        for layer in layers:
            values = rows[layer.layer].values
            if not transposed:
                parts += [struct.pack("<iQ", shape.value_type, layer.value_bytes), values.reshape(-1)]
                continue
            n_values = _values(shape, layer)
            by_value = values.reshape(len(block.positions), n_values, shape.value_size).swapaxes(0, 1)
            parts += [struct.pack("<iII", shape.value_type, shape.value_size, n_values), by_value.reshape(-1)]
    return np.concatenate([np.frombuffer(part, np.uint8) if isinstance(part, bytes) else part for part in parts])


def check_encoded(data: bytes | memoryview, shape: StateShape, positions: Range) -> None:
    """Raise StateError unless `encode` wrote these bytes for such a block, not transposed.

    This is as strict as `decode` and many times faster, because all bytes outside keys and values are compared
    together.
    """
    if len(data) != encoded_bytes(shape, len(positions)):
        raise StateError(f"a state of {len(data)} bytes; expected {encoded_bytes(shape, len(positions))}")
    at, expected, cells = _header(shape, len(positions))
    header = np.frombuffer(data, np.uint8)[at]
    for start in cells:
        words = header[start : start + shape.cell.size * len(positions)].view("<i4").reshape(len(positions), -1)
        words[:, [0, 2, 3] if shape.sections else 0] -= positions.start
    if header.tobytes() != expected:
        raise StateError(f"a state of other positions than {positions}, or of another shape")


@lru_cache(8)
def _header(shape: StateShape, tokens: int) -> tuple[NDArray[np.intp], bytes, tuple[int, ...]]:
    """Return the bytes outside keys and values in an encoded block from position 0.

    The result has their places, the bytes, and the index among them at which the cells of each cache begin.
    """
    zeros, ones = (
        encode(
            KVBlock(
                Range(0, tokens),
                tuple(
                    LayerRows(
                        np.full((tokens, layer.key_bytes), byte, np.uint8),
                        np.full((tokens, layer.value_bytes), byte, np.uint8),
                    )
                    for layer in shape.layers
                ),
            ),
            shape,
        )
        for byte in (0, 255)
    )
    at = np.flatnonzero(zeros == ones)
    cells, begin = [], 8
    for number in range(shape.caches):
        cells.append(begin + 8)
        begin += 16 + shape.cell.size * tokens + 24 * len(shape.in_cache(number))
    return at, zeros[at].tobytes(), tuple(cells)


def encoded_bytes(shape: StateShape, tokens: int) -> int:
    """Return the length of `encode`'s result for `tokens` tokens, not transposed."""
    heads = shape.caches * (16 + shape.cell.size * tokens) + 24 * len(shape.layers)
    return 8 + heads + tokens * shape.token_bytes


def check(block: KVBlock, shape: StateShape) -> None:
    """Raise StateError unless the block has the layers and rows of this shape."""
    if len(block.layers) != len(shape.layers):
        raise StateError(f"keys and values of {len(block.layers)} layers; expected those of {len(shape.layers)}")
    for layer, rows in zip(shape.layers, block.layers, strict=True):
        expected = ((len(block.positions), layer.key_bytes), (len(block.positions), layer.value_bytes))
        if (rows.keys.shape, rows.values.shape) != expected:
            raise StateError(
                f"layer {layer.layer} has keys of {rows.keys.shape} and values of {rows.values.shape} tokens and bytes;"
                f" expected {expected[0]} and {expected[1]}"
            )


def _values(shape: StateShape, layer: LayerShape) -> int:
    """Return the number of values of one token in a layer. Raises StateError for types in blocks."""
    if not shape.value_size:
        raise StateError(f"values of type {shape.value_type} have blocks and cannot be transposed; use flash attention")
    return layer.value_bytes // shape.value_size


def _order(reader: "_Reader", positions: Range, sequence: int, shape: StateShape) -> Sequence[int] | slice:
    """Return the index of each position's cell, or a slice if they are in order.

    Raises StateError unless each position occurs exactly once.
    """
    cells = np.frombuffer(reader.bytes(shape.cell.size * len(positions)), "<i4").reshape(len(positions), -1)
    if not (cells[:, [1, -1]] == (1, sequence)).all():
        raise StateError(f"a state has a cell that is not of sequence {sequence} alone")
    if shape.sections and not (cells[:, 2:4] == cells[:, :1]).all():
        raise StateError("a state has a cell whose position has two dimensions: it does not belong to text")
    at = cells[:, 0]
    order = np.argsort(at, kind="stable")
    if not np.array_equal(at[order], np.arange(positions.start, positions.stop)):
        raise StateError(f"a state has other positions than {positions}, or one of them twice")
    return slice(None) if np.array_equal(order, np.arange(len(order))) else order.tolist()


class _Reader:
    """Reads fields from a buffer. Raises StateError if the buffer ends, or if a field has an unexpected value."""

    def __init__(self, data: bytes | memoryview | Bytes) -> None:
        self._data = memoryview(data).cast("B")  # type: ignore[arg-type]
        self._at = 0

    def bytes(self, n: int) -> memoryview:
        if n > len(self._data) - self._at:
            raise StateError(f"a state ends at byte {len(self._data)}; expected {n} bytes from byte {self._at} on")
        self._at += n
        return self._data[self._at - n : self._at]

    def take(self, form: str) -> int:
        value: int = struct.unpack(form, self.bytes(struct.calcsize(form)))[0]
        return value

    def expect(self, name: str, form: str, expected: int) -> None:
        value = self.take(form)
        if value != expected:
            raise StateError(f"a state has {value} as {name}; expected {expected}")

    def take_transposed(self, before: int | None) -> int:
        """Return whether values are transposed. before: result for the previous cache, which must agree"""
        value = self.take("<I")
        if value > 1 or before not in (None, value):
            raise StateError(f"a state says {value} for whether values are transposed; expected 0 or 1 in all caches")
        return value

    def rows(self, type_id: int, row_bytes: int, tokens: int) -> Bytes:
        self.expect("type", "<i", type_id)
        self.expect("bytes a token", "<Q", row_bytes)
        return np.frombuffer(self.bytes(row_bytes * tokens), np.uint8).reshape(tokens, row_bytes)

    def columns(self, shape: StateShape, layer: LayerShape, tokens: int) -> Bytes:
        """Return transposed values as rows, in a copy."""
        n_values = _values(shape, layer)
        self.expect("type", "<i", shape.value_type)
        self.expect("bytes a value", "<I", shape.value_size)
        self.expect("values a token", "<I", n_values)
        raw = np.frombuffer(self.bytes(layer.value_bytes * tokens), np.uint8)
        by_token: Bytes = raw.reshape(n_values, tokens, shape.value_size).swapaxes(0, 1)
        return by_token.reshape(tokens, layer.value_bytes)

    def end(self) -> None:
        if self._at != len(self._data):
            raise StateError(f"a state of {len(self._data)} bytes; expected {self._at}")
