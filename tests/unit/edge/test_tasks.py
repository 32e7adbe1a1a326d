"""Test that background work continues after an error, and that repeated errors are logged once."""

import threading

import pytest

from edge.tasks import Repeated
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
