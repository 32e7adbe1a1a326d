"""Cutting a slice: the bytes that a recipe makes of its model file, in pieces, from any byte on.

Memory stays near one piece whatever the recipe says, and many small pieces of the file cost few reads.
"""

import hashlib
import os
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from edge.errors import SliceError
from partition.slices.recipe import Blocks, Copy, Literal, Recipe, Segment

Progress = Callable[[int, int], None]  # bytes done so far, bytes in all

CHUNK_BYTES = 1 << 20

# Pieces are picked out of a region read whole where they are small and near each other: what is read in vain then costs
# less than a read of its own for each piece.
_SMALL_PIECE_BYTES = 64 << 10
_NEAR_BYTES = 16 << 10
_REGION_BYTES = 1 << 20


def chunks(
    recipe: Recipe, model: str | os.PathLike[str] | BinaryIO, start: int = 0, chunk_bytes: int = CHUNK_BYTES
) -> Generator[bytes]:
    """The slice from byte `start` on, in pieces of `chunk_bytes` (the last one may be shorter).

    `model` is the model file's path, or the file opened for reading; its position is neither used nor moved. Each piece
    is an object of its own and may be kept. SliceError, with file and offset, where the file is not as the recipe says
    or changes meanwhile. Its digest is not checked here: whoever takes the slice checks the slice's.
    """
    if not 0 <= start <= recipe.n_bytes:
        raise SliceError(f"the slice has {recipe.n_bytes} bytes, it cannot be continued at byte {start}")
    if chunk_bytes < 1:
        raise ValueError(f"chunks of {chunk_bytes} bytes; needed is at least 1")
    return _chunks(recipe, model, start, chunk_bytes)


def digest_of(recipe: Recipe, model: str | os.PathLike[str] | BinaryIO, progress: Progress | None = None) -> str:
    """The SHA-256 of the slice, computed by cutting it. Errors as `chunks`."""
    sha = hashlib.sha256()
    done = 0
    for chunk in chunks(recipe, model):
        sha.update(chunk)
        done += len(chunk)
        if progress:
            progress(done, recipe.n_bytes)
    return sha.hexdigest()


def _chunks(recipe: Recipe, model: str | os.PathLike[str] | BinaryIO, start: int, chunk_bytes: int) -> Generator[bytes]:
    with ExitStack() as stack:
        if isinstance(model, str | os.PathLike):
            try:
                model = stack.enter_context(Path(model).open("rb", buffering=0))
            except OSError as exc:
                raise SliceError(f"cannot read the model file {model}: {exc.strerror}") from exc
        source = _Source(model, recipe)
        parts: list[bytes] = []
        room = chunk_bytes
        for segment in recipe.segments:
            size = segment.n_bytes
            at = min(start, size)
            start -= at
            while at < size:
                n = min(room, size - at)
                parts.append(_part(source, segment, at, n))
                at += n
                room -= n
                if not room:
                    source.check()
                    yield b"".join(parts)
                    parts, room = [], chunk_bytes
        source.check()
        if parts:
            yield b"".join(parts)


class _Source:
    """A model file that has to stay as it is while it is cut."""

    def __init__(self, file: BinaryIO, recipe: Recipe) -> None:
        self._handle = file.fileno()
        self._name = getattr(file, "name", "the model file")
        self._before = self._state()
        if recipe.copies and self._before[0] != recipe.model_bytes:
            raise SliceError(
                f"{self._name} has {self._before[0]} bytes, the recipe needs a model of {recipe.model_bytes}"
                f" (SHA-256 {recipe.model_digest[:12]}...); it has changed or is another model"
            )

    def _state(self) -> tuple[int, int]:
        status = os.fstat(self._handle)
        return status.st_size, status.st_mtime_ns

    def check(self) -> None:
        """Raise SliceError if the file was changed since it was opened."""
        if self._state() != self._before:
            raise SliceError(f"{self._name} was changed while a slice was cut from it; leave it alone and start again")

    def read(self, offset: int, n: int) -> bytes:
        """`n` bytes from `offset` on. SliceError if the file ends before, or cannot be read."""
        parts: list[bytes] = []
        while n:
            try:
                part = os.pread(self._handle, n, offset)
            except OSError as exc:
                raise SliceError(f"{self._name} cannot be read at byte {offset}: {exc.strerror}") from exc
            if not part:
                raise SliceError(f"{self._name} ends at byte {offset}, {n} more are needed; it was cut off meanwhile")
            parts.append(part)
            offset += len(part)
            n -= len(part)
        return b"".join(parts)


def _part(source: _Source, segment: Segment, at: int, n: int) -> bytes:
    """`n` bytes of a segment, from its byte `at` on."""
    if isinstance(segment, Literal):
        return segment.data[at : at + n]
    if isinstance(segment, Blocks):
        return segment.data(at, n)
    if not isinstance(segment, Copy):
        return bytes(n)
    if segment.stride == segment.length:
        return source.read(segment.offset + at, n)
    if segment.length <= _SMALL_PIECE_BYTES and segment.stride - segment.length <= _NEAR_BYTES:
        return _picked(source, segment, at, n)
    parts: list[bytes] = []
    while n:
        piece, skip = divmod(at, segment.length)
        size = min(n, segment.length - skip)
        parts.append(source.read(segment.offset + piece * segment.stride + skip, size))
        at += size
        n -= size
    return b"".join(parts)


def _picked(source: _Source, copy: Copy, at: int, n: int) -> bytes:
    """Read like `_part`, for small pieces: read whole regions of the file and pick the pieces out of them."""
    import numpy as np  # only here: the start of the program does not wait for it

    first, skip = divmod(at, copy.length)
    last = (at + n - 1) // copy.length
    step = _REGION_BYTES // copy.stride
    parts: list[Any] = []
    for piece in range(first, last + 1, step):
        count = min(step, last + 1 - piece)
        region = source.read(copy.offset + piece * copy.stride, (count - 1) * copy.stride + copy.length)
        pieces = np.ndarray((count, copy.length), np.uint8, region, strides=(copy.stride, 1))
        parts.append(pieces.tobytes())
    return b"".join(parts)[skip : skip + n]
