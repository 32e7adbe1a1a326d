"""The fork server of a forked worker: it is forked as well, so that nothing is imported again."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

from devices.processes.fork_server import serve
from devices.processes.forking import NUMBER, STARTS_S, ForkServer
from tests.support.forked_children import close_all_but

NAME = "fork server"  # of the process: its command line is that of all that is forked for tests


def fork_its_server() -> None:
    """Fork it from this process, which has no threads yet, and let the worker that this process becomes ask it. Where
    it is killed, the worker starts another one as people's workers do."""
    from edge.worker import rank, sessions

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
        ours.detach()
        _be_alone(theirs)
        serve(theirs, rank.run_forked)
        os._exit(0)
    theirs.close()
    ours.settimeout(STARTS_S)
    ours.recv(NUMBER.size)  # it is ready

    class Forked(ForkServer):
        """The process that is there already, at first."""

        def prepare(self) -> None:
            with self._lock:
                if self._process is None:
                    self._process, self._requests = _Process(pid), ours  # type: ignore[assignment]
            super().prepare()

    sessions.ForkServer = Forked  # type: ignore[attr-defined]


def _be_alone(requests: socket.socket) -> None:
    """Have nothing of the worker but its output, as a process that it starts."""
    Path("/proc/self/comm").write_text(NAME)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    close_all_but(requests.fileno())
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)


class _Process:
    """The part of subprocess.Popen that a fork server's owner uses."""

    def __init__(self, pid: int) -> None:
        self.pid, self._ended = pid, False

    def poll(self) -> int | None:
        if not self._ended:
            self._ended = os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        return 0 if self._ended else None

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        if not self._ended:
            os.waitpid(self.pid, 0)
            self._ended = True
