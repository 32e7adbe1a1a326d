"""Items on the wire. An item is one input, or one batch, on its way through the stages of an ONNX model.

An item is a CONTROL frame, followed by its tensors in the order of the boundary. Each tensor is sent in DATA frames of
PART_BYTES; its last frame has the remaining bytes. Between stages float32 is encoded in the item's wire type. All other
tensors, and all tensors that the owner sends or receives, are sent unchanged.

| bytes | field |
| 0     | operation (Op) |
| 1     | wire type: one of WIRE_IDS |
| 2-3   | 0 |
| 4-7   | number of the item, starting at 0 |
| 8-    | float32 for each passed stage: its computing seconds; then uint32 for each dimension of each tensor |

A tensor of any rank sends its rank first, then MOST_DIMS dimensions, padded with 0. All headers at one boundary
therefore have the same length, and a receiver takes header and frame in one system call. All fields are little-endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import numpy as np

from edge.onnx.samples import TYPES, Array
from quant.wire import WIRE_IDS, WIRES
from transport.collective import Wire
from transport.errors import ProtocolError
from transport.frame import Kind
from transport.link import PART_BYTES, Link

MOST_TENSOR_BYTES = 1 << 30  # largest tensor that a rank accepts
MOST_DIMS = 32  # limit that every numpy version supports
MOST_STAGES = 64


class Op(IntEnum):
    """Operation of an item."""

    RUN = 1
    END = 2  # no more items follow


_OPS = {int(op): op for op in Op}
_WIRE_NAMES = {number: name for name, number in WIRE_IDS.items()}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that crosses from one stage to the next. Raises ValueError if the tensor cannot be sent."""

    name: str
    type: str  # numpy's name of the type, one of edge.onnx.samples.TYPES
    shape: tuple[int, ...]  # shape that the model was cut for
    open: tuple[int, ...] = ()  # axes that may have other sizes
    any_rank: bool = False  # whether the tensor may have another rank and any sizes

    def __post_init__(self) -> None:
        named = f"tensor {self.name!r:.80}"
        if self.type not in TYPES.values():
            raise ValueError(f"{named} is of type {self.type!r:.40}, which cannot be sent")
        if len(self.shape) > MOST_DIMS:
            raise ValueError(f"{named} has {len(self.shape)} dimensions, at most {MOST_DIMS} are possible")
        if any(dim < 0 for dim in self.shape) or not set(self.open) <= set(range(len(self.shape))):
            raise ValueError(f"{named} has the shape {list(self.shape)!s:.80}; expected sizes of 0 or more")
        if not self._is_small(self.shape):
            raise ValueError(f"{named} has {self.n_bytes:,} bytes, at most {MOST_TENSOR_BYTES:,} can be sent")

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor in the shape that the model was cut for."""
        return math.prod(self.shape) * np.dtype(self.type).itemsize

    def _is_small(self, shape: Sequence[int]) -> bool:
        """Return whether a tensor of this shape may be sent. A size of 0 counts as 1, because numpy refuses large other
        sizes.
        """
        return math.prod(max(dim, 1) for dim in shape) * np.dtype(self.type).itemsize <= MOST_TENSOR_BYTES

    def takes(self, shape: Sequence[int]) -> bool:
        """Return whether the tensor may have this shape."""
        fits = len(shape) == len(self.shape) and all(
            dim == own or i in self.open for i, (dim, own) in enumerate(zip(shape, self.shape, strict=True))
        )
        return (fits or (self.any_rank and len(shape) <= MOST_DIMS)) and self._is_small(shape)

    @property
    def n_header_numbers(self) -> int:
        """Number of header fields that the tensor's shape takes."""
        return 1 + MOST_DIMS if self.any_rank else len(self.shape)

    def encode_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return a shape as header fields."""
        if not self.any_rank:
            return tuple(shape)
        return (len(shape), *shape, *(0,) * (MOST_DIMS - len(shape)))

    def decode_shape(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Return the shape in these header fields. Raises ProtocolError if it has more than MOST_DIMS dimensions."""
        if not self.any_rank:
            return tuple(numbers)
        if numbers[0] > MOST_DIMS:
            raise ProtocolError(
                f"{self.name!r:.80} came with {numbers[0]} dimensions, at most {MOST_DIMS} are possible"
            )
        return tuple(numbers[1 : 1 + numbers[0]])


@dataclass(frozen=True, slots=True)
class Boundary:
    """Tensors that cross between two stages, or between the owner and a stage."""

    tensors: tuple[Tensor, ...]
    inner: bool  # whether the boundary is between stages, where float32 is encoded in the item's wire type
    passed: int = 0  # number of stages before the boundary

    def __post_init__(self) -> None:
        if not 0 <= self.passed <= MOST_STAGES:
            raise ValueError(f"{self.passed} stages before a boundary; the maximum is {MOST_STAGES}")

    @property
    def layout(self) -> struct.Struct:
        """Layout of an item's header: operation, wire type, 0, number, seconds, dimensions."""
        return _layout(self.passed, sum(tensor.n_header_numbers for tensor in self.tensors))


