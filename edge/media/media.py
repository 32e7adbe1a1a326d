"""Pictures and sounds in a history of tokens: each row of embeddings has an ID instead of a token ID.

Such an ID is negative. It encodes the hash of picture and projector, the number of rows, and the row number. Histories
with different pictures therefore differ in all of these IDs when they are compared or hashed.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError

_ROW_BITS = 20  # bits of a row number, and of a number of rows
MOST_ROWS = (1 << _ROW_BITS) - 1
_FIRST = 2  # -1 is not a token anywhere
_HASH_BYTES = 16


class EmbeddingRows:
    """Rows of embeddings of a picture, a tile of a picture, or a sound."""

    def __init__(
        self,
        digest: bytes,
        embeddings: NDArray[np.float32],
        offsets: NDArray[np.int32] | None = None,
        n_positions: int | None = None,
        *,
        causal: bool = True,
    ) -> None:
        """Make rows of embeddings.

        digest: digest of all data that determine the rows
        embeddings: float32 [rows, widths]; widths is the text model's width, or a multiple with rows for later layers
        offsets, n_positions: as in `EncodedChunk`
        causal: false if each row attends to all rows
        """
        self.embeddings, self.offsets, self.causal = embeddings, offsets, causal
        self.n_positions = len(embeddings) if n_positions is None else n_positions
        if not 0 < len(embeddings) <= MOST_ROWS:
            raise EngineError(f"a picture or sound becomes 1 to {MOST_ROWS} rows, not {len(embeddings)}")
        self.key = int.from_bytes(hashlib.sha256(digest).digest()[:_HASH_BYTES], "little")
        _known.setdefault(self.key, self)

    @cached_property
    def ids(self) -> list[int]:
        """ID of each row."""
        n = len(self.embeddings)
        return [-(((self.key << _ROW_BITS | n) << _ROW_BITS | row) + _FIRST) for row in range(n)]


def interned(rows: EmbeddingRows) -> EmbeddingRows:
    """Return the existing object with the same key, or `rows`.

    All IDs of a picture then refer to one object, which exists as long as a request uses it.
    """
    return _known.setdefault(rows.key, rows)


_known: weakref.WeakValueDictionary[int, EmbeddingRows] = weakref.WeakValueDictionary()


def row_of(token: int) -> int:
    """Return the row number in an ID."""
    return (-token - _FIRST) & MOST_ROWS


def rows_from(token: int) -> int:
    """Return the number of rows from this ID's row to the end of its picture."""
    return ((-token - _FIRST) >> _ROW_BITS & MOST_ROWS) - row_of(token)


def embeddings_of(token: int) -> EmbeddingRows:
    """Return the rows that an ID belongs to. Raises EngineError if they no longer exist."""
    rows = _known.get((-token - _FIRST) >> 2 * _ROW_BITS)
    if rows is None:
        raise EngineError("the embeddings of a picture are no longer there; send the picture again")
    return rows


def has_rows(tokens: Sequence[int]) -> bool:
    """Return whether a history has pictures or sounds."""
    return any(token < 0 for token in tokens)


def text_of(tokens: Iterable[int]) -> list[int]:
    """Return the tokens of a history without its pictures and sounds."""
    return [token for token in tokens if token >= 0]


def whole(tokens: Sequence[int], length: int) -> int:
    """Return the maximum length, up to `length`, of a prefix that contains no incomplete picture."""
    last = tokens[length - 1] if 0 < length <= len(tokens) else 0
    return length if last >= 0 or rows_from(last) == 1 else length - row_of(last) - 1


def behind(tokens: Sequence[int], start: int) -> int:
    """Return the first position from `start` on that is not inside a picture."""
    token = tokens[start] if start < len(tokens) else 0
    return start + rows_from(token) if token < 0 < row_of(token) else start


def alike(tokens: Sequence[int], start: int, most: int) -> int:
    """Return the number of tokens from `start` on that one decode can process, at most `most`.

    These are either text or rows of one picture. If rows of a picture attend to each other, all of them count, even if
    they exceed `most`.
    """
    first = tokens[start]
    if first < 0:
        n_rows = rows_from(first)
        return min(n_rows, most) if embeddings_of(first).causal else n_rows
    stop = min(len(tokens), start + most)
    return next((i for i in range(start, stop) if tokens[i] < 0), stop) - start
