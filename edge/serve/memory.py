"""Memory of a server that its models share: a model in use gets more, an idle one gives way, to its least or wholly."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from edge.api.config import EngineConfig
from edge.elastic.share import MemoryUse
from edge.elastic.shares import MemoryShares, Share
from edge.errors import NotAllowed, NotEnoughMemory
from edge.serve.engine_child import ProcessShare
from edge.serve.process import EngineProcess


class ModelMemory:
    """Implements `edge.serve.served.ServedMemory`: divides one budget among engine processes; for one event loop."""

    def __init__(self, n_bytes: int | None, unload_one: Callable[[str], Awaitable[bool]], *, several: bool) -> None:
        """n_bytes: None: nothing is divided. unload_one: unloads the model, another than the one that needs memory,
        that nobody has used for longest; False if none may be. several: there may be several models, so that each has
        to be able to give way."""
        self.n_bytes, self._unload_one, self._several = n_bytes, unload_one, several
        self.asked: int | None = None
        self._processes: dict[str, ProcessShare] = {}
        self._shares = MemoryShares(lambda: n_bytes or 0, self._tell)
        self._admissions: set[asyncio.Task[None]] = set()  # references, so that they are not collected

    def shares(self) -> Mapping[str, Share]:
        """As ServedMemory.shares."""
        return self._shares.figures()

    def config(self, config: EngineConfig) -> EngineConfig:
        """Return a configuration with the memory that the model may have beside others."""
        if self.n_bytes is None:
            return config
        most = min(config.options.get("memory") or self.n_bytes, self.n_bytes)
        least = config.options.get("least_memory") or most
        here = config.plan is None and not config.workers  # ranks keep what they have
        changes = here and (config.options.get("least_memory") or (self._several and not config.reproducible))
        options = {**config.options, "memory": most, "least_memory": min(least, most) if changes else None}
        return replace(config, options=options)

    def process(self, name: str, config: EngineConfig, say: Callable[[str], None]) -> EngineProcess:
        """Return a process for a model, which asks for its share when it is started."""
        if self.n_bytes is None:
            return EngineProcess(name, config, say=say)
        self._loop = asyncio.get_running_loop()
        share = self._processes[name] = ProcessShare(partial(self._note, name))
        share.leave = lambda: self._gave_up(name, share)
        return EngineProcess(name, self.config(config), say=say, share=share)

    def leave(self, name: str) -> None:
        """Let others have what a model had."""
        self._processes.pop(name, None)
        self._shares.leave(name)

    def _gave_up(self, name: str, share: ProcessShare) -> None:
        if self._processes.get(name) is share:  # else the model was loaded anew meanwhile
            self._shares.leave(name)

    async def ask(self, n_bytes: int | None) -> None:
        """As ServedMemory.ask."""
        if self.n_bytes is None:
            raise NotAllowed("this server divides no memory among its models; start it with --memory")
        self.asked = n_bytes
        self._shares.ask(n_bytes)
        while n_bytes is not None and sum(share.least for share in self.shares().values()) > n_bytes:
            if not await self._unload_one(""):
                return

    def _note(self, name: str, use: MemoryUse) -> None:
        if use.held:
            self._shares.report(name, use)
        else:
            task = asyncio.create_task(self._admit(name, use))
            self._admissions.add(task)
            task.add_done_callback(self._admissions.discard)

    async def _admit(self, name: str, use: MemoryUse) -> None:
        share = self._processes.get(name)
        first = partial(self._send, name, first=True)
        try:
            while share is not None and self._processes.get(name) is share:  # else it has left
                try:
                    self._shares.join(name, use.least, use.most, name)
                    await asyncio.to_thread(self._shares.grant, name, lambda n_bytes: first(bytes=n_bytes))
                    return
                except NotEnoughMemory:
                    if not await self._unload_one(name):
                        raise
        except NotEnoughMemory as error:
            if self._processes.get(name) is share:
                self._shares.leave(name)
                first(refused=f"{error}; start the server with more --memory, or use a smaller --context")

    def _tell(self, name: str, n_bytes: int) -> None:
        self._send(name, bytes=n_bytes)

    def _send(self, name: str, **share: Any) -> None:
        """Send in the order of calls, from any thread."""
        if (process := self._processes.get(name)) is not None:
            self._loop.call_soon_threadsafe(process.send, {"do": "memory", "with": share})
