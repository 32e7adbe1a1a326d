"""Read weights of a larger size ahead, before the memory has been free long enough for a change.

The change then only reads the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from edge.weights.arena import ElasticArena, key_of
from edge.weights.elastic.governor import SLACK
from edge.weights.elastic.sizes import SizeChoice, Sizes
from edge.weights.reader import Job, Reader, beside_bytes, helper_reader, started
from edge.weights.window import Piece

_POPULATED = 8 << 20  # bytes per step: after each step it is checked whether reading ahead is still useful


class ReadAhead:
    """Reads into places of an arena that are not in use yet. One thread at a time may call it.

    It has its own threads. The system may return memory more slowly than a disk fills it, and neither passes nor their
    reads may wait for that.
    """

    def __init__(self, arena: ElasticArena, reader: Reader) -> None:
        """reader: reader of the passes."""
        self._arena, self._passes = arena, reader
        self._reader: Reader | None = None  # exists while there is something to read
        self._populates: threading.Thread | None = None
        self._over = threading.Event()  # set to stop that thread
        self._jobs: dict[Piece, Job] = {}
        self.budget = 0  # minimum budget in which the read pieces fit; 0: nothing was read

    @property
    def n_bytes(self) -> int:
        """Bytes of memory that it holds or will hold soon."""
        reads = beside_bytes(self._passes, 1) if self._jobs else 0
        return reads + sum(piece.span for piece in [*self._jobs])

    @property
    def left(self) -> int:
        """Bytes that are still to be read. Failed reads count as 0."""
        return sum(job.left for job in [*self._jobs.values()] if job.error is None)

    def follow(self, sizes: Sizes, budget: int, now: SizeChoice) -> None:
        """Read pieces that a larger budget would add to the current choice, if they fit in slightly less than it.

        If the budget has become too small for these pieces or much larger, choose pieces again. Pieces that have
        arrived are not read again.

        sizes: sizes of the model.
        budget: expected budget in bytes.
        now: current choice.
        """
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
            self._arena.keep_only(now.plan.resident)  # discard the pieces that arrived
            raise
        self.budget = budget - slack

    def _begin(self, pieces: Sequence[Piece], sizes: Sizes) -> None:
        """Start to read missing pieces. If it raises OSError or WeightsError, nothing is being read."""
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
        """Submit each job once its memory is allocated."""
        for piece, job in jobs:
            space, start = self._arena.place(piece)
            for at in range(start, start + piece.span, _POPULATED):
                space.populate(at, min(_POPULATED, start + piece.span - at))
                if self._over.is_set():
                    return
            reader.submit(job)

    def end(self, keep: Sequence[Piece]) -> None:
        """Stop reading, and keep only these pieces of the arena, including pieces that arrived. Other pieces must
        not be used."""
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
        """Stop reading. Return whether nothing is written to the arena any more."""
        if self._reader is not None:
            self._end_populating()
            self._reader.close()
        return self._reader is None or not self._reader.hangs

    def _end_populating(self) -> None:
        if self._populates is not None:
            self._over.set()
            self._populates.join()
