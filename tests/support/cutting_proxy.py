"""A TCP proxy that closes connections after a number of bytes, like a bad network."""

import contextlib
import socket
import threading
from collections.abc import Iterator

_BUFFER = 64 << 10  # small ones, so that few bytes are on their way at a break


class CuttingProxy:
    """Connections to `port` are passed on to `target`. `limits`: bytes to pass on towards it, a connection after the
    other; connections after these are not broken."""

    def __init__(self, target: tuple[str, int], limits: list[int]) -> None:
        self._target = target
        self._limits = list(limits)
        self.cuts = 0
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        """Take no more connections, and wait for the end of those there are."""
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket()
                server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
                try:
                    server.connect(self._target)
                except OSError:  # the worker is away
                    client.close()
                    server.close()
                    continue
                limit = self._limits.pop(0) if self._limits else None
                there = threading.Thread(target=self._pass, args=(client, server, limit))
                back = threading.Thread(target=self._pass, args=(server, client, None))
                closer = threading.Thread(target=_close, args=(there, back, client, server))
                for thread in (there, back, closer):
                    thread.start()
                self._threads += (closer,)

    def _pass(self, source: socket.socket, sink: socket.socket, limit: int | None) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(16 << 10):
                if limit is not None and passed + len(data) > limit:
                    sink.sendall(data[: limit - passed])
                    self.cuts += 1
                    break
                sink.sendall(data)
                passed += len(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _close(there: threading.Thread, back: threading.Thread, client: socket.socket, server: socket.socket) -> None:
    there.join()
    back.join()
    client.close()
    server.close()


@contextlib.contextmanager
def cutting_proxy(target: tuple[str, int], limits: list[int]) -> Iterator[CuttingProxy]:
    """A proxy, closed at the end. Its clients must be closed before."""
    proxy = CuttingProxy(target, limits)
    try:
        yield proxy
    finally:
        proxy.close()
