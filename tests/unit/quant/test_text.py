"""Test the format of numbers in text."""

import pytest

from quant.text import bytes_text, counted, listed, number_text, with_article


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0, "0"),
        (1.02e-05, "0.000010"),
        (0.00102, "0.00102"),
        (2.1, "2.10"),
        (67.9, "67.9"),
        (749, "749"),
        (1764, "1,764"),
    ],
)
def test_milliseconds_have_no_exponent(milliseconds: float, text: str) -> None:
    assert number_text(milliseconds) == text


@pytest.mark.parametrize(
    ("n", "what", "text"),
    [
        (1, "thread", "1 thread"),
        (0, "core", "0 cores"),
        (1.5, "core", "1.5 cores"),
        (3, "microbatch", "3 microbatches"),
    ],
)
def test_what_is_counted_is_one_or_many(n: float, what: str, text: str) -> None:
    assert counted(n, what) == text


def test_small_sizes_are_not_zero() -> None:
    assert bytes_text(5_000_000) == "4.77 MiB"
    assert bytes_text(3) == "3 B"


def test_articles_go_by_the_sound() -> None:
    assert [with_article(noun) for noun in ("token", "input", "eos", "uint8")] == [
        "a token", "an input", "an eos", "a uint8"
    ]  # fmt: skip


def test_names_in_a_sentence_come_once() -> None:
    assert listed(["pi", "nas", "pi", "this device"]) == "pi, nas and this device"
