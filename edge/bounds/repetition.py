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
    """Detects loops in the tokens of one answer. A token costs a few vector operations over MAX_PERIOD numbers."""

    def __init__(self) -> None:
        periods = np.arange(1, MAX_PERIOD + 1, dtype=np.int32)
        self._needed = np.maximum(LEAST_TOKENS, LEAST_TIMES * periods) - periods  # equal tokens, by period
        self._equal = np.zeros(MAX_PERIOD, np.int32)  # last tokens that are as those a period before, by period
        self._tokens = np.full(4 * MAX_PERIOD, -1, np.int32)  # the last ones end at _end; -1 is no token
        self._end = MAX_PERIOD

    def add(self, token: int) -> Repetition | None:
        """Add the next token. Return the loop of the shortest period that the answer is in now; None if it is in
        none."""
        if self._end == len(self._tokens):
            self._tokens[:MAX_PERIOD] = self._tokens[-MAX_PERIOD:]
            self._end = MAX_PERIOD
        before = self._tokens[self._end - MAX_PERIOD : self._end][::-1]
        self._equal += 1
        self._equal *= before == token
        self._tokens[self._end] = token
        self._end += 1
        loops = self._equal >= self._needed
        if not loops.any():
            return None
        place = int(loops.argmax())
        return Repetition(place + 1, int(self._equal[place]) // (place + 1) + 1)
