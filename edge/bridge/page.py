"""One page at the bridge: its streams, the engine processes that use it, its worker, and whether it is alive."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edge import log
from edge.bridge.browsers import Browsers
from edge.bridge.page_worker import PageWorker, WorkerPlace
from edge.browser.frames import Frame, Splitter, pack
from edge.browser.page import DOOR
from edge.browser.profile import PageProfile
from edge.errors import EngineError
from transport.errors import ProtocolError

LOST_S = 20.0  # a page that shows no sign of life for this long is lost
GONE_S = 5.0  # time for a page to connect again after its connection ended
MEASURE_S = 2.0  # duration of the page's measurement
_ANSWER_S = 60.0  # time for the page to answer an operation of the bridge itself
_LEAST_LOOK_S = 0.05  # least interval between two looks at the page
_READ_BYTES = 1 << 18

# Operations of a loaded slice: only the engine process that loaded it may use them.
_FREE_OPS = ("file", "chunk", "load", "ping")


@dataclass(eq=False)
class _Client:
    """Connection of an engine process."""

    writer: asyncio.StreamWriter
    names: dict[int, int] = field(default_factory=dict)  # its number of an operation, by our number


class Page:
    """A browser that has joined. All methods run in the bridge's event loop."""

    def __init__(self, name: str, place: WorkerPlace, browsers: Browsers, lost_s: float = LOST_S) -> None:
        """lost_s: silence after which the page is lost."""
        self.name, self._browsers = name, browsers
        self._place, self._lost_s = place, lost_s
        self._folder = Path(tempfile.mkdtemp(prefix="edge-page-"))
        self._stream: asyncio.Queue[bytes | None] | None = None
        self._number = 0
        self._own: dict[int, asyncio.Future[Frame]] = {}  # answers that the bridge itself waits for
        self._clients: set[_Client] = set()
        self._unanswered: dict[int, bytes] = {}  # frames of operations, by number
        self._holder: _Client | None = None  # has loaded a slice, or is about to
        self._loads, self._holds = "", ""  # name of the slice that is being loaded, and of the one that is loaded
        self._unloading: asyncio.Task[None] | None = None
        self._loading = 0  # number of the operation that loads it
        self._server: asyncio.Server | None = None
        self._worker = PageWorker(name, place, self._folder, self._on_worker_end)
        self._starting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._last_sign = 0.0
        self._profile: PageProfile | None = None
        self._is_away = False  # its user paused it or left
        self.problem = ""  # why the page does not compute; "": it does, or has not said hello

    # --- the page's side ---

    async def attach(self) -> AsyncIterator[bytes]:
        """Return the frames for the page, until it leaves. A newer stream ends an older one."""
        if self._stream is not None:
            while not self._stream.empty():
                self._stream.get_nowait()
            self._stream.put_nowait(pack({"op": "replaced"}))
            self._stream.put_nowait(None)
        own: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._stream = own
        self._sign()
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        return self._frames(own)

    async def _frames(self, own: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
        try:
            while (data := await own.get()) is not None:
                yield data
        finally:
            if self._stream is own:
                self._stream = None
                self._last_sign = min(self._last_sign, self._now() - self._lost_s + min(self._lost_s, GONE_S))

    async def receive(self, data: bytes) -> None:
        """Handle frames of the page. Raises ProtocolError if they are not valid."""
        self._sign()
        splitter = Splitter()
        frames = splitter.add(data)
        if not splitter.is_empty:
            raise ProtocolError("the last frame is incomplete")
        for header, payload in frames:
            if "event" in header:
                await self._on_event(header)
            else:
                await self._on_answer(header, payload)

    async def _on_event(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "hello":
            await self._on_hello(event)
        elif kind == "loading" and self._holder is not None:
            await self._give(self._holder, event, b"")
        elif kind in ("paused", "leave"):
            self._is_away = True
            self._lose("its user paused it" if kind == "paused" else "its user left")
        elif kind == "resumed":
            self._is_away = False
            self._begin()
        elif kind == "alive":  # perhaps again, after a silence
            self._begin()

    async def _on_hello(self, hello: dict[str, Any]) -> None:
        """Go on with a page whose connection broke, or begin with a new one."""
        if self._holds != "" and hello.get("loaded") != self._holds:
            self._lose("its page was loaded again")
        pending = hello.get("pending")
        received = set(pending) if isinstance(pending, list) and all(isinstance(n, int) for n in pending) else set()
        for number, frame in [*self._unanswered.items()]:
            if number not in received:  # it was lost with the connection
                await self._put(frame)
        profile = PageProfile.from_hello(hello)
        if self._profile is not None:
            profile = replace(profile, memory_bytes_per_s=self._profile.memory_bytes_per_s, flops=self._profile.flops)
        self._profile, self._is_away, self.problem = profile, False, ""
        self._begin()

    def _begin(self) -> None:
        is_free = not (self._worker.runs or self._is_away) and self._starting is None
        if is_free and self._profile is not None and not self.problem:
            self._starting = asyncio.create_task(self._start(self._profile))

    async def _on_answer(self, header: dict[str, Any], payload: memoryview) -> None:
        number = header.get("id")
        if not isinstance(number, int) or self._unanswered.pop(number, None) is None:
            return  # a reply that arrived before its connection broke
        if (own := self._own.pop(number, None)) is not None:
            if not own.done():
                own.set_result((header, payload))
            return
        for client in self._clients:
            if number in client.names:
                if client is self._holder and number == self._loading and "error" not in header:
                    self._holds = self._loads
                await self._give(client, {**header, "id": client.names.pop(number)}, payload)
                return

    # --- state ---

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _sign(self) -> None:
        self._last_sign = self._now()

    async def _watch(self) -> None:
        """Notice that the page shows no sign of life. A suspended page keeps its connection open."""
        while True:
            silent_s = self._now() - self._last_sign
            if silent_s >= self._lost_s:
                self._lose(
                    "its page was closed" if self._stream is None else f"its page was silent for {silent_s:.0f} s"
                )
            left_s = self._lost_s - silent_s
            await asyncio.sleep(min(max(_LEAST_LOOK_S, left_s), self._lost_s / 4))

    async def _start(self, profile: PageProfile) -> None:
        """Measure the page, then start its worker."""
        try:
            await self._call("unload")  # a slice from before a silence
            if profile.flops is None:
                rates, _ = await self._call("measure", seconds=MEASURE_S)
                memory, flops = (_rate(rates, name) for name in ("memory_bytes_per_s", "flops"))
                profile = self._profile = replace(profile, memory_bytes_per_s=memory, flops=flops)
            profile.save(self._folder)
            self._server = await asyncio.start_unix_server(self._serve, self._folder / DOOR)
            if self._browsers.checked(self.name) != profile.browser:
                await self._worker.check()
                self._browsers.remember_check(self.name, profile.browser)
            await self._worker.start(profile.threads)
            self.problem = ""
            port, memory = self._place.port(), profile.memory_bytes
            log.info("page-joined", name=self.name, browser=profile.browser, system=profile.system, port=port,
                     threads=profile.threads, memory_bytes=memory)  # fmt: skip
            await self._tell({"op": "show", "text": ""})
        except (EngineError, OSError, ProtocolError) as error:
            self.problem = str(error)
            log.warning("page-refused", name=self.name, why=self.problem)
            await self._tell({"op": "show", "text": f"This device cannot help: {error}"})
        finally:
            self._starting = None

    async def _on_worker_end(self, code: int) -> None:
        self.problem = f"its worker on this machine ended with exit code {code}"
        self._lose(self.problem)
        await self._tell({"op": "show", "text": f"This device cannot help: {self.problem}"})

    def _lose(self, why: str) -> None:
        """End the worker and all engine processes of the page, because it cannot compute now."""
        if self._starting is not None:
            self._starting.cancel()
            self._starting = None
        if self._worker.runs:
            log.warning("page-lost", name=self.name, why=why)
        for future in self._own.values():
            if not future.done():
                future.set_exception(EngineError(why))
        self._own.clear()
        self._unanswered.clear()
        if self._server is not None:
            self._server.close()
            self._server = None
            (self._folder / DOOR).unlink(missing_ok=True)
        for client in self._clients:
            client.writer.close()
        self._worker.end()

    async def close(self) -> None:
        """End everything, because the bridge ends."""
        self._lose("the bridge ends")
        await self._worker.ended()
        if self._watching is not None:
            self._watching.cancel()
        if self._stream is not None:
            self._stream.put_nowait(None)
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- operations ---

    async def _call(self, op: str, **fields: Any) -> Frame:
        """Carry out an operation of the bridge itself. Raises EngineError if the page refuses it or was lost."""
        self._number += 1
        answer = self._own[self._number] = asyncio.get_running_loop().create_future()
        await self._ask(pack({"id": self._number, "op": op, **fields}))
        try:
            header, payload = await asyncio.wait_for(answer, _ANSWER_S)
        except asyncio.TimeoutError:
            raise EngineError(f"the page did not answer {op} within {_ANSWER_S:g} s") from None
        if (error := header.get("error")) is not None:
            raise EngineError(f"{error!s:.500}")
        return header, payload

    async def _tell(self, header: dict[str, Any]) -> None:
        await self._put(pack(header))

    async def _ask(self, frame: bytes) -> None:
        """Send the operation with the newest number. It is sent again if the connection breaks before its answer."""
        self._unanswered[self._number] = frame
        await self._put(frame)

    async def _put(self, frame: bytes) -> None:
        if self._stream is not None:
            await self._stream.put(frame)

    async def _give(self, client: _Client, header: dict[str, Any], payload: bytes | memoryview) -> None:
        with suppress(OSError):  # the engine process has ended
            client.writer.write(pack(header, payload))
            await client.writer.drain()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward the operations of an engine process to the page."""
        client, splitter = _Client(writer), Splitter()
        self._clients.add(client)
        try:
            while data := await reader.read(_READ_BYTES):
                for header, payload in splitter.add(data):
                    await self._forward(client, header, payload)
        except (OSError, ProtocolError, EngineError) as error:
            log.info("engine-lost", name=self.name, why=str(error))
        finally:
            self._clients.discard(client)
            writer.close()
            if self._holder is client:
                self._holder, self._holds = None, ""
                if self._server is not None:
                    self._unloading = asyncio.create_task(self._unload())

    async def _unload(self) -> None:
        with suppress(EngineError):  # the page was lost
            await self._call("unload")

    async def _forward(self, client: _Client, header: dict[str, Any], payload: memoryview) -> None:
        op, number = header.get("op"), header.get("id")
        if op == "load" and self._unloading is not None:
            await asyncio.shield(self._unloading)
        if op == "load" and self._holder is None:
            self._holder, self._loads, self._loading = client, str(header.get("file")), self._number + 1
        if self._holder is not client and (op not in _FREE_OPS or op == "load"):
            if number is not None:
                error = (
                    "the page computes for another session; end that one first" if self._holder else "nothing is loaded"
                )
                await self._give(client, {"id": number, "error": error}, b"")
            return
        if isinstance(number, int):
            self._number += 1
            client.names[self._number] = number
            await self._ask(pack({**header, "id": self._number}, payload))
        else:
            await self._put(pack(header, payload))


def _rate(values: dict[str, Any], name: str) -> float | None:
    value = values.get(name)
    return float(value) if isinstance(value, (int, float)) and 0 < value < 1e15 else None
