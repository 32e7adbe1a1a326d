"""Lanes of a link: each has an order and waits of its own; what ends one ends all."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import memory_link
from tests.support.helpers import until
from tests.support.links import PATIENT, WAIT_S, start, tcp_sockets
from transport import lanes as module
from transport.collective import Group
from transport.errors import LinkClosed, LinkTimeout, ProtocolError, Refused, TransportError
from transport.frame import Frame, Kind
from transport.link import Deadlines, Link
from transport.tcp_link import TcpLink


def two(n: int = 2, ends: tuple[Link, Link] | None = None) -> tuple[list[Group], list[Group]]:
    """Lanes at both ends of a link."""
    a, b = ends or memory_link.pair(deadlines=PATIENT)
    return Group(0, {1: a}).lanes(n), Group(1, {0: b}).lanes(n)


def test_each_lane_has_its_own_order() -> None:
    """Whichever is read first, and however they were sent; a lane has the figures of its group."""
    a, b = memory_link.pair(deadlines=PATIENT)
    group = Group(0, {1: a})
    group.latency_s, group.bandwidth = 0.5, 7.0
    here, there = group.lanes(3), Group(1, {0: b}).lanes(3)
    for text in (b"a", b"b", b"c"):
        for number in (2, 0, 1):
            here[number].links[1].send(text * (number + 1))
    for number in (1, 2, 0):
        link = there[number].links[0]
        assert [bytes(link.receive(max_bytes=8).payload) for _ in range(3)] == [
            text * (number + 1) for text in (b"a", b"b", b"c")
        ]
    there[1].links[0].send(b"back", Kind.CONTROL)
    frame = here[1].links[1].receive()
    assert (frame.kind, bytes(frame.payload)) == (Kind.CONTROL, b"back")
    assert [(item.latency_s, item.bandwidth) for item in here] == [(0.5, 7.0)] * 3


def test_large_tensors_over_two_lanes_at_once_block_nobody() -> None:
    """Each lane of each end sends more than the socket's buffers hold before it receives."""
    left, right = tcp_sockets()
    here, there = two(2, (TcpLink(left, "b", PATIENT), TcpLink(right, "a", PATIENT)))
    n = 1 << 20
    tensors = {(end, number): np.full(n, end + 10 * number + 1, np.float32) for end in (0, 1) for number in (0, 1)}

    def swap(end: int, number: int, group: Group) -> float:
        (link,) = group.links.values()
        for part in np.split(tensors[end, number], 16):
            link.send(part)
        parts = np.empty(n, np.float32)
        for part in np.split(parts, 16):
            link.receive_into(part)
        return float(parts.mean())

    swaps = [start(swap, end, i, groups[i]) for end, groups in enumerate((here, there)) for i in (0, 1)]
    assert [done.result(WAIT_S) for done in swaps] == [2.0, 12.0, 1.0, 11.0]


def test_sums_of_two_lanes_do_not_mix() -> None:
    here, there = two()
    first, second = (np.arange(100, dtype=np.float32) * times for times in (1, 3))

    def add(group: Group, x: np.ndarray) -> np.ndarray:
        group.allreduce(x)
        return x

    done = [
        start(add, here[0], first.copy()),
        start(add, there[1], second.copy()),
        start(add, here[1], second.copy()),
        start(add, there[0], first.copy()),
    ]
    a, b, c, d = (item.result(WAIT_S) for item in done)
    for result, expected in ((a, 2 * first), (b, 2 * second), (c, 2 * second), (d, 2 * first)):
        assert np.array_equal(result, expected)


def test_a_reason_reaches_the_lane_that_waits_and_then_all() -> None:
    here, there = two()
    waiting = start(there[0].links[0].receive)
    here[0].links[1].refuse("no room")
    with pytest.raises(Refused, match="no room"):
        waiting.result(WAIT_S)
    with pytest.raises(TransportError):
        there[1].links[0].receive()


