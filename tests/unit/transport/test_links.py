"""Test links: common tests for all kinds, then tests for streams, gRPC and relays alone."""

from __future__ import annotations

import gc
import itertools
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import numpy as np
import pytest

from tests.support import ROOT
from tests.support.helpers import until
from tests.support.links import (
    KINDS,
    PATIENT,
    STREAMS,
    WAIT_S,
    Bench,
    Server,
    checked,
    frame,
    own_credentials,
    secured,
    start,
    tcp_sockets,
    trusted,
)
from tests.support.namespaces import two_hosts
from tests.support.thorough import thorough
from transport import grpc_link, security, tcp_link
from transport.errors import LinkClosed, LinkTimeout, ProtocolError, Refused, TransportError
from transport.frame import HEADER_BYTES, MAX_PAYLOAD, MAX_REASON, VERSION, Kind, pack_header
from transport.link import CONTROL_BYTES, Deadlines, Link
from transport.tcp_link import TcpLink

SIZES = (0, 1, 8 << 10, 1 << 20)
RAW_KINDS = tuple(kind for kind in KINDS if kind != "relay")
ENDS = pytest.mark.parametrize("swapped", [False, True], ids=["this end", "other end"])
ALL = pytest.mark.parametrize("kind", KINDS)
RAW = pytest.mark.parametrize("kind", RAW_KINDS)
STREAM = pytest.mark.parametrize("kind", STREAMS)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()
    no_threads("deadlines")


