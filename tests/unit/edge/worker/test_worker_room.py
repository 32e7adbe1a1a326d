"""Memory of a worker that is divided among sessions: what each is granted, and what is free again afterwards."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge.errors import NotEnoughMemory
from edge.slices.store import SliceStore
from edge.worker import sessions as worker_sessions
from edge.worker.limits import ResourceLimits
from edge.worker.sessions import Session, Sessions

MIB = 1 << 20


class NoLinks:
    """A count of links that nobody takes."""


@pytest.fixture
def sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sessions:
    """Those of a worker that lends 400 MiB and whose daemon takes 76."""
    monkeypatch.setattr(worker_sessions, "own_rss", lambda: 52 * MIB)
    monkeypatch.setattr(worker_sessions, "rss", lambda pid: 70 * MIB)
    store = SliceStore(tmp_path / "slices", MIB)
    return Sessions(store, "127.0.0.1", None, ResourceLimits(1), 400 * MIB, 0)


def running(sessions: Sessions, name: str, memory_bytes: int) -> Session:
    """A session that was granted so much."""
    nobody: Any = SimpleNamespace(pid=1)
    opened: Any = None
    links: Any = NoLinks()
    session = Session(name, opened, nobody, links, "slice", memory_bytes)
    sessions._sessions[name] = session
    return session


def test_a_session_starts_where_the_others_leave_room(sessions: Sessions) -> None:
    sessions._check_room()
    running(sessions, "a", 200 * MIB)
    sessions._check_room()
    running(sessions, "b", 0)  # which has loaded nothing: it counts with what a process takes
    with pytest.raises(NotEnoughMemory) as refused:
        sessions._check_room()
    assert str(refused.value) == (
        "a session needs 96 MiB before it loads anything, and of this worker's 400 MiB 28 are left: its daemon takes"
        " 76, other sessions 296; start it with more --memory, or end a session"
    )


def test_what_a_session_unloads_is_free_for_others(sessions: Sessions) -> None:
    first = running(sessions, "a", 300 * MIB)
    with pytest.raises(NotEnoughMemory):
        sessions._check_room()
    sessions._release(first)
    assert (first.slice, first.memory_bytes, first.held_bytes) == ("", 0, 96 * MIB)
    sessions._check_room()


def test_a_turn_to_load_ends_once(sessions: Sessions) -> None:
    first = running(sessions, "a", 0)
    assert sessions._turn.acquire(blocking=False)
    first.has_turn = True
    sessions._release(first)
    assert sessions._turn.acquire(blocking=False)
    sessions._release(first)  # of another session now
    assert not sessions._turn.acquire(blocking=False)
