"""Fork server: a process that has imported the modules that workers need, and forks them. `forking` is its client.

    python -m devices.processes.fork_server DESCRIPTOR MODULE [IMPORTED ...]

It has one thread, so that a fork copies no held lock. It uses no GPU, because drivers do not survive a fork.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

from devices.processes.forking import MOST_BYTES, MOST_DESCRIPTORS, NUMBER


class _Server:
    """Forks a process on request, and reports its exit code.

    A request is arguments in JSON, with file descriptors. The first descriptor is a socket for the process id and then
    the exit code. The others are for the process.
    """

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._waits = selectors.DefaultSelector()
        self._channels: dict[int, socket.socket] = {}  # sockets for exit codes, by process id

    def serve(self) -> tuple[list[str], list[int]] | None:
        """Serve until all clients have hung up and all forked processes have ended.

        Returns None in the server, and the request in each forked process.
        """
        self._waits.register(self._requests, selectors.EVENT_READ)
        self._requests.send(NUMBER.pack(os.getpid()))
        while self._waits.get_map():
            for key, _ in self._waits.select():
                if key.fileobj is not self._requests:
                    self._ended(key.fd, key.data)
                    continue
                request, descriptors, *_ = socket.recv_fds(self._requests, MOST_BYTES, MOST_DESCRIPTORS)
                if not request:
                    self._waits.unregister(self._requests)
                elif self._fork(*descriptors):
                    return json.loads(request), descriptors[1:]
        return None

    def _fork(self, reply: int, *descriptors: int) -> bool:
        """Fork. Return True in the forked process."""
        runs, held_end = os.pipe()  # the system closes the end held by the process when the process ends for any reason
        pid = os.fork()
        if not pid:
            watched = [key.fd for key in self._waits.get_map().values()]
            self._waits.close()
            for descriptor in (runs, reply, *watched, *(sock.detach() for sock in self._channels.values())):
                os.close(descriptor)
            self._requests.detach()
            return True
        for descriptor in (held_end, *descriptors):
            os.close(descriptor)
        self._channels[pid] = socket.socket(fileno=reply)
        self._waits.register(runs, selectors.EVENT_READ, pid)
        self._tell(pid, pid)
        return False

    def _ended(self, runs: int, pid: int) -> None:
        self._waits.unregister(runs)
        os.close(runs)
        _, status = os.waitpid(pid, 0)
        self._tell(pid, os.waitstatus_to_exitcode(status))
        self._channels.pop(pid).close()

    def _tell(self, pid: int, number: int) -> None:
        with suppress(OSError):  # the client may have ended
            self._channels[pid].send(NUMBER.pack(number))


def main() -> None:
    """Run the server, and then each process that it forks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client handles Ctrl-C
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # service managers send these to all processes of a service
        signal.signal(number, signal.SIG_IGN)
    _, descriptor, *names = sys.argv
    module, *_ = map(importlib.import_module, names)
    gc.collect()
    serve(socket.socket(fileno=int(descriptor)), module.run_forked)


def serve(requests: socket.socket, run_forked: Callable[[list[str], list[int]], None]) -> None:
    """Fork until all clients have hung up. Each forked process runs `run_forked(arguments, descriptors)`."""
    gc.freeze()  # a collection would write to pages that forked processes share
    request = _Server(requests).serve()
    if request is not None:
        run_forked(*request)


if __name__ == "__main__":
    main()
