"""Turns at weights that change: a pass has one, or a change between two passes."""

from __future__ import annotations

import threading

from edge.weights.elastic.share import MemoryShare


class Turn:
    """Lock of who uses weights or changes them. Time in which a pass has it counts as use of the memory."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._share: MemoryShare | None = None  # of the pass that has it

    @property
    def is_of_a_pass(self) -> bool:
        """True from `begin_pass` to `end_pass`."""
        return self._share is not None

    def begin_pass(self, share: MemoryShare) -> None:
        """Wait for the turn, and let a pass have it, or a load before the first one."""
        self.lock.acquire()
        self._share = share
        share.begin_pass()

    def end_pass(self) -> None:
        """End the pass that has it, if one does."""
        share, self._share = self._share, None
        if share is not None:
            share.end_pass()
            self.lock.release()
