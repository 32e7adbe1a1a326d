"""Processes that start immediately, because they are forked from one that has imported their modules (`fork_server`).

The imports take half a second on a laptop and several seconds on a Raspberry Pi. The fork server does them once.
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

STARTS_S = 60.0  # time for the imports from a slow card
_END_S = 1.0  # time for a process to end after it has hung up
NUMBER = struct.Struct("<i")  # encodes a process id, and an exit code
MOST_BYTES = 1 << 17  # limit of a request's arguments
MOST_DESCRIPTORS = 8


def available() -> bool:
    """Return whether this system can fork workers: Linux 5.3 or newer. On macOS, forks break system libraries."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.close(os.pidfd_open(os.getpid()))
            return True
    return False


class ForkServer:
    """Client of a fork server, which is started at the first request, and again if it was killed."""

    def __init__(self, module: str, *imported: str, under: Sequence[str] = ()) -> None:
        """Prepare a client; the server starts later.

        module: module whose `run_forked(arguments, descriptors)` each forked process runs.
        imported: further modules to import at the start.
        under: command that runs the server, such as one that enters a network namespace.
        """
        self._modules = (module, *imported)
        self._under = under
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None  # socket to the running server, or None

    def prepare(self) -> None:
        """Start the server if needed, and wait for its imports. Raises ChildProcessError if it fails."""
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
                    # numpy's threads for matrix products would be lost in a fork.
                    env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                )
            if _receive(self._requests) is None:
                try:
                    self._process.wait(_END_S)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    raise ChildProcessError(
                        f"the fork server needs more than {STARTS_S:.0f} s for its imports, because the machine is"
                        " very busy; try again later"
                    ) from None
                raise ChildProcessError("the fork server ended while it started; its output says why")

    def start(self, arguments: Sequence[str], descriptors: Sequence[int]) -> ForkedProcess:
        """Fork a process with arguments and copies of file descriptors. Raises ChildProcessError, as `prepare` does."""
        self.prepare()
        ours, server_end = socket.socketpair()
        with server_end, self._lock, suppress(OSError):
            assert self._requests is not None
            socket.send_fds(self._requests, [json.dumps([*arguments]).encode()], [server_end.fileno(), *descriptors])
        pid = _receive(ours)
        if pid is None:
            ours.close()
            raise ChildProcessError("the fork server ended before it answered; try again")
        return ForkedProcess(pid, ours)

    def close(self) -> None:
        """End the server. Processes that it forked keep running."""
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
    """A process that the fork server forked, with the needed part of the interface of subprocess.Popen."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        """channel: socket on which the server sends the exit code."""
        self.pid = pid
        self.returncode: int | None = None
        self._channel = channel
        self._handle: int | None = None
        if sys.platform == "linux":
            with suppress(ProcessLookupError):  # the process has ended already
                self._handle = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process; return its exit code, or minus the number of the signal that ended it.

        If the server, which alone knows the code, was killed, the result is minus SIGKILL.

        Raises subprocess.TimeoutExpired if the process has not ended in time.
        """
        if self._handle is not None:
            ends = select.poll()  # unlike select, it works with descriptors above 1024
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
        """Return the exit code if the process has ended, else None."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal. Does nothing if the process has ended."""
        if self._handle is not None and sys.platform == "linux":
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        """Kill the process. Does nothing if it has ended."""
        self.send_signal(signal.SIGKILL)


def _receive(channel: socket.socket) -> int | None:
    """Return the server's next number, or None if it has ended or is silent for STARTS_S."""
    channel.settimeout(STARTS_S)
    try:
        data = channel.recv(NUMBER.size)
    except OSError:
        return None
    return int(NUMBER.unpack(data)[0]) if data else None
