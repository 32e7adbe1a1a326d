"""How far a long job is: a bar on a terminal, plain lines elsewhere."""

import io
import sys

import pytest

from apps.show import progress as progress_module
from apps.show.progress import progress
from tests.support.helpers import until


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal_as_stderr(monkeypatch: pytest.MonkeyPatch) -> FakeTerminal:
    """Make standard error a terminal. Not a fixture: pytest puts its own stream there when the test begins."""
    stream = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return stream


def test_a_bar_with_label_and_amount_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_as_stderr(monkeypatch)
    monkeypatch.setattr(progress_module, "SHOW_AFTER_S", 0)
    with progress("Reading the prompt", unit="tokens") as show:
        show(512, 2048)
        until(lambda: "512 of 2.05 K tokens, 25 %" in terminal.getvalue(), "the bar is shown")
    assert "Reading the prompt" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K")  # and wiped away


def test_no_bar_for_a_short_job(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_as_stderr(monkeypatch)
    with progress("Loading", 100) as show:
        show(100)
    assert terminal.getvalue() == ""


def test_plain_lines_elsewhere(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress_module, "PLAIN_INTERVAL_S", 0)
    with progress("Loading", 2048) as show:
        show(1024)
        show(2048)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "Loading: 1.00 KiB of 2.00 KiB, 50 %\nLoading: 2.00 KiB of 2.00 KiB, 100 %\n")


def test_no_lines_for_a_short_job(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("Loading", 2048) as show:
        show(2048)
    assert capsys.readouterr() == ("", "")
