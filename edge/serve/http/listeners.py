"""Listening sockets of the server, for all address families of its host."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import ExitStack

BACKLOG = 512  # connections waiting to be accepted
_TRIES = 20  # attempts to find a port that is free in both families
_NO_FAMILY = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT, errno.ENOPROTOOPT)
BOTH = {"::": ("::", "0.0.0.0"), "localhost": ("127.0.0.1", "::1")}  # resolvers may return only one family for these
_REMEDIES = {
    errno.EADDRINUSE: "give another port, or end the program that has this one",
    errno.EACCES: "give a port of 1024 or more",
}


def listeners(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen at all addresses of a host, at the same port.

    host: `::` means all addresses of this machine in both families. Families that the machine lacks are left out.
    port: 0 means any free port. Raises OSError if no address can be used, or another program uses one of them.
    """
    for tries_left in reversed(range(_TRIES)):
        try:
            return _listening(_addresses(host), port)
        except OSError as error:
            if port == 0 and error.errno == errno.EADDRINUSE and tries_left:
                continue  # the port is free in one family but not in the other
            why = os.strerror(error.errno) if error.errno in _REMEDIES else error.strerror or str(error)
            remedy = f"; {_REMEDIES[error.errno]}" if error.errno in _REMEDIES else ""
            raise OSError(f"cannot listen on {host}:{port}: {why}{remedy}") from error
    raise AssertionError("the last try returns or raises")


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """Return the family and the numeric form of each address of a host."""
    names = BOTH.get(host.lower().rstrip("."), (host,))
    numeric = [
        (info[0], str(info[4][0]))
        for name in names
        for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        if info[0] in (socket.AF_INET, socket.AF_INET6)
    ]
    return list(dict.fromkeys(numeric))


def _listening(addresses: list[tuple[socket.AddressFamily, str]], port: int) -> list[socket.socket]:
    missing: OSError | None = None
    with ExitStack() as opened:
        sockets: list[socket.socket] = []
        for family, address in addresses:
            try:
                listener = socket.create_server((address, port), family=family, backlog=BACKLOG)
            except OSError as error:
                if error.errno not in _NO_FAMILY:
                    raise
                missing = error
                continue
            sockets.append(opened.enter_context(listener))
            port = listener.getsockname()[1]
        if not sockets:
            raise missing or OSError("it has no address")
        opened.pop_all()
    return sockets
