"""Images and audio over a link: rank 0 sends files, and the rank with the projector answers with embeddings.

A request is a CONTROL frame, followed by the file in DATA frames (`transport.link.send_parts`):

| bytes | field |
| 0     | operation: 1 encode, 2 end |
| 1-3   | 0 |
| 4-7   | uint32: bytes of the file |

The answer is a CONTROL frame with JSON as written by `edge.media.child`, followed by the arrays in DATA frames. An
error has "ended": true if the encoding process crashed on the file. All values are little-endian.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from edge.errors import MediaError
from edge.media.decoding import MOST_BYTES
from edge.media.encoder import EncoderEnded, MediaEncoder, RawMedia
from edge.media.media import MOST_ROWS
from transport.errors import ProtocolError
from transport.frame import Kind
from transport.link import IDLE_S, Link, receive_parts, send_parts

MOST_ANSWER_BYTES = 1 << 30  # maximum size of embeddings
_HEAD = struct.Struct("<BBHI")
_ENCODE, _END = 1, 2
_DIGEST_BYTES = 32


class RemoteEncoder:
    """Encoder at the other end of a link."""

    def __init__(self, link: Link, width: int, n_vocab: int) -> None:
        """width, n_vocab: embedding width and vocabulary size of the text model."""
        self._link, self._width, self._n_vocab = link, width, n_vocab

    def encode(self, data: bytes, timeout_s: float) -> RawMedia:
        """Encode a file on the other device.

        Raises MediaError if the file cannot be used, and EncoderEnded if the encoding process crashed. Raises a
        TransportError if the link breaks, or if the answer is invalid or takes longer than `timeout_s`. The encoder
        cannot be used after that.
        """
        try:
            self._link.send(_HEAD.pack(_ENCODE, 0, 0, len(data)), Kind.CONTROL)
            send_parts(self._link, data)
            head = self._link.receive(timeout_s)
            if head.kind is not Kind.CONTROL:
                raise ProtocolError(f"{self._link.peer} sent {head.kind.name} where an answer was expected")
            answer = _parsed(bytes(head.payload), self._link.peer)
            error = answer.get("error")
            rest = b"" if error is not None else _received(self._link, answer["bytes"])
            if error is None:
                _check(answer, rest, self._width, self._n_vocab, self._link.peer)
        except BaseException:  # a late answer would be read as the answer to the next request
            self._link.close()
            raise
        if error is not None:
            raise (EncoderEnded if answer.get("ended") is True else MediaError)(str(error)[:1000])
        return answer, rest

    def end(self) -> None:
        """Tell the other end that no more requests follow. Raises a TransportError if the link is broken."""
        self._link.send(_HEAD.pack(_END, 0, 0, 0), Kind.CONTROL)


def follow(encoder: MediaEncoder, link: Link) -> None:
    """Answer requests from `link` until the end of requests. Raises errors of the link."""
    while True:
        frame = link.receive(IDLE_S)
        if frame.kind is not Kind.CONTROL or len(frame.payload) != _HEAD.size:
            raise ProtocolError(f"{link.peer} sent {frame.kind.name} where a request for embeddings was expected")
        op, zero, zeros, n_bytes = _HEAD.unpack(frame.payload)
        if op == _END:
            return
        if op != _ENCODE or zero or zeros or n_bytes > MOST_BYTES:
            raise ProtocolError(f"operation {op} with {n_bytes} bytes is not known; update both devices")
        data = _received(link, n_bytes)
        try:
            answer, rest = encoder.encode_raw(data)
        except MediaError as error:
            answer, rest = {"error": str(error), "ended": isinstance(error, EncoderEnded)}, b""
        link.send(json.dumps(answer).encode(), Kind.CONTROL)
        send_parts(link, rest)


def _received(link: Link, n_bytes: int) -> bytes:
    buffer = bytearray(n_bytes)
    receive_parts(link, buffer)
    return bytes(buffer)


def _parsed(text: bytes, peer: str) -> dict[str, Any]:
    """Parse an answer, which has a byte count or an error. Raises ProtocolError for anything else."""
    with _valid(peer):
        answer: dict[str, Any] = json.loads(text)
        _need(isinstance(answer, dict))
        _need(answer.get("error") is not None or _is_count(answer["bytes"], MOST_ANSWER_BYTES))
    return answer


def _check(answer: dict[str, Any], rest: bytes, width: int, n_vocab: int, peer: str) -> None:
    """Raise ProtocolError for an answer that does not fit the text model, because it would crash an engine."""
    at = 0
    with _valid(peer):
        _need(len(bytes.fromhex(answer["digest"])) == _DIGEST_BYTES)
        for chunk in answer["chunks"]:
            if "shape" not in chunk:
                _need(all(_is_count(token, n_vocab - 1) for token in chunk["tokens"]))
                continue
            n_rows, n_values = chunk["shape"]
            _need(_is_count(n_rows, MOST_ROWS) and n_rows > 0 and _is_count(n_values, width) and n_values == width)
            _need(_is_count(chunk["positions"], MOST_ROWS) and {chunk["sections"], chunk["causal"]} <= {True, False})
            _need(bool(np.isfinite(np.frombuffer(rest, np.float32, n_rows * width, at)).all()))
            at += 4 * n_rows * width
            if chunk["sections"]:
                offsets = np.frombuffer(rest, np.int32, 3 * n_rows, at)
                _need(bool(((offsets >= 0) & (offsets <= MOST_ROWS)).all()))
                at += offsets.nbytes
        _need(at == len(rest))


@contextmanager
def _valid(peer: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise ProtocolError(f"{peer} sent embeddings that do not fit this model; they are ignored") from None


def _need(holds: bool) -> None:
    if not holds:
        raise ValueError


def _is_count(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most
