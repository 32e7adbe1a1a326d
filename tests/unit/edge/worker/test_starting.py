"""Test the start of sessions: outside of the lock, within their limit, not while the daemon ends; and failed loads."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge.models.slice_store import SliceStore
from edge.worker import sessions as worker_sessions
from edge.worker.limits import WorkerOptions
from edge.worker.sessions import Session, Sessions
from transport import edge_pb2 as pb
from transport.errors import Refused

OPEN = pb.Command(open=pb.Open(world_size=2))


class Child:
    """An engine process that starts at once."""

    pid, stopped = 1, False

    def __init__(self, *_: Any) -> None: ...

    def send(self, command: pb.Command) -> None: ...

    def stop(self) -> None:
        Child.stopped = True


@pytest.fixture
def sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sessions:
    """Those of a daemon that may run one, whose process is none."""
    monkeypatch.setattr(worker_sessions, "MAX_SESSIONS", 1)
    monkeypatch.setattr(Child, "stopped", False)
    return Sessions(
        SliceStore(tmp_path / "slices", 1 << 20),
        WorkerOptions("w", "127.0.0.1", 1, 1 << 40, None, None),
    )


def test_a_process_starts_without_the_lock_and_counts(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Child):
        def __init__(self, *_: Any) -> None:
            assert not sessions._lock.locked()
            assert sessions.states() == []
            with pytest.raises(Refused, match="runs 1 sessions already"):
                sessions._start(OPEN)

    monkeypatch.setattr(worker_sessions, "RankProcess", Slow)
    session = sessions._start(OPEN)
    assert [state.session for state in sessions.states()] == [session.name]


def test_a_start_that_fails_counts_no_more(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise OSError("Too many open files")

    monkeypatch.setattr(worker_sessions, "RankProcess", fail)
    with pytest.raises(OSError, match="Too many open files"):
        sessions._start(OPEN)
    assert sessions.memory is not None
    assert sessions.memory.figures() == {}
    monkeypatch.setattr(worker_sessions, "RankProcess", Child)
    sessions._start(OPEN)


@pytest.mark.parametrize("end", ["close", "leave"])
def test_a_process_that_starts_while_the_daemon_ends_is_ended(
    end: str, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(Child):
        def __init__(self, *_: Any) -> None:
            getattr(sessions, end)()

    monkeypatch.setattr(worker_sessions, "RankProcess", Late)
    with pytest.raises(Refused, match="about to end"):
        sessions._start(OPEN)
    assert Child.stopped
    assert sessions.states() == []


def test_a_load_without_its_adapter_leaves_no_slice_in_use(sessions: Sessions) -> None:
    """The cache may evict it while the session goes on."""
    store, digest = sessions._store, "a" * 64
    path = store.folder / f"{digest}.slice"
    path.write_bytes(b"slice")
    child, links = Child(), SimpleNamespace()
    session: Any = Session("s", OPEN.open, child, links)  # type: ignore[arg-type]
    session.pending.clear()

    def commands() -> Iterator[pb.Command]:
        yield pb.Command(load=pb.Load(slice=digest, adapters=["b" * 64]))
        store.remove(path)

    sessions._feed(session, commands())
    assert "slice bbbbbbbbbbbb is not in" in session.events.get().failed.message
    assert not path.exists()


def test_only_an_answer_ends_the_command_that_it_answers(sessions: Sessions) -> None:
    """Progress of a load and heartbeats come before the answer, and the worker stays in use."""
    child, links = Child(), SimpleNamespace()
    session: Any = Session("s", OPEN.open, child, links)  # type: ignore[arg-type]
    progress = [pb.Event(loading=pb.Loading()), pb.Event(alive=pb.Alive())]
    for event in progress:
        sessions._answer(session, event)
    assert list(session.pending) == ["open"]
    answers = [pb.Event(opened=pb.Opened()), pb.Event(loaded=pb.Loaded()), pb.Event(failed=pb.Failed())]
    session.pending.extend(("load", "run"))
    for n_left, answer in zip((2, 1, 0), answers, strict=True):
        for event in progress:
            sessions._answer(session, event)
            assert session.runs
        sessions._answer(session, answer)
        assert len(session.pending) == n_left
    assert not session.runs
    assert session.events.qsize() == 2 + 3 * 3
