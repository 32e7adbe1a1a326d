"""Test a survey's record of busy and quiet moments, and the time that each device has."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from devices.remembered import KEPT_AGE_S
from edge.profiling import survey as module
from edge.profiling.survey import OWN_PART, Devices, DeviceTiming, survey
from edge.tasks import CancelScope
from partition.predict.speeds import Links
from tests.support.clock import Clock
from tests.support.deployments import own_folders


@dataclass(frozen=True)
class Times:
    seconds: float
    busy: bool = False
    estimate: bool = False


@dataclass
class Profiler:
    """Gives known times, one after the other, by rank."""

    moments: dict[int, list[Times]]
    cache: str = "made-up"
    keys: tuple[str, ...] = ("own", "worker")
    steps: int = 1
    streams: bool = False
    timed: list[int] = field(default_factory=list)  # ranks, in order
    most_s: list[float] = field(default_factory=list)  # time of each

    def send(self, worker: Any, check: Any) -> None:
        """There is nothing to send."""

    def time(self, session: Any, on_step: Any, most_s: float) -> Times:
        self.timed.append(session.rank)
        self.most_s.append(most_s)
        on_step()
        return self.moments[session.rank].pop(0)

    def to_json(self, used: Times) -> Any:
        return [used.seconds, used.busy]

    def read(self, rank: int, values: Any) -> Times | None:
        return Times(*values)


class Session:
    """Session of a device that is not there."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def close(self) -> None:
        """There is nothing to close."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clock:
    """Its own folders, and no sessions."""
    import devices.remembered as remembered

    own_folders(monkeypatch, tmp_path)
    monkeypatch.setattr(module, "LocalSession", lambda *_, **__: Session(0))
    monkeypatch.setattr(module, "RemoteSession", lambda _, rank, *__, **___: Session(rank))
    monkeypatch.setattr(module, "connect_all", lambda *_: [])
    monkeypatch.setattr(module, "measure_links", lambda *_, **__: Links())
    clock = Clock().install(monkeypatch, remembered)
    clock.now = 1e9
    return clock


def devices(workers: int, hosts: tuple[str, ...] = ("a", "a")) -> Devices:
    built = Devices(None, 1)
    built.addresses = ("local", "worker:1", "worker:2")[: workers + 1]
    built.workers = [None, object(), object()][: workers + 1]  # type: ignore[assignment, list-item]
    built.profiles = [replace(built.profiles[0], host=host) for host in hosts[: workers + 1]]
    return built


def surveyed(
    own: list[Times], worker: list[Times] | None = None, *, fresh: bool = False
) -> tuple[list[DeviceTiming[Times]], list[int]]:
    """The figures, and the ranks that were measured, in order."""
    timing = Profiler({0: own, 1: worker or []})
    reported: list[tuple[float, float]] = []
    with CancelScope() as closing:
        result, _ = survey(
            devices(int(worker is not None)), timing, closing, fresh=fresh, on_step=lambda *step: reported.append(step)
        )
    assert [done for done, _ in reported] == list(range(1, len(reported) + 1))
    assert all(done <= total for done, total in reported)
    return result, timing.timed


SLOW, SLOWER, QUIET = Times(3.0, True), Times(4.0, True), Times(1.0)


def test_each_device_is_measured_once_even_if_it_is_busy(clock: Clock) -> None:
    [own, worker], order = surveyed([SLOW], [SLOW])
    assert order == [0, 1]
    assert (own, worker) == (DeviceTiming(SLOW), DeviceTiming(SLOW))
    assert surveyed([], [])[1] == []  # both are remembered


def test_a_busy_moment_counts_as_long_as_a_quiet_one(clock: Clock) -> None:
    surveyed([SLOW])
    clock.now += KEPT_AGE_S - 1
    assert surveyed([])[0] == [DeviceTiming(SLOW, KEPT_AGE_S - 1)]
    clock.now += 2
    assert surveyed([QUIET])[0] == [DeviceTiming(QUIET)]


def test_a_busy_moment_does_not_replace_a_faster_one(clock: Clock) -> None:
    surveyed([QUIET])
    clock.now += 3600
    assert surveyed([SLOW], fresh=True)[0] == [DeviceTiming(QUIET, 3600)]
    assert surveyed([])[0] == [DeviceTiming(QUIET, 3600)]
    assert surveyed([Times(2.0)], fresh=True)[0] == [DeviceTiming(Times(2.0))]  # it has clocked down, say
    fast = Times(0.5, True)
    assert surveyed([fast], fresh=True)[0] == [DeviceTiming(fast)]  # busy, and faster all the same


def test_an_estimate_is_not_remembered(clock: Clock) -> None:
    estimate = Times(0.5, estimate=True)
    assert surveyed([estimate])[0] == [DeviceTiming(estimate)]
    assert surveyed([QUIET])[0] == [DeviceTiming(QUIET)]
    assert surveyed([estimate], fresh=True)[0] == [DeviceTiming(QUIET)]


@pytest.mark.parametrize("seconds", [0.0, 20.0, math.inf])
def test_each_device_has_a_part_of_the_time(clock: Clock, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 7.0))
    for hosts, part in (("a", "a", "a"), 0.5), (("a", "b", "c"), 1.0):  # workers of one machine wait for each other
        profiler = Profiler({rank: [QUIET] for rank in range(3)}, keys=("own", "a", "b"))
        built = devices(2, hosts)
        with CancelScope() as closing:
            survey(built, profiler, closing, seconds=seconds, fresh=True)
        own_s, *others_s = profiler.most_s
        assert own_s == OWN_PART * seconds
        assert others_s == [pytest.approx(part * seconds), pytest.approx(seconds)]
