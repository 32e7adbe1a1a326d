"""Places for work of one purpose: so much at once, so much that may wait, and clients by turns."""

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
    """Places for one purpose; for one event loop. A free place goes to the waiting client that has fewest, and among
    these to the one that waits for longest. Where there are several keys, none takes more than half of what is left to
    wait."""

    def __init__(self, purpose: str, n_places: int, n_waiting: int, most_of_one: int | None = None) -> None:
        """purpose: for the error. n_places: at once. n_waiting: that may wait beside. most_of_one: places of one
        client; None: all."""
        self._purpose, self._free, self._n_waiting = purpose, n_places, n_waiting
        self._most_of_one = most_of_one or n_places
        self._taken: Counter[str] = Counter()  # places by client
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []  # the longest first

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Have a place for the caller, in the end. Overloaded if too many wait."""
        client = CALLER.get().client
        await self._take(client)
        try:
            yield
        finally:
            self._give(client)

    async def whole(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of work that goes on, and keeps its place, if its caller goes."""
        client = CALLER.get().client
        await self._take(client)

        def done(task: asyncio.Task[T]) -> None:
            self._give(client)
            if not task.cancelled():
                task.exception()  # seen, where nobody waits for it any more

        task = asyncio.create_task(work())
        task.add_done_callback(done)
        return await asyncio.shield(task)

    async def _take(self, client: str) -> None:
        if self._free and self._taken[client] < self._most_of_one:  # then nobody waits who could have it
            self._free -= 1
            self._taken[client] += 1
            return
        left = self._n_waiting - len(self._waiting)
        own = sum(waiting == client for waiting, _ in self._waiting)
        if left <= 0 or (CALLER.get().among_several and own >= left):
            raise Overloaded(f"{len(self._waiting)} requests wait for {self._purpose}: no more may; ask again later")
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
        # One that is cancelled is among them until its task goes on.
        ready = [item for item in self._waiting if not item[1].done() and self._taken[item[0]] < self._most_of_one]
        if ready:
            following = min(ready, key=lambda item: self._taken[item[0]])
            self._waiting.remove(following)
            self._free -= 1
            self._taken[following[0]] += 1
            following[1].set_result(None)
