"""One progress of many parts, which move in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[float, float], None]  # (bytes in place, of)


class Total:
    """The sum of parts, told as it grows."""

    def __init__(self, progress: Progress, of: int, check: Callable[[], None]) -> None:
        """check: raises where nobody waits any more; so does every part then."""
        self._progress, self._of, self._check = progress, of, check
        self._done: list[float] = []
        self._lock = threading.Lock()

    @contextmanager
    def part(self, n_bytes: int) -> Iterator[Progress]:
        """Of what is done with so many bytes: called with the bytes done. At the end of the block these are all."""
        self._check()
        with self._lock:
            mine = len(self._done)
            self._done.append(0.0)

        def count(done: float, _: float) -> None:
            self._check()
            with self._lock:
                self._done[mine] = max(self._done[mine], done)
                self._progress(sum(self._done), self._of)

        yield count
        count(n_bytes, n_bytes)
