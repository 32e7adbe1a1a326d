"""Token table under a budget: only rows of tokens that occur are in memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge.llama.address_space import PAGE, AddressSpace, pages
from edge.weights.reader import Job, Reader
from edge.weights.window import Piece

MOST_BYTES = 8 << 20  # maximum memory for rows of earlier decodes; a conversation has few different tokens


class TokenRows:
    """Rows of a token table in an address range for the whole table."""

    def __init__(self, table: Piece, reader: Reader) -> None:
        self._table, self._weight, self._reader = table, table.weight, reader
        self._space = AddressSpace(table.n_bytes)
        self._there: set[int] = set()
        self.point()

    def point(self) -> None:
        """Make graphs read the rows from here."""
        self._weight.point(self._space.address, repacked=False)

    @staticmethod
    def memory(table: Piece, batch: int) -> int:
        """Return the maximum bytes for decodes of `batch` rows."""
        row = pages(table.weight.row_bytes) + PAGE
        return min(max(MOST_BYTES, batch * row) + batch * row, pages(table.n_bytes))

    def bring(self, tokens: NDArray[np.int32]) -> None:
        """Read the rows of these tokens into memory. Raises WeightsError if they cannot be read. Invalid ids are
        ignored here, because llama.cpp rejects them."""
        missing = [int(t) for t in np.unique(tokens) if t not in self._there and 0 <= t < self._weight.rows]
        row = self._weight.row_bytes
        if (len(self._there) + len(missing)) * (pages(row) + PAGE) > MOST_BYTES and self._there:
            self._there.clear()
            self._space.release(0, self._space.n_bytes)
            missing = [int(t) for t in np.unique(tokens) if 0 <= t < self._weight.rows]
        file, offset = self._table.file, self._table.offset
        jobs = [Job(self._weight, file, offset + t * row, row, self._space, t * row, False) for t in missing]
        self._reader.submit_urgent(jobs)
        for job in jobs:
            self._reader.wait(job)
        self._there.update(missing)

    def close(self) -> None:
        self._space.close()
