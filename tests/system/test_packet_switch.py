"""Test the packet switch as a process, with sockets as network interfaces: which packets it forwards or drops, and
when.
"""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.support.helpers import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="labs have links on Linux only")

ADDRESSES = ["10.213.0.1", "10.213.0.2", "10.213.0.3"]
DELAY_S = 0.05
WAIT_S = 60.0  # never reached: only against a hang


@contextmanager
def switch(*lines: list[Any], rates: tuple[float | None, ...] = (None, None, None)) -> Iterator[list[socket.socket]]:
    """The far ends of three ports. lines: from, to, shape. rates: bytes a second of each port."""
    with ExitStack() as stack:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in ADDRESSES]
        ports = [
            [ours.fileno(), address, rate] for (ours, _), address, rate in zip(pairs, ADDRESSES, rates, strict=True)
        ]
        command = [sys.executable, "-m", "devices.lab.packet_switch", json.dumps({"ports": ports, "lines": lines})]
        process = stack.enter_context(
            subprocess.Popen(command, cwd=ROOT, pass_fds=[ours.fileno() for ours, _ in pairs])
        )
        stack.callback(process.kill)
        for ours, theirs in pairs:
            ours.close()
            theirs.settimeout(WAIT_S)
            stack.enter_context(theirs)
        yield [theirs for _, theirs in pairs]
        assert process.poll() is None  # whatever it was sent


def packet(source: str, to: str, payload: bytes = b"", first: int = 0x45) -> bytes:
    """An IPv4 packet, as far as the switch looks at one."""
    return bytes([first]) + bytes(11) + socket.inet_aton(source) + socket.inet_aton(to) + payload


def test_packets_go_where_they_are_addressed_and_others_nowhere() -> None:
    first, two, three = ADDRESSES
    with switch() as ends:
        strange = [
            b"",
            b"\x45",
            packet(first, "10.213.0.9"),
            packet("192.0.2.1", two),  # forwarded for another machine
            packet(three, two),  # from an address that is not behind this port
            packet(first, two, first=0x60),  # IPv6
        ]
        for data in [*strange, packet(first, two, b"hello"), packet(first, three, b"you")]:
            ends[0].send(data)
        assert ends[1].recv(100) == packet(first, two, b"hello")
        assert ends[2].recv(100) == packet(first, three, b"you")
        ends[1].send(packet(two, first, bytes(1000)))
        assert ends[0].recv(2000) == packet(two, first, bytes(1000))


def test_a_line_delays_one_direction_and_keeps_the_order() -> None:
    first, two, three = ADDRESSES
    with switch([0, 1, {"delay_s": DELAY_S, "jitter_s": DELAY_S}]) as ends:
        ends[0].send(packet(first, three))
        ends[2].recv(100)  # it is up
        began = time.monotonic()
        for number in range(50):
            ends[0].send(packet(first, two, bytes([number])))
        assert [ends[1].recv(100)[-1] for _ in range(50)] == list(range(50))
        assert time.monotonic() - began >= DELAY_S
        assert any(arrives_before(ends, DELAY_S) for _ in range(20))  # a busy machine delays some


def arrives_before(ends: list[socket.socket], delay_s: float) -> bool:
    """Return whether a packet the other way takes less than the delay."""
    first, two, _ = ADDRESSES
    began = time.monotonic()
    ends[1].send(packet(two, first))
    ends[0].recv(100)
    return time.monotonic() - began < delay_s


def test_a_line_that_loses() -> None:
    first, two, three = ADDRESSES
    with switch([0, 1, {"loss": 0.5}]) as ends:
        for number in range(200):
            ends[0].send(packet(first, two, bytes([number])))
        ends[0].send(packet(first, three))
        ends[2].recv(100)  # all before it were taken
        ends[1].setblocking(False)
        arrived = []
        while True:
            try:
                arrived.append(ends[1].recv(100)[-1])
            except BlockingIOError:
                break
        assert 50 < len(arrived) < 150
        assert arrived == sorted(arrived)


@pytest.mark.parametrize("rates", [(1e5, None, None), (None, 1e5, 1e5)])
def test_a_port_limits_what_passes_it(rates: tuple[float | None, ...]) -> None:
    """A port that sends takes its time over both lines together; ports that receive take theirs each by itself."""
    first, two, three = ADDRESSES
    n = 4
    with switch(rates=rates) as ends:
        for end, to in ((ends[1], two), (ends[2], three)):  # the switch runs
            ends[0].send(packet(first, to))
            end.recv(2000)
        began = time.monotonic()
        for i in range(n):
            ends[0].send(packet(first, two, bytes([i]) * 1000))
            ends[0].send(packet(first, three, bytes([i]) * 1000))
        for end, to in ((ends[1], two), (ends[2], three)):
            assert [end.recv(2000) for _ in range(n)] == [packet(first, to, bytes([i]) * 1000) for i in range(n)]
        took_s = time.monotonic() - began
    packet_s = (1000 + 20) / 1e5
    # The first packet through a port that receives, and the last one through one that sends, are not waited for.
    assert took_s >= (2 * n - 1 if rates[0] else n - 1) * packet_s
