"""Steps: what rank 0 makes all ranks do, in order, as it crosses the data links.

A step is a CONTROL frame. A decode step is followed by hidden states [rows, n_embd] in DATA frames of PART_FLOATS
values, the last one of the rest: float32 to the ranks of the first stage, in the deployment's wire type from stage to
stage.

| bytes | field |
| 0     | operation (Op) |
| 1     | 1: rank 0 had nothing under way before, so that waiting for this step was no stall |
| 2-3   | 0 |
| 4-19  | four int32, by operation: decode: rows, rows that give logits, logits wanted of each (0: all), 0; |
|       | remove: sequence, start, end, whether rank 0 could; copy: source, target, start, end; |
|       | shift: sequence, start, end, delta |
| 20-   | decode only: positions int32 [rows], sequences int32 [rows], outputs int8 [rows] |

All little-endian, as all processors are that llama.cpp runs on.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge.llama.llama import Batch
from transport.collective import Wire
from transport.errors import ProtocolError
from transport.frame import Payload
from transport.link import Link

Floats = NDArray[np.float32]

PART_FLOATS = 256 << 10  # 1 MiB: far below what frames and gRPC messages may hold

_HEAD = struct.Struct("<BBHiiii")
_BYTES_A_ROW = 9


class Op(IntEnum):
    """What a step does."""

    DECODE = 1
    REMOVE = 2  # the operations on the KV cache are those of Engine, with the same arguments
    COPY = 3
    SHIFT = 4
    CLEAR = 5
    TIMES = 6  # tell rank 0 how long the steps took; numbers: 1 to forget them afterwards
    END = 7  # no more steps come
    LINKS = 8  # change links, and tell rank 0 how they are; numbers: an Order of edge/net/relink.py


_OPS = {int(op): op for op in Op}


class Step(NamedTuple):
    """One step."""

    op: Op
    fresh: bool = True
    numbers: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def rows(self) -> int:
        """Of a decode."""
        return self.numbers[0]

    @property
    def top(self) -> int:
        """How many of each output row's largest logits are wanted; 0: all."""
        return self.numbers[2]


def max_bytes(rows: int) -> int:
    """The longest step of so many rows."""
    return _HEAD.size + _BYTES_A_ROW * rows


def pack(step: Step, rows: Batch) -> bytes:
    """A step as bytes, with what `rows` says of a decode's rows."""
    head = _HEAD.pack(step.op, step.fresh, 0, *step.numbers)
    if step.op is not Op.DECODE:
        return head
    n = step.rows
    return head + rows.positions[:n].tobytes() + rows.sequences[:n].tobytes() + rows.outputs[:n].tobytes()


def unpack(data: Payload, rows: Batch) -> Step:
    """The step in `data`; a decode's rows are filled in. ProtocolError for what `pack` cannot have written."""
    if len(data) < _HEAD.size:
        raise ProtocolError(f"a step of {len(data)} bytes came, it has at least {_HEAD.size}")
    op, fresh, zero, *numbers = _HEAD.unpack_from(data)
    if op not in _OPS or zero or fresh > 1:
        raise ProtocolError(f"operation {op} with flags {fresh} and {zero} is none; update both devices")
    step = Step(_OPS[op], bool(fresh), tuple(numbers))
    n = step.rows if step.op is Op.DECODE else 0
    if not 0 <= n <= rows.capacity or len(data) != max_bytes(n) or (step.op is Op.DECODE and not n):
        raise ProtocolError(f"a step of {n} rows came in {len(data)} bytes; this rank takes 1 to {rows.capacity} rows")
    if n:
        rest = memoryview(data)[_HEAD.size :]
        rows.positions[:n] = np.frombuffer(rest[: 4 * n], np.int32)
        rows.sequences[:n] = np.frombuffer(rest[4 * n : 8 * n], np.int32)
        rows.outputs[:n] = np.frombuffer(rest[8 * n :], np.int8)
        if step.numbers[1] != np.count_nonzero(rows.outputs[:n]) or step.top < 0:
            raise ProtocolError(f"a step of {step.numbers[1]} output rows marks others")
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


def output_rows(rows: Batch, n: int) -> Iterator[int]:
    """The rows of a decode that give logits."""
    return (int(i) for i in np.flatnonzero(rows.outputs[:n]))