def test_what_came_before_the_end_can_be_read() -> None:
    a, b = memory_link.pair(deadlines=PATIENT)
    here, there = two(2, (a, b))
    here[1].links[1].send(b"last")
    a.close("enough")
    assert bytes(there[1].links[0].receive().payload) == b"last"
    with pytest.raises(LinkClosed, match="enough"):
        there[1].links[0].receive()


def test_a_lane_that_waits_too_long_ends_the_link() -> None:
    a, b = memory_link.pair(deadlines=Deadlines(step_timeout_s=0.01))
    _, there = two(2, (a, b))
    idle = start(there[0].links[0].receive, WAIT_S)
    with pytest.raises(LinkTimeout, match=r"sent nothing for 0\.01 s \(step_timeout_s\)"):
        there[1].links[0].receive()
    with pytest.raises(LinkClosed):
        idle.result(WAIT_S)
    assert b.broken is not None


@pytest.mark.parametrize(
    ("kind", "payload"),
    [(Kind.DATA, bytes(64)), (Kind.LANE, b"\0"), (Kind.LANE, b"\2" + bytes(32))],
    ids=["no lane", "cut off", "no such lane"],
)
def test_what_is_no_frame_of_a_lane_is_refused(kind: Kind, payload: bytes) -> None:
    a, b = memory_link.pair(deadlines=PATIENT)
    there = Group(1, {0: b}).lanes(2)
    a.send(payload, kind)
    with pytest.raises(ProtocolError, match=f"{len(payload)} bytes of {kind.name} where a frame of one of 2 lanes"):
        there[1].links[0].receive()


def test_a_peer_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames that nobody receives are limited; those that were received count no more."""
    monkeypatch.setattr(module, "_MOST_WAITING", 2000)
    here, there = two()
    for _ in range(8):
        here[0].links[1].send(bytes(500))
        there[0].links[0].receive()
    for _ in range(3):
        here[0].links[1].send(bytes(500))
    with pytest.raises(ProtocolError, match="sent 2 frames, with 2056 bytes, that nobody waits for"):
        there[1].links[0].receive()


def test_a_peer_cannot_fill_the_memory_with_empty_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each counts with more than its payload."""
    monkeypatch.setattr(module, "_MOST_WAITING", 2000)
    here, there = two()
    for _ in range(4):
        here[0].links[1].send()
    with pytest.raises(ProtocolError, match="sent 4 frames, with 2112 bytes, that nobody waits for"):
        there[1].links[0].receive()


def test_a_last_word_waits_no_longer_over_a_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    below, _ = memory_link.pair(deadlines=PATIENT)
    waited: list[float] = []

    def noted(header: bytes, payload: memoryview, timeout_s: float) -> None:
        waited.append(timeout_s)

    monkeypatch.setattr(below, "_write", noted)
    Group(0, {1: below}).lanes(2)[0].links[1].send(b"a", timeout_s=0.25)
    assert waited == [0.25]


def test_who_sends_hears_why_the_peer_gave_up() -> None:
    """Also where the link below has ended by then."""
    below, other = memory_link.pair(deadlines=PATIENT)
    here, there = Group(0, {1: below}).lanes(2), Group(1, {0: other}).lanes(2)
    there[1].links[0].send(b"before")
    there[1].links[0].refuse("the roof fell in")
    until(lambda: below.broken is not None, "the end of the link below")
    with pytest.raises(Refused, match="the roof fell in"):
        here[1].links[1].send(b"a")
    with pytest.raises(LinkClosed):
        here[0].links[1].send(b"a")


def test_a_send_that_fails_first_does_not_hide_why_the_peer_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread reads a link while this one sends: which of them notices the end first is a matter of luck."""
    a, b = memory_link.pair()
    read = b._read

    def read_late(timeout_s: float, max_bytes: int) -> Frame:
        a.refuse("the roof fell in")
        with pytest.raises(LinkClosed):
            b.send(b"too late")
        return read(timeout_s, max_bytes)

    monkeypatch.setattr(b, "_read", read_late)
    with pytest.raises(Refused, match="the roof fell in"):
        b.receive()
