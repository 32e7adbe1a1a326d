"""Memory of the weights that stay."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Protocol

from edge.llama.address_space import HUGE_PAGE, AddressSpace
from edge.weights.reader import Job
from edge.weights.window import Piece

_BLOCK_BYTES = 32 << 20  # of small weights in one block


class Arena(Protocol):
    """Places in memory for weights that stay."""

    def read(self, piece: Piece) -> Job:
        """Return the job that brings a piece to its place. Nothing is left of it where that has the piece already."""

    def arrived(self, piece: Piece) -> None:
        """The piece was read to its place."""

    def close(self) -> None:
        """Give everything back. Nobody may use the weights any more."""


class OneArena:
    """One memory in huge pages, for weights that all stay to the end."""

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


Key = tuple[str, int, int, bool]  # of what a place holds: file, offset, bytes, layout


class ElasticArena:
    """A memory for each large weight, and blocks of small ones, so that any of them can go while the others stay.

    Small ones share blocks because a disk fills huge pages at twice the speed; a block goes as a whole.
    """

    def __init__(self) -> None:
        self._places: dict[Key, tuple[AddressSpace, int]] = {}
        self._arrived: set[Key] = set()

    def place(self, piece: Piece) -> tuple[AddressSpace, int]:
        """Return (memory, its first byte) of `span` bytes for a piece."""
        return self._places[key_of(piece)]

    def read(self, piece: Piece) -> Job:
        job = piece.read(*self.place(piece))
        if key_of(piece) in self._arrived:
            job.left = 0
        return job

    def arrived(self, piece: Piece) -> None:
        self._arrived.add(key_of(piece))

    def keep_only(self, pieces: Collection[Piece]) -> None:
        """Give the memory of all others, and of what has not arrived, back to the system. Nothing may use it any
        more."""
        keep = {key_of(piece) for piece in pieces}
        gone = {space for key, (space, _) in self._places.items() if key not in keep & self._arrived}
        for key, (space, _) in [*self._places.items()]:
            if space in gone:
                del self._places[key]
                self._arrived.discard(key)
        for space in gone:
            space.close()

    def make_places(self, pieces: Collection[Piece], goes_with: Callable[[Key], Hashable]) -> None:
        """Have places for these pieces, too. goes_with: of two small pieces that go at different times it is another,
        and they share no block."""
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
    """Return what a place for the piece holds."""
    return str(piece.file.path), piece.offset, piece.n_bytes, piece.repacked
