"""Test a conversation with a server that gives arbitrary answers: errors name the server, and the key is sent to no
other.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from edge.net.chat_client import ServerChat
from transport.errors import TransportError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(event: object) -> bytes:
    """A part of a chunked response: one event."""
    line = b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(line), line)


HELLO = chunk({"choices": [{"delta": {"content": "Hello"}}]})


@contextmanager
def server(answer: bytes) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Address of a server that answers each request so and hangs up, and the headers of the requests."""
    seen: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            seen.append(dict(self.headers))
            self.wfile.write(answer)
            self.close_connection = True

        do_GET = do_POST  # noqa: N815 - called by this name

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"127.0.0.1:{http.server_port}", seen
        finally:
            http.shutdown()


def test_a_key_follows_no_redirect() -> None:
    with server(HEAD + chunk(b"[DONE]") + b"0\r\n\r\n") as (other, seen):
        there = f"http://{other}/v1/chat/completions"
        with server(f"HTTP/1.1 302 Found\r\nLocation: {there}\r\nContent-Length: 0\r\n\r\n".encode()) as (here, _):
            with pytest.raises(TransportError) as refused:
                list(ServerChat(here, key="secret").ask("Hi", {}))
            assert str(refused.value) == (
                f"{here} answers 302: it is at {there}; give that address, as a key goes to no other server than the"
                " one named"
            )
    assert seen == []


def test_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with server(HEAD + HELLO + chunk(b"[DONE]") + b"0\r\n\r\n") as (here, seen), server(b"") as (proxy, passed):
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, f"http://{proxy}")
        monkeypatch.delenv("no_proxy", raising=False)
        assert list(ServerChat(here, key="secret").ask("Hi", {})) == [("Hello", "")]
    assert passed == []
    assert seen[0]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    "url", ["http://me:secret@host:8080", "me:secret@host", "ftp://me:secret@host", "http://@host"]
)
def test_a_password_in_the_address_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="the address has a name or password before its @; leave it out") as refused:
        ServerChat(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (HEAD + HELLO + b"40\r\ndata: {", "ended before the answer was complete"),  # inside a chunk
        (HEAD + HELLO, "ended before the answer was complete"),  # between two
        (HEAD + HELLO + b"0\r\n\r\n", "ended before the answer was complete"),  # without a last event
        (b"no HTTP at all\r\n\r\n", "cannot be used: no HTTP at all"),
        (b"", "cannot be used: Remote end closed connection without response"),
        *(
            (HEAD + chunk(event), "cannot be used: it sent an event that does not belong to the OpenAI API")
            for event in (
                5, [], None, {"choices": 5}, {"choices": [5]}, {"choices": [{"delta": []}]},
                {"choices": [{"delta": {"content": ["a"]}}]},
            )
        ),
        (HEAD + chunk(b"{"), "cannot be used: Expecting property name"),
        (HEAD + chunk(b"[" * 100_000), "cannot be used: maximum recursion depth exceeded"),
        (HEAD + chunk({"error": {"message": "too long"}}), ": too long"),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 9\r\n\r\n[", "answers 500: Oops"),
    ],
)  # fmt: skip
def test_whatever_a_server_answers_is_an_error_that_names_it(answer: bytes, words: str) -> None:
    """So a conversation on a terminal goes on."""
    with server(answer) as (here, _):
        chat = ServerChat(here)
        with pytest.raises(TransportError) as failed:
            list(chat.ask("Hi", {}))
    assert str(failed.value).startswith(here)
    assert words in str(failed.value)
    came = HELLO in answer
    assert [message["content"] for message in chat.messages] == (["Hi", "Hello"] if came else [])
