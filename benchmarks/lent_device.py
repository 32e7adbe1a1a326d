"""A worker process as a device of its own: real `edge worker`, its core, and how much of that core it gets.

A CPU group of Linux's control groups lets a device have a part of a core: so much in every period, then nothing until
the next one begins.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from memory_group import remove_group

ROOT = Path(__file__).parent.parent
EDGE = [sys.executable, "-m", "apps.cli"]
_GROUPS = Path("/sys/fs/cgroup")
_START_S = 30.0  # until a worker listens
_END_S = 15.0  # until it has ended by itself
_LIBC = ctypes.CDLL(None)  # looked up here: a child that was only forked should not
_PR_SET_PDEATHSIG = 1


class NoGroups(Exception):
    """CPU groups cannot be made here."""


class CpuGroup:
    """A control group that limits processor time. `close()` removes it, once its processes have ended."""

    def __init__(self) -> None:
        """NoGroups where this user, or this machine, has none to give."""
        name = f"edge-bench-{os.getpid()}"
        self._new = (_GROUPS / "cgroup.controllers").exists()  # version 2: one tree for everything
        self.folder = (_GROUPS if self._new else _GROUPS / "cpu") / name
        try:
            self.folder.mkdir()
            if self._new and not (self.folder / "cpu.max").exists():
                (_GROUPS / "cgroup.subtree_control").write_text("+cpu")
            self.limit(0.5, 10_000)
        except OSError as error:
            self.close()
            raise NoGroups(f"a CPU group cannot be made in {self.folder.parent}: {error.strerror}") from error

    def add(self, pid: int) -> None:
        """A process, and all it will start."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def limit(self, cores: float, period_us: int) -> None:
        """Give all in the group together `cores` of processor time in every period."""
        quota_us = round(cores * period_us)
        if self._new:
            (self.folder / "cpu.max").write_text(f"{quota_us} {period_us}")
            return
        (self.folder / "cpu.cfs_quota_us").write_text("-1")  # or a longer period with the old quota may be refused
        (self.folder / "cpu.cfs_period_us").write_text(str(period_us))
        (self.folder / "cpu.cfs_quota_us").write_text(str(quota_us))

    def throttled(self) -> int:
        """Periods so far in which it wanted more than it got."""
        stat = dict(line.split() for line in (self.folder / "cpu.stat").read_text().splitlines())
        return int(stat.get("nr_throttled", 0))

    def close(self) -> None:
        """Remove it. What still runs in it is killed."""
        remove_group(self.folder)


@contextmanager
def cpu_group() -> Iterator[CpuGroup]:
    """A group for the time of a block."""
    group = CpuGroup()
    try:
        yield group
    finally:
        group.close()


@contextmanager
def worker(folder: Path, group: CpuGroup | None = None) -> Iterator[tuple[str, int]]:
    """(address, process id) of a worker that lends one thread and keeps its slices in `folder`."""
    folder.mkdir(parents=True)
    env = {**os.environ, **{f"XDG_{kind.upper()}_HOME": str(folder / kind) for kind in ("config", "cache", "state")}}
    log = folder / "log"
    command = [*EDGE, "worker", "--listen", "127.0.0.1:0", "--threads", "1"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    try:
        if group is not None:
            group.add(process.pid)
        yield _address(process, log), process.pid
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def pin(pid: int, core: int) -> None:
    """Keep a process and its threads to one core. What it starts from now on stays there, too."""
    for thread in psutil.Process(pid).threads():
        with suppress(ProcessLookupError):  # that thread has just ended
            os.sched_setaffinity(thread.id, {core})


def busy(seconds: float) -> float:
    """How many cores all that this process started keeps busy, on the average of so many seconds."""
    processes = psutil.Process().children(recursive=True)

    def spent() -> float:
        total = 0.0
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    before, began = spent(), time.perf_counter()
    time.sleep(seconds)
    return (spent() - before) / (time.perf_counter() - began)


def _end_with_parent() -> None:
    """For a child: Linux tells it to end when its parent is gone, however that ended."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where a worker listens, from its log."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text(errors="replace").splitlines():
            if " listening " in line:
                return next(word for word in line.split() if word.startswith("address=")).removeprefix("address=")
        time.sleep(0.02)
    raise SystemExit(f"the worker does not listen; it said: {log.read_text(errors='replace')[-500:]}")
