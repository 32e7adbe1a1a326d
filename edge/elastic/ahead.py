"""Weights of a larger size, read while it is seen whether their room stays: a change then reads what is left."""

from __future__ import annotations

from collections.abc import Sequence

from edge.elastic.governor import SLACK
from edge.elastic.sizes import SizeChoice, Sizes
from edge.paging.arena import ElasticArena, key_of
from edge.paging.reader import Job, Reader
from edge.paging.window import Piece


class ReadAhead:
    """Reads into places of an arena that nobody uses yet. For one thread at a time."""

    def __init__(self, arena: ElasticArena, reader: Reader) -> None:
        self._arena, self._reader = arena, reader
        self._jobs: dict[Piece, Job] = {}
        self.budget = 0  # least one in which they have room; 0: nothing was read

    @property
    def n_bytes(self) -> int:
        """Bytes of memory that it takes, or is about to."""
        return sum(piece.span for piece in [*self._jobs])

    def follow(self, sizes: Sizes, budget: int, now: SizeChoice) -> None:
        """Read what a larger budget has beside the choice of now, as far as both have room in a little less. Where the
        budget is less than what was read has room in, or much more, begin anew with what arrived."""
        slack = 2 * budget // SLACK
        if self.budget <= budget <= self.budget + 2 * slack:
            return
        choice, there = sizes.choose(budget), {key_of(piece) for piece in now.plan.resident}
        room, pieces = budget - slack - now.n_bytes, list[Piece]()
        for piece in choice.plan.resident if choice.n_bytes > now.n_bytes else ():
            if key_of(piece) not in there and piece.span <= room:
                pieces.append(piece)
                room -= piece.span
        self.end([*now.plan.resident, *pieces])
        self._arena.make_places(pieces, sizes.having)
        self._jobs, self.budget = {piece: piece.read(*self._arena.place(piece)) for piece in pieces}, budget - slack
        for piece, job in self._jobs.items():
            job.left = 0 if self._arena.holds(piece) else job.left
        self._reader.submit_idle([job for job in self._jobs.values() if job.left])

    def end(self, keep: Sequence[Piece]) -> None:
        """Read no more. Of what arrived, and of all in the arena, these stay; nobody may use the others any more."""
        self._reader.drop(*self._jobs.values())
        for piece, job in self._jobs.items():
            if job.left == 0 and job.error is None:
                self._arena.arrived(piece)
        self._arena.keep_only(keep)
        self._jobs, self.budget = {}, 0
