"""Draft tokens over a link: rank 0 sends token ids, and the rank with the draft model answers with the next tokens.

A request is a CONTROL frame. It encodes the difference from the previous request's text, so each token is sent once:

| bytes | field |
| 0     | operation: 1 draft, 2 end |
| 1-3   | 0 |
| 4-7   | uint32: tokens to keep of the previous text |
| 8-11  | uint32: tokens to draft; 0: the next request continues the text |
| 12-   | int32 for each token after the kept ones |

The answer is a DATA frame with an int32 for each drafted token. All values are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from edge.llm.interface import Proposer
from edge.llm.slot import common_prefix
from transport.errors import ProtocolError
from transport.frame import Kind, Payload
from transport.link import IDLE_S, Link

ANSWER_S = 10.0  # time for an answer to a request; a slower device does not help
MOST_TOKENS = 512  # maximum per request, so that parts of a long text are answered early
_HEAD = struct.Struct("<BBHII")
_ID = np.dtype("<i4")
_DRAFT, _END = 1, 2


class DraftQuery(NamedTuple):
    """Request for draft tokens."""

    keep: int  # tokens of the previous text to keep
    n: int  # tokens to draft
    tokens: tuple[int, ...]  # tokens after the kept ones


def pack(query: DraftQuery | None) -> bytes:
    """Encode a request. None encodes the end of requests."""
    if query is None:
        return _HEAD.pack(_END, 0, 0, 0, 0)
    return _HEAD.pack(_DRAFT, 0, 0, query.keep, query.n) + np.array(query.tokens, _ID).tobytes()


def unpack(data: Payload) -> DraftQuery | None:
    """Decode a request, or return None for the end of requests. Raises ProtocolError for invalid bytes."""
    size = len(data) - _HEAD.size
    if size < 0 or size % _ID.itemsize:
        raise ProtocolError(f"a request for drafts has {len(data)} bytes; it has {_HEAD.size}, and 4 for each token")
    op, zero, zeros, keep, n = _HEAD.unpack_from(data)
    if op not in (_DRAFT, _END) or zero or zeros:
        raise ProtocolError(f"operation {op} with flags {zero} and {zeros} is not known; update both devices")
    if op == _END:
        return None
    return DraftQuery(keep, n, tuple(np.frombuffer(data, _ID, offset=_HEAD.size).tolist()))


class RemoteProposer:
    """Drafter at the other end of a link."""

    def __init__(self, link: Link, context: int, n_vocab: int) -> None:
        """context, n_vocab: sizes of the draft model. The model that verifies its drafts has the same vocabulary."""
        self.context, self.n_vocab = context, n_vocab
        self._link = link
        self._sent: list[int] = []  # text that the other end has

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Return `n` draft tokens, as `GreedyDrafter` does.

        Raises a TransportError if the link breaks, or if an answer is invalid or takes longer than ANSWER_S. The
        drafter cannot be used after that.
        """
        start = common_prefix(self._sent, tokens)
        try:
            while len(tokens) - start > MOST_TOKENS:
                self._ask(DraftQuery(start, 0, tuple(tokens[start : start + MOST_TOKENS])))
                start += MOST_TOKENS
            draft = self._ask(DraftQuery(start, n, tuple(tokens[start:])))
        except BaseException:  # a late answer would be read as the answer to the next request
            self._link.close()
            raise
        self._sent = list(tokens)
        return draft

    def end(self) -> None:
        """Tell the other end that no more requests follow. Raises a TransportError if the link is broken."""
        self._link.send(pack(None), Kind.CONTROL)

    def _ask(self, query: DraftQuery) -> list[int]:
        self._link.send(pack(query), Kind.CONTROL)
        frame = self._link.receive(ANSWER_S, query.n * _ID.itemsize)
        if frame.kind is not Kind.DATA or len(frame.payload) != query.n * _ID.itemsize:
            raise ProtocolError(
                f"{self._link.peer} was asked to draft {query.n} tokens, but sent {len(frame.payload)} bytes of"
                f" {frame.kind.name}"
            )
        draft: list[int] = np.frombuffer(frame.payload, _ID).tolist()
        _check_ids(draft, self)
        return draft


def follow(proposer: Proposer, link: Link) -> None:
    """Answer draft requests from `link` until the end of requests. Raises errors of the link and of the engine."""
    text: list[int] = []
    most = _HEAD.size + MOST_TOKENS * _ID.itemsize
    while True:
        frame = link.receive(IDLE_S, most)
        if frame.kind is not Kind.CONTROL:
            raise ProtocolError(f"{link.peer} sent {frame.kind.name} where a request for drafts was expected")
        query = unpack(frame.payload)
        if query is None:
            return
        n_tokens = query.keep + len(query.tokens)
        if query.keep > len(text) or not 0 < n_tokens <= proposer.context - max(1, query.n):
            raise ProtocolError(
                f"{query.n} drafts after {n_tokens} tokens were requested, with the first {query.keep} already sent;"
                f" {len(text)} tokens are known, and the context has {proposer.context}"
            )
        _check_ids(query.tokens, proposer)
        text[query.keep :] = query.tokens
        link.send(np.array(proposer.propose(text, query.n), _ID).tobytes())


def _check_ids(tokens: Sequence[int], proposer: Proposer) -> None:
    """Raise ProtocolError for invalid token ids, because they would crash an engine."""
    if not all(0 <= token < proposer.n_vocab for token in tokens):
        raise ProtocolError(f"received the tokens {tokens!s:.80}; token ids are from 0 to {proposer.n_vocab - 1}")
