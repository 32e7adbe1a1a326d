"""Progress of a long job: a bar on a terminal, plain lines elsewhere."""

import io
import sys

import pytest

from apps.show import progress as progress_module
from apps.show.progress import PLAIN_AFTER_S, PLAIN_INTERVAL_S, STILL_S, Lines, progress
from tests.support import NEVER_S, PLAIN_LINES
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
    monkeypatch.setattr(progress_module, "SHOW_AFTER_S", NEVER_S)
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


def test_what_takes_long_says_so_though_nothing_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line soon after it began, and then one every ten seconds, with how far it is."""
    for name, seconds in zip(PLAIN_LINES, (PLAIN_AFTER_S, PLAIN_INTERVAL_S, STILL_S), strict=True):
        monkeypatch.setattr(progress_module, name, seconds)
    now_s = 100.0
    lines = Lines("Measuring plans", 3, "plans", clock=lambda: now_s, ticking=False)

    def line_at(at_s: float) -> tuple[str, float]:
        """Return what a look at this second prints, and when the next is due."""
        nonlocal now_s
        now_s = 100.0 + at_s
        due_s = lines.tick()
        return capsys.readouterr().err, due_s

    assert line_at(PLAIN_AFTER_S - 0.25) == ("", 0.25)
    assert line_at(PLAIN_AFTER_S) == ("Measuring plans: begun\n", STILL_S)
    lines.update(1, what="on this device")
    assert line_at(PLAIN_AFTER_S + STILL_S - 0.5) == ("", 0.5)
    at_s = PLAIN_AFTER_S + STILL_S
    assert line_at(at_s) == ("Measuring plans: 1 of 3 plans, 33 %, on this device, 11 s so far\n", STILL_S)
    assert line_at(at_s + STILL_S) == ("Measuring plans: 1 of 3 plans, 33 %, on this device, 21 s so far\n", STILL_S)
    now_s += PLAIN_INTERVAL_S
    lines.update(2)
    assert capsys.readouterr().err == "Measuring plans: 2 of 3 plans, 67 %\n"
    assert line_at(at_s + STILL_S + PLAIN_INTERVAL_S)[1] == STILL_S  # that was a line, too


def test_a_thread_looks_while_it_lasts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress_module, "PLAIN_AFTER_S", 0)
    seen = ""

    def said() -> bool:
        nonlocal seen
        seen += capsys.readouterr().err
        return "Loading: begun\n" in seen

    with progress("Loading", 2048):
        until(said, "a line is there")
