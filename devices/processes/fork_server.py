"""The process that has imported what others need, and forks them (`forking` is its other side).

    python -m devices.processes.fork_server DESCRIPTOR MODULE [IMPORTED ...]

It has one thread, so a fork copies no lock that is held, and it has touched no GPU: drivers do not survive a fork.
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
    """Fork server: forks on request, and reports how each process ended.

    A request is arguments in JSON, with descriptors: where to tell the number of the process and then its exit code,
    and those that the process gets.
    """

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._waits = selectors.DefaultSelector()
        self._channels: dict[int, socket.socket] = {}  # sockets for exit codes, by process id

    def serve(self) -> tuple[list[str], list[int]] | None:
        """Serve until no client is left and all forked processes have ended. Returns the request in each forked
        process."""
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
        """Fork. Return whether this is the forked process."""
        runs, held_end = os.pipe()  # the end that the process holds is closed when it ends, however it does
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
        with suppress(OSError):  # the client may be gone
            self._channels[pid].send(NUMBER.pack(number))


def main() -> None:
    """The server, and then each process that it forked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever asks
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # service managers send them to all processes
        signal.signal(number, signal.SIG_IGN)
    _, descriptor, *names = sys.argv
    module, *_ = map(importlib.import_module, names)
    gc.collect()
    serve(socket.socket(fileno=int(descriptor)), module.run_forked)


def serve(requests: socket.socket, run_forked: Callable[[list[str], list[int]], None]) -> None:
    """Fork for who asks, until nobody can any more. Each process that was forked runs `run_forked(arguments,
    descriptors)`."""
    gc.freeze()  # a collection would write to pages that are shared with what is forked
    request = _Server(requests).serve()
    if request is not None:
        run_forked(*request)


if __name__ == "__main__":
    main()
