"""Test a survey's record of busy and quiet moments, and the time that each device has."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from devices.remembered import KEPT_AGE_S
from edge.models.demo import MODEL_PATH
from edge.profiling import survey as module
from edge.profiling.layer_times import LayerTimes, Probes, cuts_to_time, timed
from edge.profiling.survey import MARGIN, OWN_PART, Devices, DeviceTiming, survey
from edge.tasks import CancelScope
from partition.model.file import ModelFile
from partition.predict.speeds import Links, LinkSpeed
from tests.support.clock import Clock
from tests.support.deployments import own_folders
from tests.support.helpers import TIMEOUT_S
from transport import edge_pb2 as pb


@dataclass(frozen=True)
class Times:
    seconds: float
    busy: bool = False
    estimate: bool = False


ESTIMATE = Times(9.0, estimate=True)


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

    def time(self, session: Any, on_step: Any, most_s: float) -> Times:
        self.timed.append(session.rank)
        self.most_s.append(most_s)
        on_step()
        return self.moments[session.rank].pop(0)

    def so_far(self, rank: int) -> Times:
        return ESTIMATE

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
    assert surveyed([ESTIMATE])[0] == [DeviceTiming(ESTIMATE)]
    assert surveyed([QUIET])[0] == [DeviceTiming(QUIET)]
    assert surveyed([ESTIMATE], fresh=True)[0] == [DeviceTiming(QUIET)]


@pytest.mark.parametrize("seconds", [20.0, math.inf])
def test_each_device_has_a_part_of_the_time(clock: Clock, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 7.0))
    for hosts, part in (("a", "a", "a"), 0.5), (("a", "b", "c"), 1.0):  # workers of one machine wait for each other
        profiler = Profiler({rank: [QUIET] for rank in range(3)}, keys=("own", "a", "b"))
        built = devices(2, hosts)
        with CancelScope() as closing:
            survey(built, profiler, closing, seconds=seconds, fresh=True)
        own_s, *others_s = profiler.most_s
        assert own_s == OWN_PART * seconds
        rest_s = seconds if seconds == math.inf else (1 - MARGIN) * seconds
        assert others_s == [pytest.approx(part * rest_s), pytest.approx(rest_s)]


@pytest.mark.parametrize("slow", ["start", "links", "own", "worker"])
def test_a_survey_ends_when_its_time_is_over(clock: Clock, monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    """A part of the survey takes longer than all of its time. The rest has figures or estimates."""
    waits: list[float] = []
    release, stuck = threading.Event(), threading.Event()

    def stop(*_: object) -> None:
        clock.now += 100.0
        stuck.set()
        assert release.wait(TIMEOUT_S)

    def waiting(futures: Any, timeout: float) -> None:
        waits.append(timeout)
        assert stuck.wait(TIMEOUT_S)

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(module, "wait", waiting)
    profiler = Profiler({0: [QUIET], 1: [QUIET]})
    if slow == "start":
        monkeypatch.setattr(module, "connect_all", stop)
    elif slow == "links":
        monkeypatch.setattr(module, "measure_links", lambda *_, **__: stop())
    else:
        rank = int(slow == "worker")
        timed = profiler.time
        monkeypatch.setattr(profiler, "time", lambda s, *rest: stop() if s.rank == rank else timed(s, *rest))
    estimated = Links({("local", "worker:1"): LinkSpeed(1e-3, 1e6, estimate=True)})
    began_s = clock.now
    with CancelScope() as closing:
        closing.then(release.set)
        timings, links = survey(devices(1), profiler, closing, seconds=5.0, estimate_links=lambda: estimated)
    assert waits == [5.0 - (began_s - 1e9)]
    measured = [QUIET] if slow == "worker" else []
    assert [timing.times for timing in timings] == [*measured, *[ESTIMATE] * (2 - len(measured))]
    assert links == (estimated if slow in ("start", "links") else Links())


def test_one_row_corrects_the_estimate_if_time_is_short() -> None:
    """The other steps of the first slice would take longer than the time that is left."""
    commands: list[tuple[int, ...]] = []
    clock = Clock()

    def ask(command: pb.Command) -> pb.Event:
        if command.HasField("load"):
            clock.now += 0.5
            return pb.Event(loaded=pb.Loaded(memory_bytes=1 << 30))
        rows = tuple(command.time.rows)
        commands.append(rows)
        clock.now += sum(rows) * 0.1
        steps = len(rows) + bool(command.time.depth)
        return pb.Event(timed=pb.Timed(step_s=[0.1] * steps, busy=[False] * steps))

    session: Any = SimpleNamespace(ask=ask, rank=0, device="pi", unload=lambda: None)
    with CancelScope() as scope:
        file = ModelFile.open(MODEL_PATH)
        cuts, n = cuts_to_time(file)
        slices, so_far, steps = Probes(file, "0" * 64, cuts, scope), list[LayerTimes](), list[None]()
        times = timed(
            session, slices, n, lambda: steps.append(None), most_s=5.0, on_times=so_far.append, clock=lambda: clock.now
        )
        assert (commands, list(times.steps), times.steps["layers"].points) == ([(1,)], ["layers"], ((1, 0.1),))
        assert so_far[-1] == times
        assert len(steps) == len(cuts)
        assert [*slices._created] == ["layers"]  # slices that are not timed are not created
        commands.clear()
        times = timed(session, slices, n, lambda: None, most_s=50.0, clock=lambda: clock.now)
    assert commands[:2] == [(1,), slices["layers"].rows]
    assert "head" in times.steps
