"""Frames between a bridge and a page: a JSON object with a payload of bytes. docs/browser.md lists the operations.

A frame is `u32 length`, `u32 header_bytes`, header, payload. Numbers are little-endian, and `length` counts everything
after itself.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from transport.errors import ProtocolError

MAX_FRAME = 256 << 20  # bytes
MAX_HEADER = 1 << 20
_LENGTH = struct.Struct("<I")

Frame = tuple[dict[str, Any], memoryview]  # header and payload


def pack(header: dict[str, Any], payload: bytes | memoryview = b"") -> bytes:
    """Return a frame. Raises ProtocolError if it is too large."""
    text = json.dumps(header, separators=(",", ":")).encode()
    length = _LENGTH.size + len(text) + len(payload)
    if length > MAX_FRAME or len(text) > MAX_HEADER:
        raise ProtocolError(f"a frame of {length} bytes for a browser; the maximum is {MAX_FRAME}")
    return b"".join((_LENGTH.pack(length), _LENGTH.pack(len(text)), text, payload))


def unpack(body: bytes | bytearray | memoryview) -> Frame:
    """Return the frame whose bytes after the length these are. Raises ProtocolError if they are not valid."""
    view = memoryview(body)
    if len(view) < _LENGTH.size:
        raise ProtocolError("a frame of a browser is shorter than its header")
    (n_header,) = _LENGTH.unpack(view[: _LENGTH.size])
    if not 0 < n_header <= min(MAX_HEADER, len(view) - _LENGTH.size):
        raise ProtocolError(f"a frame of a browser has a header of {n_header} bytes, and {len(view)} bytes in all")
    try:
        header = json.loads(bytes(view[_LENGTH.size : _LENGTH.size + n_header]))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a frame of a browser has a header that is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise ProtocolError("a frame of a browser has a header that is not a JSON object")
    return header, view[_LENGTH.size + n_header :]


class Splitter:
    """Splits a stream of bytes into frames."""

    def __init__(self) -> None:
        self._received = bytearray()

    def add(self, data: bytes) -> list[Frame]:
        """Return the frames that `data` completes. Raises ProtocolError if one is too long or not valid."""
        self._received += data
        frames = []
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > MAX_FRAME:
                raise ProtocolError(f"a frame of {length} bytes from a browser; the maximum is {MAX_FRAME}")
            if len(self._received) < _LENGTH.size + length:
                break
            frames.append(unpack(bytes(self._received[_LENGTH.size : _LENGTH.size + length])))
            del self._received[: _LENGTH.size + length]
        return frames

    @property
    def is_empty(self) -> bool:
        """True if no frame is incomplete."""
        return not self._received
