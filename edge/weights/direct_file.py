"""Read files without the page cache, so that memory holds only what we put there."""

from __future__ import annotations

import fcntl
import os
import sys
from contextlib import suppress
from pathlib import Path

from devices.files import DIRECT
from edge.errors import WeightsError
from edge.llama.address_space import PAGE, AddressSpace


class DirectFile:
    """Weight file that several threads can read concurrently.

    reads: "direct" bypasses the page cache. "uncached" only asks the system to cache nothing (macOS). "buffered" is for
    filesystems that support neither; the cache is dropped after each read.
    """

    def __init__(self, path: Path, n_bytes: int, changed_ns: int | None = None) -> None:
        """Open the file.

        Raises WeightsError if it cannot be opened, does not have `n_bytes`, or was not last changed at `changed_ns`, if
        given.
        """
        self.path = path
        try:
            self._fd, self.reads = _open(path)
        except OSError as error:
            raise WeightsError(f"{path}: cannot be opened: {error.strerror}") from error
        self.stamp = self._now()  # (bytes, modification time in ns) that must not change
        if self.stamp[0] != n_bytes:
            self.close()
            raise WeightsError(f"{path}: has {self.stamp[0]} bytes, {n_bytes} were expected; load the model again")
        if changed_ns not in (None, self.stamp[1]):
            self.close()
            raise WeightsError(f"{path}: it was changed since its header was read; load the model again")

    def read(self, offset: int, n_bytes: int, into: memoryview) -> int:
        """Read [offset, offset + n_bytes) and return where it begins in `into`.

        `into` starts on a page boundary and has room for the surrounding whole pages. Raises WeightsError with file and
        offset.
        """
        start = offset // PAGE * PAGE
        skip = offset - start
        span = -(-(skip + n_bytes) // PAGE) * PAGE
        done = 0
        while done < skip + n_bytes:
            try:
                n_read = os.preadv(self._fd, [into[done:span]], start + done)
            except OSError as error:
                raise WeightsError(
                    f"{self.path}: reading {n_bytes} bytes at offset {offset} failed: {error.strerror}; generation"
                    " stopped. Check the disk, then load the model again"
                ) from error
            if n_read == 0 or (n_read % PAGE and done + n_read < skip + n_bytes):
                raise WeightsError(
                    f"{self.path}: {n_bytes} bytes were to be read at offset {offset}, the file ended after"
                    f" {max(0, done + n_read - skip)}; it was cut while in use. Restore it, then load the model again"
                )
            done += n_read
        self.check_same(offset)
        if self.reads == "buffered" and sys.platform != "darwin":
            os.posix_fadvise(self._fd, start, span, os.POSIX_FADV_DONTNEED)
        return skip

    def check_same(self, offset: int) -> None:
        """Raise WeightsError if the file was written since it was opened, because data at `offset` may be other
        weights."""
        if self._now() != self.stamp:
            raise WeightsError(
                f"{self.path}: it was changed while in use; what was read at offset {offset} is not trusted, and"
                " generation stopped. Load the model again"
            )

    def close(self) -> None:
        os.close(self._fd)

    def _now(self) -> tuple[int, int]:
        """Return (bytes, modification time in ns) of the open file. A new file under the same name does not count."""
        stat = os.fstat(self._fd)
        return stat.st_size, stat.st_mtime_ns


def _open(path: Path) -> tuple[int, str]:
    """Return (descriptor, read mode), the best mode that this filesystem supports."""
    if DIRECT:
        with suppress(OSError):  # tmpfs and others refuse this mode, some only when reading
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | DIRECT)
            page = AddressSpace(PAGE)
            try:
                os.preadv(fd, [page.view(0, PAGE)], 0)
                return fd, "direct"
            except OSError:
                os.close(fd)
                raise
            finally:
                page.close()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if hasattr(fcntl, "F_NOCACHE"):
        fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
        return fd, "uncached"
    return fd, "buffered"
