"""The process that imports all an engine process needs, and forks one for each session (`forking` is its other side).

It has one thread, so a fork copies no lock that is held, and it has touched no GPU: drivers do not survive a fork.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn

from edge.worker import load, rank  # noqa: F401  what is forked will want to load
from edge.worker.forking import NUMBER

_MOST_BYTES = 1 << 16  # of a request


class _Server:
    """Forks for whoever asks, and tells how each process ended.

    A request is the arguments in JSON, with three descriptors: where to tell the number of the process and then its
    exit code, and what the process gets for its commands and for what it says.
    """

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._waits = selectors.DefaultSelector()
        self._told: dict[int, socket.socket] = {}  # where to tell of a process, by its number

    def serve(self) -> None:
        """Until nobody can ask any more, and all that was forked has ended."""
        self._waits.register(self._requests, selectors.EVENT_READ)
        self._requests.send(NUMBER.pack(os.getpid()))
        while self._waits.get_map():
            for key, _ in self._waits.select():
                if key.fileobj is not self._requests:
                    self._ended(key.fd, key.data)
                    continue
                request, descriptors, *_ = socket.recv_fds(self._requests, _MOST_BYTES, 3)
                if request:
                    self._fork(json.loads(request), *descriptors)
                else:
                    self._waits.unregister(self._requests)

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
        self._tell(pid, pid)

    def _ended(self, runs: int, pid: int) -> None:
        self._waits.unregister(runs)
        os.close(runs)
        _, status = os.waitpid(pid, 0)
        self._tell(pid, os.waitstatus_to_exitcode(status))
        self._told.pop(pid).close()

    def _tell(self, pid: int, number: int) -> None:
        with suppress(OSError):  # nobody may want to know any more
            self._told[pid].send(NUMBER.pack(number))


def _run_rank(arguments: list[str]) -> NoReturn:
    """Be an engine process. Nothing of the server's runs after it."""
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


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the daemon
    gc.collect()
    gc.freeze()  # a collection would write to pages that are shared with what is forked
    _Server(socket.socket(fileno=int(sys.argv[1]))).serve()
