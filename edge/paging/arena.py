"""Memory of the weights that stay."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from edge.llama.address_space import AddressSpace
from edge.paging.window import Piece


class Arena(Protocol):
    """Places in memory for weights that stay."""

    def place(self, piece: Piece) -> tuple[AddressSpace, int]:
        """Return (memory, its first byte) of `span` bytes for a piece."""

    def holds(self, piece: Piece) -> bool:
        """Return whether the piece was read to its place before."""

    def arrived(self, piece: Piece) -> None:
        """The piece was read to its place."""

    def close(self) -> None:
        """Give everything back. Nobody may use the weights any more."""


class OneArena:
    """One memory in huge pages, for weights that all stay to the end."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._space = AddressSpace(sum(piece.span for piece in pieces), huge=True)
        self._next = 0

    def place(self, piece: Piece) -> tuple[AddressSpace, int]:
        start, self._next = self._next, self._next + piece.span
        return self._space, start

    def holds(self, piece: Piece) -> bool:
        return False

    def arrived(self, piece: Piece) -> None:
        pass

    def close(self) -> None:
        self._space.close()


_Key = tuple[str, int, int, bool]  # of what a place holds: file, offset, bytes, layout


class ElasticArena:
    """A memory for each weight, so that any of them can go while the others stay."""

    def __init__(self) -> None:
        self._spaces: dict[_Key, AddressSpace] = {}
        self._arrived: set[_Key] = set()

    def place(self, piece: Piece) -> tuple[AddressSpace, int]:
        key = _key(piece)
        if key not in self._spaces:
            self._spaces[key] = AddressSpace(piece.span, huge=True, whole=False)
        return self._spaces[key], 0

    def holds(self, piece: Piece) -> bool:
        return _key(piece) in self._arrived

    def arrived(self, piece: Piece) -> None:
        self._arrived.add(_key(piece))

    def keep_only(self, pieces: Collection[Piece]) -> None:
        """Give the memory of all others, and of what has not arrived, back to the system. Nothing may use it any
        more."""
        for key in self._spaces.keys() - ({_key(piece) for piece in pieces} & self._arrived):
            self._arrived.discard(key)
            self._spaces.pop(key).close()

    def close(self) -> None:
        self.keep_only(())


def _key(piece: Piece) -> _Key:
    return str(piece.source.file.path), piece.source.offset, piece.n_bytes, piece.repacked
