"""Links of every kind on one machine, work in threads, and peers that send arbitrary bytes: for tests of transport/."""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import grpc

from devices.trust import credentials
from tests.support import memory_link
from tests.support.shaped_link import Nic, Shape, ShapedLink
from tests.support.trust import Cluster, shown
from transport import grpc_link, security
from transport.frame import Kind, check_of, pack_header
from transport.link import Deadlines, Link
from transport.relay import relay
from transport.tcp_link import TcpLink

WAIT_S = 60.0  # never reached: only against a hang
PATIENT = Deadlines(step_timeout_s=WAIT_S, send_timeout_s=WAIT_S)
STREAMS = ("tcp", "tls", "unix")  # a frame is no unit on these: it may come in pieces
KINDS = ("memory", *STREAMS, "grpc", "relay", "shaped memory", "shaped tcp", "shaped grpc")
STAMP = struct.Struct("<dd")  # before a frame that crosses a shaped link

T = TypeVar("T")


def start(work: Callable[..., T], *args: Any) -> Future[T]:
    """Do it in a thread of its own, whose end nobody waits for. The future has what came of it."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work(*args))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="test", daemon=True).start()
    return done


def frame(payload: bytes = b"", kind: int = Kind.DATA, sequence: int = 0) -> bytes:
    """A whole frame."""
    return pack_header(kind, len(payload), sequence) + payload


def checked(data: bytes) -> bytes:
    """The same bytes with the check that its header should have."""
    return data[:6] + check_of(data).to_bytes(2, "little") + data[8:]


def tcp_sockets() -> tuple[socket.socket, socket.socket]:
    """The two ends of a connection over loopback: who dialled, who was dialled."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        return client, listener.accept()[0]


def secured(
    ends: tuple[socket.socket, socket.socket], client: security.Credentials, server: security.Credentials
) -> tuple[socket.socket, socket.socket]:
    """TLS over both ends."""
    shaking = start(
        lambda: security.handshake(
            ends[1], security.server_context(server), server_side=True, peer="a", timeout_s=WAIT_S
        )
    )
    dialled = security.handshake(
        ends[0], security.client_context(client), server_side=False, peer="b", timeout_s=WAIT_S
    )
    return dialled, shaking.result(WAIT_S)


class Server:
    """A real gRPC server whose links are handed to the test that dialled them."""

    def __init__(self) -> None:
        self._came: queue.SimpleQueue[grpc_link.GrpcLink] = queue.SimpleQueue()
        self._over = threading.Event()
        self.deadlines = Deadlines()
        # Tests make peers wait on purpose: more threads than links that are open at a time.
        self._server = grpc.server(futures.ThreadPoolExecutor(32), options=grpc_link.CHANNEL_OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(grpc_link.answering(self._accept))
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("edge.Worker", {"Link": handler}),))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def _accept(self, requests: Any, context: grpc.ServicerContext) -> grpc_link.Served:
        over = self._over

        def serve(link: grpc_link.GrpcLink) -> None:
            self._came.put(link)
            over.wait()

        return serve, "the dialler", self.deadlines

    def channel(self) -> grpc.Channel:
        """A connection of its own."""
        return grpc.insecure_channel(f"127.0.0.1:{self.port}", grpc_link.CHANNEL_OPTIONS)

    def came(self) -> grpc_link.GrpcLink:
        """The next link that was dialled."""
        return self._came.get(timeout=WAIT_S)

    def end_links(self) -> None:
        """Let go of all links so far."""
        self._over.set()
        self._over = threading.Event()

    def close(self) -> None:
        """End."""
        self.end_links()
        self._server.stop(0).wait()


class Raw:
    """The other end of a link, without the manners of one: sends any bytes."""

    def __init__(self, send: Callable[[bytes], object], end: Callable[[], object], sock: socket.socket | None) -> None:
        self.send = send  # on links that carry messages: as one of them
        self.end = end  # no more will come
        self.sock = sock  # of a stream


