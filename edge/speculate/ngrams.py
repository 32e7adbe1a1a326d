"""Prompt lookup (n-gram) drafting: what came where most of the last tokens stood before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edge.speculate.speculation import Drafts
from partition.predict.drafts import ACCEPTANCE

LEAST = 2  # tokens that must be the same; one alone says too little
LONGEST = 64  # tokens that are compared: passages that are alike for longer are as good as one another
_DIFFERS = 2  # tokens that are the same make up for one that differs: a copy may have its own word here and there
_MOST_DIFFER = 2  # in a row: else it is no copy
_LEAST_ALIKE = 8  # tokens of a copy, less what those that differ cost: fewer are chance
_MOST_PLACES = 16  # that are looked at, the last ones first, so that a draft takes no longer in a long text


class NgramDrafts(Drafts):
    """Drafts what followed the last tokens where they stood before, in the prompt or in the answer."""

    free = True
    acceptance = ACCEPTANCE["ngram"]

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}  # by each LEAST tokens: the last place behind them
        self._previous: list[int] = []  # by place: the one before it that is behind the same tokens; 0: none
        self._back = 0  # from the end of the text to the place that the last draft was from; 0: none

    def begin(self, prompt: Sequence[int]) -> None:
        self._tokens, self._last, self._previous, self._back = [], {}, [], 0
        self.extend(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in tokens that follow. The end of the text is no place: nothing follows there."""
        for token in tokens:
            place, run = len(self._tokens), tuple(self._tokens[-LEAST:])
            self._previous.append(self._last.get(run, 0))
            if place >= LEAST:
                self._last[run] = place
            self._tokens.append(token)

    def draft(self, n: int, assumed: Sequence[int] = ()) -> list[int]:
        """At most `n` tokens behind the text and then `assumed`; none where the last ones are new together."""
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
        """Places behind the last tokens, the last ones first."""
        place = self._last.get(tuple(text[-LEAST:]), 0)
        for _ in range(_MOST_PLACES):
            if not place:
                return
            yield place
            place = self._previous[place]

    def _same(self, place: int, text: Sequence[int], differing: int = 0) -> int:
        """Return how many tokens before a place are the last ones of `text`, up to more that differ than so many in a
        row; each of those takes away what _DIFFERS says."""
        best = score = 0
        for back in range(1, min(place, len(text)) + 1):
            score += 1 if self._tokens[place - back] == text[-back] else -_DIFFERS
            best = max(best, score)
            if score < best - differing * _DIFFERS:
                break
        return best

    def _repeated(self, place: int, n: int, assumed: Sequence[int]) -> list[int]:
        """`n` tokens from a place on; what ends before goes round again."""
        following = [*self._tokens[place : place + n], *assumed]
        return [following[i % len(following)] for i in range(n)]
