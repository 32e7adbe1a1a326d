"""Loads of models in progress, and the requests that wait for them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Generic, TypeVar

from edge.errors import EngineGone

T = TypeVar("T")


class Loads(Generic[T]):
    """Loads by the name of the model. Use it in one event loop."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[T]] = {}
        self._awaited: Counter[str] = Counter()  # requests that wait for each model to load

    @property
    def are_awaited(self) -> bool:
        """True if a request waits for a model to load."""
        return self._awaited.total() > 0

    def is_running(self, name: str) -> bool:
        """Return True while a model is being loaded."""
        load = self._tasks.get(name)
        return load is not None and not load.done()

    async def loaded(self, name: str, load: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the model that `load` or a running load of this name returns. Raises its errors.

        The load continues if its client disconnects, because the client may ask again. It is cancelled if no request
        waits for it, and a request waits for another model.
        """
        self._awaited[name] += 1
        self._cancel_abandoned()
        if (loading := self._tasks.get(name)) is None or loading.done():
            loading = self._tasks[name] = asyncio.create_task(load())
            loading.add_done_callback(partial(self._forget, name))
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            if loading.cancelled():
                raise EngineGone("the server is ending") from None
            raise
        finally:
            self._awaited[name] -= 1
            self._cancel_abandoned()

    async def close(self) -> None:
        """Cancel all loads."""
        for load in (loads := list(self._tasks.values())):
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)

    def _cancel_abandoned(self) -> None:
        if self.are_awaited:
            for name in [name for name in self._tasks if not self._awaited[name]]:
                self._tasks.pop(name).cancel()

    def _forget(self, name: str, loading: asyncio.Task[T]) -> None:
        """Remove a load that is done."""
        if self._tasks.get(name) is loading:
            del self._tasks[name]
        if not loading.cancelled():
            loading.exception()  # marks the error as retrieved if no request waits for the load
