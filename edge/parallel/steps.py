"""Steps: what rank 0 makes all ranks do, in order, as it crosses the data links.

A step is a CONTROL frame. A decode step is followed by hidden states [rows, n_embd] in DATA frames of PART_FLOATS
values, the last one of the rest: float32 to the ranks of the first stage, in the deployment's wire type from stage to
stage.

| bytes | field |
| 0     | operation (Op) |
| 1     | 1: rank 0 had nothing under way before, so that waiting for this step was no stall |
| 2     | decode: 1: hidden states behind the last layer are wanted: of all rows, if rank 0 is in the last stage; |
|       | else of those that give logits, behind which its first rank sends them; else 0 |
| 3     | decode: 1: each row attends to all; plus 2: positions have parts (of a picture's rows); plus 4 for each |
|       | layer at whose end they are added to, by float32 [layers, rows, n_embd] behind the hidden states; else 0 |
| 4-19  | four int32, by operation: decode: rows, rows that give logits, logits wanted of each (0: all), bytes |
|       | of masks; |
|       | remove: sequence, start, end, whether rank 0 could (ASKED: it asks); copy: source, target, start, end; |
|       | shift: sequence, start, end, delta; read and write: sequence, start, end, 0; |
|       | keep, count and restore: sequence, start, hashes, 0; |
|       | snapshot: sequence, 0, 1 (hash), 0; set back: sequence, its new length, 1 (hash), 0; |
|       | adapt: number of scales, 0, 0, 0 |
| 20-   | decode only: positions int32 [rows], sequences int32 [rows], outputs int8 [rows], where positions have |
|       | parts what time, height and width are beyond them, int32 [3, rows], and masks (edge/parallel/masks.py); |
|       | keep, count, restore, snapshot and set back: block hashes of 32 bytes; |
|       | adapt: the scale of each adapter, float32, of all decodes until the next such step; none: without any |

Behind a step that writes, rank 0 sends each rank its part of the keys and values over the link between the two; for one
that reads, each rank sends its part to rank 0: as partition/state/sequence.py lays them out, in DATA frames as above.

All little-endian, as all processors are that llama.cpp runs on.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge.llama.llama import Batch
from edge.llm.options import MOST_ADAPTERS
from edge.parallel import masks
from partition.plan.plan import Range
from partition.state.sequence import KVBlock, decode, encode, encoded_bytes
from partition.state.shape import StateShape
from transport.collective import Wire
from transport.errors import ProtocolError
from transport.frame import Payload
from transport.link import PART_BYTES, Link, receive_parts, send_parts

Floats = NDArray[np.float32]

LEAST_CHUNK = 32  # tokens: below, a pass over the weights costs nearly as much for fewer
_CHUNKS_A_STAGE = 4  # of a long prompt: so many keep all stages busy four fifths of the time, or more
PART_FLOATS = PART_BYTES // 4

# Of a removal: rank 0 has no layer, and others may be unable to forget part of a sequence (windows, recurrent layers),
# so each rank is to tell it whether it could.
ASKED = 2

_HEAD = struct.Struct("<BBBBiiii")
_BYTES_A_ROW = 9
_PARTS = 3  # of a position, each 4 bytes
_NOT_CAUSAL, _HAS_PARTS, _A_LAYER = 1, 2, 4


class Op(IntEnum):
    """Operation of a step."""

    DECODE = 1
    REMOVE = 2  # the operations on the KV cache are those of Engine, with the same arguments
    COPY = 3
    SHIFT = 4
    CLEAR = 5
    # Tell rank 0 how long steps took; numbers: 1 to forget them afterwards, of how many, of how many rows; 0: of all
    TIMES = 6
    END = 7  # no more steps come
    READ = 9  # send keys and values to rank 0
    WRITE = 10  # add keys and values that rank 0 sends
    KEEP = 11  # keep blocks of a sequence on disk, and tell rank 0; this and what follows names blocks by hashes
    COUNT = 12  # tell rank 0 how many leading blocks are kept; of this and the next, the last number is a `Part`
    RESTORE = 13  # add kept blocks to a sequence, and tell rank 0 how many leading ones were there
    SNAPSHOT = 14  # hold a snapshot of a sequence, which ends with this block
    SET_BACK = 15  # set a sequence back to a length, by the snapshot behind a block; tell rank 0 whether there is one
    ADAPT = 16  # compute with each adapter times its scale from the next decode on


_OPS = {int(op): op for op in Op}
_WITH_HASHES = (Op.KEEP, Op.COUNT, Op.RESTORE, Op.SNAPSHOT, Op.SET_BACK)  # as many as the third number says
HASH_BYTES = 32
MOST_HASHES = 256  # of a step; a group of blocks (`group_start`) begins each


class Step(NamedTuple):
    """One step."""

    op: Op
    fresh: bool = True
    numbers: tuple[int, int, int, int] = (0, 0, 0, 0)
    hashes: tuple[bytes, ...] = ()  # of blocks on disk
    masks: bytes = b""  # of a decode's rows that give logits; their length is the last number
    scales: tuple[float, ...] = ()  # of adapters
    hidden: bool = False  # of a decode: the hidden states of these rows are wanted, too

    @property
    def rows(self) -> int:
        """Number of rows of a decode."""
        return self.numbers[0]

    @property
    def outputs(self) -> int:
        """Number of rows that give logits."""
        return self.numbers[1]

    @property
    def top(self) -> int:
        """Number of each output row's largest logits that are needed; 0: all."""
        return self.numbers[2]


