"""Engine processes that start at once: they are forked from one that has imported all they need.

Imports take half a second of a laptop's processor and several of a Raspberry Pi's, for every session and every
recovery. The fork server does them once. It has one thread, so a fork copies no lock that is held, and it has touched
no GPU, whose drivers do not survive a fork.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from contextlib import ExitStack, suppress
from typing import IO, Any, NoReturn

from devices.interpreter import module_command
from edge.errors import EdgeError

AVAILABLE = sys.platform == "linux"  # elsewhere, libraries of the system break in a process that was forked
STARTS_S = 60.0  # for the imports, on a slow card
_IMPORTED = ("edge.worker.rank", "edge.worker.load")
_MOST_BYTES = 1 << 16  # of a request
_NUMBER = struct.Struct("<i")
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


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
            with theirs, os.fdopen(writes, "wb"):
                self.ask({"arguments": arguments}, [theirs.fileno(), control, writes])
            pid = _receive(ours)
            if pid is None:
                raise EdgeError("the process that starts engine processes was ended meanwhile; open the session again")
            undo.pop_all()
        return ForkedProcess(self, pid, ours, stderr)

    def ask(self, request: dict[str, Any], descriptors: list[int]) -> None:
        """Send a request, unless there is nobody to hear it."""
        with self._lock, suppress(OSError):
            socket.send_fds(self._requests, [json.dumps(request).encode()], descriptors)

    def close(self) -> None:
        """End it, and what it forked."""
        with self._lock:
            self._requests.close()
            if self._process is not None:
                self._process.kill()
                self._process.wait()


class ForkedProcess:
    """A process that the server forked, with what is used of subprocess.Popen."""

    def __init__(self, server: ForkServer, pid: int, says: socket.socket, stderr: IO[bytes]) -> None:
        """says: where the server will tell its exit code."""
        self.pid = pid
        self.stderr = stderr
        self.returncode: int | None = None
        self._server = server
        self._says = says

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, or minus the signal that ended it. subprocess.TimeoutExpired where it has not ended."""
        if self.returncode is None:
            if not select.select([self._says], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("engine process", timeout or 0.0)
            with self._says:
                code = _receive(self._says)
            self.returncode = -signal.SIGKILL if code is None else code  # it does not outlive the server
        return self.returncode

    def kill(self) -> None:
        """End it; nothing where it has ended."""
        self._server.ask({"kill": self.pid}, [])


def _receive(channel: socket.socket) -> int | None:
    """The server's next number; None where it has ended, or says nothing for STARTS_S."""
    channel.settimeout(STARTS_S)
    try:
        said = channel.recv(_NUMBER.size)
    except OSError:
        return None
    return int(_NUMBER.unpack(said)[0]) if said else None


class _Server:
    """Forks for whoever asks, and tells how each process ended."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._waits = selectors.DefaultSelector()
        self._told: dict[int, socket.socket] = {}  # where to tell the exit code of a process, by its number

    def serve(self) -> None:
        """Until nobody can ask any more, and all that was forked has ended."""
        self._waits.register(self._requests, selectors.EVENT_READ)
        self._requests.send(_NUMBER.pack(os.getpid()))
        while self._waits.get_map():
            for key, _ in self._waits.select():
                if key.fileobj is self._requests:
                    self._answer(*socket.recv_fds(self._requests, _MOST_BYTES, 3)[:2])
                else:
                    self._ended(key.fd, key.data)

    def _answer(self, message: bytes, descriptors: list[int]) -> None:
        if not message:
            self._waits.unregister(self._requests)
            return
        request = json.loads(message)
        if "arguments" in request:
            self._fork(request["arguments"], *descriptors)
        elif request["kill"] in self._told:  # else it has ended, and its number may be another's
            os.kill(request["kill"], signal.SIGKILL)

    def _fork(self, arguments: list[str], told: int, control: int, stderr: int) -> None:
        runs, held = os.pipe()  # the end that the process holds is closed when it ends, however it does
        pid = os.fork()
        if not pid:
            watched = (key.fd for key in self._waits.get_map().values())
            for descriptor in (runs, told, *watched, *(one.fileno() for one in self._told.values())):
                os.close(descriptor)
            self._waits.close()
            os.dup2(stderr, 2)
            os.close(stderr)
            _run_rank([*arguments, "--control", str(control)])
        for descriptor in (held, control, stderr):
            os.close(descriptor)
        self._told[pid] = socket.socket(fileno=told)
        self._waits.register(runs, selectors.EVENT_READ, pid)
        self._told[pid].send(_NUMBER.pack(pid))

    def _ended(self, runs: int, pid: int) -> None:
        self._waits.unregister(runs)
        os.close(runs)
        _, status = os.waitpid(pid, 0)
        with self._told.pop(pid) as told, suppress(OSError):  # nobody may want to know
            told.send(_NUMBER.pack(os.waitstatus_to_exitcode(status)))


def _run_rank(arguments: list[str]) -> NoReturn:
    """Be an engine process. Nothing of the server's runs after it."""
    from edge.worker import rank

    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    code: Any = 1
    try:
        rank.main(arguments)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """The server."""
    for module in _IMPORTED:
        importlib.import_module(module)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the daemon
    gc.collect()
    gc.freeze()  # a collection would write to pages that are shared with what is forked
    _Server(socket.socket(fileno=int(sys.argv[1]))).serve()


if __name__ == "__main__":
    main()
