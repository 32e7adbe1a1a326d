"""A stand-in for the bridge: speaks with a page in a browser or in node, so that tests call the page's operations."""

from __future__ import annotations

import itertools
import json
import mimetypes
import queue
import secrets
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
STATIC = ROOT / "edge/browser/static"
PATIENCE_S = 120.0
HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Content-Security-Policy": "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self';"
    " connect-src 'self'; worker-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'",
    "Cache-Control": "no-store",
}


class PageError(Exception):
    """An error that the page answered."""


def frame(header: dict[str, Any], payload: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<II", 4 + len(text) + len(payload), len(text)) + text + payload


def frames(data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
    while data:
        total, size = struct.unpack_from("<II", data)
        yield json.loads(data[8 : 8 + size]), data[8 + size : 4 + total]
        data = data[4 + total :]


class PageBridge:
    """Serves the page's files, and calls operations of the page that joined with the token "token"."""

    def __init__(self, *, isolated: bool = True, identity: str = "first") -> None:
        self.identity, self.isolated = identity, isolated
        self.tokens, self.keys = {"token"}, set[str]()
        self.fails = False  # True: the next reply gets the status 500
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        self.answers: dict[int, queue.Queue[tuple[dict[str, Any], bytes]]] = {}
        self.down: queue.Queue[bytes | None] | None = None
        self._numbers = itertools.count(1)
        self.hello: dict[str, Any] = {}  # first event of the page
        self.facts: dict[str, Any] = {}  # answer to `load`
        self.file = ""  # name of the loaded file
        bridge = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_arguments: object) -> None:
                """Print nothing."""

            def do_GET(self) -> None:
                bridge.get(self)

            def do_POST(self) -> None:
                bridge.post(self)

        self.server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def get(self, request: BaseHTTPRequestHandler) -> None:
        if request.path == "/api/down":
            if not self._authorized(request):
                self._answer(request, 403, b'{"error": "this device is not a member"}')
                return
            self.replace()
            mine = self.down = queue.Queue[bytes | None]()
            self._headers(request, 200, {"Transfer-Encoding": "chunked", "Edge-Bridge": self.identity})
            while (data := mine.get()) is not None:
                try:
                    request.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                except OSError:
                    return
            request.close_connection = True
            return
        name = request.path.split("?")[0].lstrip("/") or "index.html"
        path = STATIC / name
        if "/" in name or not path.is_file():
            self._answer(request, 404, b"")
            return
        self._answer(request, 200, path.read_bytes(), mimetypes.guess_type(name)[0] or "application/octet-stream")

    def post(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["Content-Length"]))
        if request.path == "/api/join":
            token = json.loads(body)["token"]
            if token not in self.tokens:
                self._answer(request, 403, b'{"error": "this link was used already; ask for a new one"}')
                return
            self.tokens.discard(token)
            key = secrets.token_hex(8)
            self.keys.add(key)
            self._answer(request, 200, json.dumps({"name": "page", "key": key}).encode())
            return
        if not self._authorized(request):
            self._answer(request, 403, b"{}")
            return
        if self.fails and any("id" in header for header, _ in frames(body)):
            self.fails = False
            self._answer(request, 500, b"{}")
            return
        for header, payload in frames(body):
            if "event" in header:
                self.events.put(header)
            elif header.get("id") in self.answers:
                self.answers[header["id"]].put((header, payload))
        self._answer(request, 204, b"")

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        assert self.down is not None, "no page is connected"
        self.down.put(frame(header, payload))

    def start(self, op: str, payload: bytes = b"", **fields: Any) -> int:
        """Send a command, and return its number."""
        number = next(self._numbers)
        self.answers[number] = queue.Queue()
        self.send({"id": number, "op": op, **fields}, payload)
        return number

    def wait(self, number: int) -> tuple[dict[str, Any], bytes]:
        """Return the answer to a command. Raises PageError if the page answers an error."""
        header, payload = self.answers[number].get(timeout=PATIENCE_S)
        if "error" in header:
            raise PageError(header["error"])
        return header, payload

    def call(self, op: str, payload: bytes = b"", **fields: Any) -> tuple[dict[str, Any], bytes]:
        return self.wait(self.start(op, payload, **fields))

    def event(self, name: str) -> dict[str, Any]:
        """Return the next event of this name. Other events are skipped."""
        while (event := self.events.get(timeout=PATIENCE_S))["event"] != name:
            pass
        return event

    def send_file(self, path: Path, chunk_bytes: int = 1 << 20) -> tuple[str, list[int]]:
        """Send the chunks of a file that the page lacks. Return its name, and the chunks that were missing."""
        data = path.read_bytes()
        chunks = [data[at : at + chunk_bytes] for at in range(0, len(data), chunk_bytes)]
        name = sha256(data).hexdigest()
        digests = [sha256(chunk).hexdigest() for chunk in chunks]
        header, _ = self.call("file", name=name, size=len(data), chunk_bytes=chunk_bytes, chunks=digests)
        for index in header["missing"]:
            self.call("chunk", chunks[index], name=name, index=index)
        return name, header["missing"]

    def cut(self) -> None:
        """End the page's stream, as a lost network does."""
        if self.down is not None:
            self.down.put(None)
            self.down = None

    def replace(self) -> None:
        if self.down is not None:
            self.down.put(frame({"op": "replaced"}))
        self.cut()

    def close(self) -> None:
        self.cut()
        self.server.shutdown()
        self.server.server_close()

    def _authorized(self, request: BaseHTTPRequestHandler) -> bool:
        return request.headers.get("Authorization", "").removeprefix("Bearer ") in self.keys

    def _headers(self, request: BaseHTTPRequestHandler, status: int, fields: dict[str, str]) -> None:
        request.send_response(status)
        for name, value in {**(HEADERS if self.isolated else {}), **fields}.items():
            request.send_header(name, value)
        request.end_headers()

    def _answer(
        self, request: BaseHTTPRequestHandler, status: int, body: bytes, kind: str = "application/json"
    ) -> None:
        self._headers(request, status, {"Content-Length": str(len(body)), "Content-Type": kind})
        request.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_arguments: object) -> None:
        """Print nothing: pages end in the middle of a request."""


@contextmanager
def node_page(
    node: str, url: str, store: Path, *options: str, threads: int = 2, single: bool = False, token: str = "token"
) -> Iterator[subprocess.Popen[str]]:
    """A page in node, which ends with the block. Its output has its states, a line of JSON each.

    options: options of node_page.mjs.
    single: the page is not isolated, so it has no threads.
    """
    command = [node, str(ROOT / "tests/support/node_page.mjs"), "--store", str(store)]
    command += ["--threads", str(threads), *(["--single"] if single else []), *options, "--", url, token]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
