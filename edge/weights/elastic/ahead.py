"""Weights of a larger size, read while it is seen whether their room stays: a change then reads what is left."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from edge.weights.arena import ElasticArena, key_of
from edge.weights.elastic.governor import SLACK
from edge.weights.elastic.sizes import SizeChoice, Sizes
from edge.weights.reader import Job, Reader, beside_bytes, helper_reader, started
from edge.weights.window import Piece

_POPULATED = 8 << 20  # bytes at once: after so many it is seen whether they are still of use


class ReadAhead:
    """Reads into places of an arena that nobody uses yet. For one thread at a time.

    Its threads are its own: a system that has given memory away may take longer to give it back than a disk takes to
    fill it, and neither passes nor its own reads are to wait for that.
    """

    def __init__(self, arena: ElasticArena, reader: Reader) -> None:
        """reader: of the passes."""
        self._arena, self._passes = arena, reader
        self._reader: Reader | None = None  # while there is something to read
        self._populates: threading.Thread | None = None
        self._over = threading.Event()  # of that thread
        self._jobs: dict[Piece, Job] = {}
        self.budget = 0  # least one in which they have room; 0: nothing was read

    @property
    def n_bytes(self) -> int:
        """Bytes of memory that it takes, or is about to."""
        reads = beside_bytes(self._passes, 1) if self._jobs else 0
        return reads + sum(piece.span for piece in [*self._jobs])

    @property
    def left(self) -> int:
        """Bytes that are still to be read. Of a read that failed none are."""
        return sum(job.left for job in [*self._jobs.values()] if job.error is None)

    def follow(self, sizes: Sizes, budget: int, now: SizeChoice) -> None:
        """Read what a larger budget has beside the choice of now, as far as both have room in a little less. Where the
        budget is less than what was read has room in, or much more, begin anew with what arrived."""
        slack = 2 * budget // SLACK
        if self.budget <= budget <= self.budget + 2 * slack:
            return
        choice, there = sizes.choose(budget), {key_of(piece) for piece in now.plan.resident}
        room, pieces = budget - slack - now.n_bytes - beside_bytes(self._passes, 1), list[Piece]()
        for piece in choice.plan.resident if choice.n_bytes > now.n_bytes else ():
            if key_of(piece) not in there and piece.span <= room:
                pieces.append(piece)
                room -= piece.span
        self.end([*now.plan.resident, *pieces])
        try:
            self._begin(pieces, sizes)
        except BaseException:
            self._arena.keep_only(now.plan.resident)  # what arrived counts no more
            raise
        self.budget = budget - slack

    def _begin(self, pieces: Sequence[Piece], sizes: Sizes) -> None:
        """Begin to read what is not there. OSError, WeightsError; nothing is read then."""
        self._arena.make_places(pieces, sizes.having)
        jobs = {piece: self._arena.read(piece) for piece in pieces}
        if pieces:
            reader = helper_reader(self._passes, 1)
            self._over.clear()
            to_read = [(piece, job) for piece, job in jobs.items() if job.left]
            try:
                self._populates = started(self._populate, (reader, to_read), "memory ahead")
            except BaseException:
                reader.close()
                raise
            self._reader = reader
        self._jobs = jobs

    def _populate(self, reader: Reader, jobs: Sequence[tuple[Piece, Job]]) -> None:
        """Submit each job when there is memory for it."""
        for piece, job in jobs:
            space, start = self._arena.place(piece)
            for at in range(start, start + piece.span, _POPULATED):
                space.populate(at, min(_POPULATED, start + piece.span - at))
                if self._over.is_set():
                    return
            reader.submit(job)

    def end(self, keep: Sequence[Piece]) -> None:
        """Read no more. Of what arrived, and of all in the arena, these stay; nobody may use the others any more."""
        if self._reader is not None:
            self._end_populating()
            self._reader.drop(*self._jobs.values())
            self._reader.close()
            self._reader = None
        for piece, job in self._jobs.items():
            if job.left == 0 and job.error is None:
                self._arena.arrived(piece)
        self._arena.keep_only(keep)
        self._jobs, self.budget = {}, 0

    def close(self) -> bool:
        """Read no more. Return whether nothing is written to the arena any more."""
        if self._reader is not None:
            self._end_populating()
            self._reader.close()
        return self._reader is None or not self._reader.hangs

    def _end_populating(self) -> None:
        if self._populates is not None:
            self._over.set()
            self._populates.join()
