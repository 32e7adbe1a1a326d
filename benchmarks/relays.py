"""Relays between workers and their peers that can close links, pause them, or change a byte.

    python benchmarks/relays.py FRONT=BACK ...    (started by `Relays`)

FRONT and BACK are addresses of this machine's loopback network (Linux). A worker listens at BACK and is named by FRONT.
Each TCP port that it or one of its engine processes listens at is listened at on FRONT, too, and passed on. Ranks dial
each other where this device reaches the worker, so a relay carries all that others dialled: this device's commands and
events, slices, and the data links of the ranks below. What the worker's own rank dials goes through the relays of
the ranks above.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import subprocess
import sys
import threading
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path

_LOOK_S = 0.01  # between two looks for new ports
_PORT_S = 10.0  # until a port is seen
_CHUNK = 64 << 10
_MAGIC, _HEADER_BYTES = b"EDGE", 16  # of a frame
# Of the kernel's sock_diag, which says who listens (linux/netlink.h, linux/inet_diag.h).
_SOCK_DIAG, _BY_FAMILY, _DONE = 4, 20, 3
_DUMP = 0x301  # a request for all
_NETLINK = 16  # socket.AF_NETLINK, which only Linux has
_LISTENS = 1 << 10  # the state, as a bit
_QUESTION = struct.Struct("=IHHII BBxxI 48x")  # nlmsghdr, inet_diag_req_v2
_MAPPED = bytes(10) + b"\xff\xff"  # before an IPv4 address, as IPv6 has it


class Relays(AbstractContextManager["Relays"]):
    """The process with the relays. `close()` ends it; it is also a context manager."""

    def __init__(self, backs: dict[str, str]) -> None:
        """backs: where workers listen, by the address that others shall use."""
        command = [sys.executable, str(Path(__file__)), *(f"{front}={back}" for front, back in backs.items())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lock = threading.Lock()

    def tell(self, order: str, front: str) -> None:
        """Do one of these to a relay; done when this returns.

        cut: close all connections, and take no more. break: close one of them. freeze: pass nothing on, in either
        direction, with all connections open. corrupt: another byte in the header of the next frame. heal: as before.
        port PORT: return when that port of the worker is listened at; SystemExit after some seconds.
        """
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(f"{front} {order}\n")
            self._process.stdin.flush()
            if self._process.stdout.readline() != "done\n":
                raise SystemExit(f"the relays have ended, and were to {order}")

    def close(self) -> None:
        """End all of them."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already
            self._process.stdin.close()  # by which it ends
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class Relay:
    """Relay that others dial in place of one worker."""

    def __init__(self, front: str, back: str) -> None:
        self._front, self._back = front, back
        self._servers: dict[int, asyncio.Server] = {}
        self._open: set[asyncio.StreamWriter] = set()
        self._passing = asyncio.Event()
        self._passing.set()
        self._is_cut = self._corrupts = False

    async def listen(self, ports: set[int]) -> None:
        """Be where the worker is, at these ports."""
        if self._is_cut:
            return
        for port in self._servers.keys() - ports:
            self._servers.pop(port).close()
        for port in ports - self._servers.keys():
            with suppress(OSError):  # taken by what is connected through us for another moment
                server = await asyncio.start_server(partial(self._carry, port), self._front, port)
                if self._is_cut:  # meanwhile
                    server.close()
                    return
                self._servers[port] = server

    async def do(self, order: str) -> None:
        """As `Relays.tell`."""
        if order == "cut":
            self._is_cut = True
            for server in self._servers.values():
                server.close()
            self._servers.clear()
            self._break(list(self._open))
        elif order == "break":
            self._break(random.sample(sorted(self._open, key=id), min(1, len(self._open))))
        elif order == "freeze":
            self._passing.clear()
        elif order == "corrupt":
            self._corrupts = True
        elif order == "heal":
            self._is_cut = self._corrupts = False
            self._passing.set()
        else:
            await asyncio.wait_for(self._seen(int(order.removeprefix("port "))), _PORT_S)

    async def _seen(self, port: int) -> None:
        while port not in self._servers:
            await asyncio.sleep(_LOOK_S)

    def _break(self, writers: list[asyncio.StreamWriter]) -> None:
        for writer in writers:
            writer.transport.abort()

    async def _carry(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection(self._back, port)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, there[1]}
        if self._is_cut:  # meanwhile
            self._break(list(both))
            return
        self._open |= both
        await asyncio.gather(self._pass(reader, there[1]), self._pass(there[0], writer))
        self._open -= both
        self._break(list(both))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK):
                await self._passing.wait()
                writer.write(self._hurt(data) if self._corrupts else data)
                await writer.drain()
            await self._passing.wait()
            if writer.can_write_eof():
                writer.write_eof()
            return
        writer.transport.abort()

    def _hurt(self, data: bytes) -> bytes:
        """With one other bit in the first frame's header, where one is in it."""
        start = data.find(_MAGIC)
        if start < 0 or start + _HEADER_BYTES > len(data):
            return data
        self._corrupts = False
        hurt = bytearray(data)
        hurt[start + random.randrange(_HEADER_BYTES)] ^= 1 << random.randrange(8)
        return bytes(hurt)


def _listening() -> dict[str, set[int]]:
    """The ports at which IPv4 addresses of this machine are listened at, asked of the kernel's sock_diag: it answers
    in no time, where /proc/net/tcp takes milliseconds."""
    results: dict[str, set[int]] = {}
    with socket.socket(_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
        for family in (socket.AF_INET, socket.AF_INET6):  # gRPC listens at IPv4 addresses in the way of IPv6
            target = _QUESTION.pack(_QUESTION.size, _BY_FAMILY, _DUMP, 0, 0, family, socket.IPPROTO_TCP, _LISTENS)
            kernel.send(target)
            while (kind := _take_in(kernel.recv(1 << 16), results)) == _BY_FAMILY:
                pass
            if kind != _DONE:
                raise SystemExit("the kernel does not say who listens (sock_diag)")
    return results


def _take_in(data: bytes, result: dict[str, set[int]]) -> int:
    """Part of an answer into `found`; the kind of its last message."""
    kind = _DONE
    while data:
        size, kind = struct.unpack_from("=IH", data)
        if kind == _BY_FAMILY:
            family, port, address = struct.unpack_from("=16xB3x2s2x16s", data)
            tail = address[12:] if family == socket.AF_INET6 and address.startswith(_MAPPED) else address[:4]
            if family == socket.AF_INET or address.startswith(_MAPPED):
                result.setdefault(socket.inet_ntoa(tail), set()).add(int.from_bytes(port, "big"))
        data = data[(size + 3) // 4 * 4 :]
    return kind


async def _look(relays: dict[str, Relay]) -> None:
    while True:
        ports = _listening()
        for back, relay in relays.items():
            await relay.listen(ports.get(back, set()))
        await asyncio.sleep(_LOOK_S)


async def _run(pairs: list[str]) -> None:
    by_front: dict[str, Relay] = {}
    by_back: dict[str, Relay] = {}
    for pair in pairs:
        front, _, back = pair.partition("=")
        by_front[front] = by_back[back] = Relay(front, back)
    looking = asyncio.create_task(_look(by_back))
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        front, _, order = line.strip().partition(" ")
        await by_front[front].do(order)
        print("done", flush=True)
    looking.cancel()


if __name__ == "__main__":
    asyncio.run(_run(sys.argv[1:]))
