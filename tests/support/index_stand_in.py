"""A stand-in for a package index on this machine: pages of links in JSON or HTML, and files in parts."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar


class Index:
    """The files of projects, what the index does wrong on purpose, and what it was asked."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}  # by "project/filename"
        self.html = False  # pages of links in HTML in place of JSON
        self.cut_after: int | None = None  # break the next download off after so many bytes
        self.knows_ranges = True
        self.user = ""  # "Basic ..." that is needed, where one is
        self.asked: list[tuple[str, str]] = []  # path, and Range of each request
        self.url = ""

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Answer on a free port until the block ends."""
        index = self

        class BoundHandler(_Handler):
            index_ = index

        server = ThreadingHTTPServer(("127.0.0.1", 0), BoundHandler)
        self.url = f"http://127.0.0.1:{server.server_port}/simple"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    index_: ClassVar[Index]

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        index, span = self.index_, self.headers.get("Range", "")
        index.asked.append((self.path, span))
        if index.user and self.headers.get("Authorization") != index.user:
            return self._send(401, b"", "text/plain")
        if self.path.startswith("/files/"):
            return self._send_file(self.path.removeprefix("/files/"), span)
        project = self.path.strip("/").removeprefix("simple/")
        names = [name for name in index.files if name.startswith(f"{project}/")]
        if not names:
            return self._send(404, b"", "text/plain")
        if index.html:
            links = "".join(f'<a href="../../files/{name}#sha256=0">{name}</a>\n' for name in names)
            return self._send(200, f"<!DOCTYPE html><body>{links}</body>".encode(), "text/html")
        files = [{"filename": name.rpartition("/")[2], "url": f"/files/{name}"} for name in names]
        return self._send(200, json.dumps({"files": files}).encode(), "application/vnd.pypi.simple.v1+json")

    def _send_file(self, name: str, span: str) -> None:
        data = self.index_.files[name]
        start = int(span.removeprefix("bytes=").rstrip("-")) if span and self.index_.knows_ranges else 0
        cut, self.index_.cut_after = self.index_.cut_after, None
        self._send(206 if start else 200, data[start:], "application/octet-stream", cut)

    def _send(self, status: int, data: bytes, kind: str, cut: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:cut])
