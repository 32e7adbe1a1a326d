"""A bridge in a thread of the test, and a page whose answers a test writes."""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from edge.bridge.app import create_app
from edge.bridge.page import Page
from edge.bridge.page_worker import WorkerPlace, free_port
from edge.browser.browsers import Browsers
from edge.browser.frames import Frame, Splitter, pack
from edge.browser.page import DOOR
from edge.cluster.fleet import Fleet
from edge.errors import EdgeError
from edge.serve.http.listeners import listeners
from tests.support.helpers import until

HELLO: dict[str, Any] = {
    "event": "hello",
    "agent": "Chrome/140",
    "threads": 2,
    "memory_bytes": 4 << 30,
    "isolated": True,
}
LIMIT_S = 60.0  # only against a hang

Answer = Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes] | None]


class Bridge:
    """A running bridge on loopback, without TLS."""

    def __init__(self, folder: Path, lost_s: float, check: bool) -> None:
        """check: compare the page's numbers. False for a scripted page, which computes nothing."""
        self._check = check
        self.browsers = Browsers(folder / "browsers")
        self._folder, self._lost_s = folder, lost_s
        self._pages: dict[str, Page] = {}
        self._ports: dict[str, int] = {}
        self._socket = listeners("127.0.0.1", 0)[0]
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        app = create_app(self.browsers, self._page, secure=False)
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none"))
        self._thread = threading.Thread(target=asyncio.run, args=(self._run(),), daemon=True)
        self._thread.start()

    async def _run(self) -> None:
        await self._server.serve(sockets=[self._socket])

    def _page(self, name: str) -> Page:
        if name not in self._pages:
            self._ports[name] = free_port("127.0.0.1")
            if not self._check:
                self.browsers.remember_check(name, "Chrome 140")
            place = WorkerPlace("127.0.0.1", lambda: self._ports[name], None, self._folder / "cache")
            self._pages[name] = Page(name, place, self.browsers, self._lost_s)
        return self._pages[name]

    def folder(self, name: str) -> Path:
        """Return the folder of a page."""
        return self._pages[name].folder

    def port(self, name: str) -> int:
        """Return the port of a page's worker."""
        return self._ports[name]

    def is_ready(self, name: str) -> bool:
        """Return whether engine processes can connect to a page."""
        return name in self._pages and (self.folder(name) / DOOR).exists()

    def answers(self, name: str) -> bool:
        """Return whether a page's worker answers."""
        try:
            with Fleet([f"127.0.0.1:{self.port(name)}"]):
                return True
        except (EdgeError, OSError):
            return False

    def is_held(self, name: str) -> bool:
        """Return whether an engine process has loaded something at a page."""
        return self._pages[name]._engines._holder is not None

    def close(self) -> None:
        """End the pages and the server."""
        loop = self._server.servers[0].get_loop()
        for page in self._pages.values():
            asyncio.run_coroutine_threadsafe(page.close(), loop).result(LIMIT_S)
        self._server.should_exit = True
        self._thread.join(LIMIT_S)
        self._socket.close()


@contextmanager
def running_bridge(folder: Path, lost_s: float = LIMIT_S, *, check: bool = False) -> Iterator[Bridge]:
    """Yield a bridge that runs during the block."""
    bridge = Bridge(folder, lost_s, check)
    try:
        yield bridge
    finally:
        bridge.close()


class ScriptedPage:
    """A page that answers operations as a test says. It measures 1e9 bytes/s."""

    def __init__(self, url: str, key: str, answer: Answer = lambda *_: ({}, b"")) -> None:
        self._http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=LIMIT_S)
        self._answer = answer
        self.is_suspended = False  # True: frames of the bridge are lost
        self.shown: list[str] = []  # texts for the page's user
        self.ops: queue.Queue[dict[str, Any]] = queue.Queue()  # operations other than `measure` and `ping`
        self.ended, self._opened = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        assert self._opened.wait(LIMIT_S)

    def say(self, header: dict[str, Any], payload: bytes = b"") -> int:
        """Send a frame. Return the status of the answer."""
        return self._http.post("/api/up", content=pack(header, payload)).status_code

    def next_op(self) -> dict[str, Any]:
        """Return the next operation."""
        return self.ops.get(timeout=LIMIT_S)

    def begin(self, bridge: Bridge, name: str = "phone") -> Path:
        """Say hello, and wait until engine processes can connect. Return the page's folder."""
        self.say(HELLO)
        folder = bridge.folder(name)
        until(lambda: (folder / DOOR).exists(), "the page is ready")
        while not self.ops.empty():
            self.ops.get()
        return folder

    def close(self) -> None:
        """Close the connection, as a closed tab does."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        splitter = Splitter()
        try:
            with self._http.stream("GET", "/api/down") as response:
                self._socket = response.extensions["network_stream"].get_extra_info("socket")
                self._opened.set()
                for data in response.iter_raw():
                    for frame in splitter.add(data):
                        self._carry_out(frame)
        except (httpx.HTTPError, RuntimeError):
            pass  # closed
        finally:
            self._http.close()
            self.ended.set()

    def _carry_out(self, frame: Frame) -> None:
        header, payload = frame
        if self.is_suspended:
            return
        if header.get("op") == "show":
            self.shown.append(header.get("text", ""))
            return
        if header.get("op") == "measure":
            self.say({"id": header["id"], "memory_bytes_per_s": 1e9, "flops": 1e10, "threads": 2})
            return
        if header.get("op") == "ping":
            self.say({"id": header["id"]}, bytes(payload))
            return
        if header.get("op") == "unload":  # noted once the bridge has the answer, so that a hello brings no repetition
            self.say({"id": header["id"]})
            self.ops.put(header)
            return
        self.ops.put(header)
        if "id" in header and (answer := self._answer(header, bytes(payload))) is not None:
            self.say({"id": header["id"], **answer[0]}, answer[1])


def joined(bridge: Bridge, name: str = "phone") -> str:
    """Return the key of a new browser."""
    response = httpx.post(f"{bridge.url}/api/join", json={"token": bridge.browsers.invite(name, 600)})
    return str(json.loads(response.content)["key"])
