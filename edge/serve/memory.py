"""Memory budget that the models of a server share. A model in use gets more; an idle one shrinks or is unloaded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from edge.api.config import EngineConfig
from edge.errors import NotAllowed, NotEnoughMemory
from edge.serve.answer import AnswersOwner
from edge.serve.process import EngineProcess
from edge.weights.elastic.share import MemoryUse
from edge.weights.elastic.shares import MemoryShares, Share

Send = Callable[[Mapping[str, Any]], None]


class ModelMemory:
    """Divides one memory budget among engine processes. Use it in one event loop.

    It implements `edge.serve.served.ServedMemory`, which documents the methods.
    """

    def __init__(self, n_bytes: int | None, unload_one: Callable[[str], Awaitable[bool]], *, several: bool) -> None:
        """n_bytes: budget; None: nothing is divided.

        unload_one: unloads the least recently used model other than the named one; returns False if none can be
        unloaded.
        several: there may be several models, so each must be able to shrink.
        """
        self.n_bytes, self._unload_one, self._several = n_bytes, unload_one, several
        self.target: int | None = None
        self._shares = MemoryShares(lambda: n_bytes or 0)

    def shares(self) -> Mapping[str, Share]:
        return self._shares.figures()

    def config(self, config: EngineConfig) -> EngineConfig:
        """Return a configuration with the memory that the model may use next to others."""
        if self.n_bytes is None:
            return config
        options = config.options
        most = min(options.memory or self.n_bytes, self.n_bytes)
        here = config.plan is None and not config.workers  # ranks keep their memory
        changes = here and (options.least_memory or (self._several and not config.reproducible))
        least = min(options.least_memory or most, most) if changes else None
        return replace(config, options=replace(options, memory=most, least_memory=least))

    def process(
        self, name: str, say: Callable[[str], None], config: EngineConfig, owner: AnswersOwner
    ) -> EngineProcess:
        """Return an engine process for a model. It claims its share when it is started."""
        share = None if self.n_bytes is None else partial(ProcessShare, name, self._shares, self._unload_one)
        return EngineProcess(name, self.config(config), say=say, share=share, owner=owner)

    async def ask(self, n_bytes: int | None) -> None:
        if self.n_bytes is None:
            raise NotAllowed("this server has no memory budget to divide among its models; start it with --memory")
        self.target = n_bytes
        self._shares.ask(n_bytes)
        # Another request may change the target meanwhile.
        while self.target is not None and sum(share.least for share in self.shares().values()) > self.target:
            if not await self._unload_one(""):
                return


class ProcessShare:
    """Memory share of one process, from its start to its end."""

    def __init__(
        self, name: str, shares: MemoryShares, unload_one: Callable[[str], Awaitable[bool]], send: Send
    ) -> None:
        """send: sends the process a message."""
        self._shares, self._unload_one, self._send = shares, unload_one, send
        self._member = shares.join(name, lambda *limit: send({"do": "memory", "with": limit}))
        self._claims: set[asyncio.Task[None]] = set()  # references that protect the tasks from garbage collection

    def receive(self, message: Mapping[str, Any]) -> bool:
        """Handle a message of the process. Return False if the message is not about memory."""
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
        """Release the memory share of the process, which has ended."""
        self._shares.leave(self._member)

    async def _claim(self, least: int, most: int) -> None:
        """Give the process memory and unload idle models if necessary. If that fails, send it the reason."""
        name = self._member.name
        try:
            while True:
                try:
                    self._shares.claim(self._member, least, most, name)
                    return
                except NotEnoughMemory:
                    if not await self._unload_one(name):
                        raise
        except Exception as error:  # the process waits for an answer
            advice = "start the server with more --memory, or use a smaller --context"
            member = self._member
            self._send({"do": "memory", "with": (*member.sent, member.number, True, f"{error}; {advice}")})
