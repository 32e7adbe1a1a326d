"""Token masks in a step: the tokens that may come next. Ranks then also send the largest logits of these tokens.

| bytes | field |
| 0-    | int32 [ranks of the last stage + 1]: first token of each rank, then the number of tokens |
|       | for each row with logits: |
| 0-3   | Form |
| 4-7   | int32: number of tokens in the list |
| 8-    | int32 token ids, ascending; for BITS one bit for each token, 1: allowed, lowest bit of a byte first |

All values are little-endian, as in steps.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from edge.text.constraints.constraint import Mask
from transport.errors import ProtocolError

MOST_BYTES = 1 << 20  # limit for a step's masks; enough for 64 rows of a vocabulary of 128,000

_HEAD = struct.Struct("<ii")
_BITS_AN_ID = 32


class Form(IntEnum):
    """Encoding of a mask."""

    NONE = 0  # the row has no mask
    ALLOWED = 1
    FORBIDDEN = 2
    BITS = 3


_FORMS = {int(form): form for form in Form}


def pack(bounds: Sequence[int], masks: Sequence[Mask | None]) -> bytes:
    """Encode the masks of rows, each in its shortest form. bounds: first tokens of the last stage's ranks, as above."""
    return np.array(bounds, np.int32).tobytes() + b"".join(map(_packed, masks))


def _packed(mask: Mask | None) -> bytes:
    if mask is None:
        return _HEAD.pack(Form.NONE, 0)
    n_allowed = int(np.count_nonzero(mask))
    for form, n_named in ((Form.ALLOWED, n_allowed), (Form.FORBIDDEN, mask.size - n_allowed)):
        if _BITS_AN_ID * n_named < mask.size:
            named = np.flatnonzero(mask if form is Form.ALLOWED else ~mask)
            return _HEAD.pack(form, n_named) + named.astype(np.int32).tobytes()
    return _HEAD.pack(Form.BITS, mask.size) + np.packbits(mask, bitorder="little").tobytes()


def unpack(data: bytes, rows: int, ranks: int, own: int, n_own: int) -> list[Mask | None]:
    """Decode masks. Return the mask [n_own] of a rank's tokens for each row, or None for a row without a mask.

    ranks: number of ranks of the last stage.
    own: index of the rank among them.
    n_own: number of its tokens.

    Raises ProtocolError for invalid data.
    """
    at = 4 * (ranks + 1)
    if len(data) < at:
        raise ProtocolError(
            f"masks of {len(data)} bytes were received; the first {at} must state the tokens of each of {ranks} ranks"
        )
    bounds = np.frombuffer(data, np.int32, ranks + 1)
    start, stop, n_vocab = int(bounds[own]), int(bounds[own + 1]), int(bounds[-1])
    if bounds[0] or (np.diff(bounds) <= 0).any() or stop - start != n_own:
        raise ProtocolError(f"masks were received for {stop - start} tokens of rank {own} of {ranks}; it has {n_own}")
    masks = []
    for row in range(rows):
        form, n_named = _HEAD.unpack_from(data, at) if len(data) >= at + _HEAD.size else (-1, 0)
        n_bytes = -(-n_named // 8) if form == Form.BITS else 4 * n_named
        at += _HEAD.size
        if form not in _FORMS or n_named < 0 or len(data) < at + n_bytes:
            raise ProtocolError(f"the mask of row {row} of {rows} is invalid, or {len(data)} bytes are too few for it")
        masks.append(_mask(_FORMS[form], n_named, data[at : at + n_bytes], n_vocab, start, stop))
        at += n_bytes
    if at != len(data):
        raise ProtocolError(f"{len(data) - at} bytes follow the masks of {rows} rows")
    return masks


def _mask(form: Form, n_named: int, data: bytes, n_vocab: int, start: int, stop: int) -> Mask | None:
    """Decode the part [start, stop) of a mask."""
    if form is Form.NONE:
        if n_named:
            raise ProtocolError(f"a row without a mask has {n_named} tokens; expected none")
        return None
    if form is Form.BITS:
        if n_named != n_vocab:
            raise ProtocolError(f"a mask of {n_named} tokens was received; expected {n_vocab} tokens")
        return np.unpackbits(np.frombuffer(data, np.uint8), count=n_vocab, bitorder="little")[start:stop].astype(bool)
    ids: NDArray[np.int32] = np.frombuffer(data, np.int32)
    if n_named and not (ids[0] >= 0 and ids[-1] < n_vocab and (ids[1:] > ids[:-1]).all()):
        raise ProtocolError(f"a mask names invalid tokens: ids must ascend from 0 to {n_vocab - 1}")
    mask = np.full(stop - start, form is Form.FORBIDDEN)
    mask[ids[(ids >= start) & (ids < stop)] - start] = form is Form.ALLOWED
    return mask
