"""Logits of one row, as each rank of the last stage sends its own to rank 0: all of them, or the largest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge.parallel.masks import MOST_BYTES, pack
from edge.text.constraints.constraint import Mask
from partition.plan.plan import Range
from transport.errors import ProtocolError
from transport.link import Link

Floats = NDArray[np.float32]


def send(link: Link, logits: Floats, top: int, mask: Mask | None = None) -> None:
    """Send the `top` largest of a rank's logits [n], and as many of those of tokens that `mask` allows; 0: all."""
    link.send(largest(logits, top, mask) if top else logits)


class LogitsQuery(NamedTuple):
    """Query of rank 0 for the logits of a step's rows."""

    top: int  # of the largest; 0: all
    masks: bytes  # as they go along with the step; none: no row has a mask
    masked: Sequence[int]  # the rows that have one

    @classmethod
    def from_masks(cls, top: int, masks: Sequence[Mask | None], heads: Sequence[Range]) -> LogitsQuery:
        """`top` logits of each row, and as many of what its mask allows. All, where that is no more bytes, or the masks
        are too long to go along. heads: the tokens that each rank of the last stage has."""
        masked = [row for row, mask in enumerate(masks) if mask is not None]
        packed = pack([0, *(head.stop for head in heads)], masks) if masked else b""
        is_few = 0 < 2 * top * (2 if masked else 1) < min(map(len, heads))
        return cls(top, packed, masked) if is_few and len(packed) <= MOST_BYTES else cls(0, b"", ())

    def n_bytes(self, rows: int, n_vocab: int) -> int:
        """Return the size in bytes of the logits of so many rows on the link."""
        return 8 * self.top * (rows + len(self.masked)) if self.top else 4 * n_vocab * rows

    def receive(self, link: Link, logits: Floats, row: int, timeout_s: float) -> None:
        """Put what `send` sends of a row into `logits` [n]; what does not come stays. ProtocolError where it is of no
        token."""
        if not self.top:
            link.receive_into(logits, timeout_s)
            return
        entries = np.empty((2, min(self.top, logits.size) * (2 if row in self.masked else 1)), np.int32)
        link.receive_into(entries, timeout_s)
        if not 0 <= entries[0].min() <= entries[0].max() < logits.size:
            raise ProtocolError(f"{link.peer} sent logits of tokens it has not")
        logits[entries[0]] = entries[1].view(np.float32)


def largest(logits: Floats, top: int, mask: Mask | None = None) -> NDArray[np.int32]:
    """The `top` largest of `logits` [n] as int32 [2, top]: where they are, and the bits of their values. With a mask
    [2, 2 top]: those, and the largest of what it allows. Where it allows fewer, the rest are any."""
    where = _places(logits, top)
    if mask is not None:
        where = np.concatenate((where, _places(np.where(mask, logits, np.float32(-np.inf)), top)))
    out = np.empty((2, where.size), np.int32)
    out[0], out[1] = where, logits[where].view(np.int32)
    return out


def _places(logits: Floats, top: int) -> NDArray[np.intp]:
    if top == 1:
        return np.array([logits.argmax()])
    n = min(top, logits.size)
    return np.argpartition(logits, logits.size - n)[logits.size - n :]