def no_threads(*names: str) -> None:
    """Wait for the end of threads whose names begin so."""

    def left() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith(names)]

    until(lambda: not left(), f"the end of {left()}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def trust(folder: Path) -> tuple[security.Credentials, security.Credentials]:
    return trusted(folder)


@pytest.fixture
def bench(tmp_path: Path, server: Server, trust: tuple[security.Credentials, security.Credentials]) -> Iterator[Bench]:
    """Links, and the proof that none leaves a thread or a socket behind."""
    bench = Bench(tmp_path, server, trust)
    yield bench
    bench.close()
    no_threads("test", "relay", "link to")
    gc.collect()  # a socket that was not closed warns, and a warning is an error


def ends(bench: Bench, kind: str, swapped: bool, deadlines: Deadlines = PATIENT) -> list[Link]:
    """Both ends, either of them first."""
    pair = bench.pair(kind, deadlines)
    return list(reversed(pair)) if swapped else list(pair)


def assert_of_no_use(link: Link, why: str) -> None:
    """Every further call says that the link is broken, and why."""
    for call in (link.send, link.receive, lambda: link.receive_into(bytearray(1))):
        with pytest.raises(LinkClosed, match="is broken") as caught:
            call()
        assert why in str(caught.value)
    link.close()
    link.close("twice")
    link.refuse("and once more")


def took(began: float) -> float:
    return time.monotonic() - began


# Frames come as they were sent.


@ALL
def test_frames_arrive_in_order_both_ways(bench: Bench, kind: str) -> None:
    a, b = bench.pair(kind)
    payloads = [os.urandom(n) for n in SIZES]
    for source, target in ((a, b), (b, a)):
        sending = start(lambda: [source.send(p, what) for p in payloads for what in (Kind.DATA, Kind.CONTROL)])  # noqa: B023
        for payload in payloads:
            for what in (Kind.DATA, Kind.CONTROL):
                result = target.receive()
                assert (result.kind, bytes(result.payload)) == (what, payload)
        sending.result(WAIT_S)


@ALL
def test_a_payload_is_received_in_place(bench: Bench, kind: str) -> None:
    a, b = bench.pair(kind)
    for source, target in ((a, b), (b, a)):
        for n in (0, 1, 1000, 1 << 18):
            sent = np.random.default_rng(n).standard_normal(n).astype(np.float32)
            into = np.full(n + 2, 7, np.float32)
            sending = start(source.send, sent)
            target.receive_into(into[1:-1])
            sending.result(WAIT_S)
            assert into[1:-1].tobytes() == sent.tobytes()
            assert into[0] == into[-1] == 7  # nothing beside it was touched
        source.send(b"\1\2", Kind.PONG)
        target.receive_into(two := bytearray(2), kind=Kind.PONG)
        assert two == b"\1\2"


@ALL
def test_what_was_sent_may_be_changed_at_once(bench: Bench, kind: str) -> None:
    a, b = bench.pair(kind)
    buffer = np.arange(1000, dtype=np.float32).reshape(10, 100)
    a.send(buffer)
    buffer[:] = -1
    b.receive_into(into := np.empty((10, 100), np.float32))
    assert into.tobytes() == np.arange(1000, dtype=np.float32).tobytes()


@pytest.mark.parametrize("kind", RAW_KINDS)  # a relay's own links have numbers of their own
def test_sequence_numbers_begin_again_after_2_to_32(bench: Bench, kind: str) -> None:
    a, b = bench.pair(kind)
    for link in (a, b):
        link._sent = link._received.sequence = 2**32 - 2
    for i in range(5):
        a.send(bytes([i]))
        assert bytes(b.receive().payload) == bytes([i])


@ALL
def test_one_thread_sends_while_another_receives_at_full_load(bench: Bench, kind: str) -> None:
    a, b = bench.pair(kind)
    sizes = [random.Random(i).choice((0, 1, 100, 8 << 10, 100 << 10, 1 << 20)) for i in range(60)]

    def send(link: Link) -> None:
        for i, n in enumerate(sizes):
            link.send(bytes([i]) * n)

    def receive(link: Link) -> None:
        for i, n in enumerate(sizes):
            if i % 2:
                link.receive_into(into := bytearray(n))
                assert into == bytes([i]) * n
            else:
                assert bytes(link.receive().payload) == bytes([i]) * n

    for done in [start(work, link) for work in (send, receive) for link in (a, b)]:
        done.result(WAIT_S)


@ALL
def test_links_count_payloads_and_the_time_of_waiting(bench: Bench, kind: str) -> None:
    a, b = bench.pair(kind)
    for link in (a, b):
        assert (link.sent_bytes, link.received_bytes, link.receive_s) == (0, 0, 0.0)
    a.send(bytes(1000))
    a.send(np.zeros(25, np.float32))
    a.send(b"", Kind.CONTROL)
    b.send(b"four", Kind.PONG)
    assert (a.sent_bytes, b.sent_bytes) == (1100, 4)
    b.receive()
    b.receive_into(bytearray(100))
    b.receive()
    a.receive_into(bytearray(4), kind=Kind.PONG)
    assert (a.received_bytes, b.received_bytes) == (4, 1100)
    assert b.receive_s > 0
    # A peer that is late is waited for.
    for receive, inside in ((b.receive, b._read), (lambda: b.receive_into(bytearray(0)), b._read_into)):
        before, began = b.receive_s, time.perf_counter()
        waiting = start(receive)
        until(lambda: is_inside(inside), "the wait")  # noqa: B023
        waits = time.perf_counter()
        until(lambda: took_s(waits) > 0.1, "a late peer")  # noqa: B023
        late_s = took_s(waits)
        a.send()
        waiting.result(WAIT_S)
        assert late_s <= b.receive_s - before <= took_s(began)
    # What fails is not counted as received.
    a.send(bytes(50))
    with pytest.raises(ProtocolError):
        b.receive_into(bytearray(49))
    assert b.received_bytes == 1100


def took_s(began: float) -> float:
    return time.perf_counter() - began


# Another kind, another size, no frame at all.


@ALL
@pytest.mark.parametrize(
    ("n", "what"), [(3, Kind.DATA), (5, Kind.DATA), (0, Kind.DATA), (4, Kind.CONTROL), (999, Kind.HELLO)]
)
def test_another_kind_or_size_than_asked_for_is_an_error(bench: Bench, kind: str, n: int, what: Kind) -> None:
    a, b = bench.pair(kind)
    a.send(bytes(n), what)
    with pytest.raises(ProtocolError, match=rf"{n} (bytes )?of {what.name}|{n} bytes") as caught:
        b.receive_into(bytearray(4))
    assert_of_no_use(b, str(caught.value))


@ALL
def test_a_frame_larger_than_asked_for_is_an_error(bench: Bench, kind: str) -> None:
    a, b = bench.pair(kind)
    a.send(bytes(100))
    assert len(b.receive(max_bytes=100).payload) == 100
    a.send(bytes(101))
    with pytest.raises(ProtocolError, match="101 bytes of DATA where at most 100 were expected"):
        b.receive(max_bytes=100)


@ALL
def test_more_than_a_frame_holds_is_not_sent_and_the_link_lives(bench: Bench, kind: str) -> None:
    a, b = bench.pair(kind)
    huge = memoryview(np.empty(MAX_PAYLOAD + 1, np.uint8))
    with pytest.raises(ProtocolError, match="send it in parts"):
        a.send(huge)
    a.send(b"small")
    assert bytes(b.receive().payload) == b"small"


@ALL
@ENDS
def test_a_wait_ends_at_its_deadline_and_names_it(bench: Bench, kind: str, swapped: bool) -> None:
    def wait(link: Link, call: Callable[[Link], object], timeout_s: float, name: str) -> None:
        began = time.monotonic()
        with pytest.raises(LinkTimeout, match=rf"sent nothing for {timeout_s:g} s \({name}\)") as caught:
            call(link)
        assert took(began) >= timeout_s - 0.01
        assert_of_no_use(link, str(caught.value))

    waits: list[tuple[Callable[[Link], object], float, str]] = [
        (lambda link: link.receive(), 0.2, "step_timeout_s"),
        (lambda link: link.receive_into(bytearray(8)), 0.2, "step_timeout_s"),
        (lambda link: link.receive(0.1), 0.1, "the time given"),
        (lambda link: link.receive(0), 0, "the time given"),
    ]
    links = [ends(bench, kind, swapped, Deadlines(step_timeout_s=0.2)) for _ in waits]
    for done in [start(wait, a, *what) for (a, _), what in zip(links, waits, strict=True)]:
        done.result(WAIT_S)


# The end of a link.


@ALL
@ENDS
def test_closing_tells_the_peer_why(bench: Bench, kind: str, swapped: bool) -> None:
    a, b = ends(bench, kind, swapped)
    a.send(b"last")
    a.close("enough for today")
    assert_of_no_use(a, "closed here")
    assert bytes(b.receive().payload) == b"last"
    with pytest.raises(LinkClosed, match=r"closed the link.*enough for today") as caught:
        b.receive()
    assert_of_no_use(b, str(caught.value))


@ALL
@ENDS
@pytest.mark.parametrize("n", [0, 8, 1 << 20])
def test_the_last_word_is_heard_by_who_expects_a_tensor(bench: Bench, kind: str, swapped: bool, n: int) -> None:
    for end, error in ((Link.close, LinkClosed), (Link.refuse, Refused)):
        a, b = ends(bench, kind, swapped)
        end(a, "this group is full, ask again tomorrow")
        with pytest.raises(error, match="this group is full, ask again tomorrow"):
            b.receive_into(bytearray(n))


@ALL
@ENDS
def test_a_refusal_reaches_who_waits_also_while_the_other_side_waits(bench: Bench, kind: str, swapped: bool) -> None:
    for _ in range(8):
        a, b = ends(bench, kind, swapped)
        there, here = start(b.receive), start(a.receive)
        a.send(b"first")
        assert bytes(there.result(WAIT_S).payload) == b"first"
        there = start(b.receive)
        a.refuse("no room for you")
        with pytest.raises(Refused, match="no room for you"):
            there.result(WAIT_S)
        with pytest.raises(LinkClosed):
            here.result(WAIT_S)


@ALL
def test_words_of_a_peer_are_cut_and_cleaned(bench: Bench, kind: str) -> None:
    for said, heard in (
        ("x" * 5000, "x" * (MAX_REASON - 100)),
        ("\x1b[31mred\x07\nnext", "[31mred  next"),
        ("\udcff lone", "lone"),
        ("ü" * 1023, "ü" * 400),
    ):
        a, b = bench.pair(kind)
        a.refuse(said)
        with pytest.raises(Refused) as caught:
            b.receive()
        words = str(caught.value)
        assert heard in words
        assert words.isprintable()
        assert len(words.encode()) < MAX_REASON + 100


@ALL
@ENDS
def test_closing_from_another_thread_frees_who_waits(bench: Bench, kind: str, swapped: bool) -> None:
    for waits in (False, True):
        a, _ = ends(bench, kind, swapped)
        waiting = start(a.receive)
        if waits:
            until(lambda: is_inside(a.receive), "the wait")  # noqa: B023
        a.close()
        with pytest.raises(LinkClosed, match="closed here"):
            waiting.result(WAIT_S)


@ALL
@ENDS
def test_closing_from_another_thread_frees_who_waits_to_send(bench: Bench, kind: str, swapped: bool) -> None:
    a, _ = ends(bench, kind, swapped)
    waiting = start(send_for_ever, a)
    assert waits(waiting, a)
    a.close()
    with pytest.raises(LinkClosed):
        waiting.result(WAIT_S)


def send_for_ever(link: Link, n: int = 1 << 20) -> None:
    payload = bytes(n)
    while True:
        link.send(payload)


def is_inside(method: Any) -> bool:
    """Return whether a thread runs this method of this object."""
    caller: FrameType | None
    for caller in sys._current_frames().values():
        while caller:
            if caller.f_code is method.__func__.__code__ and caller.f_locals.get("self") is method.__self__:
                return True
            caller = caller.f_back
    return False


def waits(sending: Future[None], link: Link) -> bool:
    """Wait until no more frames go out."""
    sent, since = link._sent, time.monotonic()
    while took(since) < 0.1 and not sending.done():
        time.sleep(0.01)
        if link._sent != sent:
            sent, since = link._sent, time.monotonic()
    return not sending.done()


@ALL
@ENDS
def test_a_peer_that_stops_reading_is_noticed_and_costs_little_memory(bench: Bench, kind: str, swapped: bool) -> None:
    a, _ = ends(bench, kind, swapped, Deadlines(send_timeout_s=0.2))
    tracemalloc.start()
    try:
        began = time.monotonic()
        with pytest.raises(LinkTimeout, match=r"took no more data for 0.2 s \(send_timeout_s\)") as caught:
            send_for_ever(a)
        assert took(began) > 0.19
        # What memory links hold are the frames themselves, by their number.
        most = 66 if "memory" in kind else 32
        assert a._sent <= most
        assert tracemalloc.get_traced_memory()[1] < (most + 4) << 20
    finally:
        tracemalloc.stop()
    assert_of_no_use(a, str(caught.value))


# Peers that say anything.


@RAW
@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not our protocol"),
        (frame(b"abcd")[:4] + bytes([VERSION + 1]) + frame(b"abcd")[5:], f"version {VERSION + 1} of the protocol"),
        (frame(b"abcd", sequence=1), "expected frame 0, got frame 1"),
        (frame(b"abcd", kind=99), "kind 99"),
        (frame(b"abcd")[:8] + b"\x05" + frame(b"abcd")[9:], "damaged in transit"),
        (checked(frame()[:8] + b"\xff\xff\xff\xff" + bytes(4)), "4294967295 bytes was announced"),
    ],
)
def test_damaged_headers_end_a_link(bench: Bench, kind: str, data: bytes, why: str) -> None:
    for call in (lambda link: link.receive(), lambda link: link.receive_into(bytearray(4))):
        link, raw = bench.raw(kind)
        raw.send(data)
        with pytest.raises(ProtocolError, match=why) as caught:
            call(link)
        assert str(caught.value).startswith(f"{link.peer}: ")
        assert_of_no_use(link, str(caught.value))


