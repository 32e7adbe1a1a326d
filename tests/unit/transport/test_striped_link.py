"""A link over several connections: pieces in order, refusals, and when several are tried."""

from __future__ import annotations

import pytest

from tests.support import memory_link
from tests.support.links import PATIENT, WAIT_S, frame, start
from transport.errors import LinkClosed, ProtocolError, TransportError
from transport.frame import HEADER_BYTES, MAX_PAYLOAD, Kind
from transport.link import Link
from transport.measure import LinkFigures
from transport.striped_link import MOST_STRIPES, PIECE_BYTES, StripedLink, stripes

SIZES = (0, 1, PIECE_BYTES - HEADER_BYTES - 1, PIECE_BYTES - HEADER_BYTES, PIECE_BYTES, 3 * PIECE_BYTES + 5)


def two(n: int = 3) -> tuple[StripedLink, StripedLink]:
    pairs = [memory_link.pair(deadlines=PATIENT) for _ in range(n)]
    return StripedLink([a for a, _ in pairs], PATIENT), StripedLink([b for _, b in pairs], PATIENT)


@pytest.mark.parametrize("n", [2, 3, MOST_STRIPES])
def test_frames_come_whole_and_in_order(n: int) -> None:
    """Frames of any size, from both ends at once, are received either way."""
    here, there = two(n)
    data = {size: bytes(i * 7 % 251 for i in range(size)) for size in SIZES}

    def swap(link: Link) -> list[bytes]:
        for size in SIZES:
            link.send(data[size])
        results = []
        for i, size in enumerate(SIZES):
            into = bytearray(size)
            if i % 2:
                link.receive_into(into)
            results.append(bytes(into) if i % 2 else bytes(link.receive(max_bytes=size).payload))
        return results

    other = start(swap, there)
    assert swap(here) == other.result(WAIT_S) == list(data.values())


def test_pieces_are_spread_evenly() -> None:
    here, there = two(4)
    into = bytearray(32 * PIECE_BYTES)
    sending = start(here.send, bytes(len(into)))
    there.receive_into(into)
    sending.result(WAIT_S)
    sent = [link.sent_bytes for link in here.links]
    assert sum(sent) == len(into) + HEADER_BYTES
    assert max(sent) - min(sent) <= PIECE_BYTES


@pytest.mark.parametrize(
    ("piece", "kind", "words"),
    [
        (frame(b"abc"), Kind.DATA, "sent DATA over one of 3 connections"),
        (frame(b"abc")[:-1], Kind.STRIPE, "began a frame of 3 bytes with 2"),
        (frame(b"abc") + b"d", Kind.STRIPE, "began a frame of 3 bytes with 4"),
        (frame(b"abc", sequence=1), Kind.STRIPE, "frame 0 was expected, frame 1 came"),
        (b"EDGE", Kind.STRIPE, "cut off inside its header"),
    ],
    ids=["no piece", "too short", "too long", "out of order", "no header"],
)
def test_what_is_no_piece_is_refused(piece: bytes, kind: Kind, words: str) -> None:
    here, there = two()
    here.links[0].send(piece, kind)
    with pytest.raises(ProtocolError, match=words):
        there.receive()
    with pytest.raises(TransportError):
        here.links[1].receive()


def test_a_frame_that_is_too_large_is_refused_before_it_has_memory() -> None:
    here, there = two()
    whole = frame(bytes(MAX_PAYLOAD))
    here.links[0].send(whole[:PIECE_BYTES], Kind.STRIPE)
    with pytest.raises(ProtocolError, match=f"sent {MAX_PAYLOAD} bytes of DATA where at most 1000 were expected"):
        there.receive(max_bytes=1000)


def test_the_end_of_one_connection_is_the_end_of_all() -> None:
    here, there = two()
    here.links[1].close("enough")
    here.links[0].send(frame(bytes(PIECE_BYTES))[:PIECE_BYTES], Kind.STRIPE)
    with pytest.raises(LinkClosed, match="enough"):
        there.receive()
    assert all(link.broken is not None for link in there.links)


@pytest.mark.parametrize(
    ("round_trip_ms", "mbytes_per_s", "n"),
    [
        (0.2, 110, 1),  # near
        (4, 110, 1),
        (10, 12, 1),  # all of 100 Mbit/s, with 120 kB under way
        (20, 19, 4),  # 380 kB under way: held by the buffer
        (50, 8, 4),
        (100, 4, 6),
        (100, 1, 1),  # 100 kB under way: held by the path
        (300, 1.4, MOST_STRIPES),
    ],
)
def test_several_are_tried_where_the_buffer_of_one_is_what_holds_it(
    round_trip_ms: float, mbytes_per_s: float, n: int
) -> None:
    seconds, rate = round_trip_ms / 1e3, mbytes_per_s * 1e6
    for send, receive in ((rate, rate), (rate, rate / 2), (rate / 2, rate)):
        assert stripes(LinkFigures(seconds, seconds, seconds, send, receive)) == n


def test_a_frame_has_one_deadline_over_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pieces wait for what is left of it: by a clock that each of them takes 25 s of."""
    here, _ = two()
    waited: list[float] = []
    now_s = [100.0]
    monkeypatch.setattr("transport.striped_link.time.monotonic", lambda: now_s[0])

    def noted(header: bytes, payload: memoryview, timeout_s: float) -> None:
        waited.append(timeout_s)
        now_s[0] += 25.0

    for link in here.links:
        monkeypatch.setattr(link, "_write", noted)
    here.send(bytes(3 * PIECE_BYTES + 1))
    here.send(b"a", timeout_s=0.25)
    assert PATIENT.send_timeout_s == 60.0
    assert waited == [60.0, 35.0, 10.0, 0.0, 0.25]
