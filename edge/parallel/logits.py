"""Transfer of logits of one row from the ranks of the last stage to rank 0: all logits, or only the largest."""

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
    """Send the `top` largest of a rank's logits [n], and as many of the tokens that `mask` allows. top 0: send all."""
    link.send(largest(logits, top, mask) if top else logits)


class LogitsQuery(NamedTuple):
    """Query of rank 0 for the logits of a step's rows."""

    top: int  # number of largest logits; 0: all
    masks: bytes  # packed masks that are sent with the step; empty if no row has a mask
    masked: Sequence[int]  # rows with a mask

    @classmethod
    def from_masks(cls, top: int, masks: Sequence[Mask | None], heads: Sequence[Range]) -> LogitsQuery:
        """Return a query for the `top` logits of each row, and as many of the tokens that its mask allows.

        The query asks for all logits if that takes no more bytes, or if the masks are too long to send.

        heads: range of tokens of each rank of the last stage.
        """
        masked = [row for row, mask in enumerate(masks) if mask is not None]
        packed = pack([0, *(head.stop for head in heads)], masks) if masked else b""
        is_few = 0 < 2 * top * (2 if masked else 1) < min(map(len, heads))
        return cls(top, packed, masked) if is_few and len(packed) <= MOST_BYTES else cls(0, b"", ())

    def n_bytes(self, rows: int, n_vocab: int) -> int:
        """Return the bytes of the logits of this many rows on the link."""
        return 8 * self.top * (rows + len(self.masked)) if self.top else 4 * n_vocab * rows

    def receive(self, link: Link, logits: Floats, row: int, timeout_s: float) -> None:
        """Receive the logits of a row into `logits` [n]. Entries that are not sent stay unchanged. Raises
        ProtocolError for an invalid token.
        """
        if not self.top:
            link.receive_into(logits, timeout_s)
            return
        entries = np.empty((2, min(self.top, logits.size) * (2 if row in self.masked else 1)), np.int32)
        link.receive_into(entries, timeout_s)
        if not 0 <= entries[0].min() <= entries[0].max() < logits.size:
            raise ProtocolError(f"{link.peer} sent logits of tokens that it does not hold")
        logits[entries[0]] = entries[1].view(np.float32)


def largest(logits: Floats, top: int, mask: Mask | None = None) -> NDArray[np.int32]:
    """Return the `top` largest of `logits` [n] as int32 [2, top]: indices, and the bits of the values.

    With a mask the result is [2, 2 top]; the second half are the largest logits that the mask allows. If it allows
    fewer, the remaining entries are arbitrary.
    """
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