@RAW
def test_a_frame_that_comes_again_is_refused(bench: Bench, kind: str) -> None:
    link, raw = bench.raw(kind)
    raw.send(frame(b"pay 5"))
    raw.send(frame(b"pay 5"))
    assert bytes(link.receive().payload) == b"pay 5"
    with pytest.raises(ProtocolError, match="expected frame 1, got frame 0: frames were lost or repeated"):
        link.receive()


@RAW
@pytest.mark.parametrize("into", [None, 100, 10], ids=["any", "a tensor", "a small tensor"])
@pytest.mark.parametrize("n", [15, 115, *thorough(1, 17)])  # of a header of 16 bytes and a payload of 100
def test_a_stream_that_ends_inside_a_frame_was_cut_off(bench: Bench, kind: str, into: int | None, n: int) -> None:
    link, raw = bench.raw(kind)
    raw.send(frame(bytes(100))[:n])
    raw.end()
    with pytest.raises(ProtocolError, match=r"cut off|100 bytes"):
        link.receive() if into is None else link.receive_into(bytearray(into))


@RAW
def test_a_stream_that_ends_between_frames_is_a_peer_that_went_away(bench: Bench, kind: str) -> None:
    link, raw = bench.raw(kind)
    raw.send(frame(b"abc"))
    raw.end()
    assert bytes(link.receive().payload) == b"abc"
    with pytest.raises(LinkClosed, match=r"went away|closed the link"):
        link.receive()


