"""Frames: the layout of a message on a link. A header of 16 bytes, then the payload.

| bytes | field    | meaning                                                                   |
| 0-3   | magic    | "EDGE"                                                                    |
| 4     | version  | VERSION; frames of other versions are refused                             |
| 5     | kind     | Kind                                                                      |
| 6-7   | check    | CRC-16 (XMODEM) of the other 14 bytes, because a wrong length would block |
| 8-11  | length   | bytes of payload, little endian; at most MAX_PAYLOAD                      |
| 12-15 | sequence | number of earlier frames in this direction, modulo 2 to 32                |
"""

from __future__ import annotations

import struct
from binascii import crc_hqx
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

from transport.errors import ProtocolError

MAGIC = b"EDGE"
VERSION = 5
MAX_PAYLOAD = 64 << 20  # bytes: 512 rows of 32,768 floats, more than any tensor sent in one frame
MAX_REASON = 1 << 10  # bytes of text in an ERROR or CLOSE frame
HEADER_BYTES = 16
SEQUENCES = 1 << 32  # number of sequence numbers; they wrap around

# Any object that memoryview accepts. Type checkers accept numpy's arrays as such only from Python 3.12 on.
Buffer: TypeAlias = Any

_HEADER = struct.Struct("<4sBBHII")
assert _HEADER.size == HEADER_BYTES


class Kind(IntEnum):
    """Purpose of a frame."""

    DATA = 1  # a tensor or a part of one, raw
    HELLO = 2  # the first frame of a link and its answer: ranks of both ends and the secret
    PING = 3  # returned as PONG, for measuring
    PONG = 4
    CONTROL = 5  # an encoded command or event
    ERROR = 6  # the last frame of a link: the reason why the sender gives up, as text
    CLOSE = 7  # the last frame of a link: the sender closes it
    SHAPED = 8  # a frame that contains a frame of a shaped link


_KINDS = {int(kind): kind for kind in Kind}


class Header(NamedTuple):
    """A checked header."""

    kind: Kind
    length: int  # bytes of payload
    sequence: int


Payload = bytes | bytearray | memoryview


class Frame(NamedTuple):
    """A received message."""

    kind: Kind
    payload: Payload


def pack_header(kind: int, length: int, sequence: int) -> bytes:
    """Return the 16-byte header for a payload of `length` bytes. Raises ProtocolError if that exceeds MAX_PAYLOAD."""
    if length > MAX_PAYLOAD:
        raise ProtocolError(f"a frame holds at most {MAX_PAYLOAD} bytes, got {length}; send it in parts")
    header = _HEADER.pack(MAGIC, VERSION, kind, 0, length, sequence)
    return header[:6] + check_of(header).to_bytes(2, "little") + header[8:]


def check_of(header: Buffer) -> int:
    """Return the CRC-16 of a header."""
    return crc_hqx(header[8:HEADER_BYTES], crc_hqx(header[:6], 0))


def parse_header(data: Buffer, sequence: int) -> Header:
    """Parse and check the header at the start of `data`. Raises ProtocolError, which names the wrong field."""
    try:
        magic, version, kind, check, length, number = _HEADER.unpack_from(data)
    except struct.error:
        n = len(memoryview(data))
        raise ProtocolError(f"a frame of {n} bytes was cut off inside its header of {HEADER_BYTES}") from None
    if magic != MAGIC:
        raise ProtocolError(f"a frame starts with {MAGIC!r}, got {magic!r}: not our protocol, or bytes were lost")
    if version != VERSION:
        raise ProtocolError(
            f"the peer speaks version {version} of the protocol, this is version {VERSION}; update both"
        )
    if check != check_of(data):
        raise ProtocolError("the header of a frame was damaged in transit: its checksum is wrong")
    if kind not in _KINDS:
        raise ProtocolError(f"frames of kind {kind} do not exist in version {VERSION}")
    if length > MAX_PAYLOAD:
        raise ProtocolError(f"a frame of {length} bytes was announced, at most {MAX_PAYLOAD} are allowed")
    if number != sequence:
        raise ProtocolError(f"expected frame {sequence}, got frame {number}: frames were lost or repeated")
    return Header(_KINDS[kind], length, number)


def parse_frame(data: memoryview, sequence: int) -> Frame:
    """Parse one whole frame; its payload is a view of `data`. Raises ProtocolError if it is cut off or too long."""
    header = parse_header(data, sequence)
    if len(data) - HEADER_BYTES != header.length:
        raise ProtocolError(f"a frame announced {header.length} bytes, got {len(data) - HEADER_BYTES}")
    return Frame(header.kind, data[HEADER_BYTES:])
