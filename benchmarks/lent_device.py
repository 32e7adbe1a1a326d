"""A worker process as a device: a real `edge worker` on one core, with a limited share of that core.

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from benchmarks.harness import EDGE, ROOT
from tests.support.groups import CountedGroup

_START_S = 30.0  # until a worker listens
_END_S = 15.0  # until it has ended by itself
_LIBC = ctypes.CDLL(None)  # looked up here: a child that was only forked should not
_PR_SET_PDEATHSIG = 1


def cpu_group() -> CountedGroup:
    """A control group for processor time, half a core at first. A context: it ends with it. NoGroups where this user,
    or this machine, has none to give."""
    return CountedGroup(f"edge-bench-{os.getpid()}", cores=0.5)


class Worker:
    """A real `edge worker` that keeps its slices in `folder`. It can be killed, and started again where it was."""

    def __init__(
        self, folder: Path, listen: str = "127.0.0.1:0", threads: int | None = 1, more: Sequence[str] = ()
    ) -> None:
        """threads: that it lends; None: all. more: arguments."""
        self._folder, self._log = folder, folder / "log"
        lends = ("--threads", str(threads)) if threads else ()
        self._command = [*EDGE, "worker", "--listen", listen, *lends, *more]
        self.process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        """Start it; it listens some time later."""
        own = {f"XDG_{kind.upper()}_HOME": str(self._folder / kind) for kind in ("config", "cache", "state")}
        with self._log.open("wb") as out:
            self.process = subprocess.Popen(
                self._command, cwd=ROOT, env={**os.environ, **own}, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True, preexec_fn=end_with_parent,
            )  # fmt: skip

    def wait(self) -> str:
        """Where it listens, as soon as it does. SystemExit where it does not."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self.process is not None and self.process.poll() is None:
            for line in self._log.read_text(errors="replace").splitlines():
                if " listening " in line:
                    return next(word for word in line.split() if word.startswith("address=")).removeprefix("address=")
            time.sleep(0.02)
        raise SystemExit(f"the worker does not listen; it said: {self._log.read_text(errors='replace')[-500:]}")

    def end(self) -> None:
        """Ask it to end; kill it where it does not."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill it and all that it started, with SIGKILL."""
        if self.process is None:
            return
        with suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.process.pid)
            for process in (own, *own.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()
        self.process = None


@contextmanager
def worker(
    folder: Path, group: CountedGroup | None = None, listen: str = "127.0.0.1:0", threads: int | None = 1
) -> Iterator[tuple[str, int]]:
    """(address, process id) of a worker, for the time of a block; in a group, where one is given."""
    first = Worker(folder, listen, threads)
    first.start()
    assert first.process is not None
    try:
        if group is not None:
            group.add(first.process.pid)
        yield first.wait(), first.process.pid
    finally:
        first.end()


def pin(pid: int, core: int) -> None:
    """Keep a process and its threads to one core. What it starts from now on stays there, too."""
    for thread in psutil.Process(pid).threads():
        if sys.platform == "linux":
            with suppress(ProcessLookupError):  # that thread has just ended
                os.sched_setaffinity(thread.id, {core})


def busy(seconds: float) -> float:
    """Return how many cores all that this process started keeps busy, on the average of so many seconds."""
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
