"""Test links that the daemon relays to an engine process: they wait as long as the owner states."""

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge.models.slice_store import SliceStore
from edge.worker import sessions as worker_sessions
from edge.worker.limits import WorkerOptions
from edge.worker.sessions import Session, Sessions
from tests.support import memory_link
from tests.support.links import PATIENT, WAIT_S, start
from transport import edge_pb2 as pb
from transport.errors import LinkClosed, Refused
from transport.grpc_link import SESSION_KEY
from transport.link import Deadlines

OPEN = pb.Open(world_size=2, connect_timeout_s=1.0, step_timeout_s=280.0, send_timeout_s=0.0625)
CONTEXT: Any = SimpleNamespace(invocation_metadata=lambda: ((SESSION_KEY, "s"),), auth_context=dict)


@pytest.fixture
def door(tmp_path: Path) -> Iterator[socket.socket]:
    """Listener of an engine process that accepts nothing yet."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "door"))
        listener.listen(0)
        yield listener


@pytest.fixture
def sessions(tmp_path: Path) -> Sessions:
    """Those of a daemon with one session, whose process is not there."""
    sessions = Sessions(
        SliceStore(tmp_path / "slices", 1 << 20),
        WorkerOptions("w", "127.0.0.1", 1, 1 << 30, None, None),
    )
    child: Any = SimpleNamespace(door=tmp_path / "door", pid=1)
    links: Any = SimpleNamespace(acquire=lambda blocking: True, release=lambda: None)
    sessions._sessions["s"] = Session("s", OPEN, child, links)
    return sessions


def test_both_ends_of_a_relay_have_the_deadlines_of_the_session(sessions: Sessions, door: socket.socket) -> None:
    serve, _, deadlines = sessions.link(CONTEXT)
    assert deadlines == Deadlines(1.0, 280.0, 0.0625)
    here, outside = memory_link.pair(deadlines=PATIENT)
    for _ in range(8):  # more than the buffers of a socket hold
        here.send(bytes(1 << 20))
    relaying = start(serve, outside)
    process, _ = door.accept()  # it computes, and reads nothing
    with process:
        with pytest.raises(LinkClosed, match=r"the engine process took no more data for 0\.0625 s \(send_timeout_s\)"):
            here.receive()
        relaying.result(WAIT_S)


def test_a_process_that_accepts_no_link_is_not_waited_for_without_end(
    sessions: Sessions, door: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_sessions, "ACCEPT_S", 0.0625)
    serve, *_ = sessions.link(CONTEXT)
    here, outside = memory_link.pair(deadlines=PATIENT)
    with socket.socket(socket.AF_UNIX) as before:
        before.connect(door.getsockname())  # it fills the queue
        start(serve, outside).result(WAIT_S)
    with pytest.raises(Refused, match=r"takes no links: it accepted no link for 0\.0625 s"):
        here.receive()
