"""What native code prints straight to file descriptor 2, caught."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_stderr_lock = threading.Lock()


@contextmanager
def native_stderr() -> Iterator[list[str]]:
    """The lines printed inside the block, known after it: llama.cpp's grammar parser says it nowhere else."""
    lines: list[str] = []
    with _stderr_lock, tempfile.TemporaryFile() as sink:
        sys.stderr.flush()
        kept = os.dup(2)
        try:
            os.dup2(sink.fileno(), 2)
            yield lines
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            sink.seek(0)
            lines.extend(sink.read().decode(errors="replace").splitlines())
