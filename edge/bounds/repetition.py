"""Detector of repetition loops: answers that say the same stretch of tokens over and over.

A loop has a period p: the number of tokens of the stretch that repeats, at most MAX_PERIOD. An answer is in a loop when
its last tokens are that stretch again and again, LEAST_TIMES or more, LEAST_TOKENS tokens or more in all. Each token
is the one p places before it: tables, similar objects and counting differ in some token of each row, so they are no
loops however long they get. In 14 million tokens of code, documentation and tables there is no loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAX_PERIOD = 512  # tokens
LEAST_TOKENS = 400  # of a loop
LEAST_TIMES = 4  # repeats of the stretch in a loop


@dataclass(frozen=True)
class Repetition:
    """A loop at the end of an answer."""

    period: int  # tokens of the stretch that repeats
    times: int  # whole repeats of the stretch

    def __str__(self) -> str:
        stretch = "token" if self.period == 1 else f"{self.period} tokens"
        return f"the answer repeats the same {stretch}, {self.times} times so far"


class RepetitionDetector:
    """Detects loops in the tokens of one answer. A token costs two vector operations over MAX_PERIOD numbers."""

    def __init__(self) -> None:
        periods = np.arange(1, MAX_PERIOD + 1, dtype=np.int32)
        self._needed = np.maximum(LEAST_TOKENS, LEAST_TIMES * periods) - periods  # equal tokens, by period
        self._n_tokens = 0
        self._equal_behind = np.zeros(MAX_PERIOD, np.int32)  # tokens after which all are as a period before, by period
        self._soonest = 0  # tokens with which there may be a loop at the earliest
        self._last = np.full(4 * MAX_PERIOD, -1, np.int32)  # tokens from _start on, the last one first; -1 is no token
        self._start = len(self._last) - MAX_PERIOD

    def add(self, token: int) -> Repetition | None:
        """Add the next token. Return the loop of the shortest period that the answer is in now; None if it is in
        none."""
        if self._start == 0:
            self._last[-MAX_PERIOD:] = self._last[:MAX_PERIOD]
            self._start = len(self._last) - MAX_PERIOD
        self._n_tokens += 1
        np.putmask(self._equal_behind, self._last[self._start : self._start + MAX_PERIOD] != token, self._n_tokens)
        self._start -= 1
        self._last[self._start] = token
        if self._n_tokens < self._soonest:
            return None
        loops_with = self._equal_behind + self._needed  # so many tokens, which further tokens can only make more
        self._soonest = int(loops_with.min())
        if self._n_tokens < self._soonest:
            return None
        place = int((loops_with <= self._n_tokens).argmax())
        equal = self._n_tokens - int(self._equal_behind[place])
        return Repetition(place + 1, equal // (place + 1) + 1)
