"""A proxy that forwards requests to a server and records them, with the status of each answer.

with Recorder("http://127.0.0.1:8080") as front:
    ...  # clients ask front.url
    front.exchanges
"""

from __future__ import annotations

import http.client
import json
import threading
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ANSWER_S = 900
_OF_CONNECTION = {
    "connection",
    "keep-alive",
    "transfer-encoding",
    "host",
    "content-length",
    "accept-encoding",
    "upgrade",
}


@dataclass
class Exchange:
    """A request, and how it was answered."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any  # of JSON; a text where it is none
    status: int = 0  # 0: no answer came
    answer: str = ""

    @property
    def refused(self) -> bool:
        """True if the server did not do what was asked."""
        return not 200 <= self.status < 400


class Recorder:
    """The front: it listens on a free port of loopback as long as its block lasts."""

    def __init__(self, server: str) -> None:
        self.target = urlsplit(server)
        self.exchanges: list[Exchange] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"recorder": self}))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Recorder:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def save(self, path: Path) -> None:
        """Write what was seen, a line of JSON for each request."""
        path.write_text("".join(json.dumps(asdict(exchange)) + "\n" for exchange in self.exchanges))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    recorder: Recorder

    def do_GET(self) -> None:
        raw = self._body()
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _OF_CONNECTION}
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            body = raw.decode(errors="replace")
        exchange = Exchange(self.command, self.path, headers, body)
        self.recorder.exchanges.append(exchange)
        server = http.client.HTTPConnection(self.recorder.target.netloc, timeout=ANSWER_S)
        try:
            server.request(self.command, self.path, raw or None, {**headers, "Connection": "close"})
            response = server.getresponse()
            exchange.status = response.status
            self._pass(response, exchange)
        except OSError as error:
            exchange.answer += f" [{type(error).__name__}: {error}]"
            self.close_connection = True
        finally:
            server.close()

    do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = do_OPTIONS = do_GET  # noqa: N815

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _pass(self, response: http.client.HTTPResponse, exchange: Exchange) -> None:
        self.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in _OF_CONNECTION:
                self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        while data := response.read1(1 << 16):
            exchange.answer = (exchange.answer + data.decode(errors="replace"))[:20_000]
            self.wfile.write(data)
            self.wfile.flush()
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Say nothing."""
