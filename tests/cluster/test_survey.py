"""Test the measurement of devices, and sessions that misbehave."""

import math
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from devices.remembered import KEPT_AGE_S, Remembered
from edge.cluster import session as engine_session
from edge.cluster.fleet import Fleet
from edge.cluster.session import EngineSession, LocalSession, RemoteSession
from edge.errors import WorkerError
from edge.models.demo import MODEL_PATH
from edge.profiling import links, llm_survey, survey
from edge.profiling.layer_times import LayerTimes, Probes, cuts_to_time
from edge.profiling.profile import shared_hosts
from edge.profiling.survey import host_locks, host_of, own_profile
from partition.model.file import ModelFile
from partition.plan.plan import LOCAL
from partition.predict.hosts import Host
from partition.predict.speeds import Curve, DeviceSpeed
from tests.support.deployments import own_folders, survey_is_over
from tests.support.helpers import TIMEOUT_S, stand_still, until
from tests.support.links import start
from tests.support.planning import device
from tests.support.workers import SECRET, Worker
from transport import edge_pb2 as pb
from transport.errors import LinkClosed, LinkTimeout

pytestmark = pytest.mark.usefixtures("measured_briefly")

TIMES = LayerTimes(1, {name: Curve(((1, 1e-3),)) for name in ("layers", "more", "head")}, 0.0, 1, None)


