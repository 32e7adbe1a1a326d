"""Cutting of a slice: the bytes that a recipe makes from its model file, in chunks, starting at any byte.

Memory stays near one chunk for any recipe, and many small pieces of the file need few reads.
"""

import hashlib
import os
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from edge.errors import SliceError
from partition.slices.recipe import Blocks, Copy, Literal, Recipe, Segment

Progress = Callable[[int, int], None]  # arguments: bytes done, bytes in total

CHUNK_BYTES = 1 << 20

# If pieces are small and near each other, a whole region is read and the pieces are picked from it. Reading the gaps
# costs less than a separate read for each piece.
_SMALL_PIECE_BYTES = 64 << 10
_NEAR_BYTES = 16 << 10
_REGION_BYTES = 1 << 20


def chunks(
    recipe: Recipe, model: str | os.PathLike[str] | BinaryIO, start: int = 0, chunk_bytes: int = CHUNK_BYTES
) -> Generator[bytes]:
    """Yield the slice from byte `start` on, in chunks of `chunk_bytes`; the last one may be shorter.

    model: path of the model file, or the file opened for reading; its position is neither used nor moved

    Each chunk is a separate object that the caller may keep. The model's digest is not checked here, because the
    receiver checks the slice's digest. Raises SliceError, with file and offset, if the file does not fit the recipe or
    changes meanwhile.
    """
    if not 0 <= start <= recipe.n_bytes:
        raise SliceError(f"the slice has {recipe.n_bytes} bytes, it cannot be continued at byte {start}")
    if chunk_bytes < 1:
        raise ValueError(f"chunks of {chunk_bytes} bytes; expected at least 1")
    return _chunks(recipe, model, start, chunk_bytes)


def digest_of(recipe: Recipe, model: str | os.PathLike[str] | BinaryIO, progress: Progress | None = None) -> str:
    """Return the SHA-256 of the slice, computed by cutting it. Raises the errors of `chunks`."""
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
    """A model file that must not change while it is cut."""

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
        """Raise SliceError if the file has changed since it was opened."""
        if self._state() != self._before:
            raise SliceError(f"{self._name} was changed while a slice was cut from it; leave it alone and start again")

    def read(self, offset: int, n: int) -> bytes:
        """Return `n` bytes at `offset`. Raises SliceError if the file is too short or cannot be read."""
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
    """Return `n` bytes of a segment, from its byte `at` on."""
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
    """Return the same as `_part` for small pieces: read whole regions of the file and pick the pieces from them."""
    import numpy as np  # imported here so that the program starts without waiting for numpy

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
