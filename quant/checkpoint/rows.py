"""Reads the rows of a checkpoint's tensor in chunks, in the order and type that a GGUF needs. Loads numpy when used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from quant.checkpoint.checkpoint import Checkpoint
from quant.checkpoint.tensors import STORED_TYPES, Rows, Target
from quant.errors import ModelFileError
from quant.types import TYPES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

_CHUNK_BYTES = 1 << 20


def chunks(checkpoint: Checkpoint, target: Target, type_name: str) -> Iterator[bytes]:
    """Yield the bytes of `target` as `type_name` (f32, f16, bf16), about 1 MiB at a time.

    Raises ModelFileError for a value that f16 cannot represent, or if the file became shorter.
    """
    for source in target.sources:
        stored = STORED_TYPES[source.tensor.dtype]
        as_is = stored == type_name and not target.offset
        for raw, rows in _read(checkpoint, target, source):
            if as_is and not target.interleave:
                yield raw
                continue
            if as_is:
                yield _interleaved(_bytes_of(raw, rows), target.interleave).tobytes()
                continue
            values = _floats(raw, stored).reshape(rows, -1)
            if target.offset:
                import numpy as np

                values = values + np.float32(target.offset)
            if target.interleave:
                values = _interleaved(values, target.interleave)
            yield _stored_as(type_name, values, source)


def _read(checkpoint: Checkpoint, target: Target, source: Rows) -> Iterator[tuple[bytes, int]]:
    """Yield (bytes, number of rows) in order. If rows are interleaved, a chunk contains whole heads."""
    row_bytes = target.row * TYPES[STORED_TYPES[source.tensor.dtype]].block_bytes
    unit = target.interleave or 1
    step = max(1, _CHUNK_BYTES // (row_bytes * unit)) * unit
    for first in range(0, source.count, step):
        rows = min(step, source.count - first)
        yield checkpoint.read(source.tensor, (source.first + first) * row_bytes, rows * row_bytes), rows


def _interleaved(rows: NDArray[Any], head: int) -> NDArray[Any]:
    """Return rows [n, ...] in which the two halves of each head are interleaved."""
    halves = rows.reshape(-1, 2, head // 2, *rows.shape[1:])
    turned: NDArray[Any] = halves.swapaxes(1, 2).reshape(rows.shape)
    return turned


def _bytes_of(raw: bytes, rows: int) -> NDArray[np.uint8]:
    import numpy as np

    return np.frombuffer(raw, np.uint8).reshape(rows, -1)


def _floats(raw: bytes, stored: str) -> Floats:
    import numpy as np

    if stored == "bf16":  # the upper half of a float32
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, "<f4" if stored == "f32" else "<f2").astype(np.float32)


def _stored_as(type_name: str, values: Floats, source: Rows) -> bytes:
    import numpy as np

    if type_name == "f32":
        return values.astype("<f4").tobytes()
    if type_name == "bf16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16  # to nearest, ties to even
        quiet = (bits >> 16) | 64  # keeps a NaN a NaN
        return np.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, rounded).astype("<u2").tobytes()
    with np.errstate(over="ignore"):
        halves = values.astype("<f2")
    if np.isinf(halves).any() and np.isfinite(values[np.isinf(halves)]).any():
        raise ModelFileError(
            f"{source.tensor.path.name}: tensor {source.tensor.name!r} has values beyond the range of f16; "
            "convert to bf16 or f32"
        )
    return halves.tobytes()
