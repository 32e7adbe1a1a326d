"""Test request bodies: the limit of bytes held at a time, and that clients can read why a request was refused."""

import asyncio
import gzip
import json
import socket
import zlib
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from edge.serve.app import create_app
from edge.serve.http import bodies
from edge.serve.http.bodies import MOST_ITEMS, MOST_STRINGS, SHORT_BYTES, BodyRoom, IncomingBody, check_values
from edge.serve.http.errors import BadRequest
from edge.serve.options import ServeOptions
from tests.serve.scripted import ScriptedModels
from tests.serve.serving import serving

MOST, TOTAL = 400_000, 500_000
CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(create_app(ScriptedModels(), ServeOptions(max_body_bytes=MOST, max_bodies_bytes=TOTAL))) as address:
        yield address


def half_sent(url: str, length: int, sent: int = 1000) -> socket.socket:
    """A connection with a request that says it has so many bytes, of which fewer come."""
    at = urlsplit(url)
    connection = socket.create_connection((at.hostname, at.port), 60)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
    connection.sendall(head.encode() + b" " * sent)
    return connection


def chat_of(n_bytes: int) -> bytes:
    return json.dumps(ASK).encode().ljust(n_bytes)


def test_bodies_have_room_together_and_short_ones_need_none(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "ROOM_S", 0.2)
    with half_sent(url, 300_000):
        assert httpx.post(url + "/tokenize", content=b"{}", timeout=60).status_code == 400  # the head came before
        refused = httpx.post(url + CHAT, content=chat_of(300_000), timeout=60)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == str(bodies.RETRY_S)
        assert f"{TOTAL} bytes" in refused.json()["error"]["message"]
        assert httpx.post(url + CHAT, content=chat_of(SHORT_BYTES), timeout=60).status_code == 200
        assert httpx.post(url + CHAT, content=chat_of(TOTAL - 300_000), timeout=60).status_code == 200
    # The client has gone, and so has what it took: this waits for that, at most as long as a usual request does.
    monkeypatch.setattr(bodies, "ROOM_S", 60.0)
    assert httpx.post(url + CHAT, content=chat_of(300_000), timeout=120).status_code == 200


def test_a_body_of_unknown_length_takes_room_as_it_comes(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "ROOM_S", 0.2)
    body = chat_of(300_000)
    parts = [body[at : at + 50_000] for at in range(0, len(body), 50_000)]
    assert httpx.post(url + CHAT, content=iter(parts), timeout=60).status_code == 200
    with half_sent(url, 300_000):
        httpx.post(url + "/tokenize", content=b"{}", timeout=60)
        assert httpx.post(url + CHAT, content=iter(parts), timeout=60).status_code == 503


@pytest.mark.parametrize("path", [CHAT, "/nothing", "/v1/models"])
def test_a_client_that_sends_all_of_what_is_refused_reads_the_answer(url: str, path: str) -> None:
    at = urlsplit(url)
    length = 20 << 20  # far more than sockets hold between them
    with socket.create_connection((at.hostname, at.port), 60) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode())
        connection.sendall(b" " * length)  # a connection that is reset raises
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert f"more than {MOST} bytes" in answer.decode()


def test_not_more_than_a_bound_is_read_past(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "DRAIN_BYTES", 100_000)
    sent = half_sent(url, 999_999_999)
    with sent, pytest.raises(ConnectionError):
        send_megabytes(sent, 999)


def send_megabytes(connection: socket.socket, n: int) -> None:
    for _ in range(n):
        connection.sendall(b" " * 1_000_000)


def test_who_sends_nothing_more_of_what_is_refused_is_not_waited_for(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "DRAIN_S", 0.2)
    with half_sent(url, MOST + 1) as connection:
        assert connection.makefile("rb").read().startswith(b"HTTP/1.1 413 ")  # until it is closed


def test_room_is_given_in_turn_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        room, order = BodyRoom(100), []

        async def asks(name: str, n_bytes: int) -> None:
            await room.take(n_bytes)
            order.append(name)

        await room.take(60)
        large, small = asyncio.create_task(asks("large", 80)), asyncio.create_task(asks("small", 10))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == []  # also the small one waits for its turn, or the large one might wait for ever
        room.give(60)
        await asyncio.gather(large, small)
        assert order == ["large", "small"]
        left = asyncio.create_task(asks("left", 50))
        behind = asyncio.create_task(asks("behind", 10))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        left.cancel()  # its client has gone
        await asyncio.gather(left, behind, return_exceptions=True)
        assert order == ["large", "small", "behind"]
        room.give(80 + 10 + 10)
        await room.take(100)  # nothing was lost
        monkeypatch.setattr(bodies, "ROOM_S", 0.0)
        with pytest.raises(HTTPException, match="100 bytes"):
            await room.take(1)

    asyncio.run(scenario())


@pytest.mark.parametrize("cancelled_first", [True, False])
def test_room_is_not_lost_if_its_client_goes_in_the_moment_of_getting_it(cancelled_first: bool) -> None:
    async def scenario() -> None:
        room = BodyRoom(100)
        await room.take(60)
        waiting = asyncio.create_task(room.take(80))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        steps = [waiting.cancel, lambda: room.give(60)]
        for step in steps if cancelled_first else steps[::-1]:
            step()
        await asyncio.wait([waiting])
        if not waiting.cancelled():  # it has the room, whatever it was told
            room.give(80)
        await room.take(100)

    asyncio.run(scenario())


def test_largest_body_of_the_options_has_room_although_all_together_have_less() -> None:
    options = ServeOptions(max_body_bytes=TOTAL, max_bodies_bytes=MOST)
    with serving(create_app(ScriptedModels(), options)) as address:
        assert httpx.post(address + CHAT, content=chat_of(TOTAL), timeout=60).status_code == 200
        assert httpx.post(address + CHAT, content=chat_of(TOTAL + 1), timeout=60).status_code == 413


