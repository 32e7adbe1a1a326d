"""Engine processes that use one page. They connect to a Unix socket; one at a time has the memory of the page."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

from edge import log
from edge.bridge.exchange import Exchange
from edge.browser.frames import Splitter, pack
from edge.errors import EngineError
from transport.errors import ProtocolError

_READ_BYTES = 1 << 18
TURN_S = 5.0  # time for the process of an ended session to free the page
_LOADS = ("load", "onnx_load")
_FREE_OPS = ("file", "chunk", "ping")  # operations that need no loaded slice


class Engines:
    """Connections of engine processes to a page."""

    def __init__(self, exchange: Exchange, door: Path) -> None:
        """door: path of the Unix socket."""
        self._exchange, self._door = exchange, door
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._holder: asyncio.StreamWriter | None = None  # connection that has loaded a slice, or is about to
        self._freed = asyncio.Event()
        self._unloading: asyncio.Task[None] | None = None
        self.loaded = ""  # name of the slice that is loaded

    async def open(self) -> None:
        """Accept connections. Raises OSError if that is not possible."""
        opening = self._door.with_suffix(".opening")
        self._server = await asyncio.start_unix_server(self._serve, opening)
        opening.rename(self._door)  # a process that sees the door can connect

    def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
            self._server = None
            self._door.unlink(missing_ok=True)
        for writer in self._writers:
            writer.close()

    async def on_loading(self, event: dict[str, Any]) -> None:
        """Tell the process that loads a slice how far the page is."""
        if self._holder is not None:
            await _give(self._holder, event, b"")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        splitter = Splitter()
        self._writers.add(writer)
        try:
            while data := await reader.read(_READ_BYTES):
                for header, payload in splitter.add(data):
                    await self._forward(writer, header, payload)
        except (OSError, ProtocolError) as error:
            log.info("engine-lost", why=str(error))
        finally:
            self._writers.discard(writer)
            writer.close()
            if self._holder is writer:
                self._holder, self.loaded = None, ""
                self._freed.set()
                if self._server is not None:
                    self._unloading = asyncio.create_task(self._unload())

    async def _unload(self) -> None:
        with suppress(EngineError):  # the page was lost
            await self._exchange.call("unload")

    async def _is_free(self) -> bool:
        """Return whether no process has the page, after some time for the one whose session has ended."""
        if self._holder is not None:
            self._freed.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._freed.wait(), TURN_S)
        if self._unloading is not None:
            await asyncio.shield(self._unloading)
        return self._holder is None

    async def _forward(self, writer: asyncio.StreamWriter, header: dict[str, Any], payload: memoryview) -> None:
        """Forward an operation to the page."""
        op, number = header.get("op"), header.pop("id", None)
        if op in _LOADS and await self._is_free():
            self._holder = writer
        if self._holder is not writer and op not in _FREE_OPS:
            if number is not None:
                is_held = self._holder is not None
                error = "the page computes for another session; end that one first" if is_held else "nothing is loaded"
                await _give(writer, {"id": number, "error": error}, b"")
            return

        async def reply(answer: dict[str, Any], data: memoryview) -> None:
            if op in _LOADS and self._holder is writer and "error" not in answer:
                self.loaded = str(header.get("file"))
            await _give(writer, {**answer, "id": number}, data)

        if number is None:
            self._exchange.tell(header)
        else:
            self._exchange.ask(header, payload, reply)


async def _give(writer: asyncio.StreamWriter, header: dict[str, Any], payload: bytes | memoryview) -> None:
    with suppress(OSError):  # the engine process has ended
        writer.write(pack(header, payload))
        await writer.drain()
