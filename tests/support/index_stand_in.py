"""A local replacement for a package index: pages of links in JSON or HTML, and files."""

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
        self.paths: list[str] = []  # the path of each request
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
        index = self.index_
        index.paths.append(self.path)
        if self.path.startswith("/files/"):
            return self._send(200, index.files[self.path.removeprefix("/files/")], "application/octet-stream")
        project = self.path.strip("/").removeprefix("simple/")
        names = [name for name in index.files if name.startswith(f"{project}/")]
        if not names:
            return self._send(404, b"", "text/plain")
        if index.html:
            links = "".join(f'<a href="../../files/{name}">{name}</a>\n' for name in names)
            return self._send(200, f"<!DOCTYPE html><body>{links}</body>".encode(), "text/html")
        files = [{"filename": name.rpartition("/")[2], "url": f"/files/{name}", "hashes": {}} for name in names]
        return self._send(200, json.dumps({"files": files}).encode(), "application/vnd.pypi.simple.v1+json")

    def _send(self, status: int, data: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
