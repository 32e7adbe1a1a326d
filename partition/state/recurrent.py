"""Snapshot that llama.cpp writes for the recurrent layers of a sequence, which is untrusted and therefore checked.

    u32 magic | i32 sequence | u32 cells (1; 0: the sequence is empty)
    the cell: i32 position of the last token | u32 0
    u32 0 | u32 layers of the model, or slice
    each recurrent layer: i32 type | u64 bytes | its last inputs (R)
    each recurrent layer: i32 type | u64 bytes | its state (S)

All fields are little-endian. A snapshot covers all tokens up to its position, and cannot be divided.
"""

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partition.errors import StateError

Bytes = NDArray[np.uint8]

_BEFORE_CELLS = 8
_CELL = struct.Struct("<iI")
_LAYERS = struct.Struct("<II")
_PART = struct.Struct("<iQ")


@dataclass(frozen=True, slots=True)
class SnapshotShape:
    """Sizes of a model's recurrent layers."""

    layers: int  # number of all layers of the model or slice
    parts: tuple[tuple[int, int], ...]  # ggml type and bytes of each R, then of each S

    @classmethod
    def from_blank(cls, blank: Bytes) -> "SnapshotShape":
        """Return the shape from the snapshot of an empty sequence. Raises StateError for other data."""
        data = blank.tobytes()
        head = _BEFORE_CELLS + 4 + _LAYERS.size
        if len(data) < head or (len(data) - head) % _PART.size:
            raise StateError(f"{len(data)} bytes are not a snapshot of an empty sequence")
        cells, (transposed, layers) = struct.unpack_from("<I", data, _BEFORE_CELLS)[0], _LAYERS.unpack_from(data, 12)
        if cells or transposed:
            raise StateError(f"a snapshot of an empty sequence has {cells} cells")
        return cls(layers, tuple(_PART.iter_unpack(data[head:])))

    @property
    def n_bytes(self) -> int:
        """Bytes of a snapshot."""
        heads = _BEFORE_CELLS + 4 + _CELL.size + _LAYERS.size
        return heads + sum(_PART.size + n_bytes for _, n_bytes in self.parts)

    def check(self, data: Bytes, length: int) -> None:
        """Raise StateError unless this is a snapshot of this shape for the first `length` positions."""
        if data.size != self.n_bytes:
            raise StateError(f"a snapshot of {data.size} bytes; expected {self.n_bytes}")
        view, at = memoryview(data.data), _BEFORE_CELLS
        (cells,), (position, sequences) = struct.unpack_from("<I", view, at), _CELL.unpack_from(view, at + 4)
        if (cells, position, sequences) != (1, length - 1, 0):
            raise StateError(f"a snapshot of {cells} cells, up to position {position}; expected one up to {length - 1}")
        at += 4 + _CELL.size
        if _LAYERS.unpack_from(view, at) != (0, self.layers):
            raise StateError(f"a snapshot has other layers than the {self.layers} of this rank")
        at += _LAYERS.size
        for part in self.parts:
            if _PART.unpack_from(view, at) != part:
                raise StateError(f"a snapshot has {_PART.unpack_from(view, at)} as a type and bytes; expected {part}")
            at += _PART.size + part[1]
