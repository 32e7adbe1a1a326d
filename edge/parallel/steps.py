"""Steps: operations that rank 0 makes all ranks carry out in order, and their encoding on data links.

A step is a CONTROL frame: one byte for the operation, followed by its fields. All values are little-endian, like all
processors that llama.cpp supports. `_LAYOUTS` has the numbers and fields of all operations except Decode:

| bytes | field of Decode |
| 0     | 1, the operation |
| 1     | 1 if `fresh` |
| 2     | 1 if `hidden` |
| 3     | 1 if each row attends to all rows, plus 2 if positions have parts (rows of a picture), plus 4 for each layer |
|       | that has additional rows of a picture at its end |
| 4-19  | int32: rows, outputs, top, bytes of masks |
| 20-   | positions int32 [rows], sequences int32 [rows], outputs int8 [rows]; if positions have parts, the offsets of |
|       | time, height and width, int32 [3, rows]; masks (edge/parallel/masks.py) |

After a decode, hidden states [rows, n_embd] follow in DATA frames of PART_FLOATS values; the last frame is shorter.
They are float32 to the ranks of the first stage, and in the deployment's wire type between stages. Additional rows of a
picture for the end of layers follow as float32 [layers, rows, n_embd].
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edge.llama.llama import Batch
from edge.llm.options import MOST_ADAPTERS
from edge.llm.states import Part
from edge.parallel import masks
from partition.plan.plan import Range
from partition.state.sequence import KVBlock, decode, encode, encoded_bytes
from partition.state.shape import StateShape
from transport.collective import Wire
from transport.errors import ProtocolError
from transport.frame import Payload
from transport.link import PART_BYTES, Link, receive_parts, send_parts

Floats = NDArray[np.float32]

LEAST_CHUNK = 32  # tokens; a pass over the weights costs nearly as much for fewer
_CHUNKS_A_STAGE = 4  # chunks of a long prompt per stage, which keep all stages busy at least 80 % of the time
PART_FLOATS = PART_BYTES // 4
HASH_BYTES = 32
MOST_HASHES = 256  # limit per step; each step begins with a group of blocks (`group_start`)

_DECODE = 1
_HEAD = struct.Struct("<BBBBiiii")  # header of a decode
_BYTES_A_ROW = 9
_PARTS = 3  # number of int32 parts of a position: time, height, width
_NOT_CAUSAL, _HAS_PARTS, _A_LAYER = 1, 2, 4


class Decode(NamedTuple):
    """Compute rows, whose hidden states follow."""

    rows: int
    outputs: int  # number of rows with logits
    top: int = 0  # number of largest logits for each of these rows; 0: all
    fresh: bool = True  # True if rank 0 had no step in flight before, so waiting for this step was no stall
    # True if rank 0 wants hidden states after the last layer. If rank 0 is not in the last stage, only rows with logits
    # count, and the first rank of the last stage sends them after the logits.
    hidden: bool = False
    masks: bytes = b""  # packed masks of the rows with logits


# The operations on the KV cache equal the methods of Engine, with the same arguments.


class Remove(NamedTuple):
    """Remove positions [start, end) of a sequence."""

    sequence: int
    start: int
    end: int
    removed: bool = False  # True if rank 0 could remove them
    # True if each rank reports to rank 0 whether it could, because rank 0 has no layers. The caches of attention
    # windows and recurrent layers may be unable to remove a part of a sequence.
    answers: bool = False


class Copy(NamedTuple):
    """Share positions [start, end) of a sequence with another one."""

    source: int
    target: int
    start: int
    end: int


class Shift(NamedTuple):
    """Add a number to positions [start, end) of a sequence."""

    sequence: int
    start: int
    end: int
    delta: int


class Clear(NamedTuple):
    """Clear the KV cache."""


class Times(NamedTuple):
    """Report step times to rank 0."""

    clear: bool  # forget the steps afterwards
    last: int  # number of most recent steps to report; 0: all
    rows: int  # only decode steps with this many rows; 0: all


class End(NamedTuple):
    """End: no more steps follow."""


class Read(NamedTuple):
    """Send the KV cache of positions [start, end) to rank 0 over the direct link."""

    sequence: int
    start: int
    end: int


class Write(NamedTuple):
    """Write the KV cache of positions [start, end), which rank 0 sends over the direct link."""

    sequence: int
    start: int
    end: int


class Keep(NamedTuple):
    """Keep blocks of a sequence on disk, and confirm to rank 0."""

    sequence: int
    start: int
    hashes: tuple[bytes, ...]


class Count(NamedTuple):
    """Report to rank 0 the number of leading blocks on disk."""

    part: Part
    hashes: tuple[bytes, ...]


class Restore(NamedTuple):
    """Add blocks from disk to a sequence, and report the number of leading blocks found to rank 0."""

    sequence: int
    start: int
    part: Part
    hashes: tuple[bytes, ...]


class Snapshot(NamedTuple):
    """Make a snapshot of a sequence that ends with a block."""

    sequence: int
    block_hash: bytes


class SetBack(NamedTuple):
    """Set a sequence back to a length by the snapshot after a block. Report to rank 0 whether there was one."""

    sequence: int
    length: int
    block_hash: bytes


class Adapt(NamedTuple):
    """Use these adapter scales for later decodes."""

    scales: tuple[float, ...]


CacheStep: TypeAlias = Remove | Copy | Shift | Clear | Snapshot | SetBack | Adapt
BlockStep: TypeAlias = Keep | Count | Restore
Step: TypeAlias = Decode | CacheStep | BlockStep | Times | End | Read | Write

# Layout of each operation: its fields in order. Hashes and scales follow the other fields and fill the remaining bytes.
_LAYOUTS: dict[int, tuple[Callable[..., Step], struct.Struct]] = {
    2: (Remove, struct.Struct("<iii??")),
    3: (Copy, struct.Struct("<iiii")),
    4: (Shift, struct.Struct("<iiii")),
    5: (Clear, struct.Struct("<")),
    6: (Times, struct.Struct("<?II")),
    7: (End, struct.Struct("<")),
    9: (Read, struct.Struct("<iii")),
    10: (Write, struct.Struct("<iii")),
    11: (Keep, struct.Struct("<ii")),
    12: (Count, struct.Struct("<B")),
    13: (Restore, struct.Struct("<iiB")),
    14: (Snapshot, struct.Struct(f"<i{HASH_BYTES}s")),
    15: (SetBack, struct.Struct(f"<ii{HASH_BYTES}s")),
    16: (Adapt, struct.Struct("<")),
}
_OPERATIONS = {make: operation for operation, (make, _) in _LAYOUTS.items()}


def chunk_rows(n: int, batch: int, stages: int) -> int:
    """Return the rows of each step of a prompt of `n` tokens, at most `batch`. Several steps keep all stages busy."""
    if stages == 1:
        return batch
    even = -(-n // (_CHUNKS_A_STAGE * stages))
    return min(batch, max(LEAST_CHUNK, -(-even // LEAST_CHUNK) * LEAST_CHUNK))


def max_bytes(rows: int) -> int:
    """Return the bytes of the longest step of `rows` rows."""
    return _HEAD.size + max((_BYTES_A_ROW + 4 * _PARTS) * rows + masks.MOST_BYTES, HASH_BYTES * MOST_HASHES)


def pack(step: Step, rows: Batch) -> bytes:
    """Encode a step. rows: rows of a decode."""
    if isinstance(step, Decode):
        return _pack_decode(step, rows)
    operation = _OPERATIONS[type(step)]
    values, tail = tuple(step), b""
    if isinstance(step, BlockStep):
        values, tail = values[:-1], b"".join(step.hashes)
    elif isinstance(step, Adapt):
        values, tail = (), struct.pack(f"<{len(step.scales)}f", *step.scales)
    return bytes((operation,)) + _LAYOUTS[operation][1].pack(*values) + tail


def unpack(data: Payload, rows: Batch) -> Step:
    """Decode the step in `data`, and fill in the rows of a decode. Raises ProtocolError for invalid data."""
    operation = data[0] if data else 0
    if operation == _DECODE:
        return _unpack_decode(data, rows)
    if operation not in _LAYOUTS:
        raise ProtocolError(f"a step of {len(data)} bytes has the unknown operation {operation}; update both devices")
    make, layout = _LAYOUTS[operation]
    tail = memoryview(data)[1 + layout.size :]
    if len(data) < 1 + layout.size or (tail and make not in (Keep, Count, Restore, Adapt)):
        raise ProtocolError(f"operation {operation} has {len(data)} bytes; it needs {1 + layout.size}")
    values = list(layout.unpack_from(data, 1))
    if make is Adapt:
        values.append(_scales(tail))
    if make in (Count, Restore):
        if values[-1] not in range(4):
            raise ProtocolError(f"{values[-1]} is not a known kind of cache part; update both devices")
        values[-1] = Part(values[-1])
    if make in (Keep, Count, Restore):
        values.append(_hashes(tail))
    return make(*values)


def _hashes(data: memoryview) -> tuple[bytes, ...]:
    n, rest = divmod(len(data), HASH_BYTES)
    if rest or not 0 < n <= MOST_HASHES:
        raise ProtocolError(f"a step has {len(data)} bytes of block hashes; it takes 1 to {MOST_HASHES} hashes")
    return tuple(bytes(data[lo : lo + HASH_BYTES]) for lo in range(0, len(data), HASH_BYTES))


def _scales(data: memoryview) -> tuple[float, ...]:
    n, rest = divmod(len(data), 4)
    if rest or n > MOST_ADAPTERS:
        raise ProtocolError(
            f"scales of adapters have {len(data)} bytes; at most {MOST_ADAPTERS} scales of 4 bytes are allowed"
        )
    scales = struct.unpack(f"<{n}f", data)
    if not all(map(math.isfinite, scales)):
        raise ProtocolError("a scale of an adapter is not a number; update both devices")
    return scales


def _pack_decode(step: Decode, rows: Batch) -> bytes:
    n, n_deep = step.rows, 0 if rows.deep is None else len(rows.deep)
    kind = (0 if rows.causal else _NOT_CAUSAL) | (0 if rows.offsets is None else _HAS_PARTS) | _A_LAYER * n_deep
    arrays = (rows.positions[:n], rows.sequences[:n], rows.outputs[:n], rows.offsets)
    own = b"".join(array.tobytes() for array in arrays if array is not None)
    numbers = (n, step.outputs, step.top, len(step.masks))
    return _HEAD.pack(_DECODE, step.fresh, step.hidden, kind, *numbers) + own + step.masks


def _unpack_decode(data: Payload, rows: Batch) -> Decode:
    if len(data) < _HEAD.size:
        raise ProtocolError(f"a decode has {len(data)} bytes; it needs at least {_HEAD.size}")
    _, fresh, hidden, kind, n, outputs, top, n_masks = _HEAD.unpack_from(data)
    if max(fresh, hidden) > 1:
        raise ProtocolError(f"a decode has the flags {fresh} and {hidden}; update both devices")
    if not 0 <= n_masks <= masks.MOST_BYTES or (n_masks and not (top and outputs)):
        raise ProtocolError(
            f"{n_masks} bytes of masks were received for {top} logits of {outputs} rows; a step takes masks if few"
            " logits are"
            f" wanted, up to {masks.MOST_BYTES} bytes"
        )
    rest = memoryview(data)[_HEAD.size :]
    flags = _BYTES_A_ROW * n
    own = flags + (4 * _PARTS * n if kind & _HAS_PARTS else 0)  # masks follow
    if not 0 < n <= rows.capacity or len(rest) != own + n_masks:
        raise ProtocolError(f"a step of {n} rows has {len(data)} bytes; this rank takes 1 to {rows.capacity} rows")
    rows.positions[:n] = np.frombuffer(rest[: 4 * n], np.int32)
    rows.sequences[:n] = np.frombuffer(rest[4 * n : 8 * n], np.int32)
    rows.outputs[:n] = np.frombuffer(rest[8 * n : flags], np.int8)
    rows.causal = not kind & _NOT_CAUSAL
    n_deep = kind // _A_LAYER
    rows.deep = np.empty((n_deep, n, rows.embeddings.shape[1]), np.float32) if n_deep else None
    rows.offsets = np.frombuffer(rest[flags:own], np.int32).reshape(_PARTS, n) if kind & _HAS_PARTS else None
    if outputs != np.count_nonzero(rows.outputs[:n]) or top < 0:
        raise ProtocolError(f"a step states {outputs} output rows, but marks another number")
    return Decode(n, outputs, top, bool(fresh), bool(hidden), bytes(rest[own:]))


def send_states(link: Link, states: Floats, wire: Wire | None = None) -> None:
    """Send hidden states [rows, n_embd] after a step."""
    flat = states.reshape(-1)
    for lo in range(0, flat.size, PART_FLOATS):
        part = flat[lo : lo + PART_FLOATS]
        if wire is not None:
            data = np.empty(wire.n_bytes(part.size), np.uint8)
            wire.encode(part, data)
            link.send(data)
        else:
            link.send(part)


def receive_states(link: Link, states: Floats, wire: Wire | None = None) -> None:
    """Receive hidden states [rows, n_embd] from the frames of `send_states`."""
    flat = states.reshape(-1)
    for lo in range(0, flat.size, PART_FLOATS):
        part = flat[lo : lo + PART_FLOATS]
        if wire is not None:
            data = np.empty(wire.n_bytes(part.size), np.uint8)
            link.receive_into(data)
            wire.decode(data, part)
        else:
            link.receive_into(part)


def send_block(link: Link, block: KVBlock, shape: StateShape) -> None:
    """Send a KV block after a step."""
    send_parts(link, encode(block, shape))


def receive_block(link: Link, shape: StateShape, positions: Range) -> KVBlock:
    """Receive a KV block of a slice of this shape. Raises StateError for invalid data."""
    data = np.empty(encoded_bytes(shape, len(positions)), np.uint8)
    receive_parts(link, data)
    return decode(data, shape, positions)


def output_rows(rows: Batch, n: int) -> Iterator[int]:
    """Yield the indices of rows with logits."""
    return (int(i) for i in np.flatnonzero(rows.outputs[:n]))
