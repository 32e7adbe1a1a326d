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
from edge.serve.process import EngineProcess

Send = Callable[[Mapping[str, Any]], None]


class ModelMemory:
    """Implements `edge.serve.served.ServedMemory`, which documents the methods: divides one budget among engine
    processes; for one event loop."""

    def __init__(self, n_bytes: int | None, unload_one: Callable[[str], Awaitable[bool]], *, several: bool) -> None:
        """n_bytes: None: nothing is divided. unload_one: unloads the model, another than the one that needs memory,
        that nobody has used for longest; False if none may be. several: there may be several models, so that each has
        to be able to give way."""
        self.n_bytes, self._unload_one, self._several = n_bytes, unload_one, several
        self.target: int | None = None
        self._shares = MemoryShares(lambda: n_bytes or 0)

    def shares(self) -> Mapping[str, Share]:
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
        share = None if self.n_bytes is None else partial(ProcessShare, name, self._shares, self._unload_one)
        return EngineProcess(name, self.config(config), say=say, share=share)

    async def ask(self, n_bytes: int | None) -> None:
        if self.n_bytes is None:
            raise NotAllowed("this server divides no memory among its models; start it with --memory")
        self.target = n_bytes
        self._shares.ask(n_bytes)
        # Somebody may ask otherwise meanwhile.
        while self.target is not None and sum(share.least for share in self.shares().values()) > self.target:
            if not await self._unload_one(""):
                return


class ProcessShare:
    """Share of one process, from its start to its end."""

    def __init__(
        self, name: str, shares: MemoryShares, unload_one: Callable[[str], Awaitable[bool]], send: Send
    ) -> None:
        """send: sends the process a message."""
        self._shares, self._unload_one, self._send = shares, unload_one, send
        self._member = shares.join(name, lambda *limit: send({"do": "memory", "with": limit}))
        self._claims: set[asyncio.Task[None]] = set()  # references, so that they are not collected

    def receive(self, message: Mapping[str, Any]) -> bool:
        """Handle a message of the process; False if it is about other things."""
        if "memory" in message:
            self._shares.report(self._member, MemoryUse(**message["memory"]))
        elif "claim" in message:
            task = asyncio.create_task(self._claim(*message["claim"]))
            self._claims.add(task)
            task.add_done_callback(self._claims.discard)
        else:
            return False
        return True

    def leave(self) -> None:
        """Let others have what the process had. It has ended."""
        self._shares.leave(self._member)

    async def _claim(self, least: int, most: int) -> None:
        """Give it memory, for which idle models are unloaded if need be, or say why there is none."""
        name = self._member.name
        try:
            while True:
                try:
                    self._shares.claim(self._member, least, most, name)
                    return
                except NotEnoughMemory:
                    if not await self._unload_one(name):
                        raise
        except Exception as error:  # it waits for an answer
            advice = "start the server with more --memory, or use a smaller --context"
            member = self._member
            self._send({"do": "memory", "with": (*member.sent, member.number, True, f"{error}; {advice}")})
