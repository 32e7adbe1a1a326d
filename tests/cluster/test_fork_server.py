"""Test that engine processes forked from one that has imported everything behave like any others."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from devices.processes import forking
from devices.processes.forking import ForkServer
from edge.cluster.session import RemoteSession
from edge.errors import WorkerError
from edge.worker.limits import ResourceLimits
from edge.worker.process import RankProcess
from tests.support.helpers import TIMEOUT_S, heed_interrupts, stand_still, until
from tests.support.thorough import some
from tests.support.workers import SECRET, Worker, gone, worker
from transport import edge_pb2 as pb


@pytest.fixture(scope="module", name="one")
def a_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Started as people start it, so that its fork server is its own."""
    with worker(tmp_path_factory.mktemp("w"), preexec=heed_interrupts) as first:
        yield first


def open_files(pid: int) -> set[str]:
    """Return what its descriptors refer to, files left out."""
    links = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
    return {link for link in links if not link.startswith("/")}


def test_a_process_holds_nothing_of_the_server_or_of_other_sessions(one_worker: Worker) -> None:
    """Else what their owners have closed would stay open."""
    with (
        one_worker.remote() as remote,
        RemoteSession(remote, 0, 1, SECRET) as first,
        RemoteSession(remote, 0, 1, SECRET) as last,
    ):
        assert not open_files(last.pid) & open_files(first.pid)
        [end] = open_files(last.pid) & open_files(one_worker.fork_server().pid)
        assert end.startswith("pipe:")  # that it has ended is seen by this


def test_where_memory_is_limited_there_is_none(tmp_path: Path) -> None:
    own_group = ("--memory", "1GiB", "--gpu-layers", "0", "--threads", "1")
    with (
        worker(tmp_path, *own_group) as first,
        first.remote() as remote,
        RemoteSession(remote, 0, 1, SECRET) as session,
    ):
        alone = psutil.Process(session.pid)
        assert alone.ppid() == first.process.pid
        command = alone.cmdline()
        limits = ResourceLimits.from_text(command[command.index("--limits") + 1])
        assert limits == ResourceLimits(1, gpu_layers=0)


def test_engine_processes_go_on_where_it_was_killed(one_worker: Worker) -> None:
    """They end as they should, and the next has another server."""
    with one_worker.remote() as remote:
        with RemoteSession(remote, 0, 1, SECRET) as session:
            before = one_worker.fork_server()
            before.kill()
            until(lambda: gone(before.pid), "the end of the fork server")
            with RemoteSession(remote, 0, 1, SECRET) as other:
                assert psutil.Process(other.pid).ppid() == one_worker.fork_server().pid != before.pid
            session.tell(pb.Command(unload=pb.Unload()))
            assert session.answer().WhichOneof("event") == "unloaded"
        until(lambda: gone(session.pid), "the end of the engine process")


def test_a_kill_is_told_of_where_no_server_saw_it(one_worker: Worker) -> None:
    with one_worker.remote() as remote, RemoteSession(remote, 0, 1, SECRET) as session:
        one_worker.fork_server().kill()
        os.kill(session.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="was killed by SIGKILL"):
            session.answer()


def test_what_stands_still_is_ended_where_no_server_is_left(one_worker: Worker) -> None:
    with one_worker.remote() as remote, RemoteSession(remote, 0, 1, SECRET) as session:
        server = one_worker.fork_server()
        server.kill()
        until(
            lambda: gone(server.pid), "the end of the fork server"
        )  # a process that stops before it would be hung up on
        stand_still(session.pid)
    until(lambda: gone(session.pid), "the end of the engine process")


def test_a_key_of_the_terminal_ends_neither(one_worker: Worker) -> None:
    """Ctrl-C goes to all processes of a terminal; the daemon decides what it means."""
    with one_worker.remote() as remote, RemoteSession(remote, 0, 1, SECRET) as session:
        server = one_worker.fork_server().pid
        for pid in (server, session.pid):
            os.kill(pid, signal.SIGINT)
        session.tell(pb.Command(unload=pb.Unload()))
        assert session.answer().WhichOneof("event") == "unloaded"
        with RemoteSession(remote, 0, 1, SECRET) as other:
            assert psutil.Process(other.pid).ppid() == server


def test_signals_that_ask_for_memory_do_not_end_it() -> None:
    """Service managers send them to all processes of a worker."""
    server = ForkServer("edge.worker.rank")
    try:
        server.prepare()
        assert server._process is not None
        pid = server._process.pid
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            os.kill(pid, number)
        child = RankProcess("127.0.0.1", None, ResourceLimits(1), "signalled", server)
        try:
            assert psutil.Process(child.pid).ppid() == pid
        finally:
            child.ask_to_end()
            while child.receive() is not None:
                pass
            child.died()
    finally:
        server.close()


def test_a_server_that_cannot_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "module_command", lambda *_: [sys.executable, "-c", "raise SystemExit(1)"])
    server = ForkServer("json")
    with pytest.raises(ChildProcessError, match="its output says why"):
        server.prepare()
    server.close()


def test_a_server_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "STARTS_S", 0.01)
    monkeypatch.setattr(forking, "module_command", lambda *_: ["sleep", "600"])
    server = ForkServer("json")
    with pytest.raises(ChildProcessError, match="needs more than 0 s for its imports"):
        server.prepare()
    assert server._process is not None
    assert server._process.wait(60.0) == -signal.SIGKILL  # it is not left behind
    server.close()


def test_a_process_whose_daemon_goes_while_it_begins_leaves_nothing() -> None:
    """Its threads do not hinder each other in that: one takes links in the folder that another one removes."""
    server = ForkServer("edge.worker.rank")
    request = pb.Open(rank=0, world_size=1, secret=SECRET, connect_timeout_s=9, step_timeout_s=9, send_timeout_s=9)
    try:
        for _ in range(some(20, 200)):
            child = RankProcess("127.0.0.1", None, ResourceLimits(1), "begun", server)
            child.send(pb.Command(open=request))
            child.ask_to_end()
            assert child._process.wait(TIMEOUT_S) == 0
            assert not child.folder.exists()
            while child.receive() is not None:
                pass
            assert child.died() is None
    finally:
        server.close()
