"""Prompt lookup (n-gram) drafting: copy the tokens that followed an earlier occurrence of the last tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edge.speculate.speculation import Drafts
from partition.predict.drafts import ACCEPTANCE

LEAST = 2  # minimum number of matching tokens; a single match is weak evidence
LONGEST = 64  # maximum number of compared tokens: longer matches are not better
_DIFFERS = 2  # matching tokens that compensate a different one: a copy may contain some changed words
_MOST_DIFFER = 2  # maximum number of consecutive different tokens in a copy
_LEAST_ALIKE = 8  # minimum score of an inexact copy: lower scores are chance
_MOST_PLACES = 16  # maximum number of compared places, latest first, to bound the time in a long text


class NgramDrafts(Drafts):
    """Draft the tokens that followed the last tokens at an earlier place in the prompt or answer."""

    free = True
    acceptance = ACCEPTANCE["ngram"]

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}  # by each LEAST tokens: the last place after them
        self._previous: list[int] = []  # by place: the previous place after the same tokens; 0: none
        self._back = 0  # distance from the end of the text to the last draft's place; 0: none

    def begin(self, prompt: Sequence[int]) -> None:
        self._tokens, self._last, self._previous, self._back = [], {}, [], 0
        self.extend(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text. The end of the text is not a place to copy from, because nothing follows it."""
        for token in tokens:
            place, run = len(self._tokens), tuple(self._tokens[-LEAST:])
            self._previous.append(self._last.get(run, 0))
            if place >= LEAST:
                self._last[run] = place
            self._tokens.append(token)

    def draft(self, n: int, assumed: Sequence[int] = ()) -> list[int]:
        """Return at most `n` tokens after the text and `assumed`, or none if the last tokens did not occur together
        before."""
        text = [*self._tokens[-LONGEST:], *assumed][-LONGEST:]
        end = len(self._tokens) + len(assumed)
        same = {place: self._same(place, text) for place in self._places(text)}
        best = max(same, key=same.__getitem__, default=0)
        goes_on = end - self._back if self._back else 0
        if 0 < goes_on < len(self._tokens):
            alike = self._same(goes_on, text, differing=_MOST_DIFFER)
            best = goes_on if alike >= _LEAST_ALIKE and alike > same.get(best, 0) else best
        self._back = end - best if best else 0
        return self._repeated(best, n, assumed) if best else []

    def _places(self, text: Sequence[int]) -> Iterator[int]:
        """Yield places after earlier occurrences of the last tokens, latest first."""
        place = self._last.get(tuple(text[-LEAST:]), 0)
        for _ in range(_MOST_PLACES):
            if not place:
                return
            yield place
            place = self._previous[place]

    def _same(self, place: int, text: Sequence[int], differing: int = 0) -> int:
        """Return the match score of the tokens before `place` with the end of `text`.

        differing: maximum number of consecutive different tokens. Each of them costs _DIFFERS.
        """
        best = score = 0
        for back in range(1, min(place, len(text)) + 1):
            score += 1 if self._tokens[place - back] == text[-back] else -_DIFFERS
            best = max(best, score)
            if score < best - differing * _DIFFERS:
                break
        return best

    def _repeated(self, place: int, n: int, assumed: Sequence[int]) -> list[int]:
        """Return `n` tokens from a place on, repeated if the text ends before."""
        following = [*self._tokens[place : place + n], *assumed]
        return [following[i % len(following)] for i in range(n)]
