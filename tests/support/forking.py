"""Processes of `edge` that are forks of one that has imported its modules already.

To start Python and import what a worker or an engine needs takes half a second of CPU, and the tests start hundreds of
them. With EDGE_THOROUGH=1, and where it is not Linux, each is started in the ordinary way: see helpers.begin.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import IO, Any

from tests.support import ROOT
from tests.support.thorough import THOROUGH

CAN_FORK = sys.platform == "linux" and not THOROUGH
_MOST_BYTES = 1 << 20  # of an environment and arguments
_STARTS_S = 60.0


class Forked:
    """A running `edge`; of subprocess.Popen what tests need."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], streams: Sequence[IO[Any]], forks: Forks) -> None:
        """args: after the name of the command. streams: standard input, output and error."""
        self.args = ["edge", *args]
        self.returncode: int | None = None
        read, write = os.pipe()
        self._status = os.fdopen(read, "rb", buffering=0)  # what was read shows no more that there is something
        try:
            message = json.dumps({"args": self.args, "env": dict(env)}).encode()
            forks.ask(message, [*(stream.fileno() for stream in streams), write])
        finally:
            os.close(write)
        self.pid = int(self._read(_STARTS_S))

    def _read(self, timeout_s: float | None) -> bytes:
        if not select.select([self._status], [], [], timeout_s)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout_s or 0)
        line = self._status.readline()
        assert line, "the process that forks has ended"
        return line

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, or minus the signal that ended it."""
        if self.returncode is None:
            self.returncode = int(self._read(timeout))
            self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        """The exit code of one that has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """To one that runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ended just now
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it whatever it does."""
        self.send_signal(signal.SIGKILL)


class Forks:
    """A process that forks."""

    def __init__(self, under: Sequence[str] = ()) -> None:
        """under: a command that runs it, such as one that enters a network namespace."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [*under, sys.executable, "-m", __name__, str(theirs.fileno())], pass_fds=[theirs.fileno()], cwd=ROOT
            )
        atexit.register(self.close)

    def ask(self, message: bytes, files: list[int]) -> None:
        """Let it fork."""
        with self._lock:
            socket.send_fds(self._socket, [message], files)

    def close(self) -> None:
        """End it, and not what it has forked."""
        atexit.unregister(self.close)
        self._socket.close()
        self._process.wait()


_here_lock = threading.Lock()


def forks_here() -> Forks:
    """The one of this process, which is started when it is first asked for."""
    with _here_lock:
        return _start_here()


@cache
def _start_here() -> Forks:
    return Forks()


def _import() -> None:
    """What commands and workers import."""
    import apps.cli
    from apps.options import quiet_grpc

    quiet_grpc()  # before it is imported, as commands do
    import edge.cluster.deployment
    import edge.llm.chat
    import edge.planning.deployed
    import edge.worker.daemon  # noqa: F401

    apps.cli.build_parser()
    gc.collect()
    gc.freeze()  # or each fork would look through it all at its end, and copy it


def _serve(control: socket.socket) -> None:
    """Fork until nobody asks any more. Returns in each fork, which is then the process that was asked for."""
    running: dict[int, int] = {}  # where the exit code of a process is written
    woken, wake = socket.socketpair()
    for end in (woken, wake):
        end.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            woken.recv(1 << 12)
        _reap(running)
        if control not in ready:
            continue
        message, files, _, _ = socket.recv_fds(control, _MOST_BYTES, 4)
        if not message:
            os._exit(0)
        *streams, status = files
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's threads; they stand still
            pid = os.fork()
        if pid == 0:
            for number in (status, *running.values()):
                os.close(number)
            for end in (control, woken, wake):
                end.close()
            _become(json.loads(message), streams)
            return
        for stream in streams:
            os.close(stream)
        running[pid] = status
        _tell(status, pid)


def _reap(running: dict[int, int]) -> None:
    with suppress(ChildProcessError):
        while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = running.pop(ended[0])
            _tell(status, os.waitstatus_to_exitcode(ended[1]))
            os.close(status)


def _tell(status: int, figure: int) -> None:
    with suppress(BrokenPipeError):  # nobody waits for it any more
        os.write(status, f"{figure}\n".encode())


def _become(asked: dict[str, Any], streams: list[int]) -> None:
    """Be as a process that has just been started."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.argv = asked["args"]
    os.environ.clear()
    os.environ.update(asked["env"])
    tempfile.tempdir = None
    time.tzset()


if __name__ == "__main__":
    from apps import cli

    _import()
    _serve(socket.socket(fileno=int(sys.argv[1])))
    sys.exit(cli.main())
