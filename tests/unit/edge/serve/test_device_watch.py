"""Test the watch of devices in sequences of answers, timeouts and losses, with a set clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from devices.profile import describe
from edge.errors import WorkerError
from edge.serve.devices import watch as module
from edge.serve.devices.watch import AGAIN_S, ANSWER_S, CONNECT_S, LOOK_S, LOOKED_S, OWN_S, DeviceWatch, Sight
from partition.plan.plan import LOCAL
from tests.support.clock import Clock
from tests.support.helpers import until
from transport.errors import LinkClosed, LinkTimeout

A = "10.0.0.1:7070"
PROFILE = describe("any")


class Worker:
    """A stand-in for a worker and for the connections to it. The test sets its answers."""

    def __init__(self, clock: Clock) -> None:
        self.name, self.secure, self.clock = "pi", True, clock
        self.errors: list[Exception | None] = []  # one for each of the next questions
        self.refuses: Exception | None = None  # raised instead of a connection
        self.leaving, self.takes_s = False, 0.2
        self.is_open = False
        self.log: list[str] = []

    def reach(self, address: str, *, insecure: bool, timeout_s: float) -> Worker:
        assert (address, timeout_s) == (A, CONNECT_S)
        self.log.append("insecure" if insecure else "secure")
        if self.refuses is not None:
            raise self.refuses
        self.is_open = True
        return self

    def describe(self, timeout_s: float) -> Any:
        assert self.is_open
        assert timeout_s == ANSWER_S
        self.clock.now += self.takes_s
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error
        return PROFILE, SimpleNamespace(leaving=self.leaving)

    def close(self) -> None:
        self.is_open = False


class Watched:
    """A watch of one worker. Each call of `ask` asks the worker once."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.clock.now = 1000.0
        self.worker = Worker(self.clock)
        self.watch = DeviceWatch(self.clock.monotonic)
        self.remotes: dict[str, Any] = {}
        self.answered: list[tuple[str, str]] = []
        self.is_slow = False
        patch.setattr(module, "reach", self.worker.reach)
        patch.setattr(module, "has_answered", lambda *names: self.answered.append(names))
        patch.setattr(module, "is_slow", lambda address: self.is_slow)

    def ask(self, *errors: Exception | None, n_workers: int = 1) -> float:
        """Ask once, with these errors of the worker's answers. Return the seconds until the next question."""
        self.worker.errors += errors
        return self.watch._look_at(A, False, self.remotes, n_workers)

    @property
    def sight(self) -> Sight:
        return self.watch._sights[A]


@pytest.fixture
def pi(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_second_timeout_in_a_row_is_a_loss(pi: Watched) -> None:
    timeout = LinkTimeout("no answer")
    for _ in range(2):  # an answer between two timeouts
        assert pi.ask(None) == LOOK_S
        assert pi.ask(timeout) == 0.0
        assert (pi.sight.answers, pi.sight.timeouts) == (True, 1)
    assert pi.ask(timeout) == AGAIN_S
    assert (pi.sight.answers, pi.sight.lost_at, pi.sight.why) == (False, pi.clock.now, "no answer")
    assert (pi.remotes, pi.worker.is_open) == ({}, False)
    assert pi.ask(timeout) == AGAIN_S  # a lost worker gets no second chance
    assert pi.ask(None) == LOOK_S
    assert (pi.sight.answers, pi.sight.lost_at, pi.sight.why, pi.sight.timeouts) == (True, None, "", 0)
    assert pi.answered == [(A, "pi")] * 2  # once for each connection


@pytest.mark.parametrize("error", [LinkClosed("it broke"), WorkerError("it broke"), OSError("it broke")])
def test_first_reason_and_time_of_a_loss_stay(pi: Watched, error: Exception) -> None:
    pi.ask(None)
    assert pi.ask(error) == AGAIN_S
    lost_at = pi.clock.now
    pi.worker.refuses = WorkerError("cannot connect")
    pi.clock.now += 100
    assert pi.ask() == AGAIN_S
    assert (pi.sight.lost_at, pi.sight.why, pi.sight.name) == (lost_at, "it broke", "pi")


def test_worker_that_never_answered_is_lost(pi: Watched) -> None:
    pi.worker.refuses = LinkTimeout("cannot connect")
    assert pi.ask() == AGAIN_S
    assert (pi.sight.name, pi.sight.profile, pi.sight.why) == ("", None, "cannot connect")
    assert pi.answered == []


def test_leaving_worker_is_lost_until_it_answers_again(pi: Watched) -> None:
    pi.ask(None)
    pi.worker.leaving = True
    assert pi.ask(None) == LOOK_S
    assert (pi.sight.answers, pi.sight.why) == (False, "is about to end")
    pi.ask(LinkTimeout("no answer"))
    assert pi.sight.why == "is about to end"
    pi.worker.leaving = False
    pi.ask(None)
    assert (pi.sight.answers, pi.sight.why) == (True, "")


def test_latency_is_half_of_the_best_recent_question(pi: Watched) -> None:
    for takes_s, expected in ((0.2, 0.1), (0.1, 0.05), (0.4, 0.0525), (0.08, 0.04)):
        pi.worker.takes_s = takes_s
        pi.ask(None)
        assert pi.sight.latency_s == pytest.approx(expected)


@pytest.mark.parametrize(("n_workers", "times"), [(1, 1.0), (4, 1.0), (5, 1.25), (8, 2.0)])
def test_many_workers_are_asked_less_often(pi: Watched, n_workers: int, times: float) -> None:
    assert pi.ask(n_workers=n_workers) == pytest.approx(times * LOOK_S)


def test_slowness_is_read_again_after_some_seconds(pi: Watched) -> None:
    pi.worker.takes_s = 0.0
    pi.ask()
    pi.is_slow = True
    for seconds, is_slow in ((0.0, False), (module._SLOW_S - 1, False), (1.0, True)):
        pi.clock.now += seconds
        pi.ask()
        assert pi.sight.is_slow == is_slow


def test_watch_goes_on_for_some_seconds_after_the_last_poll(pi: Watched) -> None:
    pi.watch._looked_at = pi.clock.now
    pi.clock.now += LOOKED_S
    assert pi.watch._goes_on()
    pi.clock.now += 0.01
    assert not pi.watch._goes_on()


def test_watch_closes_connections_that_are_not_used_and_begins_again(
    pi: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    def look_here() -> float:
        looks.append(0)
        pi.watch._put(LOCAL, Sight("this device", PROFILE))
        return OWN_S

    monkeypatch.setattr(pi.watch, "_look_here", look_here)
    worker, watch = pi.worker, pi.watch
    watch.look({A: True})
    thread = watch._thread
    assert thread is not None
    until(lambda: watch.look({A: True}).keys() == {LOCAL, A}, "the first answers")
    assert watch.look({}).keys() == {LOCAL}
    until(lambda: not worker.is_open, "the end of the connection")
    pi.clock.now += OWN_S
    watch.look({A: True})
    until(lambda: worker.is_open and len(looks) == 2, "the next questions")
    assert watch._thread is thread
    pi.clock.now += 2 * LOOKED_S
    thread.join(60)
    assert not thread.is_alive()
    assert not worker.is_open
    watch.look({A: True})
    until(lambda: worker.is_open, "a question of the next thread")
    thread = watch._thread
    assert thread is not None
    watch.close()
    thread.join(60)
    assert not worker.is_open
    watch.look({A: True})
    assert watch._thread is None
    assert worker.log == ["insecure"] * 3
