"""Test shaped links: delay, bandwidth and faults, with a simulated clock, so that times are exact."""

from __future__ import annotations

import random
import struct
import threading
import time
from types import SimpleNamespace

import pytest

from tests.support import memory_link, shaped_link
from tests.support.links import STAMP, WAIT_S, frame, start
from tests.support.shaped_link import Nic, Shape, ShapedLink
from transport.errors import LinkClosed, LinkTimeout, ProtocolError, Refused, TransportError
from transport.frame import HEADER_BYTES, Kind
from transport.link import Deadlines, Link

TICK = 1e-6  # a look at the clock takes so long
NEAR = 5e-4  # how exact a wait must be
PLAIN = Shape()


class Clock:
    """Time that passes when somebody sleeps, and a little when somebody looks."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += TICK
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(shaped_link, "time", SimpleNamespace(sleep=clock.sleep, monotonic=clock))
    return clock


def pair(
    clock: Clock, shape: Shape = PLAIN, *, nics: tuple[Nic, Nic] | None = None, seed: int = 0
) -> tuple[ShapedLink, ShapedLink]:
    """Two ends over memory; the first sends as `shape` says."""
    a, b = memory_link.pair(deadlines=Deadlines(step_timeout_s=5))
    first, two = nics or (Nic(), Nic())
    return ShapedLink(a, shape, first, seed, clock), ShapedLink(b, Shape(), two, seed, clock)


def arrivals(clock: Clock, sender: Link, receiver: Link, sizes: list[int]) -> list[float]:
    """When each of several frames, sent at once, was there: seconds after the first was sent."""
    began = clock.now
    for n in sizes:
        sender.send(bytes(n))
    times = []
    for n in sizes:
        receiver.receive_into(bytearray(n))
        times.append(clock.now - began)
    return times


def test_delay_is_added_once_to_each_frame(clock: Clock) -> None:
    for delay_s in (0.0, 0.002, 0.3):
        a, b = pair(clock, Shape(delay_s=delay_s))
        for _ in range(5):
            (took,) = arrivals(clock, a, b, [100])
            assert delay_s <= took < delay_s + NEAR
        assert arrivals(clock, a, b, [0, 10, 1000])[-1] < delay_s + NEAR  # frames travel at the same time


def test_delay_on_a_real_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round trip takes twice the delay at least, and no more sleep than that is asked for."""
    requests: list[float] = []

    def sleep(seconds: float) -> None:
        requests.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(shaped_link, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    inner = memory_link.pair()
    shape = Shape(delay_s=0.004)
    a, b = (ShapedLink(link, shape) for link in inner)

    def echo() -> None:
        for _ in range(9):
            b.send(b.receive().payload)

    echoing = start(echo)
    times = []
    for _ in range(9):
        began = time.perf_counter()
        a.send(b"x")
        a.receive()
        times.append(time.perf_counter() - began)
    echoing.result(WAIT_S)
    assert min(times) >= 0.008
    assert 0 < sum(requests) <= 18 * 0.004


def test_a_cap_makes_bytes_take_their_time(clock: Clock) -> None:
    """n bytes take n/B, one frame after the other."""
    for sender, receiver in ((1e6, 1e9), (1e9, 1e6), (1e6, 1e6)):
        a, b = pair(clock, Shape(delay_s=0.001), nics=(Nic(sender), Nic(receiver)))
        n = 10_000 - HEADER_BYTES
        times = arrivals(clock, a, b, [n] * 20)
        for i, took in enumerate(times):
            # The receiver's own cap is not looked at: a frame takes it as long as it took its sender.
            wire_s = 10_000 / sender
            assert took == pytest.approx(0.001 + (i + 1) * wire_s, abs=0.001), (sender, receiver)


def test_links_of_a_device_share_what_it_can_send(clock: Clock) -> None:
    nic = Nic(1e6)
    pairs = [pair(clock, nics=(nic, Nic(1e9))) for _ in range(3)]
    began = clock.now
    n = 10_000 - HEADER_BYTES
    for a, _ in pairs:
        a.send(bytes(n))
    times = []
    for _, b in pairs:
        b.receive_into(bytearray(n))
        times.append(clock.now - began)
    assert times == pytest.approx([0.01, 0.02, 0.03], abs=0.002)


def test_links_of_a_device_share_what_it_can_receive(clock: Clock) -> None:
    """Three devices send at once; one after the other arrives."""
    nic = Nic(1e6)
    pairs = [pair(clock, Shape(delay_s=0.005), nics=(Nic(1e6), nic)) for _ in range(3)]
    began = clock.now
    n = 10_000 - HEADER_BYTES
    for a, _ in pairs:
        a.send(bytes(n))
    times = []
    for _, b in pairs:
        b.receive_into(bytearray(n))
        times.append(clock.now - began)
    assert times == pytest.approx([0.015, 0.025, 0.035], abs=0.002)


def test_a_nic_may_be_used_by_many_threads() -> None:
    nic = Nic(1e6)
    frozen = [100.0]
    links = [ShapedLink(memory_link.pair()[0], Shape(drop=1), nic, clock=lambda: frozen[0]) for _ in range(4)]

    def send(link: Link) -> None:
        for _ in range(2000):
            link.send(b"")

    for done in [start(send, link) for link in links]:
        done.result(WAIT_S)
    assert nic.send_free == pytest.approx(100 + 8000 * HEADER_BYTES / 1e6)


def test_jitter_delays_and_keeps_the_order(clock: Clock) -> None:
    a, b = pair(clock, Shape(delay_s=0.001, jitter_s=0.05), seed=7)
    times = []
    for i in range(50):
        a.send(bytes([i]))
    began = clock.now
    for i in range(50):
        assert bytes(b.receive().payload) == bytes([i])
        times.append(clock.now - began)
    assert times == sorted(times)
    assert times[-1] < 0.051 + NEAR
    alone = []
    for _ in range(30):
        alone += arrivals(clock, a, b, [1])
    assert 0.001 <= min(alone) < 0.01
    assert 0.04 < max(alone) < 0.051 + NEAR


def test_jitter_and_faults_are_the_same_for_the_same_seed(clock: Clock) -> None:
    shape = Shape(jitter_s=0.1, drop=0.3, truncate=0.3, corrupt=0.3)

    def sent(seed: int) -> list[bytes]:
        clock.now = 100.0
        inner, far = memory_link.pair()
        link = ShapedLink(inner, shape, seed=seed, clock=clock)
        for i in range(20):
            link.send(bytes([i]) * 10)
        inner.close("end")
        results = []
        try:
            while True:
                results.append(bytes(far.receive().payload))
        except LinkClosed:
            return results

    assert sent(1) == sent(1)
    assert sent(1) != sent(2)


# Faults.


def test_a_frame_that_is_lost_shows_at_the_next_one(clock: Clock) -> None:
    a, b = pair(clock)
    a.send(b"first")
    a.shape = Shape(drop=1)
    a.send(b"second")
    a.shape = Shape()
    a.send(b"third")
    assert bytes(b.receive().payload) == b"first"
    with pytest.raises(ProtocolError, match="expected frame 1, got frame 2: frames were lost"):
        b.receive()


def test_a_last_frame_that_is_lost_is_a_timeout() -> None:
    inner = memory_link.pair(deadlines=Deadlines(step_timeout_s=0.05))
    a, b = ShapedLink(inner[0], Shape(drop=1)), ShapedLink(inner[1])
    a.send(b"lost")
    with pytest.raises(LinkTimeout, match="step_timeout_s"):
        b.receive()
    assert b.inner.broken is not None


@pytest.mark.parametrize("seed", range(20))
def test_a_frame_that_is_cut_off_is_an_error(clock: Clock, seed: int) -> None:
    for call in (lambda link: link.receive(), lambda link: link.receive_into(bytearray(100))):
        a, b = pair(clock, Shape(truncate=1), seed=seed)
        a.send(bytes(100))
        with pytest.raises(ProtocolError, match=r"cut off|announced"):
            call(b)
        with pytest.raises(LinkClosed):
            b.receive()


def test_what_is_damaged_never_passes_as_what_was_sent(clock: Clock) -> None:
    """Damage to a header is noticed by who expects a tensor. Damage to a payload is not: that is for TLS, or TCP."""
    noticed = changed = 0
    for seed in range(1000):
        a, b = pair(clock, Shape(corrupt=1), seed=seed)
        payload = random.Random(seed).randbytes(16)
        a.send(payload)
        into = bytearray(16)
        try:
            b.receive_into(into)
        except TransportError:
            noticed += 1
        else:
            assert into != payload
            assert sum(x != y for x, y in zip(into, payload, strict=True)) == 1
            changed += 1
    assert 400 < noticed < 600  # half of the bytes are header
    assert noticed + changed == 1000


def test_every_byte_of_a_header_is_watched_over(clock: Clock) -> None:
    good = frame(b"data", sequence=0)
    for at in range(HEADER_BYTES):
        for bit in range(8):
            data = bytearray(good)
            data[at] ^= 1 << bit
            inner, far = memory_link.pair()
            inner.send(STAMP.pack(0, 0) + data, Kind.SHAPED)
            with pytest.raises(TransportError):
                ShapedLink(far, clock=clock).receive_into(bytearray(4))


# Peers that are not shaped, or lie.


@pytest.mark.parametrize(("payload", "kind"), [(b"abc", Kind.SHAPED), (bytes(64), Kind.DATA), (b"", Kind.CONTROL)])
def test_the_other_end_must_be_shaped_too(clock: Clock, payload: bytes, kind: Kind) -> None:
    inner, far = memory_link.pair()
    inner.send(payload, kind)
    with pytest.raises(ProtocolError, match=f"{len(payload)} bytes of {kind.name} over a shaped link; shape both"):
        ShapedLink(far, clock=clock).receive()


@pytest.mark.parametrize("due", [1e300, float("inf"), float("nan"), -float("inf"), 101.5])
@pytest.mark.parametrize("wire_s", [0.0, float("nan"), float("inf"), 1e300])
def test_a_frame_is_not_waited_for_longer_than_the_deadline(clock: Clock, due: float, wire_s: float) -> None:
    inner, far = memory_link.pair(deadlines=Deadlines(step_timeout_s=1.0))
    inner.send(STAMP.pack(due, wire_s) + frame(b"late"), Kind.SHAPED)
    link = ShapedLink(far, clock=clock)
    began = clock.now
    with pytest.raises((LinkTimeout, ProtocolError), match=r"step_timeout_s|due at"):
        link.receive()
    assert clock.now - began < 1 + NEAR


def test_last_words_are_heard(clock: Clock) -> None:
    for end, error in ((Link.close, LinkClosed), (Link.refuse, Refused)):
        a, b = pair(clock, Shape(delay_s=0.01))
        end(a, "no more room on this device, which has four already")
        with pytest.raises(error, match="no more room on this device"):
            b.receive_into(bytearray(4))


def test_exact_sleep_is_harmless() -> None:
    before = threading.active_count()
    shaped_link.exact_sleep()
    assert threading.active_count() == before
    assert struct.calcsize("<dd") == STAMP.size
