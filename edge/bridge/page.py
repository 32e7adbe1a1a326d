"""One page at the bridge: whether it is alive, and the worker that it has while it is."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge import log
from edge.bridge.engines import Engines
from edge.bridge.exchange import Exchange
from edge.bridge.page_worker import PageWorker, WorkerPlace
from edge.browser.browsers import Browsers
from edge.browser.frames import Splitter
from edge.browser.page import DOOR
from edge.browser.profile import PageProfile
from edge.errors import EngineError
from transport.errors import ProtocolError

LOST_S = 20.0  # a page that shows no sign of life for this long is lost
GONE_S = 5.0  # time for a page to connect again after its connection ended
MEASURE_S = 2.0  # duration of the page's measurement
_LEAST_LOOK_S = 0.05  # least interval between two looks at the page


class Page:
    """A browser that has joined. All methods run in the bridge's event loop."""

    def __init__(self, name: str, place: WorkerPlace, browsers: Browsers, lost_s: float = LOST_S) -> None:
        """lost_s: silence after which the page is lost."""
        self.name, self.folder = name, Path(tempfile.mkdtemp(prefix="edge-page-"))
        self._browsers, self._place, self._lost_s = browsers, place, lost_s
        self._exchange = Exchange(self._on_disconnect)
        self._engines = Engines(self._exchange, self.folder / DOOR)
        self._worker = PageWorker(name, place, self.folder, self._on_worker_end)
        self._starting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._last_sign = 0.0
        self._profile: PageProfile | None = None
        self._is_away = False  # its user paused it or left
        self._problem = ""  # why the page cannot compute

    async def attach(self) -> AsyncIterator[bytes]:
        """Return the frames for the page, until it leaves. A newer stream ends an older one."""
        self._last_sign = _now()
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        return self._exchange.attach()

    async def receive(self, data: bytes) -> None:
        """Handle frames of the page. Raises ProtocolError if they are not valid."""
        self._last_sign = _now()
        splitter = Splitter()
        frames = splitter.add(data)
        if not splitter.is_empty:
            raise ProtocolError("the last frame is incomplete")
        for header, payload in frames:
            if "event" in header:
                await self._on_event(header)
            else:
                await self._exchange.on_answer(header, payload)

    async def close(self) -> None:
        """End everything, because the bridge ends."""
        self._lose("the bridge ends")
        await self._worker.ended()
        if self._watching is not None:
            self._watching.cancel()
        self._exchange.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def _on_event(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "hello":
            self._on_hello(event)
        elif kind == "loading":
            await self._engines.on_loading(event)
        elif kind == "full":
            log.warning("page-storage-full", name=self.name, why="its slice is not kept, and is sent again next time")
        elif kind in ("paused", "leave"):
            self._is_away = True
            self._lose("its user paused it" if kind == "paused" else "its user left")
        elif kind == "closed":
            self._lose("its page was closed")
        elif kind == "resumed":
            self._is_away = False
            self._begin()
        elif kind == "alive":  # perhaps again, after a silence
            self._begin()

    def _on_hello(self, hello: dict[str, Any]) -> None:
        """Go on with a page whose connection broke, or begin with a new one."""
        if self._engines.loaded and hello.get("loaded") != self._engines.loaded:
            self._lose("its page was loaded again")
        self._exchange.send_again(hello.get("pending"))
        profile = PageProfile.from_hello(hello)
        if self._profile is not None:
            profile = replace(profile, memory_bytes_per_s=self._profile.memory_bytes_per_s, flops=self._profile.flops)
        self._profile, self._is_away, self._problem = profile, False, ""
        self._begin()

    def _begin(self) -> None:
        is_free = not (self._worker.runs or self._is_away or self._problem) and self._starting is None
        if is_free and self._profile is not None:
            self._starting = asyncio.create_task(self._start(self._profile))

    async def _start(self, profile: PageProfile) -> None:
        """Measure and check the page, then start its worker."""
        try:
            await self._exchange.call("unload")  # a slice from before a silence
            if profile.flops is None:
                rates = await self._exchange.call("measure", seconds=MEASURE_S)
                memory, flops = (_rate(rates, name) for name in ("memory_bytes_per_s", "flops"))
                profile = self._profile = replace(profile, memory_bytes_per_s=memory, flops=flops)
            round_trip_s, bytes_per_s = await self._exchange.network()
            profile = replace(profile, round_trip_s=round_trip_s, bytes_per_s=bytes_per_s)
            profile.save(self.folder)
            await self._engines.open()
            if self._browsers.checked(self.name) != profile.browser:
                await self._worker.check()
                self._browsers.remember_check(self.name, profile.browser)
            await self._worker.start(profile.threads)
            port, memory_bytes = self._place.port(), profile.memory_bytes
            log.info("page-joined", name=self.name, browser=profile.browser, system=profile.system, port=port,
                     threads=profile.threads, memory_bytes=memory_bytes)  # fmt: skip
        except (EngineError, OSError, ProtocolError) as error:
            if self._starting is asyncio.current_task():  # otherwise the page was lost, and may come back
                self._refuse(str(error))
        finally:
            if self._starting is asyncio.current_task():
                self._starting = None

    def _refuse(self, why: str) -> None:
        """Use the page no more until it says hello again."""
        self._problem = why
        log.warning("page-refused", name=self.name, why=why)
        self._exchange.tell({"op": "show", "text": f"This device cannot help: {why}"})

    async def _on_worker_end(self, code: int) -> None:
        why = f"its worker on this machine ended with exit code {code}"
        self._lose(why)
        self._refuse(why)

    def _on_disconnect(self) -> None:
        """Lose the page soon, if it does not connect again."""
        self._last_sign = min(self._last_sign, _now() - self._lost_s + min(self._lost_s, GONE_S))

    async def _watch(self) -> None:
        """Notice that the page shows no sign of life, and ask for one first. A suspended page keeps its connection."""
        while True:
            silent_s = _now() - self._last_sign
            if silent_s >= self._lost_s:
                is_silent = self._exchange.is_connected
                self._lose(f"its page was silent for {silent_s:.0f} s" if is_silent else "its page was closed")
            elif silent_s >= self._lost_s / 4:  # its worker may compute something that gives no signs
                self._exchange.tell({"op": "alive"})
            left_s = max(_LEAST_LOOK_S, self._lost_s - silent_s)
            await asyncio.sleep(min(left_s, self._lost_s / 4))

    def _lose(self, why: str) -> None:
        """End the worker and all engine processes of the page, because it cannot compute now."""
        if self._starting is not None:
            self._starting.cancel()
            self._starting = None
        if self._worker.runs:
            log.warning("page-lost", name=self.name, why=why)
        self._exchange.fail(why)
        self._engines.close()
        self._worker.end()


def _now() -> float:
    return asyncio.get_running_loop().time()


def _rate(values: dict[str, Any], name: str) -> float | None:
    value = values.get(name)
    return float(value) if isinstance(value, (int, float)) and 0 < value < 1e15 else None
