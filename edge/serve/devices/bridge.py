"""Bridge of a server: a child process serves the pages of browsers."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

from devices.processes.interpreter import module_command
from edge.errors import EdgeError, WorkerError
from edge.net.channel import is_loopback

EVERYWHERE = "0.0.0.0"
PORT = 7443  # browsers keep slices for this origin
START_S = 60.0
_END_S = 5.0


class Bridge:
    """Starts the process at the first invitation, or earlier for joined browsers. Use it in one event loop."""

    def __init__(self, host: str) -> None:
        """host: address that the server listens on."""
        self._host = host
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._beginning: asyncio.Task[None] | None = None

    def begin(self, *, has_cluster: bool) -> None:
        """Serve the pages of browsers that have joined before, unless another process does. Does not wait."""
        self._beginning = asyncio.create_task(self._begin(has_cluster))

    async def _begin(self, has_cluster: bool) -> None:
        with suppress(EdgeError, OSError):
            await self.link(None, 0.0, has_cluster=has_cluster)

    async def link(self, name: str | None, lifetime_s: float, *, has_cluster: bool) -> str:
        """Return the link of a page. One browser that opens it joins as `name`. None: there is no new browser.

        has_cluster: the cluster's certificate secures the pages, so other devices can open them, even if the server
        listens on this machine only.
        If a bridge runs already, the link is of its page. Raises the error of the process.
        """
        if has_cluster and is_loopback(self._host):
            self._host = EVERYWHERE
        async with self._starting:
            try:
                return await self._link(name, lifetime_s, PORT)
            except OSError:  # another program uses the port
                return await self._link(name, lifetime_s, 0)

    async def _link(self, name: str | None, lifetime_s: float, port: int) -> str:
        process = await asyncio.create_subprocess_exec(
            *module_command("edge.bridge.child"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        listen = {"host": self._host, "port": port}
        try:
            process.stdin.write(json.dumps({"name": name, "lifetime_s": lifetime_s, **listen}).encode() + b"\n")
            line = await asyncio.wait_for(process.stdout.readline(), START_S)
            answer = json.loads(line)
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            await _end(process)
            raise WorkerError(f"the pages of browsers are not served: {error or 'no answer'}; try again") from error
        except BaseException:
            with suppress(ProcessLookupError):
                process.kill()
            raise
        if answer.get("serves"):
            self._process = process
        else:
            await _end(process)
        if "link" in answer:
            return str(answer["link"])
        raise (OSError if answer.get("is_address") else EdgeError)(str(answer.get("error", "it ended")))

    async def close(self) -> None:
        """End the process, and with it the connections of browsers."""
        if self._beginning is not None:
            self._beginning.cancel()
            with suppress(asyncio.CancelledError):
                await self._beginning
        if self._process is not None:
            await _end(self._process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a process by the end of its input."""
    if process.stdin is not None:
        process.stdin.close()
    with suppress(ProcessLookupError):
        try:
            await asyncio.wait_for(process.wait(), _END_S)
        except asyncio.TimeoutError:
            process.kill()
            await process.wait()
