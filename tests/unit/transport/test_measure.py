"""Test link measurements: real links, shaped links, and peers that send wrong answers."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

import transport.measure
from tests.support import memory_link, shaped_link
from tests.support.clock import Clock
from tests.support.links import PATIENT, WAIT_S, start, tcp_sockets
from tests.support.shaped_link import Nic, Shape, ShapedLink
from transport.errors import LinkClosed, LinkTimeout, ProtocolError, TransportError
from transport.frame import Kind
from transport.link import Deadlines, Link
from transport.measure import TENSOR_BYTES, LinkFigures, answer, finish, measure, round_trips
from transport.tcp_link import TcpLink


def measured(a: Link, b: Link, seconds: float) -> LinkFigures:
    with a, b:
        answering = start(answer, b)
        figures = measure(a, seconds)
        answering.result(WAIT_S)
        return figures


def test_a_tcp_link_on_this_machine() -> None:
    left, right = tcp_sockets()
    figures = measured(TcpLink(left, "b", PATIENT), TcpLink(right, "a", PATIENT), 0.3)
    assert 1e-6 < figures.round_trip_best_s <= figures.round_trip_median_s <= figures.round_trip_p99_s < 1
    assert figures.latency_s == figures.round_trip_median_s / 2
    for rate in (figures.send_bytes_per_s, figures.receive_bytes_per_s):
        assert 10e6 < rate < 1e12


def test_a_shaped_link_is_as_it_was_shaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 ms one way; 20 MB/s there, 5 MB/s back. No time passes but what frames wait: where a thread sends a block only
    after the one before it has come, that takes another 5 ms beside its 13 or 52."""
    clock = Clock(tick_s=1e-5).install(monkeypatch, transport.measure, shaped_link)
    left, right = memory_link.pair(deadlines=PATIENT)
    shape = Shape(delay_s=0.005)
    figures = measured(
        ShapedLink(left, shape, Nic(20e6), clock=clock.monotonic),
        ShapedLink(right, shape, Nic(5e6), clock=clock.monotonic),
        1.0,
    )
    assert 0.010 <= figures.round_trip_best_s <= figures.round_trip_p99_s < 0.011
    assert 0.005 <= figures.latency_s < 0.0055
    assert 20e6 * 0.7 < figures.send_bytes_per_s < 20e6 * 1.05
    assert 5e6 * 0.9 < figures.receive_bytes_per_s < 5e6 * 1.05


def test_round_trips_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport.measure._FAR_S", 1e9)  # however long a busy processor makes one of them
    a, b = memory_link.pair(deadlines=PATIENT)
    answering = start(answer, b)
    times = round_trips(a, TENSOR_BYTES, 0.0)
    assert len(times) == 20
    assert times == sorted(times)
    assert len(round_trips(a, 8, 10.0, most=30)) == 30
    finish(a)
    answering.result(WAIT_S)
    a.send(b"still of use")
    assert bytes(b.receive().payload) == b"still of use"


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        (b"data", Kind.DATA),
        (b"pong", Kind.PONG),
        (b"", Kind.CONTROL),
        (bytes(6), Kind.CONTROL),
        (b"x\1\0\0\0", Kind.CONTROL),
        (b"s\xff\xff\xff\xff", Kind.CONTROL),
        (b"r\1\0\x10\0", Kind.CONTROL),  # one more than 2 to 20
        (bytes(TENSOR_BYTES + 1), Kind.PING),
    ],
)
def test_nonsense_is_not_answered(payload: bytes, kind: Kind) -> None:
    a, b = memory_link.pair(deadlines=PATIENT)
    a.send(payload, kind)
    with pytest.raises(ProtocolError, match=r"a (should have measured|asked for|sent)"):
        answer(b)


def say(*frames: tuple[bytes, Kind]) -> Callable[[Link], None]:
    def answers(link: Link) -> None:
        link.receive()
        for payload, kind in frames:
            link.send(payload, kind)

    return answers


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        (say((bytes(9), Kind.PONG)), ProtocolError),
        (say((bytes(7), Kind.PONG)), ProtocolError),
        (say((bytes(8), Kind.PING)), ProtocolError),
        (say((bytes(8), Kind.DATA)), ProtocolError),
        (lambda link: link.close("busy"), LinkClosed),
        (say(), LinkTimeout),
    ],
)
def test_nonsense_in_answer_is_an_error(answers: Callable[[Link], None], error: type[TransportError]) -> None:
    a, b = memory_link.pair(deadlines=Deadlines(step_timeout_s=0.1))
    answering = start(answers, b)
    with pytest.raises(error):
        measure(a, 0.1)
    answering.result(WAIT_S)


def test_bandwidth_of_a_peer_that_sends_something_else() -> None:
    a, b = memory_link.pair(deadlines=Deadlines(step_timeout_s=1.0))

    def answers() -> None:
        while True:
            kind, payload = b.receive()
            if kind is Kind.PING:
                b.send(payload, Kind.PONG)
            else:
                b.send(struct.pack("<I", 1), Kind.CONTROL)

    answering = start(answers)
    with pytest.raises(ProtocolError, match=r"b should have sent 1 bytes of CONTROL, but sent 4|4 bytes"):
        measure(a, 0.1)
    assert isinstance(answering.exception(WAIT_S), TransportError)
