"""Test observed drafts in passes of one row: a free draft is compared with the answer; a draft that costs time is not
made.
"""

from collections.abc import Callable, Sequence

import pytest

from edge.llm.interface import VerifyResult
from edge.speculate.choice import RowChoice
from edge.speculate.ngrams import NgramDrafts
from edge.speculate.speculation import Speculation, SpeculationStats
from edge.speculate.windows import WindowChoice

TEXT = [1, 2, 3, 4, 5] * 4
PRIOR = RowChoice().accepted


class OneRow(RowChoice):
    """As where more never pay."""

    def rows(self, most: int) -> int:
        return 1


class OneWindow(WindowChoice):
    def shape(self, most_rows: int, most_windows: int) -> tuple[int, int]:
        return 1, 1


class Dear(NgramDrafts):
    """As a model's drafts."""

    free = False

    def draft(self, n: int, assumed: Sequence[int] = ()) -> list[int]:
        raise AssertionError("this takes time")


class Request:
    """A request whose answer is made by the test."""

    prompt, left, tokens, sequence = TEXT, 99, TEXT, 0

    def __init__(self) -> None:
        self.answer: list[int] = []


def plain_passes(drafts: Callable[[], NgramDrafts], tokens: Sequence[int], n: int) -> float:
    """The fraction that is accepted, as known after passes of one row gave these tokens to each of `n` requests."""
    choice = OneWindow(OneRow())
    speculation, requests = Speculation(drafts, "any", choice=lambda: choice), [Request() for _ in range(n)]
    for token in tokens:
        assert speculation.shape(requests, 8, 1) == (1, 1)
        for request in requests:
            assert speculation.draft(request, [token], 1) == [token]
            request.answer.append(token)
        speculation.verified([VerifyResult(1, 1, right=0, looked_at=0)] * n)
    speculation.shape(requests, 8, 1)
    return choice.rows.accepted


@pytest.mark.parametrize("n", [1, 2])
def test_free_drafts_are_looked_at(n: int) -> None:
    assert plain_passes(NgramDrafts, [1, 2, 3, 4, 5, 1], n) > 0.9
    assert plain_passes(NgramDrafts, [9, 8, 9, 7], n) < PRIOR  # the first was drafted, and was wrong; then nothing is


def test_a_draft_that_was_verified_is_not_counted_again() -> None:
    class Twice(OneRow):
        sizes = iter([2, 1])

        def rows(self, most: int) -> int:
            return next(self.sizes)

    choice, request = WindowChoice(Twice()), Request()
    speculation = Speculation(NgramDrafts, "any", choice=lambda: choice)
    rows, _ = speculation.shape([request], 8)
    assert speculation.draft(request, [7], rows)[1:] == [1]
    speculation.verified([VerifyResult(2, 1, right=0, looked_at=1)])
    once = choice.rows.accepted
    request.answer.append(9)
    speculation.shape([request], 8)
    assert choice.rows.accepted == once < PRIOR


@pytest.mark.parametrize("n", [1, 2])
def test_drafts_that_take_time_are_not_made(n: int) -> None:
    assert plain_passes(Dear, TEXT, n) == PRIOR


def test_the_gain_outlasts_plain_passes_that_are_measured_anew() -> None:
    stats = SpeculationStats()
    stats.time([VerifyResult(4, 4)], 1.0, is_plain=False, usual_plain_s=0.5)
    assert stats.gain == 2.0
    stats.time([VerifyResult(4, 4)], 1.0, is_plain=False, usual_plain_s=0.0)
    assert stats.gain == 2.0
