"""Test reasoning on a terminal: its last lines are shown while it is generated, and one line afterwards."""

import io
import json
import sys
import time

import pytest
from rich.console import Console

from apps.show import answer_stream
from apps.show.answer import PlainAnswer
from apps.show.answer_stream import LINES, AnswerStream
from apps.show.table import print_json


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> Console:
    monkeypatch.setattr(answer_stream, "REDRAW_EVERY_S", 0)
    return Console(file=io.StringIO(), width=40, force_terminal=True, highlight=False)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_thought_is_dim_and_folded_before_the_answer(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [5.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with AnswerStream(console, "; /thought shows it") as shown:
        shown.push("", "\n".join(f"line {i}" for i in range(LINES + 3)))
        drawn = written(console)
        assert "\x1b[2mline 8" in drawn
        assert "line 2" not in drawn  # only the last lines
        clock[0] = 8.5
        shown.push("**Hi**")
        shown.push(" there")
    rest = written(console)[len(drawn) :]
    assert "thought for 3.5 s; /thought shows it" in rest
    assert rest.index("thought for") < rest.index("Hi")
    assert shown.thought.endswith("line 8")


def test_a_thought_alone_is_folded_at_the_end(console: Console) -> None:
    with AnswerStream(console) as shown:
        shown.push("", "so")
    assert "thought for" in written(console)


def test_an_answer_without_a_thought_has_no_such_line(console: Console) -> None:
    with AnswerStream(console) as shown:
        shown.push("Hi")
    assert "thought" not in written(console)
    assert "Hi" in written(console)


def test_a_thought_goes_to_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_terminal, errors in ((False, ""), (True, "\x1b[2mso \x1b[22m\x1b[2m \n\x1b[22m\n\n")):
        monkeypatch.setattr(sys.stderr, "isatty", lambda value=is_terminal: value)
        shown = PlainAnswer()
        for text, thought in (("", "so\x07"), ("", "\x1b\n"), ("Hi", ""), (".", "")):
            shown.write(text, thought)
        assert capsys.readouterr() == ("Hi.", errors)


ATTACK = "\x1b]52;c;aGk=\x07\x9b2J\u202ea\u200bb"


def test_an_answer_on_a_terminal_has_no_control_characters(console: Console) -> None:
    for text, thought in ((ATTACK, ""), ("", ATTACK), ("", "so"), (ATTACK, ATTACK)):
        with AnswerStream(console) as shown:
            shown.push(text, thought)
    drawn = written(console)
    assert not {char for char in ATTACK if not char.isprintable()} - {"\x1b"} & set(drawn)
    assert "\x1b]" not in drawn


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_pipe_gets_an_answer_as_it_is_and_a_terminal_what_can_be_printed(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    PlainAnswer().write(f"{ATTACK}\n\tx", "")
    text = capsys.readouterr().out
    if is_terminal:
        assert text.endswith("\n\tx")
        assert text.replace("\n", "").replace("\t", "").isprintable()
    else:
        assert text == f"{ATTACK}\n\tx"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_json_on_a_terminal_is_escaped(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    print_json({"text": ATTACK}, escaped=False)
    text = capsys.readouterr().out
    assert json.loads(text) == {"text": ATTACK}
    assert text.strip().isprintable() is is_terminal


def test_json_with_bytes_that_are_no_text_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"text": "\udcff\u00e9"}, escaped=False)
    assert capsys.readouterr().out == '{"text": "\\udcff\\u00e9"}\n'
