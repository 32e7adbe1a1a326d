r"""A network switch in user space: it passes IP packets between TUN interfaces, and delays and drops them like links.

    python -m devices.lab.packet_switch \
        '{"ports": [[FD, "10.213.0.1", 125e6], ...], "lines": [[0, 1, {"delay_s": 0.005}], ...]}'

A port has three parts: the descriptor of an interface that another process opened, the address behind it, and its
bandwidth. The bandwidth is in bytes per second, each for sending and receiving over all lines together, and optional.

Every packet goes to the port with its destination. A packet without such a port is dropped, and so is a packet whose
source is not the address behind its port: the switch carries nothing for other machines. All protocols work, and TCP
retransmits what a link loses. The switch runs until it is killed.
"""

from __future__ import annotations

import heapq
import json
import os
import select
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from devices.lab.shaper import Port, Shape, Shaper
from devices.sleeping import run_first

MOST_WAITING_BYTES = 512 << 20  # limit of bytes in flight, so that an unthrottled sender cannot fill the memory
_HEADER_BYTES = 20  # bytes of an IPv4 header: the version comes first, source and destination last
_PACKET_BYTES = 65536  # longer than any IP packet
_AT_ONCE = 64  # packets to read from one port before other ports and due deliveries get their turn
_EARLY_S = 100e-6  # a wait may end this much late; the rest of it is spent polling the clock
_PRIORITY = -10  # links do not become slower while devices are busy


class Switch:
    """Ports, and the lines between them."""

    def __init__(
        self, ports: list[tuple[int, str]], lines: dict[tuple[int, int], Shape], rates: Sequence[float | None] = ()
    ) -> None:
        """Prepare the ports.

        ports: (descriptor, address) of each.
        lines: shapes by (from port, to port), for lines that are not perfect.
        rates: bytes per second of each port; None or no rates means no limit.
        """
        self._sources = {fd: number for number, (fd, _) in enumerate(ports)}
        self._sends = [None if rate is None else Port(rate) for rate in rates] or [None] * len(ports)
        self._receives = {fd: Port(rate) for (fd, _), rate in zip(ports, rates, strict=False) if rate is not None}
        self._own = [socket.inet_aton(address) for _, address in ports]
        for fd, _ in ports:
            os.set_blocking(fd, False)
        # By source port and destination address: (descriptor to write to, shaper of the line).
        self._ways: list[dict[bytes, tuple[int, Shaper | None]]] = [
            {
                socket.inet_aton(address): (fd, self._line(lines.get((source, number)), source, number))
                for number, (fd, address) in enumerate(ports)
            }
            for source in range(len(ports))
        ]
        # Heap of (arrival, number, descriptor, packet, receiving port that it must still pass).
        self._waiting: list[tuple[float, int, int, bytes, Port | None]] = []
        self._waiting_bytes = 0
        self._order = 0

    @staticmethod
    def _line(shape: Shape | None, source: int, to: int) -> Shaper | None:
        return None if shape is None or shape == Shape() else Shaper(shape, seed=source << 16 | to)

    def run(self) -> None:
        """Carry packets until killed."""
        descriptors = list(self._sources)
        while True:
            for fd in select.select(descriptors, [], [], self._wait_s())[0]:
                self._take(fd)
            self._deliver()

    def _wait_s(self) -> float | None:
        """Return the seconds to wait for packets: until just before the next delivery is due, or None for no limit."""
        return max(0.0, self._waiting[0][0] - time.monotonic() - _EARLY_S) if self._waiting else None

    def _take(self, fd: int) -> None:
        """Read some packets of one port, and deliver or schedule them."""
        source = self._sources[fd]
        own, ways, port = self._own[source], self._ways[source], self._sends[source]
        for _ in range(_AT_ONCE):
            try:
                packet = os.read(fd, _PACKET_BYTES)
            except BlockingIOError:
                return
            if len(packet) < _HEADER_BYTES or packet[0] >> 4 != 4 or packet[12:16] != own:
                continue
            to, line = ways.get(packet[16:20], (-1, None))
            if to < 0:
                continue
            into = self._receives.get(to)
            if line is None and port is None and into is None:
                _write(to, packet)
                continue
            now = time.monotonic()
            due = now if port is None else port.send(now, len(packet))
            if line is not None and due is not None:
                due = line.arrival(due, len(packet))
            if due is not None and self._waiting_bytes + len(packet) <= MOST_WAITING_BYTES:
                self._order += 1  # packets with the same arrival keep their order
                heapq.heappush(self._waiting, (due, self._order, to, packet, into))
                self._waiting_bytes += len(packet)

    def _deliver(self) -> None:
        waiting = self._waiting
        while waiting and waiting[0][0] <= time.monotonic():
            due, order, to, packet, into = heapq.heappop(waiting)
            if into is not None:  # packets from other links that arrive at the same time go first
                heapq.heappush(waiting, (into.receive(due, len(packet)), order, to, packet, None))
                continue
            self._waiting_bytes -= len(packet)
            _write(to, packet)


def _write(fd: int, packet: bytes) -> None:
    with suppress(OSError):  # the interface is down or gone, so the link loses the packet
        os.write(fd, packet)


def main(text: str) -> None:
    """Switch packets as the JSON states, until killed."""
    settings = json.loads(text)
    with suppress(OSError):
        os.nice(_PRIORITY)
    with suppress(OSError):  # without it, waits end up to 50 us late
        Path("/proc/self/timerslack_ns").write_text("1000")
    if settings.get("first"):
        run_first(children=True)
    lines = {(source, to): Shape(**shape) for source, to, shape in settings["lines"]}
    ports = settings["ports"]
    rates = [rate for _, _, *more in ports for rate in (more or [None])]
    Switch([(fd, address) for fd, address, *_ in ports], lines, rates).run()


if __name__ == "__main__":
    main(sys.argv[1])
