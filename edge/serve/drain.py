"""Draining of a server: it ends when its answers have ended, and proxies send new requests elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from edge.errors import EngineGone

_NOTICE_S = 2.0  # time for proxies to notice by `/health` that the server drains, before it refuses requests


class Drain:
    """State of draining, which `begin` starts."""

    def __init__(self, is_used: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        """is_used: returns True if a request waits for an answer. clock: returns seconds."""
        self._uses, self._clock = [is_used], clock
        self._began: float | None = None

    def also_used(self, is_used: Callable[[], bool]) -> None:
        """Let the server drain until this function returns False, too."""
        self._uses.append(is_used)

    @property
    def begun(self) -> bool:
        """True after `begin`."""
        return self._began is not None

    def begin(self) -> None:
        """Refuse new requests soon."""
        self._began = self._clock()

    def check_open(self) -> None:
        """Raise EngineGone if new requests are refused."""
        if self._began is not None and self._clock() - self._began >= _NOTICE_S:
            raise EngineGone("the server is ending and takes no more requests; send the request to another server")

    def is_over(self, most_s: float) -> bool:
        """Return True if the server should end: it has no request, or has drained for `most_s` seconds."""
        return self._began is not None and (
            not any(is_used() for is_used in self._uses) or self._clock() - self._began >= most_s
        )
