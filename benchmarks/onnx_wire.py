"""An activation from one process to another, as an item of a pipeline and as a bare TCP copy, alternating.

Run by bench_onnx_cuts.py. The receiving process says when it had all of the bytes; both read the same clock.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from echoes import Bare
from ranks import Ranks, serve


class Side:
    """One end. It holds two connections to the other one: a bare socket and a link."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def pin(self) -> None:
        """Keep to a core of its own, where there are two."""
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[self._rank % len(cores)]})

    def listen(self) -> int:
        """Wait for both connections at a port, from the next command on."""
        self._server = socket.create_server(("127.0.0.1", 0))
        return int(self._server.getsockname()[1])

    def connect(self, port: int | None, n_bytes: int) -> None:
        """port: of the other end; None: take what comes."""
        import numpy as np

        from edge.onnx.wire import Boundary, Receiver, Tensor
        from transport.tcp_link import TcpLink

        socks = [
            self._server.accept()[0] if port is None else socket.create_connection(("127.0.0.1", port))
            for _ in range(2)
        ]
        boundary = Boundary((Tensor("x", "float32", (n_bytes // 4,)),), inner=True)
        self._bare = Bare(socks[0])
        self._link = TcpLink(socks[1], "the other end", streams=True)
        self._boundary = boundary
        self._receiver = Receiver(self._link, boundary)
        self._array = np.random.default_rng(0).standard_normal(n_bytes // 4, np.float32)
        self._held = {"x": np.empty(n_bytes // 4, np.float32)}

    def move(self, way: str, wire: str, n: int) -> list[float]:
        """Send n times, or receive: when each began, or when all of it was there."""
        times, done = [], bytearray(1)
        for _ in range(n):
            if self._rank == 0:
                self._receive(way)
                times.append(time.perf_counter())
                self._bare.send(done)
            else:
                time.sleep(0.001)  # until the other end waits
                times.append(time.perf_counter())
                self._send(way, wire)
                self._bare.receive_into(done)
        return times

    def _send(self, way: str, wire: str) -> None:
        from edge.onnx.wire import Item, Op, send

        if way == "bare":
            self._bare.send(self._array)
        else:
            send(self._link, self._boundary, Item(Op.RUN, 0, wire), {"x": self._array})

    def _receive(self, way: str) -> None:
        if way == "bare":
            self._bare.receive_into(memoryview(self._held["x"]).cast("B"))
        else:
            self._receiver.tensors(*self._receiver.item(10.0), self._held)


def wire(n_bytes: int, repeats: int, rounds: int) -> dict[str, Any]:
    """Seconds from send to receive, medians, and how much of a bare copy's speed items reach: with a core for each
    process, and wherever the scheduler puts them."""
    placed = {"own cores": _measured(n_bytes, repeats, rounds, True), "anywhere": _measured(n_bytes, repeats, rounds)}
    return {"n_bytes": n_bytes, "repeats": repeats * rounds, "placed": placed}


def _measured(n_bytes: int, repeats: int, rounds: int, pinned: bool = False) -> dict[str, Any]:
    ways = [("bare", "f32"), ("item", "f32"), ("item", "f16"), ("item", "q8")]
    times: dict[str, list[float]] = {f"{way} {kind}": [] for way, kind in ways}
    with Ranks(Path(__file__), 2) as ranks:
        if pinned:
            ranks.tell("pin")
        port, _ = ranks.tell_each("listen", [{}, None])
        ranks.tell_each("connect", [{"port": None, "n_bytes": n_bytes}, {"port": port, "n_bytes": n_bytes}])
        for turn in range(rounds + 1):
            for way, kind in ways[turn % 4 :] + ways[: turn % 4]:
                ended, began = ranks.tell("move", way=way, wire=kind, n=repeats)
                if turn:  # the first one warms up
                    times[f"{way} {kind}"] += [b - a for a, b in zip(began, ended, strict=True)]
    median_s = {name: statistics.median(some) for name, some in times.items()}
    return {
        "median_s": median_s,
        "of_bare_copy": {name: median_s["bare f32"] / s for name, s in median_s.items() if name != "bare f32"},
    }


if __name__ == "__main__":
    serve(Side(int(sys.argv[1])))
