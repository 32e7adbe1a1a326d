"""Test the end of a worker: the signals, and how long it continues to serve."""

import signal

import pytest

from edge.worker import daemon
from edge.worker.daemon import _EndSignal, _leave
from edge.worker.sessions import Sessions


class Busy(Sessions):
    """Sessions that somebody uses for so many looks."""

    def __init__(self, checks: int) -> None:
        self.checks, self.seen, self.left = checks, 0, False

    @property
    def in_use(self) -> int:
        self.seen += 1
        assert self.seen <= self.checks + 1, "nobody uses it any more"
        return int(self.seen <= self.checks)

    def leave(self) -> None:
        self.left = True


@pytest.mark.parametrize(
    ("signals", "at_once"),
    [
        ([signal.SIGTERM], False),
        ([signal.SIGTERM, signal.SIGTERM], True),
        ([signal.SIGTERM, signal.SIGINT], True),
        ([signal.SIGINT], True),
    ],
)
def test_a_second_word_or_control_c_ends_it_at_once(signals: list[int], at_once: bool) -> None:
    signal_ = _EndSignal()
    assert not signal_.to_end
    for number in signals:
        signal_(number, None)
    assert signal_.to_end
    assert signal_.at_once == at_once


def test_a_signal_ends_a_wait() -> None:
    signal_ = _EndSignal()
    signal_(signal.SIGTERM, None)
    signal_.wait(1e6)  # or the test would not end


def test_it_stays_while_it_is_used_and_no_longer() -> None:
    first = Busy(5)
    _leave(first, _EndSignal(), poll_s=0)
    assert first.left
    assert first.seen == 6


@pytest.mark.parametrize("limit", ["time", "word"])
def test_it_does_not_stay_for_ever(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    signal_ = _EndSignal()
    if limit == "time":
        monkeypatch.setattr(daemon, "LEAVE_S", 0.0)
    else:
        signal_(signal.SIGINT, None)
    first = Busy(1000)
    _leave(first, signal_, poll_s=0)
    assert first.left
    assert first.seen < 1000