@STREAM
def test_nothing_is_reserved_for_what_is_too_large(bench: Bench, kind: str) -> None:
    for length, call in (
        (MAX_PAYLOAD + 1, lambda link: link.receive(max_bytes=MAX_PAYLOAD)),
        (MAX_PAYLOAD, lambda link: link.receive()),
        (CONTROL_BYTES + 1, lambda link: link.receive()),
        (MAX_PAYLOAD, lambda link: link.receive_into(bytearray(10))),
    ):
        link, raw = bench.raw(kind)
        raw.send(checked(frame()[:8] + length.to_bytes(4, "little") + bytes(4)))
        tracemalloc.start()
        try:
            with pytest.raises(ProtocolError, match=f"{length} bytes"):
                call(link)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


@STREAM
@pytest.mark.parametrize("what", [Kind.ERROR, Kind.CLOSE])
def test_a_last_word_may_not_be_long(bench: Bench, kind: str, what: Kind) -> None:
    link, raw = bench.raw(kind)
    raw.send(frame(bytes(MAX_REASON + 1), what))
    with pytest.raises(ProtocolError, match=f"{MAX_REASON + 1} bytes of {what.name} where at most {MAX_REASON}"):
        link.receive()


@STREAM
def test_what_follows_a_header_is_not_waited_for_as_long_as_a_frame(bench: Bench, kind: str) -> None:
    """A length that is damaged would keep a rank for days, as it waits that long for the next step."""
    for call in (lambda link: link.receive(WAIT_S, 200), lambda link: link.receive_into(bytearray(100), WAIT_S)):
        link, raw = bench.raw(kind, Deadlines(step_timeout_s=0.1))
        raw.send(frame(bytes(100))[:-1])
        with pytest.raises(LinkTimeout, match=r"0\.1 s \(step_timeout_s\)"):
            call(link)


