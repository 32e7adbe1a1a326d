"""Test background work that fails, and the progress of several parts."""

import threading

import pytest

from edge.tasks import AggregateProgress, Repeated
from tests.support.links import WAIT_S


def test_work_goes_on_after_errors(caplog: pytest.LogCaptureFixture) -> None:
    runs, enough = [0], threading.Event()

    def work() -> None:
        runs[0] += 1
        if runs[0] == 5:
            enough.set()
        elif runs[0] == 4:
            raise ValueError("another one")
        elif runs[0] < 4:
            raise OSError(24, "Too many open files")

    with caplog.at_level("WARNING"), Repeated(work, 0.0, "members"):
        assert enough.wait(WAIT_S)
    assert [record.message for record in caplog.records] == [
        'background-work-failed work=members why="OSError: [Errno 24] Too many open files"',
        'background-work-failed work=members why="ValueError: another one"',
    ]


def test_progress_names_the_oldest_unfinished_part() -> None:
    seen: list[tuple[float, float | None, str]] = []

    def show(n: float, total: float | None = None, what: str = "") -> None:
        seen.append((n, total, what))

    total = AggregateProgress(show, 100, lambda: None)
    with total.part(60, "sending") as sent:
        sent(30, 60)
        with total.part(40, "loading") as loaded:
            loaded(40, 40)
    with total.part(0, "linking"):
        pass
    with pytest.raises(OSError, match="lost"), total.part(0, "starting"):
        raise OSError("lost")
    assert seen == [
        (0, 100, "sending"), (30, 100, "sending"), (30, 100, "sending"), (70, 100, "sending"), (70, 100, "sending"),
        (100, 100, ""), (100, 100, "linking"), (100, 100, ""), (100, 100, "starting"),
    ]  # fmt: skip
    with total.part(0, "ending"):
        assert seen[-1][2] == "ending"  # the failed part is not shown any more
