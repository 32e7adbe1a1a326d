"""Memory of the resident weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Protocol

from edge.llama.address_space import HUGE_PAGE, AddressSpace
from edge.weights.reader import Job
from edge.weights.window import Piece

_BLOCK_BYTES = 32 << 20  # maximum size of a block of small weights


class Arena(Protocol):
    """Places in memory for resident weights."""

    def read(self, piece: Piece) -> Job:
        """Return the job that reads a piece to its place. The job is complete if the piece is already there."""

    def arrived(self, piece: Piece) -> None:
        """Record that the piece was read to its place."""

    def close(self) -> None:
        """Free all memory. The weights must not be used afterwards."""


class OneArena:
    """Single allocation in huge pages, for weights that stay until the end."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._space = AddressSpace(sum(piece.span for piece in pieces), huge=True)
        self._next = 0

    def read(self, piece: Piece) -> Job:
        start, self._next = self._next, self._next + piece.span
        return piece.read(self._space, start)

    def arrived(self, piece: Piece) -> None:
        pass

    def close(self) -> None:
        self._space.close()


Key = tuple[str, int, int, bool]  # contents of a place: file, offset, bytes, layout


class ElasticArena:
    """Separate memory for each large weight, and blocks of small weights, so that some can be freed while others stay.

    Small weights share blocks because a disk fills huge pages at twice the speed. A block is freed as a whole.
    """

    def __init__(self) -> None:
        self._places: dict[Key, tuple[AddressSpace, int]] = {}
        self._arrived: set[Key] = set()

    def place(self, piece: Piece) -> tuple[AddressSpace, int]:
        """Return (memory, offset of the first byte) of the `span` bytes for a piece."""
        return self._places[key_of(piece)]

    def read(self, piece: Piece) -> Job:
        job = piece.read(*self.place(piece))
        if key_of(piece) in self._arrived:
            job.left = 0
        return job

    def arrived(self, piece: Piece) -> None:
        self._arrived.add(key_of(piece))

    def keep_only(self, pieces: Collection[Piece]) -> None:
        """Free the memory of all other pieces, and of pieces that have not arrived. It must not be used afterwards."""
        keep = {key_of(piece) for piece in pieces}
        gone = {space for key, (space, _) in self._places.items() if key not in keep & self._arrived}
        for key, (space, _) in [*self._places.items()]:
            if space in gone:
                del self._places[key]
                self._arrived.discard(key)
        for space in gone:
            space.close()

    def make_places(self, pieces: Collection[Piece], goes_with: Callable[[Key], Hashable]) -> None:
        """Allocate places for these pieces, in addition to the existing ones.

        goes_with: key of a small piece. Pieces with different keys are freed at different times, so they share no
        block.
        """
        groups: dict[Hashable, list[list[Piece]]] = {}
        for piece in pieces:
            if key_of(piece) not in self._places:
                is_small = piece.span < HUGE_PAGE
                blocks = groups.setdefault(goes_with(key_of(piece)) if is_small else piece, [[]])
                if sum(other.span for other in blocks[-1]) + piece.span > _BLOCK_BYTES:
                    blocks.append([])
                blocks[-1].append(piece)
        for block in filter(None, (block for blocks in groups.values() for block in blocks)):
            space, start = AddressSpace(sum(piece.span for piece in block), huge=True, whole=False), 0
            for piece in block:
                self._places[key_of(piece)] = space, start
                start += piece.span

    def close(self) -> None:
        self.keep_only(())


def key_of(piece: Piece) -> Key:
    """Return the key of the place for a piece."""
    return str(piece.file.path), piece.offset, piece.n_bytes, piece.repacked
