"""Test the detection of repetition: exactly at the position of its definition, and never in other text."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edge.text import repetition
from edge.text.repetition import LEAST_TIMES, LEAST_TOKENS, MAX_PERIOD, Repetition
from tests.support import ROOT
from tests.support.repetition import first_loop
from tests.support.thorough import some

TEXTS = [
    ROOT / "edge" / "quantization" / "calibration.txt",
    *(ROOT / "docs").glob("*.md"),
    *(path for package in ("edge", "partition", "apps") for path in (ROOT / package).rglob("*.py")),
]


def by_definition(tokens: list[int], least_tokens: int, least_times: int, max_period: int) -> tuple[int, int] | None:
    """(tokens until the first loop is complete, its shortest period), straight from the words of the docs."""
    for end in range(1, len(tokens) + 1):
        for period in range(1, max_period + 1):
            length = max(least_tokens, least_times * period)
            last = tokens[max(0, end - length) : end]
            if len(last) == length and last[period:] == last[:-period]:
                return end, period
    return None


@settings(max_examples=some(60, 600), deadline=None)
@given(st.lists(st.integers(0, 1), max_size=80), st.lists(st.integers(0, 2), min_size=1, max_size=7), st.integers(0, 9))
def test_a_loop_is_what_its_definition_says(prefix: list[int], stretch: list[int], times: int) -> None:
    """In small numbers, so that all of what may be nearly a loop occurs."""
    tokens = prefix + stretch * times + prefix
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("LEAST_TOKENS", 12), ("LEAST_TIMES", 3), ("MAX_PERIOD", 6)):
            patch.setattr(repetition, name, value)
        loop = first_loop(tokens)
    assert (loop and (loop[0], loop[1].period)) == by_definition(tokens, 12, 3, 6)


@settings(max_examples=some(40, 512), deadline=None)
@given(st.integers(1, MAX_PERIOD), st.integers(0, 5000), st.integers(0, 2**32 - 1))
@example(1, 0, 0)
@example(MAX_PERIOD, 3 * MAX_PERIOD, 0)
@example(MAX_PERIOD, 4 * MAX_PERIOD - 1, 0)
def test_a_planted_loop_of_every_period_is_noticed_in_time(period: int, before: int, seed: int) -> None:
    """Behind an answer of any length, whose tokens do not repeat."""
    rng = np.random.default_rng(seed)
    stretch = [-2 - i for i in range(period)]
    rng.shuffle(stretch)
    length = max(LEAST_TOKENS, LEAST_TIMES * period)
    tokens = [*range(before), *(stretch * (length // period + 1))]
    assert first_loop(tokens) == (before + length, Repetition(period, length // period))
    assert first_loop(tokens[: before + length - 1]) is None


def test_a_longer_stretch_is_no_loop() -> None:
    assert first_loop([*range(MAX_PERIOD + 1)] * 8) is None


def test_a_loop_says_what_it_is() -> None:
    assert str(Repetition(1, 400)) == "the answer repeats the same token, 400 times so far"
    assert str(Repetition(12, 34)) == "the answer repeats the same 12 tokens, 34 times so far"


@pytest.mark.parametrize("seed", range(5))
def test_random_tokens_are_no_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    assert first_loop(rng.integers(0, 2 + seed * 500, 20_000).tolist()) is None


@pytest.mark.parametrize(
    "text",
    [
        "ha " * 100,
        "".join(f"{i}, " for i in range(3000)),
        "".join(f"| row {i} | yes | 0.0 |\n" for i in range(400)),
        "".join(f'{{"name": "Item", "price": 10, "id": {i}}}, ' for i in range(300)),
        "    x += 1\n" * 30,
        "-" * 200,
    ],
    ids=["ha", "counting", "table", "objects", "code", "line"],
)
def test_what_people_ask_for_is_no_loop(text: str) -> None:
    """A byte a token, which is three or four times as many as any vocabulary makes of them."""
    assert first_loop(text.encode()) is None


def test_texts_are_no_loops() -> None:
    for path in TEXTS[:: some(10, 1)]:
        assert first_loop(path.read_bytes()[: some(8_000, 1_000_000)]) is None, path
