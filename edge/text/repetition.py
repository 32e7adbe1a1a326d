"""Detector of repetition loops: answers that repeat the same sequence of tokens endlessly.

A loop has a period of p tokens, at most MAX_PERIOD. An answer is in a loop if its last tokens equal the tokens p places
before them, for at least LEAST_TIMES repeats and at least LEAST_TOKENS tokens. Tables, lists of similar objects and
counting differ in some token of each row, so they are not loops, however long. A corpus of 14 million tokens of code,
documentation and tables contains no loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAX_PERIOD = 512  # maximum period in tokens
LEAST_TOKENS = 400  # minimum tokens of a loop
LEAST_TIMES = 4  # minimum repeats in a loop


@dataclass(frozen=True)
class Repetition:
    """A loop at the end of an answer."""

    period: int  # tokens of the repeated sequence
    times: int  # complete repeats of the sequence

    def __str__(self) -> str:
        stretch = "token" if self.period == 1 else f"{self.period} tokens"
        return f"the answer repeats the same {stretch}, {self.times} times so far"


class RepetitionDetector:
    """Detects loops in the tokens of one answer. Each token costs two vector operations on MAX_PERIOD numbers."""

    def __init__(self) -> None:
        periods = np.arange(1, MAX_PERIOD + 1, dtype=np.int32)
        self._needed = np.maximum(LEAST_TOKENS, LEAST_TIMES * periods) - periods  # needed equal tokens, by period
        self._n_tokens = 0
        # For each period: token count after which all tokens equal those a period before.
        self._equal_behind = np.zeros(MAX_PERIOD, np.int32)
        self._soonest = 0  # smallest token count at which a loop is possible
        self._last = np.full(4 * MAX_PERIOD, -1, np.int32)  # tokens from _start on, newest first; -1: none
        self._start = len(self._last) - MAX_PERIOD

    def add(self, token: int) -> Repetition | None:
        """Add the next token. Return the current loop with the shortest period, or None if there is no loop."""
        if self._start == 0:
            self._last[-MAX_PERIOD:] = self._last[:MAX_PERIOD]
            self._start = len(self._last) - MAX_PERIOD
        self._n_tokens += 1
        np.putmask(self._equal_behind, self._last[self._start : self._start + MAX_PERIOD] != token, self._n_tokens)
        self._start -= 1
        self._last[self._start] = token
        if self._n_tokens < self._soonest:
            return None
        # Token counts at which a loop is complete; further tokens can only raise them.
        loops_with = self._equal_behind + self._needed
        self._soonest = int(loops_with.min())
        if self._n_tokens < self._soonest:
            return None
        place = int((loops_with <= self._n_tokens).argmax())
        equal = self._n_tokens - int(self._equal_behind[place])
        return Repetition(place + 1, equal // (place + 1) + 1)