class Bench:
    """Makes links of every kind; `close` ends all of them."""

    def __init__(self, folder: Path, server: Server, trust: tuple[security.Credentials, security.Credentials]) -> None:
        self._stack = ExitStack()
        self._folder = folder
        self._server = server
        self._trust = trust

    def close(self) -> None:
        """End everything that was made here."""
        self._server.end_links()
        self._stack.close()

    def sockets(self, kind: str) -> tuple[socket.socket, socket.socket]:
        """Two connected sockets: tcp, tls or unix."""
        if kind == "unix":
            return socket.socketpair()
        return secured(tcp_sockets(), *self._trust) if kind == "tls" else tcp_sockets()

    def pair(self, kind: str, deadlines: Deadlines = PATIENT) -> tuple[Link, Link]:
        """Both ends of a link. "grpc" ends at who dialled and at who answered, "relay" goes over gRPC and TCP."""
        a, b = self._pair(kind, deadlines)
        for link in (a, b):
            self._stack.callback(link.close)
        return a, b

    def _pair(self, kind: str, deadlines: Deadlines) -> tuple[Link, Link]:
        if kind == "memory":
            return memory_link.pair(deadlines=deadlines)
        if kind == "grpc":
            self._server.deadlines = deadlines
            channel = self._server.channel()
            self._stack.callback(channel.close)
            return grpc_link.dial(channel, "b", "session", deadlines), self._server.came()
        if kind == "relay":
            a, outside = self._pair("grpc", deadlines)
            inside, b = self._pair("unix", deadlines)
            outside.deadlines = inside.deadlines = PATIENT
            start(relay, outside, inside)
            return a, b
        if kind.startswith("shaped"):
            inner_a, inner_b = self._pair(kind.split()[1], deadlines)
            shape = Shape(delay_s=0.001, jitter_s=0.0005)
            return ShapedLink(inner_a, shape, Nic(1e9), seed=1), ShapedLink(inner_b, shape, Nic(1e9), seed=2)
        left, right = self.sockets(kind)
        return TcpLink(left, "b", deadlines), TcpLink(right, "a", deadlines)

    def raw(self, kind: str, deadlines: Deadlines = PATIENT) -> tuple[Link, Raw]:
        """A link and a peer that sends what it likes."""
        if kind in STREAMS:
            left, right = self.sockets(kind)
            right.setblocking(True)
            link: Link = TcpLink(left, "b", deadlines)
            self._stack.callback(right.close)
            raw = Raw(right.sendall, lambda: socket.socket.shutdown(right, socket.SHUT_WR), right)
        elif kind == "grpc":
            self._server.deadlines = deadlines
            channel = self._server.channel()
            self._stack.callback(channel.close)
            said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
            self._stack.callback(said.put, None)
            call = channel.stream_stream(grpc_link.METHOD)(iter(said.get, None))
            self._stack.callback(call.cancel)
            link = self._server.came()
            raw = Raw(said.put, lambda: said.put(None), None)
        elif kind == "memory":
            link, other = memory_link.pair(deadlines=deadlines)
            self._stack.callback(other.close)
            raw = Raw(lambda data: other._write(b"", memoryview(data), WAIT_S), other._end, None)
        else:
            inner, other = self._pair(kind.split()[1], deadlines)  # type: ignore[assignment]
            self._stack.callback(other.close)
            link = ShapedLink(inner)
            raw = Raw(lambda data: other.send(STAMP.pack(0, 0) + data, Kind.SHAPED), other.close, None)
        self._stack.callback(link.close)
        return link, raw


def trusted(folder: Path) -> tuple[security.Credentials, security.Credentials]:
    """Return the credentials of two members of one cluster; in the folders `desk` and `pi`."""
    cluster = Cluster(folder, time.time())
    return shown(cluster.owner), shown(cluster.joined("pi"))


def own_credentials(folder: Path) -> security.Credentials:
    """The credentials in a folder, for another process."""
    result = credentials.load(folder)
    assert result is not None
    return shown(result)
