"""Guesses of a small model: the likeliest next tokens, asked for over a link.

Rank 0 sends token ids, and the rank that holds the model sends back others. A request is a CONTROL frame. It says how
the text differs from that of the request before, so a token crosses once:

| bytes | field |
| 0     | operation: 1 guess, 2 end |
| 1-3   | 0 |
| 4-7   | uint32: tokens of the text before that stay |
| 8-11  | uint32: tokens to guess; 0: the text goes on in the next request |
| 12-   | int32 for each token that follows those |

A guess is answered by a DATA frame: int32 for each token that was guessed. All little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from edge.llm.interface import Proposer
from edge.llm.slot import common_prefix
from edge.parallel.follower import IDLE_S
from transport.errors import ProtocolError
from transport.frame import Kind, Payload
from transport.link import Link

GUESS_S = 10.0  # for an answer to a request: a device that takes longer is of no use
MOST_TOKENS = 512  # of a request, so that the answer to a part of a long text is soon there, too
_HEAD = struct.Struct("<BBHII")
_ID = np.dtype("<i4")


class Op(IntEnum):
    """What a request asks for."""

    DRAFT_QUERY = 1
    END = 2  # no more come


_OPS = {int(op): op for op in Op}


class DraftQuery(NamedTuple):
    """A request."""

    keep: int  # tokens of the text before
    n: int  # tokens to guess
    tokens: tuple[int, ...]  # behind those that are kept


def pack(asked: DraftQuery | None) -> bytes:
    """A request as bytes; None: no more come."""
    if asked is None:
        return _HEAD.pack(Op.END, 0, 0, 0, 0)
    return _HEAD.pack(Op.DRAFT_QUERY, 0, 0, asked.keep, asked.n) + np.array(asked.tokens, _ID).tobytes()


def unpack(data: Payload) -> DraftQuery | None:
    """What `pack` was given. ProtocolError for what it cannot have written."""
    size = len(data) - _HEAD.size
    if size < 0 or size % _ID.itemsize:
        raise ProtocolError(f"a request for guesses has {len(data)} bytes; it has {_HEAD.size}, and 4 for each token")
    op, zero, zeros, keep, n = _HEAD.unpack_from(data)
    if op not in _OPS or zero or zeros:
        raise ProtocolError(f"operation {op} with flags {zero} and {zeros} is none; update both devices")
    if op == Op.END:
        return None
    return DraftQuery(keep, n, tuple(np.frombuffer(data, _ID, offset=_HEAD.size).tolist()))


class RemoteProposer:
    """The proposer at the other end of a link."""

    def __init__(self, link: Link, context: int, n_vocab: int) -> None:
        """context, n_vocab: of the model there; who checks its guesses has the same vocabulary."""
        self.context, self.n_vocab = context, n_vocab
        self._link = link
        self._held: list[int] = []  # the text that the other end has

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """As `GreedyDrafter`. A TransportError where the link breaks, or where an answer takes longer than GUESS_S or
        cannot be; then it is of no use any more."""
        start = common_prefix(self._held, tokens)
        try:
            while len(tokens) - start > MOST_TOKENS:
                self._ask(DraftQuery(start, 0, tuple(tokens[start : start + MOST_TOKENS])))
                start += MOST_TOKENS
            found = self._ask(DraftQuery(start, n, tuple(tokens[start:])))
        except BaseException:  # an answer that nobody waited for would be taken for the next one
            self._link.close()
            raise
        self._held = list(tokens)
        return found

    def end(self) -> None:
        """Ask for nothing any more. A TransportError where the link is broken."""
        self._link.send(pack(None), Kind.CONTROL)

    def _ask(self, asked: DraftQuery) -> list[int]:
        self._link.send(pack(asked), Kind.CONTROL)
        frame = self._link.receive(GUESS_S, asked.n * _ID.itemsize)
        if frame.kind is not Kind.DATA or len(frame.payload) != asked.n * _ID.itemsize:
            raise ProtocolError(
                f"{self._link.peer} was to guess {asked.n} tokens, it sent {len(frame.payload)} bytes of"
                f" {frame.kind.name}"
            )
        found: list[int] = np.frombuffer(frame.payload, _ID).tolist()
        _check_ids(found, self)
        return found


def follow(proposer: Proposer, link: Link) -> None:
    """Guess what is asked for over `link`, until its end. The errors of links and of the engine."""
    text: list[int] = []
    most = _HEAD.size + MOST_TOKENS * _ID.itemsize
    while True:
        frame = link.receive(IDLE_S, most)
        if frame.kind is not Kind.CONTROL:
            raise ProtocolError(f"{link.peer} sent {frame.kind.name} where a request for guesses was expected")
        asked = unpack(frame.payload)
        if asked is None:
            return
        n_tokens = asked.keep + len(asked.tokens)
        if asked.keep > len(text) or not 0 < n_tokens <= proposer.context - max(1, asked.n):
            raise ProtocolError(
                f"{asked.n} guesses behind {n_tokens} tokens were asked for, {asked.keep} of them known; known are"
                f" {len(text)}, and there is room for {proposer.context}"
            )
        _check_ids(asked.tokens, proposer)
        text[asked.keep :] = asked.tokens
        link.send(np.array(proposer.propose(text, asked.n), _ID).tobytes())


def _check_ids(tokens: Sequence[int], proposer: Proposer) -> None:
    """ProtocolError for what is no token: an engine would end on it."""
    if not all(0 <= token < proposer.n_vocab for token in tokens):
        raise ProtocolError(f"the tokens {tokens!s:.80} came; token ids are from 0 to {proposer.n_vocab - 1}")
