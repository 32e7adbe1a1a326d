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


class Asked:
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
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


def test_second_timeout_in_a_row_is_a_loss(asked: Asked) -> None:
    timeout = LinkTimeout("no answer")
    for _ in range(2):  # an answer between two timeouts
        assert asked.ask(None) == LOOK_S
        assert asked.ask(timeout) == 0.0
        assert (asked.sight.answers, asked.sight.timeouts) == (True, 1)
    assert asked.ask(timeout) == AGAIN_S
    assert (asked.sight.answers, asked.sight.lost_at, asked.sight.why) == (False, asked.clock.now, "no answer")
    assert (asked.remotes, asked.worker.is_open) == ({}, False)
    assert asked.ask(timeout) == AGAIN_S  # a lost worker gets no second chance
    assert asked.ask(None) == LOOK_S
    assert (asked.sight.answers, asked.sight.lost_at, asked.sight.why, asked.sight.timeouts) == (True, None, "", 0)
    assert asked.answered == [(A, "pi")] * 2  # once for each connection


@pytest.mark.parametrize("error", [LinkClosed("it broke"), WorkerError("it broke"), OSError("it broke")])
def test_first_reason_and_time_of_a_loss_stay(asked: Asked, error: Exception) -> None:
    asked.ask(None)
    assert asked.ask(error) == AGAIN_S
    lost_at = asked.clock.now
    asked.worker.refuses = WorkerError("cannot connect")
    asked.clock.now += 100
    assert asked.ask() == AGAIN_S
    assert (asked.sight.lost_at, asked.sight.why, asked.sight.name) == (lost_at, "it broke", "pi")


def test_worker_that_never_answered_is_lost(asked: Asked) -> None:
    asked.worker.refuses = LinkTimeout("cannot connect")
    assert asked.ask() == AGAIN_S
    assert (asked.sight.name, asked.sight.profile, asked.sight.why) == ("", None, "cannot connect")
    assert asked.answered == []


def test_leaving_worker_is_lost_until_it_answers_again(asked: Asked) -> None:
    asked.ask(None)
    asked.worker.leaving = True
    assert asked.ask(None) == LOOK_S
    assert (asked.sight.answers, asked.sight.why) == (False, "is about to end")
    asked.ask(LinkTimeout("no answer"))
    assert asked.sight.why == "is about to end"
    asked.worker.leaving = False
    asked.ask(None)
    assert (asked.sight.answers, asked.sight.why) == (True, "")


def test_latency_is_half_of_the_best_recent_question(asked: Asked) -> None:
    for takes_s, expected in ((0.2, 0.1), (0.1, 0.05), (0.4, 0.0525), (0.08, 0.04)):
        asked.worker.takes_s = takes_s
        asked.ask(None)
        assert asked.sight.latency_s == pytest.approx(expected)


@pytest.mark.parametrize(("n_workers", "times"), [(1, 1.0), (4, 1.0), (5, 1.25), (8, 2.0)])
def test_many_workers_are_asked_less_often(asked: Asked, n_workers: int, times: float) -> None:
    assert asked.ask(n_workers=n_workers) == pytest.approx(times * LOOK_S)


def test_slowness_is_read_again_after_some_seconds(asked: Asked) -> None:
    asked.worker.takes_s = 0.0
    asked.ask()
    asked.is_slow = True
    for seconds, is_slow in ((0.0, False), (module._SLOW_S - 1, False), (1.0, True)):
        asked.clock.now += seconds
        asked.ask()
        assert asked.sight.is_slow == is_slow


def test_watch_goes_on_for_some_seconds_after_the_last_poll(asked: Asked) -> None:
    asked.watch._looked_at = asked.clock.now
    asked.clock.now += LOOKED_S
    assert asked.watch._goes_on()
    asked.clock.now += 0.01
    assert not asked.watch._goes_on()


def test_watch_closes_connections_that_are_not_used_and_begins_again(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    def look_here() -> float:
        looks.append(0)
        asked.watch._put(LOCAL, Sight("this device", PROFILE))
        return OWN_S

    monkeypatch.setattr(asked.watch, "_look_here", look_here)
    worker, watch = asked.worker, asked.watch
    watch.look({A: True})
    thread = watch._thread
    assert thread is not None
    until(lambda: watch.look({A: True}).keys() == {LOCAL, A}, "the first answers")
    assert watch.look({}).keys() == {LOCAL}
    until(lambda: not worker.is_open, "the end of the connection")
    asked.clock.now += OWN_S
    watch.look({A: True})
    until(lambda: worker.is_open and len(looks) == 2, "the next questions")
    assert watch._thread is thread
    asked.clock.now += 2 * LOOKED_S
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
