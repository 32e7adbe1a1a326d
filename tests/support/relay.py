"""A TCP relay whose connections break, and whose target is away, whenever a test wants that."""

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator


class Relay(socketserver.ThreadingTCPServer):
    """Passes connections on to `target`. Without a target, it closes each connection immediately."""

    daemon_threads = False
    allow_reuse_address = True

    def __init__(self, target: tuple[str, int] | None) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.target = target
        self.connections: set[socket.socket] = set()
        self.refused = 0  # connections that came while there was no target

    def cut(self) -> None:
        """Break all connections, and accept no more until there is a target again."""
        self.target = None
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Passing(socketserver.BaseRequestHandler):
    server: Relay

    def handle(self) -> None:
        if self.server.target is None:
            self.server.refused += 1
            return
        with socket.create_connection(self.server.target) as there:
            ends = {self.request, there}
            self.server.connections |= ends
            back = threading.Thread(target=_copy, args=(there, self.request))
            back.start()
            _copy(self.request, there)
            back.join()
            self.server.connections -= ends


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def relay(target: tuple[str, int]) -> Iterator[Relay]:
    with Relay(target) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            server.cut()
            thread.join()
