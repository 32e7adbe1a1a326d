"""Measured speeds of a replica, and the time in which it would finish another request."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

_NEW = 0.2  # weight of a new measurement in an average
_CHARS_PER_TOKEN = 4.0  # usual for text in Latin letters
_TOKENS = 128.0  # expected tokens of an answer until some answers have ended
_TOKENS_PER_PREFILL = 4.0  # prompt tokens that take as long as one generated token, until prompts were measured


def lower_hull(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the corners of the lower convex hull of points, which are sorted by different first values."""
    hull: list[tuple[int, float]] = []
    for n, seconds in points:
        while len(hull) > 1:
            (n_0, s_0), (n_1, s_1) = hull[-2:]
            if (s_1 - s_0) * (n - n_0) < (seconds - s_0) * (n_1 - n_0):
                break
            hull.pop()
        hull.append((n, seconds))
    return hull


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
        self._changed_at = -math.inf  # time at which an answer began or ended last

    def begun(self, number: int) -> None:
        """Note that the process computes the prompt of an answer from now on."""
        self._last[number] = self._changed_at = self._clock()
        self._in_prompt.add(number)

    def token(self, number: int, n_computed: int) -> None:
        """Note a token of an answer. n_computed: tokens of its prompt that were computed before its first token; 0:
        unknown.
        """
        before, now = self._last[number], self._clock()
        self._last[number] = now
        if number not in self._in_prompt:
            # Otherwise a part of the time belongs to another number of answers. Answers of one step often end together,
            # so all smaller numbers would be measured with the time of the largest one.
            if before >= self._changed_at:
                self._token_s.setdefault(len(self._last), Average()).add(now - before)
            return
        self._in_prompt.remove(number)
        if n_computed:
            self._prefill_s.add((now - before) / n_computed)

    def ended(self, number: int) -> None:
        """Note the end of an answer."""
        if self._last.pop(number, None) is not None:
            self._changed_at = self._clock()
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

        The factor is that of the lower convex hull of all measured times, because two neighbouring times differ by
        noise and by the groups of a pipeline. A pipeline is as fast for each answer until all its stages are busy, so a
        line would count a delay that does not exist.
        """
        points = sorted((n, average.value) for n, average in self._token_s.items() if average.value is not None)
        if not points or not points[0][0] <= n_answers < points[-1][0]:
            return 1.0
        (low, low_s), (high, high_s) = next((a, b) for a, b in pairwise(lower_hull(points)) if a[0] <= n_answers < b[0])
        slope = (high_s - low_s) / (high - low)
        before_s = low_s + slope * (n_answers - low)
        return 1.0 + slope / before_s if slope > 0 < before_s else 1.0

    def prefill_s(self) -> float | None:
        """Return the seconds for each token of a prompt; None if unknown."""
        if self._prefill_s.value is None and (token_s := self.token_s(1)) is not None:
            return token_s / _TOKENS_PER_PREFILL
        return self._prefill_s.value