def chunk_rows(n: int, batch: int, stages: int) -> int:
    """Rows of each step of a prompt of `n` tokens, at most `batch`: several steps keep all stages busy."""
    if stages == 1:
        return batch
    even = -(-n // (_CHUNKS_A_STAGE * stages))
    return min(batch, max(LEAST_CHUNK, -(-even // LEAST_CHUNK) * LEAST_CHUNK))


def max_bytes(rows: int) -> int:
    """The longest step of so many rows."""
    return _HEAD.size + max((_BYTES_A_ROW + 4 * _PARTS) * rows + masks.MOST_BYTES, HASH_BYTES * MOST_HASHES)


def pack(step: Step, rows: Batch) -> bytes:
    """A step as bytes, with what `rows` says of a decode's rows."""
    if step.op is not Op.DECODE:
        head = _HEAD.pack(step.op, step.fresh, step.hidden, 0, *step.numbers)
        return head + b"".join(step.hashes) + struct.pack(f"<{len(step.scales)}f", *step.scales)
    n = step.rows
    n_deep = 0 if rows.deep is None else len(rows.deep)
    kind = (0 if rows.causal else _NOT_CAUSAL) | (0 if rows.offsets is None else _HAS_PARTS) | _A_LAYER * n_deep
    arrays = (rows.positions[:n], rows.sequences[:n], rows.outputs[:n], rows.offsets)
    own = b"".join(array.tobytes() for array in arrays if array is not None)
    return _HEAD.pack(step.op, step.fresh, step.hidden, kind, *step.numbers) + own + step.masks


def unpack(data: Payload, rows: Batch) -> Step:
    """The step in `data`; a decode's rows are filled in. ProtocolError for what `pack` cannot have written."""
    if len(data) < _HEAD.size:
        raise ProtocolError(f"a step of {len(data)} bytes came, it has at least {_HEAD.size}")
    op, fresh, hidden, kind, *numbers = _HEAD.unpack_from(data)
    is_known = op in _OPS and max(fresh, hidden) <= 1
    if not is_known or ((hidden or kind) and op != Op.DECODE):
        raise ProtocolError(f"operation {op} with flags {fresh} and {hidden | kind << 8} is none; update both devices")
    step = Step(_OPS[op], bool(fresh), tuple(numbers), hidden=bool(hidden))
    rest = memoryview(data)[_HEAD.size :]
    if step.op in _WITH_HASHES:
        n = numbers[2]
        if not 0 < n <= MOST_HASHES or len(rest) != HASH_BYTES * n:
            raise ProtocolError(
                f"a step of {n} block hashes came with {len(rest)} bytes of them; it takes 1 to {MOST_HASHES}"
            )
        return step._replace(hashes=tuple(bytes(rest[i : i + HASH_BYTES]) for i in range(0, len(rest), HASH_BYTES)))
    if step.op is Op.ADAPT:
        n = numbers[0]
        if not 0 <= n <= MOST_ADAPTERS or len(rest) != 4 * n:
            raise ProtocolError(f"{n} scales of adapters came in {len(rest)} bytes; there are up to {MOST_ADAPTERS}")
        scales = struct.unpack(f"<{n}f", rest)
        if not all(map(math.isfinite, scales)):
            raise ProtocolError("a scale of an adapter came that is no number; update both devices")
        return step._replace(scales=scales)
    n, n_masks = (step.rows, step.numbers[3]) if step.op is Op.DECODE else (0, 0)
    if not 0 <= n_masks <= masks.MOST_BYTES or (n_masks and not (step.top and step.outputs)):
        raise ProtocolError(
            f"{n_masks} bytes of masks came for {step.top} logits of {step.outputs} rows; a step takes them where few"
            f" logits are wanted, up to {masks.MOST_BYTES} bytes"
        )
    flags = _BYTES_A_ROW * n
    own = flags + (4 * _PARTS * n if kind & _HAS_PARTS else 0)  # behind them are the masks
    if not 0 <= n <= rows.capacity or len(rest) != own + n_masks or (step.op is Op.DECODE and not n):
        raise ProtocolError(f"a step of {n} rows came in {len(data)} bytes; this rank takes 1 to {rows.capacity} rows")
    if n:
        rows.positions[:n] = np.frombuffer(rest[: 4 * n], np.int32)
        rows.sequences[:n] = np.frombuffer(rest[4 * n : 8 * n], np.int32)
        rows.outputs[:n] = np.frombuffer(rest[8 * n : flags], np.int8)
        rows.causal = not kind & _NOT_CAUSAL
        n_deep = kind // _A_LAYER
        rows.deep = np.empty((n_deep, n, rows.embeddings.shape[1]), np.float32) if n_deep else None
        rows.offsets = np.frombuffer(rest[flags:own], np.int32).reshape(_PARTS, n) if kind & _HAS_PARTS else None
        if step.outputs != np.count_nonzero(rows.outputs[:n]) or step.top < 0:
            raise ProtocolError(f"a step of {step.outputs} output rows marks others")
        step = step._replace(masks=bytes(rest[own:]))
    return step


def send_states(link: Link, states: Floats, wire: Wire | None = None) -> None:
    """Send hidden states [rows, n_embd] behind a step."""
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
    """Fill `states` [rows, n_embd] with what `send_states` sends."""
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
    """Send keys and values behind a step."""
    send_parts(link, encode(block, shape))


def receive_block(link: Link, shape: StateShape, positions: Range) -> KVBlock:
    """Receive a block that `send_block` sent, of a slice of this shape. StateError for anything else."""
    data = np.empty(encoded_bytes(shape, len(positions)), np.uint8)
    receive_parts(link, data)
    return decode(data, shape, positions)


def output_rows(rows: Batch, n: int) -> Iterator[int]:
    """The rows of a decode that give logits."""
    return (int(i) for i in np.flatnonzero(rows.outputs[:n]))
