"""Test a survey's record of busy and quiet moments, and how often it measures this device."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from devices.remembered import BUSY_AGE_S, MAX_AGE_S, Remembered
from edge.profiling import survey as module
from edge.profiling.survey import OWN_TRIES, QUIET_AGE_S, Devices, DeviceTiming, survey
from edge.tasks import CancelScope
from partition.predict.speeds import Links
from tests.support.clock import Clock
from tests.support.deployments import own_folders


@dataclass(frozen=True)
class Times:
    seconds: float
    busy: bool = False


@dataclass
class Profiler:
    """Gives known times, one after the other, by rank."""

    moments: dict[int, list[Times]]
    cache: str = "made-up"
    keys: tuple[str, ...] = ("own", "worker")
    steps: int = 1
    streams: bool = False
    timed: list[int] = field(default_factory=list)  # ranks, in order

    def send(self, worker: Any, check: Any) -> None:
        """There is nothing to send."""

    def time(self, session: Any, on_step: Any) -> Times:
        self.timed.append(session.rank)
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


def devices(workers: int) -> Devices:
    built = Devices(None, 1)
    built.addresses = ("local", "worker:1")[: workers + 1]
    built.workers = [None, object()][: workers + 1]  # type: ignore[assignment, list-item]
    built.profiles = built.profiles * (workers + 1)
    return built


def surveyed(
    own: list[Times], worker: list[Times] | None = None, *, fresh: bool = False
) -> tuple[list[DeviceTiming[Times]], list[int]]:
    """The figures, and the ranks that were measured, in order."""
    timing = Profiler({0: own, 1: worker or []})
    reported: list[tuple[float, float]] = []
    with CancelScope() as closing:
        result, _ = survey(
            devices(worker is not None), timing, closing, fresh=fresh, on_step=lambda *step: reported.append(step)
        )
    assert [done for done, _ in reported] == list(range(1, len(reported) + 1))
    assert all(done <= total for done, total in reported)  # what is measured once more is no step
    return result, timing.timed


SLOW, SLOWER, QUIET = Times(3.0, True), Times(4.0, True), Times(1.0)


def test_this_device_is_measured_again_while_it_is_busy(clock: Clock) -> None:
    [own, worker], order = surveyed([SLOW, QUIET], [SLOW])
    assert order == [0, 1, 0]  # as far apart as can be
    assert own == DeviceTiming(QUIET, 0.0, 1.0)
    assert worker == DeviceTiming(SLOW, 0.0, None)
    assert surveyed([], [])[1] == []  # both are remembered


def test_tries_end_and_the_best_counts(clock: Clock) -> None:
    [own, _], order = surveyed([SLOW, *[SLOWER] * OWN_TRIES], [QUIET])
    assert order == [0, 1, *[0] * OWN_TRIES]
    assert own.times == SLOW
    assert own.quiet_s is None


def test_alone_there_is_nothing_to_compare(clock: Clock) -> None:
    [own], order = surveyed([SLOW])
    assert (own.times, order) == (SLOW, [0])


def test_a_busy_moment_is_soon_measured_again(clock: Clock) -> None:
    surveyed([SLOW])
    clock.now += BUSY_AGE_S - 1
    assert surveyed([])[0] == [DeviceTiming(SLOW, BUSY_AGE_S - 1, None)]
    clock.now += 2
    assert surveyed([SLOWER])[0] == [DeviceTiming(SLOW, 0.0, None)]
    clock.now += BUSY_AGE_S + 1
    assert surveyed([QUIET])[0] == [DeviceTiming(QUIET, 0.0, 1.0)]


def test_a_busy_moment_does_not_replace_a_quiet_one_of_the_day(clock: Clock) -> None:
    surveyed([QUIET])
    clock.now += 3600
    assert surveyed([SLOW], fresh=True)[0] == [DeviceTiming(QUIET, 3600, 1.0)]
    assert surveyed([])[0] == [DeviceTiming(QUIET, 3600, 1.0)]
    assert surveyed([Times(2.0)], fresh=True)[0] == [DeviceTiming(Times(2.0), 0.0, 2.0)]  # it has clocked down, say
    fast = Times(0.5, True)
    assert surveyed([fast], fresh=True)[0] == [DeviceTiming(fast, 0.0, 2.0)]  # busy, and faster all the same


def test_what_a_quiet_moment_gave_is_known_for_a_month(clock: Clock) -> None:
    surveyed([QUIET])
    clock.now += MAX_AGE_S + 1
    assert surveyed([SLOW])[0] == [DeviceTiming(SLOW, 0.0, 1.0)]
    clock.now += BUSY_AGE_S + 1
    clock.now += QUIET_AGE_S - MAX_AGE_S
    assert surveyed([SLOW])[0] == [DeviceTiming(SLOW, 0.0, None)]


@pytest.mark.parametrize("value", ["fast", None, -1.0, 0.0, True, [1.0]])
def test_what_else_is_in_the_file_is_no_quiet_moment(clock: Clock, value: Any) -> None:
    Remembered("quiet-made-up").put("own", value)
    assert json.dumps(value)
    assert surveyed([SLOW])[0][0].quiet_s is None
