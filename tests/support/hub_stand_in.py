"""A local replacement for the Hugging Face hub: it answers only the requests that fetch a model file."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

TOKEN = "hf_stand_in"


class Hub:
    """State of the hub: what it has, what it does wrong on purpose, and what it was asked."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.announced: dict[str, int] = {}  # file to a size that is not its own
        self.cut_after: int | None = None  # break the next download off after so many bytes
        self.stall_after: int | None = None  # send no more after so many bytes of the next download
        self.etag: str | None = None  # of every file, in place of its digest
        self.tokens: list[str] = []  # Authorization header of every request, "" without
        self.ranges: list[str] = []  # Range header of every download, "" without
        self.url = ""
        self.closing = threading.Event()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Answer on a free port until the block ends."""
        hub = self

        class BoundHandler(_Handler):
            hub_ = hub

        server = ThreadingHTTPServer(("127.0.0.1", 0), BoundHandler)
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield
        finally:
            self.closing.set()
            server.shutdown()
            thread.join()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub_: ClassVar[Hub]

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.split("?")[0].strip("/").split("/")
        api = path[:2] == ["api", "models"]
        token = self.headers.get("Authorization", "")
        self.hub_.tokens.append(token)
        if token not in ("", f"Bearer {TOKEN}"):  # as the hub does, also for public files
            return self._refuse(401, "")
        repo = "/".join(path[2:4] if api else path[:2])
        if repo not in self.hub_.repos:
            return self._refuse(401, "RepoNotFound")
        if repo in self.hub_.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._refuse(403, "GatedRepo")
        files = self.hub_.repos[repo]
        if api:
            info = {"id": repo, "siblings": [{"rfilename": name} for name in files]}
            return self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"}, body)
        name = "/".join(path[4:])  # OWNER/NAME/resolve/REVISION/FILE
        if name not in files:
            return self._refuse(404, "EntryNotFound")
        return self._send_file(name, files, body)

    def _send_file(self, name: str, files: dict[str, bytes], body: bool) -> None:
        data = files[name]
        commit = _digest(b"".join(files.values()))[:40]
        etag = self.hub_.etag or _digest(data)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if not body:
            size = self.hub_.announced.get(name, len(data))
            return self._send(200, b"", headers | {"Content-Length": str(size)}, body)
        expected = self.headers.get("Range", "")
        self.hub_.ranges.append(expected)
        start = int(expected.removeprefix("bytes=").rstrip("-")) if expected else 0
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        return self._send(206 if start else 200, data[start:], headers, body)

    def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if not body:
            return
        cut, self.hub_.cut_after = self.hub_.cut_after, None
        stall, self.hub_.stall_after = self.hub_.stall_after, None
        self.wfile.write(data[: cut or stall or len(data)])
        if stall:
            self.hub_.closing.wait(timeout=60)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code}, body=False)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
