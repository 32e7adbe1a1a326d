"""Test untrusted text on a terminal: it is shown, and its control sequences have no effect."""

import unicodedata

import pytest

from quant.text import printable

ATTACKS = {
    "escape": "\x1b[2J",
    "clipboard": "\x1b]52;c;aGk=\x07",
    "C1": "\x9b2J\x85\x90",
    "bidi": "a\u202eb\u2066c\u200f",
    "zero width": "a\u200bb\ufeff\u2060",
    "tags": "a\U000e0041",
    "return": "safe\rspoofed",
    "backspace": "a\b\x7f",
    "separators": "a\u2028b\u2029",
    "surrogate": "a\udcff",
}


@pytest.mark.parametrize("text", ATTACKS.values(), ids=ATTACKS)
@pytest.mark.parametrize("lines", [False, True])
def test_nothing_that_a_terminal_obeys_is_left(text: str, lines: bool) -> None:
    assert not {unicodedata.category(c) for c in printable(text, lines=lines)} & {"Cc", "Cf", "Cs", "Zl", "Zp"}


def test_all_control_characters_are_caught() -> None:
    text = "".join(map(chr, (*range(32), *range(127, 160))))
    assert printable(text).isprintable()
    assert printable(text, lines=True).replace("\n", "").replace("\t", "").isprintable()


def test_an_answer_keeps_its_lines_and_its_letters() -> None:
    text = "a\tb\n\n\u3000\u4e2d\u202f\u00a0! \u0645\u06cc\u200c\u062e\u0648 \U0001f469\u200d\U0001f4bb"
    assert printable(text, lines=True) == text
    assert printable("a\r\nb", lines=True) == "a\nb"
    assert "\n" not in printable(text)
