"""A worker process as a device of its own: real `edge worker`, its core, and how much of that core it gets.

A control group of Linux lets a device have a part of a core: so much in every period, then nothing until the next one
begins.
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

sys.path.insert(0, str(Path(__file__).parent.parent))  # for the test suite's groups

from tests.support.groups import CountedGroup

ROOT = Path(__file__).parent.parent
EDGE = [sys.executable, "-m", "apps.cli"]
_START_S = 30.0  # until a worker listens
_END_S = 15.0  # until it has ended by itself
_LIBC = ctypes.CDLL(None)  # looked up here: a child that was only forked should not
_PR_SET_PDEATHSIG = 1


def cpu_group() -> CountedGroup:
    """A control group for processor time, half a core at first. A context: it ends with it. NoGroups where this user,
    or this machine, has none to give."""
    return CountedGroup(f"edge-bench-{os.getpid()}", cores=0.5)


@contextmanager
def worker(folder: Path, group: CountedGroup | None = None, listen: str = "127.0.0.1:0") -> Iterator[tuple[str, int]]:
    """(address, process id) of a worker that lends one thread and keeps its slices in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, **{f"XDG_{kind.upper()}_HOME": str(folder / kind) for kind in ("config", "cache", "state")}}
    log = folder / "log"
    command = [*EDGE, "worker", "--listen", listen, "--threads", "1"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=end_with_parent,
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


def end_with_parent() -> None:
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