@pytest.fixture(autouse=True, scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        own_folders(patch, tmp_path_factory.mktemp("own"))
        yield


def measured(two: list[Worker], fleet: Fleet) -> survey.Survey[DeviceSpeed]:
    return llm_survey.llm_survey(fleet, ModelFile.open(MODEL_PATH), "0" * 64, threads={LOCAL: 1})


def test_what_is_measured_is_remembered_for_a_month(two: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[float] = []

    def few(*args: Any) -> dict[str, Any]:
        return {name: replace(probe, rows=(1, 64)) for name, probe in Probes(*args).items()}

    def few_cuts(*args: Any) -> tuple[dict[str, Any], int]:
        cuts, n = cuts_to_time(*args)
        return {name: cuts[name] for name in ("layers", "chunk", "head")}, n

    monkeypatch.setattr(llm_survey, "Probes", few)
    monkeypatch.setattr(llm_survey, "cuts_to_time", few_cuts)  # the others are timed in tests of commands

    def again(fresh: bool = False) -> survey.Survey[DeviceSpeed]:
        steps.clear()
        file = ModelFile.open(MODEL_PATH)
        with Fleet([item.address for item in two]) as fleet:
            return llm_survey.llm_survey(
                fleet,
                file,
                "0" * 64,
                threads={LOCAL: 1},
                fresh=fresh,
                on_step=lambda n, total: steps.append(total),
            )

    first = again(fresh=True)
    assert len(steps) == steps[-1] == 3 * 3 + 3  # three slices on each device, three links
    assert [speed.device for speed in first.speeds] == [LOCAL, *(item.address for item in two)]
    for speed in first.speeds:
        # That more rows take longer, a load may hide; test_figures_of_ranks.py has known times of slices.
        assert [rows for rows, _ in speed.layer_s.points] == [1, 64, 256]
        assert all(0 < seconds < 10 for _, seconds in speed.layer_s.points)
        assert speed.prompt_token_s is not None
        assert 0 <= speed.prompt_token_s <= speed.token_s
        assert speed.memory_bytes > speed.runtime_bytes > 0
        assert speed.age_s == 0
    assert {*first.links.between} == {*permutations([LOCAL, *(item.address for item in two)], 2)}
    for item in two:  # which make slices of zeros by themselves
        assert "slice-cut" in item.log()
        assert "slice-received" not in item.log()
    second = again()
    assert steps[-1] == 3
    assert [speed.layer_s for speed in second.speeds] == [speed.layer_s for speed in first.speeds]
    assert all(0 < speed.age_s < 600 for speed in second.speeds)
    # From here on what would be measured is what was: it takes long.
    timed: list[int] = []
    monkeypatch.setattr(llm_survey, "timed", lambda session, *_, **__: timed.append(session.rank) or TIMES)
    third = again(fresh=True)
    assert sorted(timed) == [0, 1, 2]
    assert {speed.host for speed in third.speeds} == {host_of(own_profile("this", 1))}  # all lend one thread of it
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + KEPT_AGE_S + 1)
    again()
    assert sorted(timed) == [0, 0, 1, 1, 2, 2]


def test_a_session_that_cannot_start_leaves_no_other(two: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(RemoteSession):
        def __init__(self, worker: Any, rank: int, *args: Any, **how: Any) -> None:
            if rank == 1:
                until(lambda: bool(two[1].children()), "the other session")
                raise WorkerError("one: not today")
            super().__init__(worker, rank, *args, **how)

    monkeypatch.setattr(survey, "RemoteSession", Failing)
    with Fleet([item.address for item in two]) as fleet:
        with pytest.raises(WorkerError, match="not today"):
            measured(two, fleet)
        survey_is_over(two)  # though the fleet is still there


def test_devices_of_one_machine_take_turns_to_be_timed() -> None:
    first = own_profile("one", 1)
    turn = host_locks(
        [
            first,
            replace(first, name="two"),
            replace(first, host="x"),
            replace(first, host=None),
            replace(first, host=None),
        ]
    )
    with turn[0]:
        assert [lock.locked() for lock in turn] == [True, True, False, False, False]
    with turn[3]:
        assert [lock.locked() for lock in turn] == [False, False, False, True, False]


def test_a_machine_that_is_shared_is_named() -> None:
    pi, quota = Host("pi", 4, 3), Host("lab", 0.5, 1)
    speeds = [device(), device("b", host=pi), device("c", host=pi), device("d", host=quota)]
    assert shared_hosts(speeds) == ["b and c are one machine with fewer cores than threads: its cores are counted once"]
    assert shared_hosts(speeds[:2]) == []
    (three,) = shared_hosts([*speeds, device("e", host=pi)])
    assert three.startswith("b, c and e are one machine")


def test_threads_and_cores_are_those_that_the_device_lends() -> None:
    profile = replace(own_profile("one", 3), host="x", cores_physical=8, cpu_quota=None)
    assert host_of(profile) == Host("x", 8, 3)
    assert host_of(profile, 2) == Host("x", 8, 2)
    assert host_of(replace(profile, cpu_quota=1.5)) == Host("x", 1.5, 3)
    assert host_of(replace(profile, host=None)) is None


def test_an_error_does_not_wait_for_a_device_that_hangs(two: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    true, stopped = llm_survey.timed, threading.Event()  # type: ignore[attr-defined]

    def timed(session: EngineSession, *args: Any, **options: Any) -> LayerTimes:
        if session.rank == 0:
            return TIMES
        if session.rank == 1:
            assert stopped.wait(TIMEOUT_S)
            raise WorkerError("one: not today")
        if session.rank == 2:
            stand_still(session.pid)
            stopped.set()
        return true(session, *args, **options)

    monkeypatch.setattr(llm_survey, "timed", timed)
    monkeypatch.setattr(Remembered, "get", lambda *_: None)
    with Fleet([item.address for item in two]) as fleet:
        fleet.profiles = {address: replace(profile, host=address) for address, profile in fleet.profiles.items()}
        with pytest.raises(WorkerError, match="not today"):
            measured(two, fleet)
        survey_is_over(two)


@pytest.mark.parametrize(
    ("kind", "trip"), [("x", 1.0), ("", 1.0), ("tcp", math.nan), ("tcp", -1.0), ("grpc", math.inf), ("tcp", 1e9)]
)
def test_round_trips_that_cannot_be(kind: str, trip: float) -> None:
    state = pb.LinkState(rank=1, kind=kind, round_trip_s=trip)
    with pytest.raises(WorkerError, match=r"fake returned invalid link states"):
        links._trip(Fake(), state)
    assert links._trip(Fake(), pb.LinkState(rank=1, kind="tcp", round_trip_s=2e-4)) == pytest.approx(2e-4)


class Fake(EngineSession):
    """A session whose events the test makes."""

    def __init__(self) -> None:
        super().__init__("fake", 1)
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def _send(self, command: pb.Command) -> None:
        pass


def test_signs_of_life_do_not_go_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_session, "WHOLE_TIMEOUT_S", 0.01)
    session = Fake()

    class Endless(queue.SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> pb.Event:
            return pb.Event(loading=pb.Loading(fraction=0.5))

    session._events = Endless()
    with pytest.raises(LinkTimeout, match=r"fake did not finish the command within 0\.01 s"):
        session.ask(pb.Command(load=pb.Load()))
    assert session.closed
    with pytest.raises(LinkTimeout):
        session.tell(pb.Command())


def test_who_waits_for_a_session_of_this_device_hears_its_end() -> None:
    session = LocalSession("here", 1, SECRET, None, 1)
    done = start(session.answer)
    session.close()
    assert isinstance(done.exception(TIMEOUT_S), LinkClosed)
