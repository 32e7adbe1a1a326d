"""Tensors of the Open Inference Protocol: datatypes, and values as raw bytes, as JSON and as lists.

The server does not load numpy, so values stay bytes: little-endian, in row-major order.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isfinite, prod
from typing import Any

from edge.serve.http.errors import BadRequest

BYTES = "BYTES"  # datatype of texts; each element has its length before it
_LENGTH = struct.Struct("<I")  # length of an element of BYTES
# Codes of the module `array`. FP16 has none there.
CODES = {
    "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q",
    "FP32": "f", "FP64": "d",
}  # fmt: skip
SIZES = {"BOOL": 1, "FP16": 2} | {name: array(code).itemsize for name, code in CODES.items()}  # bytes of an element
NUMPY = {"BOOL": "bool", "FP16": "float16", "FP32": "float32", "FP64": "float64"}
NUMPY |= {name: name.lower() for name in CODES if "INT" in name}  # numpy's names of the datatypes
DATATYPES = {name: datatype for datatype, name in NUMPY.items()}  # by numpy's name
MOST_DIMS = 64  # limit of dimensions, as in numpy
OPEN = -1  # size of an open dimension in metadata


@dataclass(frozen=True)
class Tensor:
    """A tensor in a request or in a response."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | memoryview  # little-endian, row-major; elements of BYTES have their length before them


@dataclass(frozen=True)
class TensorSpec:
    """Declaration of an input or an output."""

    name: str
    datatype: str
    shape: tuple[int, ...] | None  # OPEN for open dimensions; None: any shape
    dims: tuple[str, ...] = ()  # names of the dimensions, for messages

    @property
    def public_shape(self) -> list[int]:
        """Shape in metadata."""
        return [OPEN] if self.shape is None else list(self.shape)

    def check(self, tensor: Tensor) -> None:
        """Raise BadRequest if a tensor does not have this datatype and shape."""
        if tensor.datatype != self.datatype:
            raise BadRequest(
                f"input {self.name!r} has the datatype {self.datatype}, got {tensor.datatype[:20]!r}", "inputs"
            )
        if self.shape is None:
            return
        pairs = zip(self.shape, tensor.shape, strict=False)
        if len(self.shape) != len(tensor.shape) or any(need not in (OPEN, size) for need, size in pairs):
            raise BadRequest(
                f"input {self.name!r} takes the shape [{', '.join(self.dims)}], got {_text(tensor.shape)}", "inputs"
            )


def check_shape(name: str, shape: Sequence[int]) -> None:
    """Raise BadRequest if a tensor would have no values, or more dimensions than any network takes."""
    if len(shape) > MOST_DIMS:
        raise BadRequest(f"{name!r:.200} has {len(shape)} dimensions; at most {MOST_DIMS} are possible", "inputs")
    if any(size < 1 for size in shape):
        raise BadRequest(f"{name!r:.200} has the shape {_text(shape)}; each size must be at least 1", "inputs")


def check_size(tensor: Tensor) -> None:
    """Raise BadRequest if the data of a tensor is not as long as its shape and datatype say, or is invalid."""
    name, count = f"{tensor.name!r:.200}", prod(tensor.shape)
    if tensor.datatype == BYTES:
        _check_texts(tensor, name, count)
        return
    n_bytes = SIZES.get(tensor.datatype)
    if n_bytes is None:
        raise BadRequest(
            f"{name} has the datatype {tensor.datatype[:20]!r}; there are {', '.join((*SIZES, BYTES))}", "inputs"
        )
    if len(tensor.data) != count * n_bytes:
        raise BadRequest(
            f"{name} has {len(tensor.data)} bytes; {tensor.datatype} of shape {_text(tensor.shape)} has"
            f" {count * n_bytes}",
            "inputs",
        )
    if tensor.datatype == "BOOL" and bytes(tensor.data).translate(None, b"\0\1"):
        raise BadRequest(f"{name} has a BOOL that is neither 0 nor 1", "inputs")


def _check_texts(tensor: Tensor, name: str, count: int) -> None:
    data, at, n_texts = tensor.data, 0, 0
    while at + _LENGTH.size <= len(data):
        at += _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
        n_texts += 1
    if at != len(data) or n_texts != count:
        raise BadRequest(
            f"{name} needs {count} elements of BYTES, each after its length in 4 bytes; its {len(data)} bytes are not"
            " that",
            "inputs",
        )


def packed(name: str, datatype: str, values: Any) -> bytes:
    """Return JSON values, flat or nested, as raw bytes. Raises BadRequest if they do not have the datatype."""
    flat = _flat(name, values)
    refused = BadRequest(f"{name!r:.200}: the data has a value that is not {datatype[:20]}", "inputs")
    try:
        if datatype == BYTES:
            return packed_texts(flat)
        if datatype == "BOOL":
            if not all(value is True or value is False for value in flat):
                raise refused
            return bytes(flat)
        if any(value is True or value is False for value in flat):
            raise refused
        if datatype == "FP16":
            return struct.pack(f"<{len(flat)}e", *flat)
        numbers = array(CODES[datatype], flat)
        if datatype == "FP32" and sum(map(isfinite, numbers)) != sum(map(isfinite, flat)):
            raise refused  # a large number became infinite
        return numbers.tobytes()
    except KeyError:
        raise BadRequest(
            f"{name!r:.200} has the datatype {datatype[:20]!r}; there are {', '.join((*SIZES, BYTES))}", "inputs"
        ) from None
    except (TypeError, ValueError, OverflowError, AttributeError, struct.error):
        raise refused from None


def _flat(name: str, values: Any) -> list[Any]:
    """Return the values of nested lists in one list."""
    flat = values if isinstance(values, list) else [values]
    for _ in range(MOST_DIMS):
        if not any(isinstance(value, list) for value in flat):
            return flat
        if not all(isinstance(value, list) for value in flat):
            break
        flat = list(chain.from_iterable(flat))
    raise BadRequest(f"{name!r:.200}: the lists of the data are not nested like a tensor", "inputs")


def packed_texts(texts: Sequence[str]) -> bytes:
    """Return texts as the data of a tensor of BYTES."""
    return packed_parts([text.encode() for text in texts])


def packed_parts(parts: Iterable[bytes]) -> bytes:
    """Return bytes as the data of a tensor of BYTES."""
    return b"".join(part for item in parts for part in (_LENGTH.pack(len(item)), item))


def unpacked(tensor: Tensor) -> list[Any]:
    """Return the values of a tensor as a flat list for JSON."""
    data, datatype = tensor.data, tensor.datatype
    if datatype == BYTES:
        texts, at = [], 0
        while at < len(data):
            end = at + _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
            texts.append(bytes(data[at + _LENGTH.size : end]).decode(errors="replace"))
            at = end
        return texts
    if datatype == "BOOL":
        return list(map(bool, data))
    if datatype == "FP16":
        return list(struct.unpack(f"<{len(data) // 2}e", data))
    numbers = array(CODES[datatype])
    numbers.frombytes(data)
    return numbers.tolist()


def _text(shape: Sequence[int]) -> str:
    """Return a shape for messages."""
    more = ", ..." if len(shape) > MOST_DIMS else ""
    return f"[{', '.join(map(str, shape[:MOST_DIMS]))}{more}]"
