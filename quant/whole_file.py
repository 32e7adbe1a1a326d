"""Atomic output files: they appear under their names only when they are complete."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from quant.text import bytes_text


def check_room(path: Path, need: int) -> None:
    """Raise OSError (ENOSPC) if the disk of `path` has fewer than `need` bytes free."""
    free = shutil.disk_usage(path.absolute().parent).free
    if free < need:
        raise OSError(
            errno.ENOSPC,
            f"no room for {path}: {bytes_text(need)} needed, {bytes_text(free)} free on that disk; free some room"
            " or name a file on another disk",
        )


@contextmanager
def whole_file(path: Path, n_bytes: int) -> Iterator[IO[bytes]]:
    """Yield a file to write about `n_bytes` to. It gets the name `path` after the block, or is removed after an error.

    Raises OSError if it cannot be written, with ENOSPC if the disk has too little room.
    """
    check_room(path, n_bytes)
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.part")
    try:
        with temporary.open("xb") as file:
            yield file
        temporary.replace(path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
