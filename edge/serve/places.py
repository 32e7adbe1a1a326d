"""Concurrency limits for work of one purpose, with a bounded queue that is fair to clients."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from edge.errors import Overloaded
from edge.serve.caller import CALLER

T = TypeVar("T")


class Places:
    """Concurrency limit for one purpose. Use it in one event loop.

    A free place goes to the waiting client with the fewest places, and among equal clients to the longest waiting. If
    there are several keys, each may fill at most half of the remaining queue.
    """

    def __init__(self, purpose: str, n_places: int, n_waiting: int, most_of_one: int | None = None) -> None:
        """purpose: name for errors.
        n_places: maximum concurrent work.
        n_waiting: maximum length of the queue.

        most_of_one: maximum places of one client; None: all.
        """
        self._purpose, self._free, self._n_waiting = purpose, n_places, n_waiting
        self._most_of_one = most_of_one or n_places
        self._taken: Counter[str] = Counter()  # occupied places by client
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []  # longest waiting first

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place and hold it inside the context. Raises Overloaded if the queue is full."""
        client = CALLER.get().client
        await self._take(client)
        try:
            yield
        finally:
            self._give(client)

    async def whole(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run work in a place and return its result. The work continues if its caller is cancelled."""
        client = CALLER.get().client
        await self._take(client)

        def done(task: asyncio.Task[T]) -> None:
            self._give(client)
            if not task.cancelled():
                task.exception()  # marks the error as retrieved

        task = asyncio.create_task(work())
        task.add_done_callback(done)
        return await asyncio.shield(task)

    async def _take(self, client: str) -> None:
        if self._free and self._taken[client] < self._most_of_one:  # then no waiting client could use it
            self._free -= 1
            self._taken[client] += 1
            return
        left = self._n_waiting - len(self._waiting)
        own = sum(waiting == client for waiting, _ in self._waiting)
        if left <= 0 or (CALLER.get().among_several and own >= left):
            raise Overloaded(
                f"{len(self._waiting)} requests wait for {self._purpose}, which is the maximum; try again later"
            )
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((client, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give(client)
            else:
                self._waiting.remove((client, turn))
            raise

    def _give(self, client: str) -> None:
        self._free += 1
        self._taken[client] -= 1
        if not self._taken[client]:
            del self._taken[client]
        # Cancelled entries remain in the queue until their tasks resume.
        ready = [item for item in self._waiting if not item[1].done() and self._taken[item[0]] < self._most_of_one]
        if ready:
            following = min(ready, key=lambda item: self._taken[item[0]])
            self._waiting.remove(following)
            self._free -= 1
            self._taken[following[0]] += 1
            following[1].set_result(None)