@STREAM
def test_rest_of_a_frame_does_not_extend_the_timeout_of_the_caller(bench: Bench, kind: str) -> None:
    for call in (lambda link: link.receive(0.1, 200), lambda link: link.receive_into(bytearray(100), 0.1)):
        link, raw = bench.raw(kind, Deadlines(step_timeout_s=2.0))
        raw.send(frame(bytes(100))[:-1])
        with pytest.raises(LinkTimeout, match=r"0\.1 s \(the time given\)"):
            call(link)


@STREAM
@pytest.mark.parametrize(
    ("part", "pause_s"),
    # A header is there before its deadline unless its bytes come slowly.
    [
        ("header", 0.02),
        *itertools.product(("payload", "tensor"), (0, 0.02)),
        *(pytest.param(part, 0.0002, marks=pytest.mark.thorough) for part in ("payload", "tensor")),
    ],
)
def test_a_byte_now_and_then_does_not_extend_a_deadline(bench: Bench, kind: str, part: str, pause_s: float) -> None:
    link, raw = bench.raw(kind, Deadlines(step_timeout_s=0.2))
    sock = raw.sock
    assert sock is not None
    if part != "header":
        raw.send(pack_header(Kind.DATA, MAX_PAYLOAD, 0))

    def drip() -> None:
        for _ in range(MAX_PAYLOAD):
            raw.send(b"E" if part == "header" else b"\0")
            if pause_s:
                time.sleep(pause_s)

    dripping = start(drip)
    call = link.receive_into if part == "tensor" else link.receive
    what = (bytearray(MAX_PAYLOAD),) if part == "tensor" else (None, MAX_PAYLOAD)
    with pytest.raises((LinkTimeout, ProtocolError) if part == "header" else LinkTimeout, match=r"0\.2 s|EEEE"):
        call(*what)
    link.close()
    assert isinstance(dripping.exception(WAIT_S), OSError)


@STREAM
def test_reading_a_bit_now_and_then_does_not_extend_a_deadline(bench: Bench, kind: str) -> None:
    link, raw = bench.raw(kind, Deadlines(send_timeout_s=0.2))
    sock = raw.sock
    assert sock is not None
    over = threading.Event()

    def sip() -> None:
        while not over.is_set() and sock.recv(16 << 10):
            time.sleep(0.002)

    sipping = start(sip)
    with pytest.raises(LinkTimeout, match="send_timeout_s"):
        link.send(bytes(MAX_PAYLOAD))
    over.set()
    sipping.exception(WAIT_S)


