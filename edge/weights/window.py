"""Streaming window: non-resident weights pass through it, and are read ahead in their order of use."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from edge.errors import EngineError
from edge.llama.address_space import PAGE, AddressSpace, pages
from edge.llama.buffers import Weight
from edge.weights.direct_file import DirectFile
from edge.weights.reader import Job, Reader


@dataclass(frozen=True, eq=False)
class Piece:
    """Weight, or some of its rows, that is read as a whole."""

    weight: Weight
    file: DirectFile
    offset: int  # offset of its first row in the file
    n_bytes: int
    repacked: bool  # True: in this CPU's layout in memory
    is_laid_out: bool = False  # True: the file already has that layout

    @property
    def name(self) -> str:
        """Name of the weight, with the offset if the piece has only some rows."""
        return self.weight.name if self.n_bytes == self.weight.n_bytes else f"{self.weight.name}@{self.offset}"

    @property
    def rows(self) -> int:
        return self.n_bytes // self.weight.row_bytes

    @property
    def span(self) -> int:
        """Bytes of whole pages that it takes. Without repacking, it begins at the same offset within a page as in
        the file."""
        return pages(self.n_bytes + self._skip)

    def read(self, space: AddressSpace, start: int) -> Job:
        """Return the job that reads the piece to `span` bytes of `space`, which begin on a page boundary."""
        repack = self.repacked and not self.is_laid_out
        start += self._skip
        return Job(self.weight, self.file, self.offset, self.n_bytes, space, start, repack)

    def cut(self, rows: int) -> list[Piece]:
        """Return pieces of `rows` rows each, and the rest as the last one."""
        step = rows * self.weight.row_bytes
        starts = range(0, self.n_bytes, step)
        return [replace(self, offset=self.offset + at, n_bytes=min(step, self.n_bytes - at)) for at in starts]

    @property
    def _skip(self) -> int:
        return 0 if self.repacked and not self.is_laid_out else self.offset % PAGE


class Pager:
    """Ring buffer through which streamed weights pass repeatedly."""

    def __init__(self, streamed: Sequence[Piece], window: int, reader: Reader) -> None:
        """streamed: expected order of use, which is corrected by the actual order.
        window: bytes; the largest weight must fit.
        """
        self._order = list(streamed)
        self._window = AddressSpace(window, huge=True)
        self._reader = reader
        self._next = 0  # index in the order of the next piece to read
        self._placed: deque[tuple[Piece, Job, int]] = deque()  # placed pieces, oldest first: piece, job, start
        self._in_use: tuple[Piece, Job, int] | None = None
        self._lost = False  # True: all placed pieces must be read again
        self._requested: list[Piece] = []  # pieces requested in this pass
        self._fill()

    def ready(self) -> bool:
        """Return whether the next weight in turn has arrived."""
        return bool(self._placed) and self._placed[0][1].done

    def acquire(self, piece: Piece) -> int:
        """Wait for `piece` and return its address, which is valid until `release`.

        A piece that is used earlier than expected is not read again if it has a place. Raises WeightsError if it cannot
        be read.
        """
        if self._in_use is not None:
            raise EngineError(f"{piece.name} is needed before {self._in_use[0].name} was released")
        place = next((place for place in self._placed if place[0] is piece), None)
        if self._lost or place is None:
            self._go_to(piece)
            place = self._placed[0]
        _, job, _ = place
        try:
            self._reader.wait(job)
        except BaseException:
            self._go_to(piece)  # another attempt starts another read
            raise
        self._in_use = place
        self._requested.append(piece)
        return self._window.address + job.start

    def release(self) -> None:
        """Release the acquired weight, so that its place may be overwritten."""
        if self._in_use is not None:
            self._placed.remove(self._in_use)
            self._in_use = None
            self._fill()

    def begin(self) -> None:
        """Begin a pass over the weights. A weight that a failed pass had acquired is released."""
        self.release()
        self._lost |= any(job.error for _, job, _ in self._placed)  # repeat reads that failed
        self._requested = []

    def end(self) -> None:
        """End the pass. The next pass is expected to use the same order."""
        if self._requested and self._requested != self._order:
            self._order = list(dict.fromkeys(self._requested))
            self._go_to(self._order[0])

    def close(self) -> None:
        self._reader.drop(*(job for _, job, _ in self._placed))
        self._placed.clear()
        self._window.close()

    def _go_to(self, piece: Piece) -> None:
        """Restart reading from this piece, because the order of use differs from the expected one."""
        self._lost = True  # until nothing writes to the window any more
        self._reader.drop(*(job for _, job, _ in self._placed))
        self._placed.clear()
        self._lost = False
        if piece not in self._order:
            self._order.insert(self._next, piece)
        self._next = self._order.index(piece)
        self._fill()

    def _fill(self) -> None:
        """Start to read as many pieces as fit."""
        while len(self._placed) < len(self._order):
            piece = self._order[self._next]
            start = self._room(piece.span)
            if start is None:
                return
            self._next = (self._next + 1) % len(self._order)
            job = piece.read(self._window, start)
            # added before it is read, so that its place stays taken after an error
            self._placed.append((piece, job, start))
            self._reader.submit(job)

    def _room(self, span: int) -> int | None:
        """Return the start of `span` free bytes of the window after the last placed weight, or None if there is no
        room yet."""
        if not self._placed:
            return 0
        first = self._placed[0][2]
        last, _, start = self._placed[-1]
        end = start + last.span
        if start < first:  # the ring has wrapped
            return end if end + span <= first else None
        if end + span <= self._window.n_bytes:
            return end
        return 0 if span <= first else None
