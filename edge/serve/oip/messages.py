"""Messages between the server and the process of a network: JSON with tensors as raw bytes behind it.

From the server: first {"config"}, then {"id", "inputs", "outputs"} with the data of the inputs, or {"cancel": id}.
From the process: {"say": line for users}, {"ready": description}, {"fatal": error}, {"id", "error"}, or {"id",
"outputs", "timing": nanoseconds of queue, input, computing and output, "rows": of the whole run, "own_rows",
"is_first": in its run} with the data of the outputs.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edge.serve.oip.tensors import Tensor

HEAD = struct.Struct("<IQ")  # bytes of the JSON, and of the data behind it
_ALIGNMENT = 16  # bytes; numpy can use aligned tensors in place


def message_of(text: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON of a message."""
    values: dict[str, Any] = json.loads(text)
    return values


def frame(message: Mapping[str, Any], tensors: Sequence[Tensor] = (), key: str = "") -> list[bytes | memoryview]:
    """Return the parts of a message. key: key of the list that describes the tensors."""
    parts: list[bytes | memoryview] = []
    rows, at = [], 0
    for tensor in tensors:
        rows.append([tensor.name, tensor.datatype, tensor.shape, at, len(tensor.data)])
        padding = -len(tensor.data) % _ALIGNMENT
        parts += (tensor.data, bytes(padding))
        at += len(tensor.data) + padding
    text = json.dumps({**message, key: rows} if key else message).encode()
    return [HEAD.pack(len(text), at) + text, *parts]


def tensors_of(rows: Iterable[Sequence[Any]], data: bytes | bytearray) -> list[Tensor]:
    """Return the tensors that a list in a message describes."""
    view = memoryview(data)
    return [Tensor(name, kind, tuple(shape), view[at : at + size]) for name, kind, shape, at, size in rows]
