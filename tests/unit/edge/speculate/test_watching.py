"""Beside a pass of one row, a free guess tells whether it would have been right; one that costs time is not made."""

from collections.abc import Callable, Sequence

import pytest

from edge.llm.interface import VerifyResult
from edge.speculate.choice import RowChoice
from edge.speculate.ngrams import NgramDrafts
from edge.speculate.shared import SharedSpeculation
from edge.speculate.speculation import Speculation
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
    """As a model's guesses."""

    free = False

    def draft(self, n: int, assumed: Sequence[int] = ()) -> list[int]:
        raise AssertionError("this takes time")


def answered(drafts: type[NgramDrafts], tokens: Sequence[int]) -> float:
    """The fraction that is right, as it is known after passes of one row gave these tokens."""
    speculation = Speculation(drafts(), "any", windows=OneWindow(OneRow()))
    speculation.begin(TEXT)
    for token in tokens:
        speculation.shape([], 8, 1)
        speculation.checked(VerifyResult(1, 1, right=0, looked_at=0))
        speculation.shape([token], 8, 1)
    return speculation.choice.accepted


def shared(drafts: type[NgramDrafts], tokens: Sequence[int]) -> float:
    """The same of a request beside others."""

    class Request:
        number, prompt, left = 0, TEXT, 99

        def __init__(self) -> None:
            self.text = list(TEXT)

        @property
        def length(self) -> int:
            return len(self.text)

        def part(self, start: int, n_tokens: int) -> list[int]:
            return self.text[start : start + n_tokens]

    choice, request = OneRow(), Request()
    speculation = SharedSpeculation(drafts, "any", choice=lambda: choice)
    for token in tokens:
        assert speculation.draft([request], 8) == [()]
        speculation.checked([1], [1])
        request.text.append(token)
    speculation.draft([request], 8)
    return choice.accepted


@pytest.mark.parametrize("known", [answered, shared])
def test_free_guesses_are_looked_at(known: Callable[[type[NgramDrafts], Sequence[int]], float]) -> None:
    assert known(NgramDrafts, [1, 2, 3, 4, 5, 1]) > 0.9
    assert known(NgramDrafts, [9, 8, 9, 7]) < PRIOR  # the first was guessed, and was wrong; then nothing is guessed


def test_a_guess_that_was_checked_is_not_counted_again() -> None:
    class Twice(OneRow):
        sizes = iter([2, 1])

        def rows(self, most: int) -> int:
            return next(self.sizes)

    class Request:
        number, prompt, left, length = 0, TEXT, 99, len(TEXT)

        def part(self, start: int, n_tokens: int) -> list[int]:
            return [*TEXT, 9][start : start + n_tokens]

    choice, request = Twice(), Request()
    speculation = SharedSpeculation(NgramDrafts, "any", choice=lambda: choice)
    assert speculation.draft([request], 8) == [[1]]
    speculation.checked([2], [1])
    once, request.length = choice.accepted, len(TEXT) + 1
    speculation.draft([request], 8)
    assert choice.accepted == once < PRIOR


def test_guesses_that_take_time_are_not_made() -> None:
    assert answered(Dear, TEXT) == PRIOR
    assert shared(Dear, TEXT) == PRIOR
