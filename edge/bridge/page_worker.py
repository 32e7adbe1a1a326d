"""Worker daemon of a page, as the bridge starts and ends it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from devices.processes.interpreter import module_command
from edge.browser.profile import PAGE_VARIABLE
from edge.errors import EngineError

# Largest deviation in the check. Numbers of node and Chromium deviate by 0.03, wrong ones by about 1. Flash attention
# alone deviates by 0.01.
TOLERANCE = 0.1
_CHECK_S = 60.0  # time for the check on a slow phone
_END_S = 10.0  # time for the daemon to end before it is killed
CACHE_BYTES = 20 << 30  # disk space for slices of each page


@dataclass(frozen=True)
class WorkerPlace:
    """Address and files of a page's worker."""

    host: str
    port: Callable[[], int]  # returns the port
    credentials: Path | None  # None: no cluster
    cache: Path


class PageWorker:
    """Daemon of one page. It is started again each time the page is there."""

    def __init__(self, name: str, place: WorkerPlace, folder: Path, on_end: Callable[[int], Awaitable[None]]) -> None:
        """folder: folder of the page.
        on_end: called with the exit code if the daemon ends by itself.
        """
        self._name, self._place, self._folder, self._on_end = name, place, folder, on_end
        self._process: asyncio.subprocess.Process | None = None
        self._ending: asyncio.Task[None] | None = None  # ends the last daemon, whose port the next one needs
        self._following: asyncio.Task[None] | None = None

    @property
    def runs(self) -> bool:
        """True from `start` to `end`, or until the daemon ends by itself."""
        return self._process is not None

    async def check(self) -> None:
        """Raise EngineError if the page computes other numbers than this machine."""
        process = await asyncio.create_subprocess_exec(
            *module_command("edge.bridge.check"),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, PAGE_VARIABLE: str(self._folder)},
            start_new_session=True,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), _CHECK_S)
        except asyncio.TimeoutError:
            raise EngineError(f"its browser did not compute a small model within {_CHECK_S:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        try:
            result = json.loads(output)
        except ValueError:
            raise EngineError("its browser could not be checked: the check ended without a result") from None
        if (error := result.get("error")) is not None:
            raise EngineError(f"its browser could not be checked: {error}")
        if result["deviation"] > TOLERANCE:
            raise EngineError(
                f"its browser computes wrong numbers: they deviate by {result['deviation']:.3g} standard deviations, at"
                f" most {TOLERANCE:g} are allowed; use another browser"
            )

    async def start(self, threads: int) -> None:
        """Start the daemon once the last one has ended. Raises OSError if that is not possible.

        threads: threads with which the page computes.
        """
        await self.ended()
        place = self._place
        options = {
            "name": self._name,
            "host": place.host,
            "port": place.port(),
            "threads": threads,
            "credentials": None if place.credentials is None else str(place.credentials),
            "cache": str(place.cache),
            "cache_bytes": CACHE_BYTES,
        }
        self._process = process = await asyncio.create_subprocess_exec(
            *module_command("edge.bridge.daemon"),
            stdin=asyncio.subprocess.PIPE,
            env={**os.environ, PAGE_VARIABLE: str(self._folder)},
            start_new_session=True,  # Ctrl-C ends the bridge, which ends its workers
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(options).encode() + b"\n")
        await process.stdin.drain()
        self._following = asyncio.create_task(self._follow(process))

    def end(self) -> None:
        """End the daemon and all its sessions, without waiting."""
        process, self._process = self._process, None
        if process is not None:
            self._ending = asyncio.create_task(_end(process))

    async def ended(self) -> None:
        """Wait for the end of the daemon that `end` ended."""
        if self._ending is not None:
            await asyncio.shield(self._ending)

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if self._process is process:
            self._process = None
            await self._on_end(code)


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), _END_S)
    except asyncio.TimeoutError:
        process.kill()
        await process.wait()


def free_port(host: str) -> int:
    """Return a port that is free now."""
    with socket.create_server((host, 0)) as server:
        return int(server.getsockname()[1])