@cache
def _layout(passed: int, dims: int) -> struct.Struct:
    return struct.Struct(f"<BBHI{passed}f{dims}I")


@dataclass(frozen=True, slots=True)
class Item:
    """One item without its tensors."""

    op: Op
    number: int = 0
    wire: str = "f32"
    compute_s: tuple[float, ...] = ()  # computing seconds of each passed stage


def send(link: Link, boundary: Boundary, item: Item, tensors: Mapping[str, Array]) -> None:
    """Send an item with its tensors by name. Their types and shapes must fit `boundary`."""
    if item.op is Op.END:
        link.send(bytes([Op.END]).ljust(boundary.layout.size, b"\0"), Kind.CONTROL)
        return
    assert len(item.compute_s) == boundary.passed, "every stage must add its seconds"
    arrays = [np.asarray(tensors[tensor.name], order="C") for tensor in boundary.tensors]
    dims = [n for tensor, a in zip(boundary.tensors, arrays, strict=True) for n in tensor.encode_shape(a.shape)]
    head = boundary.layout.pack(item.op, WIRE_IDS[item.wire], 0, item.number, *item.compute_s, *dims)
    wire = WIRES[item.wire] if boundary.inner else None
    pieces = _pieces(arrays, wire)
    first = next(pieces, None)
    if first is None:
        link.send(head, Kind.CONTROL)
        return
    link.send_behind(head, first)
    for piece in pieces:
        link.send(piece)


def _pieces(arrays: Sequence[Array], wire: Wire | None) -> Iterator[Array]:
    """Yield the payloads of the DATA frames."""
    for array in arrays:
        for part in _parts(array):
            if wire is not None and part.dtype == np.float32:
                coded = np.empty(wire.n_bytes(part.size), np.uint8)
                wire.encode(part, coded)
                part = coded
            yield part


def _parts(array: Array) -> Iterator[Array]:
    """Yield the values of a contiguous array in views of PART_BYTES."""
    flat = array.reshape(-1)
    step = PART_BYTES // array.itemsize
    for lo in range(0, flat.size, step):
        yield flat[lo : lo + step]


class Receiver:
    """Receives items from one link into buffers that it allocates once and reuses."""

    def __init__(self, link: Link, boundary: Boundary) -> None:
        self._link = link
        self._boundary = boundary
        self._head = bytearray(boundary.layout.size)
        self._dims: tuple[int, ...] = ()  # dimensions of the last item, whose shapes were checked
        self._shapes: list[tuple[int, ...]] = []

    def item(self, timeout_s: float) -> tuple[Item, list[tuple[int, ...]]]:
        """Receive the next item's header. Return the item and the shape of each tensor.

        Raises ProtocolError if `send` cannot have written the header, or if the boundary does not accept a shape.
        """
        self._link.receive_into(self._head, timeout_s, Kind.CONTROL)
        op, wire, zero, number, *rest = self._boundary.layout.unpack(self._head)
        if op not in _OPS or wire not in _WIRE_NAMES or zero:
            raise ProtocolError(f"{self._link.peer} sent operation {op} in wire type {wire}; update both devices")
        if op == Op.END:
            return Item(Op.END), []
        passed = self._boundary.passed
        return Item(_OPS[op], number, _WIRE_NAMES[wire], tuple(rest[:passed])), self._checked(tuple(rest[passed:]))

    def _checked(self, dims: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the shape of each tensor. Raises ProtocolError if the boundary does not accept a shape."""
        if dims != self._dims or not self._shapes:
            at, shapes = 0, []
            for tensor in self._boundary.tensors:
                shape = tensor.decode_shape(dims[at : at + tensor.n_header_numbers])
                at += tensor.n_header_numbers
                if not tensor.takes(shape):
                    raise ProtocolError(
                        f"{self._link.peer} sent {tensor.name!r} of shape {list(shape)}; it is cut for {tensor.shape}"
                    )
                shapes.append(shape)
            self._dims, self._shapes = dims, shapes
        return self._shapes

    def tensors(self, item: Item, shapes: Sequence[tuple[int, ...]], arrays: dict[str, Array]) -> None:
        """Receive the item's tensors into `arrays`, by name. Arrays of the right shape are reused."""
        wire = WIRES[item.wire] if self._boundary.inner else None
        for tensor, shape in zip(self._boundary.tensors, shapes, strict=True):
            array = arrays.get(tensor.name)
            if array is None or array.shape != shape:
                array = arrays[tensor.name] = np.empty(shape, tensor.type)
            for part in _parts(array):
                if wire is not None and part.dtype == np.float32:
                    coded = np.empty(wire.n_bytes(part.size), np.uint8)
                    self._link.receive_into(coded)
                    wire.decode(coded, part)
                else:
                    self._link.receive_into(part)
