"""Windows: the rows of one answer, in as many passes at once as keep the stages of an engine busy.

A window begins with a token that was chosen, or with a guess at the one that will be; guesses follow. While the stages
work on one window, the next is guessed and submitted as if all of it were right:

    W1  the cat sat on        its rows choose  cat sat on the
    W2  the mat and the       begins with the guess at what the last row of W1 chooses

Every row is looked at in order, and each token is chosen by the model's own logits. The rows behind a token that was
chosen otherwise are cancelled, in this window and in all that are under way: they leave the caches of all stages, in
order with the steps, and what still comes of them is dropped. What follows is submitted at once, behind them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edge.errors import EdgeError
from edge.llm.interface import Drafter, VerifyResult
from edge.llm.sequence import Session, await_none, awaits
from partition.predict.drafts import most_windows


@dataclass(frozen=True)
class _Window:
    tokens: list[int]
    is_first: bool  # of those since a guess was wrong
    planned: int  # windows that were to be under way with it
    follows_cancelled: bool  # whose passes it had to wait for
    rows: NDArray[np.float32] | None  # where they were computed at once


class Windows:
    """Those of one answer. `close` it at the end."""

    def __init__(self, session: Session, drafter: Drafter | None) -> None:
        """session: with the prompt. drafter: None for one row a pass."""
        self._session, self._drafter = session, drafter
        self._under_way: deque[_Window] = deque()  # the oldest first
        self._cancelled = 0  # passes before those, whose logits are to be dropped
        self._checked: VerifyResult | None = None  # the window collected last, as far as it is known

    @property
    def most(self) -> int:
        """Windows that may be under way."""
        return 1 if self._drafter is None else most_windows(self._session.engine.stages)

    def fill(self, chosen: Sequence[int], left: int) -> None:
        """Submit windows, at least one, as long as that pays. chosen: tokens of the answer since the last call. left:
        tokens that it may still get. The errors of `Session.check`."""
        rows, planned = (1, 1) if self._drafter is None else self._drafter.shape(chosen, self._room(left), self.most)
        while not self._under_way or len(self._under_way) < min(planned, self.most):
            assumed = [token for window in self._under_way for token in window.tokens][1:]
            behind = 1 + len(assumed) if self._under_way else 0  # rows that the answer gets tokens of before
            if self._under_way and (left <= behind or self._session.full):
                return
            tokens = first = [] if self._under_way else [chosen[-1]]
            if self._drafter is not None:
                tokens = [*self._drafter.draft(first, min(rows, self._room(left - behind)), assumed)]
            if not tokens:
                return
            self._submit(tokens, planned, [*assumed, *tokens] if behind else tokens[1:])

    def collect(self) -> tuple[NDArray[np.float32], list[int]]:
        """The logits [rows, n_vocab] of the oldest window, and the tokens that were submitted behind its rows: one of
        each, or none of the last. They hold until the next call of anything here."""
        window = self._under_way[0]
        rows = window.rows
        if rows is None:
            self._drop_cancelled()
            rows = self._session.collect()
        self._under_way.popleft()
        alone = window.is_first and not window.follows_cancelled and not self._under_way
        self._checked = VerifyResult(len(window.tokens), 0, window.is_first, alone, window.planned)
        return rows, [*window.tokens[1:], *(token for other in list(self._under_way)[:1] for token in other.tokens[:1])]

    def used(self, used: int, right: int, looked_at: int) -> None:
        """Of the rows collected last so many were used; and of the tokens behind them, so many were looked at and were
        right. Where the last was wrong, all that is behind it is cancelled."""
        checked, self._checked = self._checked, None
        if checked is None:  # rows of the prompt
            return
        cancelled = [len(window.tokens) for window in self._under_way] if right < used else []
        if wrong := checked.rows - used + sum(cancelled):
            self._cancel(wrong)
        if self._drafter is not None:
            self._drafter.checked(
                replace(checked, used=used, right=right, looked_at=looked_at, cancelled=tuple(cancelled))
            )

    @property
    def is_empty(self) -> bool:
        """Whether no window is under way."""
        return not self._under_way

    def close(self) -> None:
        """Cancel what is under way, and wait until it is done: somebody else may use the engine then."""
        try:
            with suppress(EdgeError):  # where the engine has failed or is stopped, that error is on its way
                if wrong := sum(len(window.tokens) for window in self._under_way):
                    self._cancel(wrong)
                while self._session.engine.uncollected:
                    self._session.collect()
        finally:
            self._cancelled = 0
            await_none(self._session.engine)

    # --- pieces ---

    def _room(self, left: int) -> int:
        return max(1, min(left, self._session.most_rows))

    def _submit(self, tokens: list[int], planned: int, guesses: list[int]) -> None:
        rows, engine, follows_cancelled = None, self._session.engine, self._cancelled > 0
        if engine.stages == 1 and not self._under_way:
            self._drop_cancelled()
            rows = self._session.check(tokens)
        else:
            self._session.submit(tokens, guesses)
            awaits(engine, self.close)
        self._under_way.append(_Window(tokens, not self._under_way, planned, follows_cancelled, rows))

    def _cancel(self, n_rows: int) -> None:
        self._cancelled += sum(window.rows is None for window in self._under_way)
        self._under_way.clear()
        self._session.forget(n_rows)

    def _drop_cancelled(self) -> None:
        while self._cancelled:
            self._cancelled -= 1
            self._session.collect()
