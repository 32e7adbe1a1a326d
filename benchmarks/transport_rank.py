"""One rank of bench_transport.py: a process that connects to the other ranks and follows the parent's commands.

    python benchmarks/transport_rank.py RANK RANKS FOLDER    (started by bench_transport.py)

FOLDER holds Unix sockets, and the credentials that all ranks show for TLS.
"""

from __future__ import annotations

import math
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.echoes import BARE_METHOD, WAIT_S, Bare, BarePolling, BareStream, echo, ping
from benchmarks.processes import serve
from tests.support.memory_link import pair
from tests.support.shaped_link import Nic, Shape, ShapedLink, exact_sleep
from transport.collective import Group
from transport.link import Deadlines, Link
from transport.security import Credentials, client_context, handshake, server_context
from transport.tcp_link import POLL_S, TcpLink

_START_MARGIN_S = 0.3e-3  # a rank; the agreed start lies so far ahead that all know of it in time
_SPIN_S = 200e-6  # a start is waited for without sleeping at the end
_BLAST_BLOCK = 256 << 10


class Rank:
    """Methods are commands; they take and return JSON."""

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        self.rank, self.ranks, self.folder = rank, ranks, folder
        self.ends: dict[str, dict[int, Any]] = {}  # by name of the connection, then by rank
        self.groups: dict[str, Group] = {}
        self.nic = Nic()
        self._listener: socket.socket | None = None
        self._streams: dict[str, queue.SimpleQueue[tuple[int, Link]]] = {}
        self._server: Any = None
        self._port = 0
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        exact_sleep()

    # --- connecting: all listen, then each dials those below it ---

    def listen(self, kind: str) -> int | str:
        """Where the ranks above may dial."""
        if kind in ("grpc", "bare-grpc"):
            return self._serve_grpc()
        if kind == "unix":
            path = str(self.folder / f"{self.rank}.socket")
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(path)
            self._listener.listen(self.ranks)
        else:
            self._listener = socket.create_server(("127.0.0.1", 0), backlog=self.ranks)
        self._listener.settimeout(WAIT_S)
        address: str | tuple[str, int] = self._listener.getsockname()
        return address if isinstance(address, str) else address[1]

    def connect(self, name: str, kind: str, addresses: list[int | str], poll_s: float | None = None) -> None:
        """To all other ranks. poll_s: of TcpLinks; by default theirs."""
        ends: dict[int, Any] = {}
        for peer in range(self.rank):
            if kind in ("grpc", "bare-grpc"):
                ends[peer] = self._dial_grpc(name, kind, peer, addresses[peer])
            else:
                address = addresses[peer]
                sock = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
                sock.settimeout(WAIT_S)
                sock.connect(address if isinstance(address, str) else ("127.0.0.1", address))
                sock.sendall(bytes([self.rank]))
                ends[peer] = self._end_of(kind, sock, peer, False, poll_s)
        for _ in range(self.rank + 1, self.ranks):
            if kind == "grpc":
                peer, ends_peer = self._streams_of(name).get(timeout=WAIT_S)
                ends[peer] = ends_peer
            elif kind != "bare-grpc":
                assert self._listener is not None
                sock, _ = self._listener.accept()
                sock.settimeout(WAIT_S)
                peer = sock.recv(1)[0]
                ends[peer] = self._end_of(kind, sock, peer, True, poll_s)
        if self._listener is not None:
            self._listener.close()
        self.ends[name] = ends
        if all(isinstance(end, Link) for end in ends.values()):
            self.groups[name] = Group(self.rank, ends)

    def _end_of(self, kind: str, sock: socket.socket, peer: int, server_side: bool, poll_s: float | None) -> Any:
        if kind == "bare":
            return Bare(sock)
        if kind == "bare-polling":
            return BarePolling(sock)
        if kind == "tls":
            context = (server_context if server_side else client_context)(self._credentials())
            sock = handshake(sock, context, server_side=server_side, peer=f"rank {peer}", timeout_s=WAIT_S)
        link = TcpLink(sock, f"rank {peer}", poll_s=POLL_S if poll_s is None else poll_s)
        # The seed matters to faults and jitter, and there are none.
        return ShapedLink(link, nic=self.nic) if kind == "shaped" else link

    def _credentials(self) -> Credentials:
        from devices.trust import credentials

        current = credentials.load(self.folder / "credentials")
        assert current is not None
        return Credentials(current.authority, current.certificate, current.key)

    def _serve_grpc(self) -> int:
        """One server for all streams to this rank. A link's stream lasts until the process ends."""
        if self._server is not None:
            return self._port
        import grpc

        from transport.grpc_link import CHANNEL_OPTIONS, METHOD, SESSION_KEY, GrpcLink, Served, answering

        def linked(_: Iterator[bytes], context: grpc.ServicerContext) -> Served:
            name, peer = str(dict(context.invocation_metadata())[SESSION_KEY]).split(":")

            def lend(link: GrpcLink) -> None:
                self._streams_of(name).put((int(peer), link))
                threading.Event().wait()  # this thread owns the link; the process ends it

            return lend, f"rank {peer}", Deadlines()

        def bare(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            yield from requests

        def registered(method: str, behaviour: Callable[..., Any]) -> grpc.GenericRpcHandler:
            service, name = method[1:].split("/")
            return grpc.method_handlers_generic_handler(
                service, {name: grpc.stream_stream_rpc_method_handler(behaviour)}
            )

        workers = ThreadPoolExecutor(2 * self.ranks + 2)
        self._server = grpc.server(workers, options=CHANNEL_OPTIONS)
        self._server.add_generic_rpc_handlers((registered(METHOD, answering(linked)), registered(BARE_METHOD, bare)))
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        return self._port

    def _dial_grpc(self, name: str, kind: str, peer: int, port: int | str) -> Any:
        import grpc

        from transport.grpc_link import CHANNEL_OPTIONS, dial

        channel = grpc.insecure_channel(f"127.0.0.1:{port}", CHANNEL_OPTIONS)
        grpc.channel_ready_future(channel).result(WAIT_S)
        return BareStream(channel) if kind == "bare-grpc" else dial(channel, f"rank {peer}", f"{name}:{self.rank}")

    def _streams_of(self, name: str) -> queue.SimpleQueue[tuple[int, Link]]:
        return self._streams.setdefault(name, queue.SimpleQueue())

    def pin(self, place: str) -> None:
        """Where this thread may run: `apart` a core for each rank, `together` one for all, `free` anywhere."""
        if hasattr(os, "sched_setaffinity"):
            mine = {"apart": self.rank % len(self._cores), "together": 0}
            os.sched_setaffinity(0, {self._cores[mine[place]]} if place in mine else self._cores)

    # --- two ranks: rank 0 answers, rank 1 dialled and measures ---

    def trips(self, name: str, n_bytes: int, n: int, warm_up: int) -> list[float] | None:
        """Seconds of each message there and back, at rank 1; rank 0 echoes."""
        if name == "memory":
            return self._memory_trips(n_bytes, n, warm_up) if self.rank else None
        if self.rank:
            return ping(self.ends[name][0], n_bytes, n, warm_up)
        if name != "bare-grpc":  # that one echoes by itself
            echo(self.ends[name][1], n_bytes, n + warm_up)
        return None

    def blast(self, name: str, n_bytes: int) -> float | None:
        """Seconds that so many bytes take from rank 1 to rank 0 over a bare socket, until it says that it has them."""
        block, blocks = bytearray(_BLAST_BLOCK), max(1, n_bytes // _BLAST_BLOCK)
        if self.rank == 0:
            for _ in range(blocks):
                self.ends[name][1].receive_into(block)
            self.ends[name][1].send(b"\0")
            return None
        began = time.monotonic()
        for _ in range(blocks):
            self.ends[name][0].send(block)
        self.ends[name][0].receive_into(bytearray(1))
        return (time.monotonic() - began) * n_bytes / (blocks * _BLAST_BLOCK)

    def _memory_trips(self, n_bytes: int, n: int, warm_up: int) -> list[float]:
        a, b = pair()
        thread = threading.Thread(target=echo, args=(b, n_bytes, n + warm_up), daemon=True)
        thread.start()
        times = ping(a, n_bytes, n, warm_up)
        thread.join()
        return times

    # --- allreduce ---

    def allreduce(self, name: str, algorithm: str, n_floats: int, n: int) -> dict[str, Any] | None:
        """`n` of them, each from an agreed start. Times by the machine's clock, which is the same for all ranks."""
        if name == "memory":
            return self._memory_allreduce(algorithm, n_floats, n) if self.rank == 0 else None
        return _allreduce(self.groups[name], self._agreed_start, algorithm, n_floats, n)

    def back_to_back(self, name: str, algorithm: str, n_floats: int, n: int, warm_up: int) -> tuple[float, float]:
        """When `n` of them without a pause began and ended here."""
        group, x = self.groups[name], np.zeros(n_floats, np.float32)
        for i in range(warm_up + n):
            if i == warm_up:
                began = time.monotonic()
            group.allreduce(x, algorithm)
        return began, time.monotonic()

    def _agreed_start(self) -> float:
        """Wait until all ranks are here, and then for a time that rank 0 names. Over links of its own, never shaped."""
        control, when = self.groups["control"], np.zeros(1)
        control.gather(np.zeros(1, np.uint8))
        if self.rank == 0:
            when[0] = time.monotonic() + _START_MARGIN_S * self.ranks
        control.broadcast(when.view(np.uint8))
        at = float(when[0])
        time.sleep(max(0.0, at - time.monotonic() - _SPIN_S))
        while time.monotonic() < at:
            os.sched_yield()
        return at

    def _memory_allreduce(self, algorithm: str, n_floats: int, n: int) -> dict[str, Any]:
        """Two ranks that are threads here."""
        links, together = pair(), threading.Barrier(2, timeout=WAIT_S)

        def start() -> float:
            together.wait()
            return time.monotonic()

        def run(rank: int) -> dict[str, Any]:
            return _allreduce(Group(rank, {1 - rank: links[rank]}), start, algorithm, n_floats, n)

        with ThreadPoolExecutor(2) as pool:
            a, b = pool.map(run, range(2))
        both = {key: list(map(max, a[key], b[key])) for key in ("at", "began", "ended")}
        return {"used": a["used"], **both}

    # --- shaped links ---

    def shape(self, delay_s: float, bandwidth: float | None) -> None:
        """Shape all links from now on; nothing may be under way. bandwidth: of this rank's device, bytes/s."""
        self.nic.bandwidth = bandwidth or math.inf
        for link in self.ends["shaped"].values():
            link.shape = Shape(delay_s=delay_s)


def _allreduce(group: Group, start: Callable[[], float], algorithm: str, n_floats: int, n: int) -> dict[str, Any]:
    x, used = np.empty(n_floats, np.float32), ""
    at, began, ended = [], [], []
    for _ in range(n):
        x.fill(group.rank + 1)
        at.append(start())
        began.append(time.monotonic())
        used = group.allreduce(x, algorithm)
        ended.append(time.monotonic())
        if not x[0] == x[-1] == group.world_size * (group.world_size + 1) / 2:
            raise SystemExit(f"{algorithm} over {group.links[(group.rank + 1) % group.world_size].kind}: a wrong sum")
    return {"used": used, "at": at, "began": began, "ended": ended}


if __name__ == "__main__":
    serve(Rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
