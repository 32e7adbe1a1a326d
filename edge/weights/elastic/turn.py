"""Turns for changing weights: either a pass or a change between two passes holds the turn."""

from __future__ import annotations

import threading

from edge.weights.elastic.share import MemoryShare


class Turn:
    """Lock between a forward pass and a weight change. The time in which a pass holds it counts as computing time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._share: MemoryShare | None = None  # share of the pass that holds the turn

    @property
    def is_of_a_pass(self) -> bool:
        """Return whether a pass holds the turn."""
        return self._share is not None

    def begin_pass(self, share: MemoryShare) -> None:
        """Wait for the turn, and take it for a pass or for the load before the first pass."""
        self.lock.acquire()
        self._share = share
        share.begin_pass()

    def end_pass(self) -> None:
        """Release the turn, if a pass holds it."""
        share, self._share = self._share, None
        if share is not None:
            share.end_pass()
            self.lock.release()
