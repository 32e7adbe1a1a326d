"""Test engine processes: cleanup after a failed start, the receivers of Ctrl-C, and a process that does not end."""

import errno
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from edge.worker import process
from edge.worker.limits import ResourceLimits
from edge.worker.process import RankProcess


def start() -> RankProcess:
    return RankProcess("127.0.0.1", None, ResourceLimits(1), "s")


@pytest.mark.parametrize("call", ["socket.socketpair", "os.pipe", "subprocess.Popen"])
def test_what_does_not_start_leaves_nothing(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(f"edge.worker.process.{call}", fail)
    with pytest.raises(OSError, match="Too many open files"):
        start()
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_control_c_does_not_reach_a_process_that_was_not_forked() -> None:
    child = start()
    try:
        assert os.getsid(child.pid) == child.pid
    finally:
        child.stop()
        child._link.close()


def test_a_process_that_does_not_die_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits for a disk, where SIGKILL does nothing for now."""
    monkeypatch.setattr(process, "EXIT_S", 0.0625)
    child = start()
    running: Any = child._process
    waited: list[float] = []

    def still_there(timeout: float | None = None) -> int:
        assert timeout is not None, "it is waited for without end"
        waited.append(timeout)
        raise subprocess.TimeoutExpired("a process", timeout)

    try:
        monkeypatch.setattr(running, "kill", lambda: None)
        monkeypatch.setattr(running, "poll", lambda: None)
        monkeypatch.setattr(running, "wait", still_there)
        event = child.died()
        assert event is not None
        assert event.died.reason == "the engine process was killed, and did not end within 10 s"
        assert waited == [0.0625, process.KILL_S]
        assert not child.folder.exists()
    finally:
        monkeypatch.undo()
        child.stop()
        child._link.close()