@STREAM
def test_a_link_that_is_closed_while_it_sends_does_not_say_goodbye_inside_a_frame(bench: Bench, kind: str) -> None:
    link, raw = bench.raw(kind)
    sock = raw.sock
    assert sock is not None
    payload = os.urandom(8 << 20)
    sending = start(link.send, payload)
    until(lambda: link._sent == 1, "the send")
    writing = select.poll()
    writing.register(link._socket, select.POLLOUT)  # type: ignore[attr-defined]
    until(lambda: not writing.poll(0), "full buffers")
    link.close("goodbye")
    with pytest.raises(LinkClosed):
        sending.result(WAIT_S)
    came = bytearray()
    try:
        while data := sock.recv(1 << 20):
            came += data
    except OSError:
        pass  # TLS: cut off
    assert len(came) < len(payload)
    assert frame(payload).startswith(came)


def test_what_does_not_speak_tls_is_told_from_who_went_away(bench: Bench) -> None:
    """Damage inside an encrypted stream is an error of the protocol, wherever frames begin."""
    link, raw = bench.raw("tls")
    assert raw.sock is not None
    socket.socket.send(raw.sock, b"\x17\x03\x03\x00\x20" + bytes(32))  # beside OpenSSL: a record that is forged
    with pytest.raises(ProtocolError, match="the encrypted stream from b is damaged"):
        link.receive()


# Peers whose process is killed.

PEERS = ("tcp", "tls", "grpc dialler", "grpc server")


