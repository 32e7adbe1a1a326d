"""Engine processes that start at once: they are forked from one that has imported all they need (`fork_server`).

Imports take half a second of a laptop's processor and several of a Raspberry Pi's, for every session and every
recovery. The fork server does them once.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from typing import IO

from devices.interpreter import module_command
from edge.errors import EdgeError

STARTS_S = 60.0  # for the imports, on a slow card
NUMBER = struct.Struct("<i")  # of a process, and its exit code


def available() -> bool:
    """Whether this system has what it takes: Linux 5.3. On macOS, libraries of the system break in forked processes."""
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


class ForkServer:
    """Starts when it is first asked for a process, and again where it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests = socket.socket()  # to the server that runs, where one does

    def prepare(self) -> None:
        """Return when it has imported everything. EdgeError where it cannot."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            self._requests.close()
            self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    module_command("edge.worker.fork_server", str(theirs.fileno())),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    # The threads with which numpy multiplies matrices would serve nobody here, and a fork loses them.
                    env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                )
            if _receive(self._requests) is None:
                raise EdgeError("engine processes need a process that starts them, and it ended; its log says why")

    def start(self, arguments: list[str], control: int) -> ForkedProcess:
        """An engine process with these arguments, and this descriptor for its commands. EdgeError as `prepare`."""
        self.prepare()
        ours, theirs = socket.socketpair()
        reads, writes = os.pipe()
        stderr = os.fdopen(reads, "rb")
        with ExitStack() as undo:
            undo.enter_context(stderr)
            undo.enter_context(ours)
            with theirs, os.fdopen(writes, "wb"), self._lock, suppress(OSError):
                request = json.dumps(arguments).encode()
                socket.send_fds(self._requests, [request], [theirs.fileno(), control, writes])
            pid = _receive(ours)
            if pid is None:
                raise EdgeError("the process that starts engine processes was ended meanwhile; open the session again")
            undo.pop_all()
        return ForkedProcess(pid, ours, stderr)

    def close(self) -> None:
        """End it. What it forked runs on."""
        with self._lock:
            self._requests.close()
            if self._process is not None:
                self._process.kill()
                self._process.wait()


class ForkedProcess:
    """A process that the server forked, with what is used of subprocess.Popen."""

    def __init__(self, pid: int, says: socket.socket, stderr: IO[bytes]) -> None:
        """says: where the server tells its exit code."""
        self.pid = pid
        self.stderr = stderr
        self.returncode: int | None = None
        self._says = says
        self._handle: int | None = None
        with suppress(ProcessLookupError):  # it has ended already
            self._handle = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, or minus the signal that ended it: SIGKILL where the server, which alone knows, was killed.

        subprocess.TimeoutExpired where it has not ended.
        """
        if self._handle is not None:
            if not select.select([self._handle], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("engine process", timeout or 0.0)
            os.close(self._handle)
            self._handle = None
        if self.returncode is None:
            with self._says:
                code = _receive(self._says)
            self.returncode = -signal.SIGKILL if code is None else code
        return self.returncode

    def kill(self) -> None:
        """End it; nothing where it has ended."""
        if self._handle is not None:
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)


def _receive(channel: socket.socket) -> int | None:
    """The server's next number; None where it has ended, or says nothing for STARTS_S."""
    channel.settimeout(STARTS_S)
    try:
        said = channel.recv(NUMBER.size)
    except OSError:
        return None
    return int(NUMBER.unpack(said)[0]) if said else None
