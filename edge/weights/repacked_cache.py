"""Files with repacked copies of streamed weights, which need no repacking after a read.

Repacking takes CPU time, about 0.12 s per GB of Q4_0. A pass usually waits for the disk, so this costs nothing. If the
disk keeps up with computing, both compete for the same cores. Also, some disks are slower if their data is read from
memory immediately. In these cases the files are faster.

Each file holds one matrix and its SHA-256. The files are in the cache folder, in one folder per model and CPU. They may
be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from devices.files import make_private, write_whole
from devices.paths import cache_folder
from edge.errors import WeightsError
from edge.llama import llama
from edge.llama.address_space import PAGE, AddressSpace
from edge.llama.library import PINNED_VERSION
from edge.weights.direct_file import DirectFile
from edge.weights.reader import Reader
from edge.weights.window import Piece

MOST_BYTES = 8 << 30  # maximum size of all such files; files of the least recently used models are deleted first
_FREE_SHARE = 4  # maximum size as a fraction of the free space on the disk
_DIGEST_BYTES = 32


def laid_out(pieces: Sequence[Piece], reader: Reader, *, make: bool) -> Sequence[Piece]:
    """Return the pieces, with repacked copies as their source if these exist.

    make: write files for all pieces, if there is room.
    Raises WeightsError if the weights cannot be read.
    """
    changed = [piece for piece in pieces if piece.repacked]
    if not changed:
        return pieces
    folder = cache_folder() / "laid-out" / _key(changed)
    moved: dict[Piece, Piece] = {}
    if not make and not folder.is_dir():
        return pieces
    space = AddressSpace(max(piece.n_bytes for piece in changed) + PAGE, huge=True)
    try:
        make_private(folder)
        os.utime(folder)  # marks the folder as used now
        missing = [piece for piece in changed if not _open(folder, piece, space, moved)]
        if make and missing and _make_room(folder, sum(piece.n_bytes for piece in missing)):
            for piece in missing:
                _write(folder, piece, space, reader)
                _open(folder, piece, space, moved)
    except OSError:  # for a full disk or a foreign folder, use the existing files
        pass
    except BaseException:
        for piece in moved.values():
            piece.file.close()
        raise
    finally:
        space.close()
    return [moved.get(piece, piece) for piece in pieces]


def _key(pieces: Sequence[Piece]) -> str:
    """Return the key of everything that determines the files' content, except the weight."""
    stamps = {str(piece.file.path.resolve()): piece.file.stamp for piece in pieces}
    text = json.dumps([PINNED_VERSION, llama.system_info(), stamps])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _path(folder: Path, piece: Piece) -> Path:
    return folder / f"{piece.offset}-{piece.n_bytes}.weights"


def _open(folder: Path, piece: Piece, space: AddressSpace, moved: dict[Piece, Piece]) -> bool:
    """Add a piece's file to `moved` and return True, if the file exists and its digest is right."""
    try:
        file = DirectFile(_path(folder, piece), piece.n_bytes + _DIGEST_BYTES)
    except WeightsError:
        return False
    with suppress(WeightsError):
        file.read(0, piece.n_bytes + _DIGEST_BYTES, space.view(0, space.n_bytes))
        digest = bytes(space.view(piece.n_bytes, _DIGEST_BYTES))
        if hashlib.sha256(space.view(0, piece.n_bytes)).digest() == digest:
            moved[piece] = replace(piece, file=file, offset=0, is_laid_out=True)
            return True
    file.close()
    return False


def _write(folder: Path, piece: Piece, space: AddressSpace, reader: Reader) -> None:
    """Repack a piece and write its file atomically."""
    reader.wait(reader.submit(piece.read(space, 0)))
    whole = space.view(0, piece.n_bytes)
    space.view(piece.n_bytes, _DIGEST_BYTES)[:] = hashlib.sha256(whole).digest()
    path = _path(folder, piece)
    write_whole(path, space.view(0, piece.n_bytes + _DIGEST_BYTES))
    if sys.platform != "darwin":  # the budget has no room for the page cache
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _make_room(folder: Path, n_bytes: int) -> bool:
    """Delete files of other models, least recently used first, until `n_bytes` more fit. Return False if they cannot
    fit."""
    if n_bytes > shutil.disk_usage(folder).free // _FREE_SHARE:
        return False
    sizes = {entry: sum(file.stat().st_size for file in entry.iterdir()) for entry in folder.parent.iterdir()}
    total = sum(sizes.values())
    for entry in sorted(sizes, key=lambda entry: entry.stat().st_mtime):
        if total + n_bytes <= MOST_BYTES:
            break
        if entry != folder:
            with suppress(OSError):
                shutil.rmtree(entry)
                total -= sizes[entry]
    return total + n_bytes <= MOST_BYTES
