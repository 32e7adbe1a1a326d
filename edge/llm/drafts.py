"""Drafts of a scheduler: which requests get draft tokens after their next tokens, and in how many windows."""

from __future__ import annotations

from collections.abc import Sequence

from edge.llm.in_flight import InFlight, Rows, room
from edge.llm.interface import Drafter, TextEngine, VerifyResult
from edge.llm.requests import RequestState
from partition.predict.drafts import most_windows


class Drafts:
    """The windows of draft tokens that a drafter and an engine allow. Without a drafter there are none."""

    def __init__(self, drafter: Drafter | None, engine: TextEngine, in_flight: InFlight) -> None:
        self.drafter, self._engine, self._in_flight = drafter, engine, in_flight

    def shape(self, running: Sequence[RequestState], n_ready: int) -> tuple[int, int] | None:
        """Return (rows of each request in a window, windows in flight). Return None if ordinary steps must
        be submitted, because one step cannot contain exactly the rows of all requests, or drafts cannot be rolled back.
        """
        if self.drafter is None or not self._allowed(running, n_ready):
            return None
        n, rollback = len(running), self._engine.rollback
        most_rows, windows = max(1, min(self._engine.outputs, self._engine.batch) // n), 1
        if n == 1:
            most_rows, windows = room(running[0], most_rows), most_windows(self._engine.stages)
            if rollback is not None:  # recurrent layers forget rows of one step alone
                most_rows, windows = min(most_rows, 1 + rollback), 1
        return self.drafter.shape(running, most_rows, windows)

    def _allowed(self, running: Sequence[RequestState], n_ready: int) -> bool:
        n, rollback = len(running), self._engine.rollback
        can_forget = rollback is None or (n == 1 and rollback > 0)
        has_media = any(member.request.media for member in running)
        if len({member.adapters for member in running}) != 1 or not can_forget or has_media:
            return False
        if self._in_flight.awaited:
            return n == 1 and self._in_flight.has_windows
        in_one_step = n <= n_ready and self._in_flight.of_step(n) == n
        return in_one_step and all(member.pending <= 1 for member in running)

    def windows(self, running: Sequence[RequestState], n_rows: int) -> list[Rows]:
        """Return the next window of each request, of `n_rows` at most; empty if none can follow the steps in flight."""
        assert self.drafter is not None
        rows = [self._in_flight.window(self.drafter, member, n_rows) for member in running]
        return rows if rows[0].tokens else []

    def begin(self) -> None:
        """Note that an answer begins."""
        if self.drafter is not None:
            self.drafter.begin()

    def disturbed(self) -> None:
        """Note that a step without drafts follows."""
        if self.drafter is not None:
            self.drafter.disturbed()

    def verified(self, results: Sequence[VerifyResult]) -> None:
        """Let the drafter learn from a step that had draft windows."""
        if self.drafter is not None:
            self.drafter.verified(results)

    def ended(self, state: RequestState) -> None:
        """Forget a request."""
        if self.drafter is not None:
            self.drafter.ended(state)