def test_an_answered_body_gives_its_room_back_once() -> None:
    async def scenario() -> None:
        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": b" " * 100_000, "more_body": False}

        room = BodyRoom(100_000)
        for _ in range(3):
            body = IncomingBody(receive, Headers({"content-length": "100000"}), 200_000, room)
            await body.receive()
            assert body.is_complete
            body.close()
            body.close()
        await room.take(100_000)

    asyncio.run(scenario())


def many(value: bytes, n: int) -> bytes:
    return b"[" + b",".join([value] * n) + b"]"


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":' + many(b'{"role":"user","content":""}', 900_000) + b"}",
        b'{"messages":' + many(b'{"content":"\\\\\\""}', 30_000) + b"}",
        b'{"prompt":' + many(b"1", MOST_ITEMS + 2) + b"}",
        b'{"messages":' + many(b"{}", MOST_ITEMS + 2) + b"}",
        many(b'""', MOST_STRINGS + 1),
    ],
    ids=["messages", "escapes", "numbers", "objects", "strings"],
)
def test_more_values_than_any_request_needs_are_refused_before_they_are_objects(body: bytes) -> None:
    with pytest.raises(BadRequest, match="at most"):
        check_values(body)


@pytest.mark.parametrize(
    "body",
    [
        many(b'""', MOST_STRINGS),
        many(b"1", MOST_ITEMS + 1),
        json.dumps({"text": '{"a": ["b\\\\", "c", 1]}\n' * 200_000}).encode(),
        b'{"text": "' + b"\\\\" * 2_000_000 + b'"}',
        b'"' + b'\\"' * 1_000_000,
    ],
    ids=["strings", "numbers", "text", "backslashes", "open"],
)
def test_what_texts_contain_does_not_count(body: bytes) -> None:
    check_values(body)


def test_large_body_is_answered_like_a_small_one() -> None:
    text = "word, " * 20_000
    with serving(create_app(ScriptedModels(), ServeOptions())) as url:
        answered = httpx.post(f"{url}/tokenize", json={"content": text}, timeout=60)
        assert len(answered.json()["tokens"]) == len(text)
        wrong = httpx.post(f"{url}/tokenize", json={"content": 5, "more": text}, timeout=60)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "content")
        hostile = b'{"messages":' + many(b'{"role":"user","content":""}', 30_000) + b"}"
        refused = httpx.post(f"{url}/v1/chat/completions", content=hostile, timeout=60)
        assert (refused.status_code, "at most 50000 are allowed" in refused.text) == (400, True)


def deflated(body: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(body) + compressor.flush()


@pytest.mark.parametrize(
    ("coding", "compress"),
    [("gzip", gzip.compress), ("X-GZIP", gzip.compress), ("deflate", zlib.compress), ("deflate", deflated)],
)
@pytest.mark.parametrize("n_bytes", [100, SHORT_BYTES, SHORT_BYTES + 1, 300_000, MOST])
def test_compressed_body_is_answered(url: str, coding: str, compress: Callable[[bytes], bytes], n_bytes: int) -> None:
    body = compress(chat_of(n_bytes))
    answered = httpx.post(url + CHAT, content=body, headers={"Content-Encoding": coding}, timeout=60)
    assert answered.status_code == 200, answered.text


def test_compressed_body_keeps_to_the_limits(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def status(body: bytes, coding: str = "gzip") -> tuple[int, str]:
        answered = httpx.post(url + CHAT, content=body, headers={"Content-Encoding": coding}, timeout=60)
        return answered.status_code, answered.json()["error"]["message"]

    assert status(gzip.compress(chat_of(MOST + 1))) == (413, f"the request has more than {MOST} bytes; send less")
    bomb = gzip.compress(b" " * (1 << 26))
    assert len(bomb) < MOST
    assert status(bomb)[0] == 413
    assert status(gzip.compress(chat_of(300_000))[:-9])[0] == 400
    for damaged in (gzip.compress(chat_of(100))[:-9], b"", b"{}", b"\x1f\x8b"):
        assert status(damaged)[0] == 400, damaged
    assert status(b"{}", "br") == (
        415,
        "the body is compressed as 'br'; send it without compression, or as gzip or deflate",
    )
    assert status(b"{}", "gzip, gzip")[0] == 415
    monkeypatch.setattr(bodies, "ROOM_S", 0.2)
    with half_sent(url, 300_000):
        httpx.post(url + "/tokenize", content=b"{}", timeout=60)
        assert status(gzip.compress(chat_of(300_000)))[0] == 503  # what it takes is there once it is decompressed
    monkeypatch.setattr(bodies, "ROOM_S", 60.0)
    body = gzip.compress(chat_of(MOST))
    for _ in range(3):  # the room was given back
        assert (
            httpx.post(url + CHAT, content=body, headers={"Content-Encoding": "gzip"}, timeout=120).status_code == 200
        )


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8"])
def test_json_in_other_encodings_is_answered(url: str, encoding: str) -> None:
    answered = httpx.post(url + CHAT, content=json.dumps(ASK).encode(encoding), timeout=60)
    assert answered.status_code == 200, answered.text


@pytest.mark.parametrize(
    "body", [b"\xff\xfe{", b"{\0\0", "{'a': '\u4f60'}".encode("gbk"), b"\xef\xbb\xbf", b"\0\0\xfe\xff"]
)
def test_bytes_that_are_no_text_are_refused(url: str, body: bytes) -> None:
    refused = httpx.post(url + CHAT, content=body, timeout=60)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
