"""Devices that are measured, and sessions that do not do what they should."""

import math
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from edge import engine_session, survey
from edge.demo import MODEL_PATH
from edge.engine_session import EngineSession
from edge.errors import WorkerError
from edge.fleet import MAX_WORKERS, Fleet
from edge.local_session import LocalSession
from edge.place import place
from edge.remote_session import RemoteSession
from quant.gguf_file import GgufFile
from tests.deployments import ONE_THREAD, own_folders
from tests.helpers import until
from tests.links import start
from tests.workers import SECRET, Worker, worker
from transport import edge_pb2 as pb
from transport.errors import LinkClosed, LinkTimeout


@pytest.fixture(autouse=True, scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        own_folders(patch, tmp_path_factory.mktemp("own"))
        yield


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    folder = tmp_path_factory.mktemp("w")
    with ExitStack() as stack:
        yield [stack.enter_context(worker(folder / name, "--name", name, *ONE_THREAD)) for name in ("one", "two")]


def measured(two: list[Worker], fleet: Fleet) -> survey.Survey:
    return survey.survey(fleet, [one.address for one in two], GgufFile.open(MODEL_PATH), "0" * 64, threads=1)


def idle(two: list[Worker]) -> None:
    until(lambda: not any(one.children() for one in two), "the end of the sessions", 10)
    until(lambda: not any(t.name.startswith("survey") for t in threading.enumerate()), "the end of threads", 10)


def test_as_many_devices_as_there_can_be() -> None:
    world_size = MAX_WORKERS + 1
    for rank in range(world_size):
        load = survey._load(rank, world_size, "0" * 64, Path("x"))
        assert not place(rank, load.stages).last


def test_a_session_that_cannot_start_leaves_no_other(two: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(RemoteSession):
        def __init__(self, worker: Any, rank: int, *args: Any) -> None:
            if rank == 1:
                until(lambda: bool(two[1].children()), "the other session")
                raise WorkerError("one: not today")
            super().__init__(worker, rank, *args)

    monkeypatch.setattr(survey, "RemoteSession", Failing)
    with Fleet([one.address for one in two]) as fleet:
        with pytest.raises(WorkerError, match="not today"):
            measured(two, fleet)
        idle(two)  # though the fleet is still there


def test_an_error_does_not_wait_for_a_device_that_hangs(two: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    true = survey._timed

    def timed(session: EngineSession, *args: Any) -> survey.Speed:
        if session.rank == 0:
            time.sleep(0.2)
            raise WorkerError("local: not today")
        os.kill(session.pid, signal.SIGSTOP)
        return true(session, *args)

    monkeypatch.setattr(survey, "_timed", timed)
    with Fleet([one.address for one in two]) as fleet:
        began = time.monotonic()
        with pytest.raises(WorkerError, match="not today"):
            measured(two, fleet)
        assert time.monotonic() - began < 30
        idle(two)


@pytest.mark.parametrize(
    ("kind", "trip"), [("x", 1.0), ("", 1.0), ("tcp", math.nan), ("tcp", -1.0), ("grpc", math.inf), ("tcp", 1e9)]
)
def test_round_trips_that_cannot_be(kind: str, trip: float) -> None:
    state = pb.LinkState(rank=1, kind=kind, tcp_round_trip_s=trip, grpc_round_trip_s=trip)
    with pytest.raises(WorkerError, match=r"fake says of its links what cannot be"):
        survey._trip(Fake(), state)
    assert survey._trip(Fake(), pb.LinkState(rank=1, kind="tcp", tcp_round_trip_s=2e-4)) == pytest.approx(2e-4)


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
    monkeypatch.setattr(engine_session, "WHOLE_TIMEOUT_S", 0.3)
    session = Fake()

    class Endless(queue.SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> pb.Event:
            time.sleep(0.01)
            return pb.Event(loading=pb.Loading(fraction=0.5))

    session._events = Endless()
    with pytest.raises(LinkTimeout, match=r"fake did not do what it was asked within 0\.3 s"):
        session.ask(pb.Command(load=pb.Load()))
    assert session.closed
    with pytest.raises(LinkTimeout):
        session.tell(pb.Command())


def test_who_waits_for_a_session_of_this_device_hears_its_end() -> None:
    session = LocalSession("here", 1, SECRET, None, 1)
    done = start(session.answer)
    session.close()
    assert isinstance(done.exception(10), LinkClosed)
