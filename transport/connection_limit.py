"""Connection limits of a gRPC server: the maximum number of connections, and the connections that are closed first.

gRPC accepts connections by itself and reports none before its first call. So a thread polls this process's own sockets.
It closes connections over which no caller was admitted in time. If there are too many of these, it closes the oldest
one of the address with the most.
"""

from __future__ import annotations

import os
import resource
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from transport.errors import Refused

MOST = 1024  # limit of concurrent connections
LEAST = 8
RESERVE = 40  # descriptors for other uses: the daemon has 20, each session of an engine process 3
FIRST_CALL_S = 10.0  # time for a connection to make a call that is admitted
_LOOK_S = 0.25
_DESCRIPTORS = next((path for path in (Path("/proc/self/fd"), Path("/dev/fd")) if path.is_dir()), None)

Address = tuple[str, int]


@dataclass
class _Connection:
    since: float
    inode: int
    caller: str | None = None  # name of the admitted caller; None before the first is admitted


class ConnectionLimiter:
    """Limits the connections to one port. `watch` starts it. It never closes an owner's connection in use."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        """most: limit of the server's connections, its option max_allowed_incoming_connections."""
        self.most = most
        self.most_waiting = most // 4  # limit of connections without an admitted caller
        self.most_members = most // 2  # limit for all members together except the owner
        self.most_each = max(2, most // 8)  # limit for each of these members
        self._clock = clock
        self._connections: dict[Address, _Connection] = {}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._port = 0

    def watch(self, port: int) -> None:
        """Start the thread that watches the connections to `port`."""
        self._port = port
        threading.Thread(target=self._run, daemon=True, name="connection limiter").start()

    def close(self) -> None:
        """Stop watching."""
        self._over.set()

    def admitted(self, peer: str, caller: str, owner: bool) -> None:
        """Record that `caller` was admitted to a call over the connection of `peer`, an address in gRPC's form.

        Raises Refused if `caller` does not own the cluster and has reached the limit of connections for members.
        """
        address = _address(peer)
        with self._lock:
            connection = self._connections.setdefault(address, _Connection(self._clock(), 0))
            if connection.caller is not None:
                return
            counts = Counter(known.caller for known in self._connections.values() if known.caller)
            if not owner:
                if counts[caller] >= self.most_each:
                    raise Refused(f"{caller} has {counts[caller]} connections to this worker; close some")
                if counts.total() >= self.most_members:
                    raise Refused(f"this worker has {counts.total()} connections of members, which is its limit")
            connection.caller = "" if owner else caller

    def look(self, sockets: dict[Address, int]) -> list[Address]:
        """Record the current connections (inode by address); return the addresses of those to close."""
        now = self._clock()
        with self._lock:
            for address in self._connections.keys() - sockets.keys():
                del self._connections[address]
            for address, inode in sockets.items():
                connection = self._connections.setdefault(address, _Connection(now, inode))
                connection.inode = connection.inode or inode
                if connection.inode != inode:  # a new connection from the same port as the last
                    self._connections[address] = _Connection(now, inode)
            waiting = {a: known.since for a, known in self._connections.items() if known.caller is None}
            late = [address for address, since in waiting.items() if now - since > FIRST_CALL_S]
            for address in late:
                del waiting[address]
            while len(waiting) > self.most_waiting:
                ((host, _),) = Counter(address[0] for address in waiting).most_common(1)
                oldest = min((a for a in waiting if a[0] == host), key=waiting.__getitem__)
                del waiting[oldest]
                late.append(oldest)
            return late

    def _run(self) -> None:
        while not self._over.wait(_LOOK_S):
            with suppress(OSError):  # no descriptor is free now; the next look will find some
                sockets = {}
                for number in _sockets():
                    with _borrowed(number) as sock, suppress(OSError):  # the socket was closed meanwhile
                        if _is_connection(sock, self._port):
                            sockets[_plain(*sock.getpeername()[:2])] = os.fstat(number).st_ino
                closing = set(self.look(sockets))
                for number in _sockets() if closing else ():
                    # Shut a copy down: gRPC may close its own, and the number may then belong to another file.
                    with suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
                        if _is_connection(copy, self._port) and _plain(*copy.getpeername()[:2]) in closing:
                            copy.shutdown(socket.SHUT_RDWR)


def connections_allowed() -> int:
    """Raise this process's limit of open files to its maximum; return how many connections that leaves room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # macOS allows less than it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return MOST if soft == resource.RLIM_INFINITY else max(LEAST, min(MOST, soft - RESERVE))


def _sockets() -> Iterator[int]:
    """Yield the descriptors of this process's sockets."""
    for name in os.listdir(_DESCRIPTORS) if _DESCRIPTORS else ():
        with suppress(OSError):  # the descriptor with which the list was read
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                yield int(name)


@contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """Yield a socket for a descriptor, which stays open after the block."""
    sock = socket.socket(fileno=number)
    try:
        yield sock
    finally:
        sock.detach()


def _is_connection(sock: socket.socket, port: int) -> bool:
    """Return whether the socket is a connection accepted at this port."""
    internet = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
    return internet and sock.getsockname()[1] == port and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def _address(peer: str) -> Address:
    """Parse gRPC's "ipv4:127.0.0.1:4711" to ("127.0.0.1", 4711), "ipv6:%5B::1%5D:4711" to ("::1", 4711)."""
    host, _, port = unquote(peer.partition(":")[2]).rpartition(":")
    return _plain(host.strip("[]"), int(port) if port.isdigit() else 0)


def _plain(host: str, port: int) -> Address:
    return host.partition("%")[0].removeprefix("::ffff:"), port
