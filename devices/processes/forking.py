"""Processes that start at once: they are forked from one that has imported all they need (`fork_server`).

Imports take half a second of a laptop's processor and several of a Raspberry Pi's. The fork server does them once.
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
from collections.abc import Sequence
from contextlib import suppress

from devices.processes.interpreter import module_command

STARTS_S = 60.0  # for the imports, on a slow card
_END_S = 1.0  # for a process that has hung up to be gone
NUMBER = struct.Struct("<i")  # encodes a process id, and an exit code
MOST_BYTES = 1 << 17  # limit of a request's arguments
MOST_DESCRIPTORS = 8


def available() -> bool:
    """Return whether this system can fork workers: Linux 5.3. On macOS, system libraries break in forked processes."""
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


class ForkServer:
    """Client of a fork server, which is started at the first request, and again if it was killed."""

    def __init__(self, module: str, *imported: str, under: Sequence[str] = ()) -> None:
        """module: whose `run_forked(arguments, descriptors)` each process runs; imported: beside it, at the start;
        under: a command that runs it, such as one that enters a network namespace."""
        self._modules = (module, *imported)
        self._under = under
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None  # to the server that runs, where one does

    def prepare(self) -> None:
        """Return when it has imported everything. ChildProcessError if it cannot."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            self._hang_up()
            self._requests, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with server_end:
                self._process = subprocess.Popen(
                    [
                        *self._under,
                        *module_command("devices.processes.fork_server", str(server_end.fileno()), *self._modules),
                    ],
                    pass_fds=[server_end.fileno()],
                    stdin=subprocess.DEVNULL,
                    # The threads with which numpy multiplies matrices would be lost in a fork.
                    env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                )
            if _receive(self._requests) is None:
                try:
                    self._process.wait(_END_S)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    raise ChildProcessError(
                        f"the process that is to start others needs more than {STARTS_S:.0f} s for its imports, as the"
                        " machine is very busy; try again when it is not"
                    ) from None
                raise ChildProcessError("the process that is to start others ended; what it said tells why")

    def start(self, arguments: Sequence[str], descriptors: Sequence[int]) -> ForkedProcess:
        """Fork a process with these arguments, and copies of these file descriptors. ChildProcessError as `prepare`."""
        self.prepare()
        ours, server_end = socket.socketpair()
        with server_end, self._lock, suppress(OSError):
            assert self._requests is not None
            socket.send_fds(self._requests, [json.dumps([*arguments]).encode()], [server_end.fileno(), *descriptors])
        pid = _receive(ours)
        if pid is None:
            ours.close()
            raise ChildProcessError("the process that starts others was ended meanwhile; try again")
        return ForkedProcess(pid, ours)

    def close(self) -> None:
        """End the server. Processes it forked keep running."""
        with self._lock:
            self._hang_up()
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def _hang_up(self) -> None:
        if self._requests is not None:
            self._requests.close()
            self._requests = None


class ForkedProcess:
    """A process that the server forked, with what is used of subprocess.Popen."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        """channel: where the server sends the exit code."""
        self.pid = pid
        self.returncode: int | None = None
        self._channel = channel
        self._handle: int | None = None
        with suppress(ProcessLookupError):  # it has ended already
            self._handle = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, or minus the signal that ended it: SIGKILL where the server, which alone knows, was killed.

        subprocess.TimeoutExpired where it has not ended.
        """
        if self._handle is not None:
            ends = select.poll()  # which takes descriptors above 1024, too
            ends.register(self._handle, select.POLLIN)
            if not ends.poll(None if timeout is None else 1e3 * timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            os.close(self._handle)
            self._handle = None
        if self.returncode is None:
            with self._channel:
                code = _receive(self._channel)
            self.returncode = -signal.SIGKILL if code is None else code
        return self.returncode

    def poll(self) -> int | None:
        """The exit code of one that has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal; does nothing if the process has ended."""
        if self._handle is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        """Kill the process; does nothing if it has ended."""
        self.send_signal(signal.SIGKILL)


def _receive(channel: socket.socket) -> int | None:
    """The server's next number; None if it has ended, or says nothing for STARTS_S."""
    channel.settimeout(STARTS_S)
    try:
        data = channel.recv(NUMBER.size)
    except OSError:
        return None
    return int(NUMBER.unpack(data)[0]) if data else None
