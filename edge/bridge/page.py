"""One page at the bridge: its streams, the engine processes that use it, its worker, and whether it is alive."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from devices.processes.interpreter import module_command
from edge import log
from edge.browser.frames import Frame, Splitter, pack
from edge.browser.page import DOOR
from edge.browser.profile import PAGE_VARIABLE, PageProfile
from edge.errors import EngineError
from transport.errors import ProtocolError

LOST_S = 20.0  # a page that shows no sign of life for this long is lost
MEASURE_S = 2.0  # duration of the page's measurement
_ANSWER_S = 60.0  # time for the page to answer an operation of the bridge itself
_END_S = 10.0  # time for the worker to end before it is killed
_WAITING = 64  # frames that wait for the page
_READ_BYTES = 1 << 18
CACHE_BYTES = 20 << 30  # disk space for slices of each page

# Operations of a loaded slice: only the engine process that loaded it may use them.
_FREE_OPS = ("file", "chunk", "load", "ping")


@dataclass
class WorkerPlace:
    """Where the worker of a page listens, and its files."""

    host: str
    port: Callable[[], int]  # returns the port
    credentials: Path | None  # None: no cluster
    cache: Path


@dataclass(eq=False)
class _Client:
    """Connection of an engine process."""

    writer: asyncio.StreamWriter
    names: dict[int, int] = field(default_factory=dict)  # its number of an operation, by our number


class Page:
    """A browser that has joined. All methods run in the bridge's event loop."""

    def __init__(self, name: str, place: WorkerPlace, lost_s: float = LOST_S) -> None:
        """lost_s: silence after which the page is lost."""
        self.name = name
        self._place, self._lost_s = place, lost_s
        self._folder = Path(tempfile.mkdtemp(prefix="edge-page-"))
        self._stream: asyncio.Queue[bytes | None] | None = None
        self._splitter = Splitter()
        self._number = 0
        self._own: dict[int, asyncio.Future[Frame]] = {}  # answers that the bridge itself waits for
        self._clients: set[_Client] = set()
        self._holder: _Client | None = None  # has loaded a slice, or is about to
        self._server: asyncio.Server | None = None
        self._worker: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None  # ends the last worker, whose port the next one needs
        self._last_sign = 0.0
        self.problem = ""  # why the page does not compute; "": it does, or has not said hello

    # --- the page's side ---

    async def attach(self) -> AsyncIterator[bytes]:
        """Return the frames for the page, until it leaves. A newer stream ends an older one."""
        await self._replace_stream()
        own: asyncio.Queue[bytes | None] = asyncio.Queue(_WAITING)
        self._stream = own
        self._sign()
        return self._frames(own)

    async def _frames(self, own: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
        watch = asyncio.create_task(self._watch())
        try:
            while (data := await own.get()) is not None:
                yield data
        finally:
            watch.cancel()
            if self._stream is own:
                self._stream = None
                await self._lose("its page was closed or its connection broke")

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
        if kind == "hello" and self._worker is None and self._starting is None:
            self._starting = asyncio.create_task(self._start(event))
        elif kind == "loading" and self._holder is not None:
            await self._give(self._holder, event, b"")
        elif kind in ("paused", "leave"):
            await self._lose("its user paused it" if kind == "paused" else "its user left")
        elif kind == "resumed" and self._worker is None and self._starting is None:
            self._starting = asyncio.create_task(self._start(event))

    async def _on_answer(self, header: dict[str, Any], payload: memoryview) -> None:
        number = header.get("id")
        if isinstance(number, int) and (own := self._own.pop(number, None)) is not None:
            if not own.done():
                own.set_result((header, payload))
            return
        for client in self._clients:
            if isinstance(number, int) and number in client.names:
                await self._give(client, {**header, "id": client.names.pop(number)}, payload)
                return

    # --- state ---

    def _sign(self) -> None:
        self._last_sign = asyncio.get_running_loop().time()

    async def _watch(self) -> None:
        """End the page's stream if it shows no sign of life. A suspended page keeps its connection open."""
        while True:
            silent_s = asyncio.get_running_loop().time() - self._last_sign
            if silent_s >= self._lost_s:
                await self._lose(f"its page was silent for {silent_s:.0f} s")
                self._last_sign = asyncio.get_running_loop().time()
            await asyncio.sleep(max(0.05, self._lost_s - silent_s))

    async def _replace_stream(self) -> None:
        before, self._stream = self._stream, None
        if before is not None:
            await self._lose("its link was opened in another tab")
            while not before.empty():
                before.get_nowait()
            before.put_nowait(pack({"op": "replaced"}))
            before.put_nowait(None)

    async def _start(self, hello: dict[str, Any]) -> None:
        """Measure the page, then start its worker."""
        try:
            if hello["event"] == "hello":
                profile = PageProfile.from_hello(hello)
                rates, _ = await self._call("measure", seconds=MEASURE_S)
                profile = replace(
                    profile, memory_bytes_per_s=_rate(rates, "memory_bytes_per_s"), flops=_rate(rates, "flops")
                )
                profile.save(self._folder)
            profile = PageProfile.load(self._folder)
            await self._ended()
            self._server = await asyncio.start_unix_server(self._serve, self._folder / DOOR)
            await self._start_worker(profile.threads)
            self.problem = ""
            log.info("page-joined", name=self.name, agent=profile.agent, threads=profile.threads,
                     memory_bytes=profile.memory_bytes, port=self._place.port())  # fmt: skip
        except (EngineError, OSError, ProtocolError) as error:
            self.problem = str(error)
            log.warning("page-refused", name=self.name, why=self.problem)
            await self._tell({"op": "show", "text": f"This device cannot help: {error}"})
        finally:
            self._starting = None

    async def _start_worker(self, threads: int) -> None:
        place = self._place
        options = {
            "name": self.name,
            "host": place.host,
            "port": place.port(),
            "threads": threads,
            "credentials": None if place.credentials is None else str(place.credentials),
            "cache": str(place.cache),
            "cache_bytes": CACHE_BYTES,
        }
        self._worker = await asyncio.create_subprocess_exec(
            *module_command("edge.bridge.daemon"),
            stdin=asyncio.subprocess.PIPE,
            env={**os.environ, PAGE_VARIABLE: str(self._folder)},
            start_new_session=True,  # Ctrl-C ends the bridge, which ends its workers
        )
        assert self._worker.stdin is not None
        self._worker.stdin.write(json.dumps(options).encode() + b"\n")
        await self._worker.stdin.drain()
        self._following = asyncio.create_task(self._follow(self._worker))

    async def _follow(self, worker: asyncio.subprocess.Process) -> None:
        code = await worker.wait()
        if self._worker is worker:
            self.problem = f"its worker on this machine ended with exit code {code}"
            await self._lose(self.problem)
            await self._tell({"op": "show", "text": f"This device cannot help: {self.problem}"})

    async def _lose(self, why: str) -> None:
        """End the worker and all engine processes of the page, because it cannot compute now."""
        if self._starting is not None:
            self._starting.cancel()
            self._starting = None
        worker, self._worker = self._worker, None
        if worker is not None:
            log.warning("page-lost", name=self.name, why=why)
        for future in self._own.values():
            if not future.done():
                future.set_exception(EngineError(why))
        self._own.clear()
        if self._server is not None:
            self._server.close()
            self._server = None
            (self._folder / DOOR).unlink(missing_ok=True)
        for client in self._clients:
            client.writer.close()
        if worker is not None:
            self._ending = asyncio.create_task(_end(worker))

    async def _ended(self) -> None:
        """Wait for the end of the last worker."""
        if self._ending is not None:
            await asyncio.shield(self._ending)

    async def close(self) -> None:
        """End everything, because the bridge ends."""
        await self._lose("the bridge ends")
        await self._ended()
        if self._stream is not None:
            with suppress(asyncio.QueueFull):
                self._stream.put_nowait(None)
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- operations ---

    async def _call(self, op: str, **fields: Any) -> Frame:
        """Carry out an operation of the bridge itself. Raises EngineError if the page refuses it or was lost."""
        self._number += 1
        answer = self._own[self._number] = asyncio.get_running_loop().create_future()
        await self._put(pack({"id": self._number, "op": op, **fields}))
        try:
            header, payload = await asyncio.wait_for(answer, _ANSWER_S)
        except asyncio.TimeoutError:
            raise EngineError(f"the page did not answer {op} within {_ANSWER_S:g} s") from None
        if (error := header.get("error")) is not None:
            raise EngineError(f"{error!s:.500}")
        return header, payload

    async def _tell(self, header: dict[str, Any]) -> None:
        with suppress(EngineError):
            await self._put(pack(header))

    async def _put(self, data: bytes) -> None:
        if self._stream is None:
            raise EngineError("the page was closed")
        await self._stream.put(data)

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
                with suppress(EngineError):  # the page was lost, and has nothing loaded
                    await self._call("unload")
                self._holder = None

    async def _forward(self, client: _Client, header: dict[str, Any], payload: memoryview) -> None:
        op, number = header.get("op"), header.get("id")
        if op == "load" and self._holder is None:
            self._holder = client
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
            header = {**header, "id": self._number}
        await self._put(pack(header, payload))


async def _end(worker: asyncio.subprocess.Process) -> None:
    assert worker.stdin is not None
    worker.stdin.close()
    try:
        await asyncio.wait_for(worker.wait(), _END_S)
    except asyncio.TimeoutError:
        worker.kill()
        await worker.wait()


def _rate(values: dict[str, Any], name: str) -> float | None:
    value = values.get(name)
    return float(value) if isinstance(value, (int, float)) and 0 < value < 1e15 else None


def free_port(host: str) -> int:
    """Return a port that is free now."""
    with socket.create_server((host, 0)) as server:
        return int(server.getsockname()[1])
