"""Tests of the speeds of a replica, with a clock of their own."""

import pytest

from edge.serve.speeds import AnswerLengths, Speeds


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_tokens_and_prompts_are_measured_apart() -> None:
    clock = Clock()
    speeds = Speeds(clock)
    assert (speeds.token_s(1), speeds.prefill_s()) == (None, None)
    speeds.begun(1)
    clock.now += 2.0
    speeds.token(1, 100)
    assert (speeds.token_s(1), speeds.prefill_s()) == (None, 0.02)
    for _ in range(3):
        clock.now += 0.5
        speeds.token(1, 0)
    assert (speeds.token_s(1), speeds.prefill_s()) == (0.5, 0.02)


def test_an_answer_that_goes_on_elsewhere_measures_no_prompt() -> None:
    clock = Clock()
    speeds = Speeds(clock)
    speeds.begun(1)
    clock.now += 9.0
    speeds.token(1, 0)
    assert (speeds.token_s(1), speeds.prefill_s()) == (None, None)


def test_several_answers_count_by_their_number_until_they_end() -> None:
    clock = Clock()
    speeds = Speeds(clock)
    for number in (1, 2, 3):
        speeds.begun(number)
        speeds.token(number, 0)
    clock.now += 0.8
    for number in (1, 2, 3):
        speeds.token(number, 0)
    assert speeds.token_s(3) == pytest.approx(0.8)
    assert speeds.token_s(1) == pytest.approx(0.4)
    assert speeds.token_s(7) == pytest.approx(1.6)
    for number in (2, 3, 3):  # an answer may be ended twice
        speeds.ended(number)
    clock.now += 0.1
    speeds.token(1, 0)
    assert speeds.token_s(1) == pytest.approx(0.1)


def test_a_token_counts_only_if_no_answer_began_or_ended_before_it() -> None:
    """Answers of one step end one by one: none of them is measured with fewer answers than were computed."""
    clock = Clock()
    speeds = Speeds(clock)
    for number in (1, 2, 3):
        speeds.begun(number)
        speeds.token(number, 0)
    clock.now += 0.6
    for number in (1, 2, 3):
        speeds.token(number, 0)
    clock.now += 0.6
    for number in (1, 2):
        speeds.token(number, 0)
        speeds.ended(number)
    speeds.token(3, 0)
    assert speeds.token_s(3) == pytest.approx(0.6)
    assert speeds.token_s(1) == pytest.approx(0.3)  # from three answers
    clock.now += 0.5
    speeds.token(3, 0)
    assert speeds.token_s(1) == pytest.approx(0.5)
    clock.now += 0.3
    speeds.begun(4)
    clock.now += 0.4
    speeds.token(3, 0)
    assert (speeds.token_s(1), speeds.token_s(2)) == pytest.approx((0.5, 0.5 + 0.1 / 2))


def measured(*seconds: tuple[int, float]) -> Speeds:
    """Speeds with the seconds of a token by the number of answers."""
    clock = Clock()
    speeds = Speeds(clock)
    for count, token_s in seconds:
        for number in range(count):
            speeds.begun(number)
            speeds.token(number, 0)
        clock.now += token_s
        speeds.token(0, 0)
        for number in range(count):
            speeds.ended(number)
    return speeds


def test_times_between_measured_numbers_of_answers_are_interpolated() -> None:
    speeds = measured((2, 0.2), (4, 0.4))
    assert [speeds.token_s(n) for n in (2, 3, 4)] == pytest.approx([0.2, 0.3, 0.4])
    assert [speeds.token_s(n) for n in (1, 5)] == pytest.approx([0.2 * 2 / 3, 0.4 * 6 / 5])


def test_a_further_answer_slows_others_by_the_lower_hull_of_all_times() -> None:
    assert measured().slowdown(1) == 1.0
    linear = measured((2, 0.2), (4, 0.4))
    assert [linear.slowdown(n) for n in (0, 1, 2, 3, 4)] == pytest.approx([1, 1, 1.5, 4 / 3, 1])
    steps = measured((1, 0.2), (2, 0.2), (3, 0.3), (4, 0.3))  # the third answer counts as 0.25
    assert [steps.slowdown(n) for n in (1, 2, 3)] == pytest.approx([1, 0.25 / 0.2, 0.3 / 0.25])
    busy = measured((1, 0.72), (4, 0.71), (8, 1.45))  # stages have time for four answers
    assert [busy.slowdown(n) for n in (1, 2, 3, 4)] == pytest.approx([1, 1, 1, 1 + 0.185 / 0.71])
    assert measured((1, 0.4), (2, 0.2)).slowdown(1) == 1.0  # noise: more answers are no faster


def test_answers_are_expected_to_be_as_long_as_the_latest() -> None:
    lengths = AnswerLengths()
    before = lengths.tokens(None)
    assert lengths.tokens(5) == 5
    for _ in range(40):
        lengths.ended(20, 600, 300)
    assert before > lengths.tokens(None) == pytest.approx(20)
    assert lengths.tokens(5) == 5
    assert (lengths.tokens(50, 50), lengths.tokens(None, 30), lengths.tokens(50, 10)) == (50, 30, pytest.approx(20))
    assert lengths.prompt_tokens(600) == pytest.approx(300)
    lengths.ended(20, 0, 0)  # an answer that was cancelled before its prompt was counted
    assert lengths.prompt_tokens(600) == pytest.approx(300)
