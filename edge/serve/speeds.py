"""Measured speeds of a replica, and the time in which it would finish another request."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import linear_regression

_NEW = 0.2  # weight of a new measurement in an average
_CHARS_PER_TOKEN = 4.0  # usual for text in Latin letters
_TOKENS = 128.0  # expected tokens of an answer until some answers have ended
_TOKENS_PER_PREFILL = 4.0  # prompt tokens that take as long as one generated token, until prompts were measured


class Average:
    """A running average, in which the latest values weigh most."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + _NEW * (value - self.value)


class AnswerLengths:
    """Lengths of the prompts and answers of a model."""

    def __init__(self) -> None:
        self._tokens, self._chars_per_token = Average(), Average()

    def ended(self, n_tokens: int, prompt_chars: int, prompt_tokens: int) -> None:
        """Count an answer that has ended."""
        self._tokens.add(n_tokens)
        if prompt_tokens:
            self._chars_per_token.add(prompt_chars / prompt_tokens)

    def tokens(self, limit: int | None, least: int = 0) -> float:
        """Return the expected tokens of an answer. limit, least: largest and smallest number of tokens
        that the request allows."""
        expected = self._tokens.value or _TOKENS
        return max(least, expected if limit is None else min(expected, limit))

    def prompt_tokens(self, chars: int) -> float:
        """Return the expected tokens of a text."""
        return chars / (self._chars_per_token.value or _CHARS_PER_TOKEN)


class Speeds:
    """Speeds of one engine process: seconds for a token of an answer, and for a token of a prompt."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: returns seconds."""
        self._clock = clock
        self._token_s: dict[int, Average] = {}  # by the number of answers that are generated at the same time
        self._prefill_s = Average()
        # Time of the last token of each answer by number; the beginning of an answer without tokens.
        self._last: dict[int, float] = {}
        self._in_prompt: set[int] = set()

    def begun(self, number: int) -> None:
        """Note that the process computes the prompt of an answer from now on."""
        self._last[number] = self._clock()
        self._in_prompt.add(number)

    def token(self, number: int, n_computed: int) -> None:
        """Note a token of an answer. n_computed: tokens of its prompt that were computed before its first token; 0:
        unknown.
        """
        before, now = self._last[number], self._clock()
        self._last[number] = now
        if number not in self._in_prompt:
            self._token_s.setdefault(len(self._last), Average()).add(now - before)
            return
        self._in_prompt.remove(number)
        if n_computed:
            self._prefill_s.add((now - before) / n_computed)

    def ended(self, number: int) -> None:
        """Note the end of an answer."""
        self._last.pop(number, None)
        self._in_prompt.discard(number)

    def token_s(self, n_answers: int) -> float | None:
        """Return the seconds between two tokens of an answer while `n_answers` are generated; None if unknown.

        Between two measured numbers of answers the time is interpolated. Outside of them: a step reads all weights
        once, and computes a row for each answer. If both take equally long, n + 1 of them take (n + 2) / (n + 1) times
        as long as n. So a measurement with m answers counts (1 + n) / (1 + m) times.
        """
        times = {number: average.value for number, average in self._token_s.items() if average.value is not None}
        if not times:
            return None
        low = max((number for number in times if number <= n_answers), default=None)
        high = min((number for number in times if number >= n_answers), default=None)
        if low is not None and high is not None:
            part = (n_answers - low) / (high - low) if high > low else 0.0
            return times[low] + part * (times[high] - times[low])
        near = high if low is None else low
        assert near is not None
        return times[near] * (1 + n_answers) / (1 + near)

    def slowdown(self, n_answers: int) -> float:
        """Return the factor by which one more answer lengthens the tokens of `n_answers`; 1 if it is unknown.

        The factor is that of a line through all measured times, because two neighbouring times differ by noise and by
        the groups of a pipeline.
        """
        if not self._token_s or not min(self._token_s) <= n_answers < max(self._token_s):
            return 1.0
        numbers, averages = zip(*self._token_s.items(), strict=True)
        slope, intercept = linear_regression(numbers, [average.value for average in averages])
        before_s = intercept + slope * n_answers
        return 1.0 + slope / before_s if slope > 0 < before_s else 1.0

    def prefill_s(self) -> float | None:
        """Return the seconds for each token of a prompt; None if unknown."""
        if self._prefill_s.value is None and (token_s := self.token_s(1)) is not None:
            return token_s / _TOKENS_PER_PREFILL
        return self._prefill_s.value