def be_a_peer(kind: str, port: str, folder: str) -> None:
    """In a process of its own: link to the test, say one word, and be killed."""
    if kind == "grpc server":
        server = Server()
        print(server.port, flush=True)
        link: Link = server.came()
    elif kind == "grpc dialler":
        there = grpc.insecure_channel(f"127.0.0.1:{port}", grpc_link.CHANNEL_OPTIONS)
        link = grpc_link.dial(there, "test", "s")
    else:
        sock = socket.create_connection(("127.0.0.1", int(port)))
        if kind == "tls":
            context = security.client_context(own_credentials(Path(folder) / "pi"))
            sock = security.handshake(sock, context, server_side=False, peer="test", timeout_s=WAIT_S)
        link = TcpLink(sock, "test")
    link.send(b"here")
    link.receive(3600)


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_that_is_killed_is_noticed_at_once(
    bench: Bench, server: Server, folder: Path, trust: tuple[security.Credentials, security.Credentials], peer: str
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = server.port if peer == "grpc dialler" else listener.getsockname()[1]
    code = f"from tests.unit.transport.test_links import be_a_peer; be_a_peer({peer!r}, '{port}', {str(folder)!r})"
    with listener, subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            if peer == "grpc dialler":
                server.deadlines = PATIENT
                link: Link = server.came()
            elif peer == "grpc server":
                target = f"127.0.0.1:{int(child.stdout.readline())}"
                there = grpc.insecure_channel(target, grpc_link.CHANNEL_OPTIONS)
                bench._stack.callback(there.close)
                link = grpc_link.dial(there, "b", "session", PATIENT)
            else:
                sock = listener.accept()[0]
                if peer == "tls":
                    context = security.server_context(trust[0])
                    sock = security.handshake(sock, context, server_side=True, peer="b", timeout_s=WAIT_S)
                link = TcpLink(sock, "b", PATIENT)
            with link:
                assert bytes(link.receive().payload) == b"here"
                waiting = start(link.receive)
                until(lambda: is_inside(link.receive), "the wait")
                child.send_signal(signal.SIGKILL)
                with pytest.raises(LinkClosed) as caught:
                    waiting.result(WAIT_S)
                assert_of_no_use(link, str(caught.value))
        finally:
            child.kill()


@ALL
@ENDS
def test_a_peer_that_is_gone_is_noticed_long_before_the_deadline(bench: Bench, kind: str, swapped: bool) -> None:
    """By who sends; over gRPC, which accepts messages for a closed link, at the latest by who then receives."""
    a, b = ends(bench, kind, swapped)
    b.close()

    def find_out() -> None:
        for _ in range(200):
            a.send(bytes(100))
        assert "grpc" in kind or kind == "relay"
        a.receive()

    with pytest.raises(LinkClosed):
        find_out()


# gRPC.


def test_messages_larger_than_a_frame_are_an_error_of_the_protocol(server: Server, bench: Bench) -> None:
    with server.channel() as channel:
        link = grpc_link.dial(channel, "b", "session", PATIENT)
        other = server.came()
        other.outgoing.put(bytes(MAX_PAYLOAD + HEADER_BYTES + 1), 10.0)
        with pytest.raises(TransportError) as caught:
            link.receive(max_bytes=MAX_PAYLOAD)
        assert isinstance(caught.value, ProtocolError), caught.value


def test_a_server_that_does_not_know_the_method_refuses(bench: Bench) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with (
            grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
            grpc_link.dial(channel, "b", "session") as link,
            pytest.raises(Refused, match="b: Method not found"),
        ):
            link.receive()
    finally:
        server.stop(0).wait()


def test_nobody_listening_is_a_closed_link_with_plain_words(bench: Bench) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with (
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
        grpc_link.dial(channel, "b", "session") as link,
        pytest.raises(LinkClosed, match="b cannot be reached: nothing listens there"),
    ):
        link.receive()


# TLS and large frames in both directions at once: OpenSSL's buffers, its lock and our waits must not block each other.


def test_both_ends_send_large_frames_at_once_over_tls(trust: tuple[security.Credentials, security.Credentials]) -> None:
    left, right = secured(tcp_sockets(), *trust)
    with TcpLink(left, "b") as a, TcpLink(right, "a") as b:
        payload = os.urandom(16 << 20)
        sending = [start(link.send, payload) for link in (a, b)]
        receiving = [start(link.receive, WAIT_S, MAX_PAYLOAD) for link in (a, b)]
        for done in sending:
            done.result(WAIT_S)
        for came in receiving:
            assert came.result(WAIT_S).payload == payload


# Peers that vanish without giving a reason, and peers that are only busy.

SILENT = """
import socket, sys
from transport.tcp_link import TcpLink
with socket.create_server((sys.argv[1], 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    link = TcpLink(listener.accept()[0], "the test")
    link.send(b"here")
    link.receive(60)
"""
CALLER = """
import socket, sys, time
from transport.errors import TransportError
from transport.tcp_link import TcpLink
link = TcpLink(socket.create_connection((sys.argv[1], int(sys.argv[2])), 5), "pi")
print(bytes(link.receive().payload), flush=True)
sys.stdin.readline()
began = time.monotonic()
try:
    if sys.argv[3] == "waits":
        link.send(b"are you there?")
        link.receive()
    while True:
        link.send(bytes(1 << 20))
except TransportError as error:
    print(type(error).__name__, error, time.monotonic() - began, sep="|", flush=True)
"""


def tcp_info(retransmits: int, probes: int, silent_ms: int) -> bytes:
    info = bytearray(60)
    info[2], info[3] = retransmits, probes
    info[56:60] = silent_ms.to_bytes(4, sys.byteorder)
    return bytes(info)


@pytest.mark.parametrize(
    ("info", "gone"),
    [
        (tcp_info(0, 0, 60_000), False),  # nothing was said for a while, nothing is on its way
        (tcp_info(5, 0, 6_000), True),
        (tcp_info(0, 4, 6_000), True),
        (tcp_info(4, 0, 1_000), False),  # a lossy network
        (tcp_info(0, 1, 9_000), False),  # a peer that does not read was just asked again whether it has room
        (tcp_info(255, 0, 2**32 - 1), True),
    ],
)
def test_how_a_vanished_peer_is_told_from_a_busy_one(info: bytes, gone: bool) -> None:
    assert tcp_link.vanished(info) is gone


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces of Linux")
def test_a_pulled_cable_is_noticed_in_seconds_and_a_busy_peer_is_left_alone() -> None:
    left, right = tcp_sockets()
    busy = TcpLink(left, "busy", Deadlines(send_timeout_s=60))
    sending = start(send_for_ever, busy)
    with two_hosts() as (first, two):
        callers = []
        for way in ("waits", "sends"):
            server = first.start([sys.executable, "-c", SILENT, first.address])
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            caller = two.start([sys.executable, "-c", CALLER, first.address, port, way])
            assert caller.stdout is not None
            assert caller.stdin is not None
            assert caller.stdout.readline() == "b'here'\n"
            callers.append(caller)
        first.unplug()
        for caller in callers:
            caller.stdin.write("\n")
            caller.stdin.flush()
        for caller in callers:
            kind, words, seconds = caller.stdout.readline().strip().split("|")
            assert (kind, words) == ("LinkClosed", "pi went away: it no longer answers")
            assert float(seconds) > 4
    assert not sending.done()  # for longer than the others took to be given up
    busy.close()
    right.close()
    with pytest.raises(LinkClosed):
        sending.result(WAIT_S)
