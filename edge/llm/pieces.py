"""Iterators for `for` and `async for`: the pieces of an answer, computed in a thread while an event loop runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from weakref import ref

from edge.closing import Closing
from edge.llama.interrupt import Stoppable

T = TypeVar("T")
_END: Any = object()


class Pieces(Closing, Iterator[T], AsyncIterator[T]):
    """Pieces that are computed one at a time, when they are needed. Iterate with `for`, or with `async for`.

    `async for` computes each piece in a thread. If its task is cancelled, the computation stops and the iterator is
    closed before the task ends. `close()` ends the iteration early; it is also a context manager.
    """

    def __init__(self, pieces: Generator[T, None, None], engine: Stoppable | None = None) -> None:
        """engine: computes the pieces, and is stopped if a task is cancelled; None: the current piece is completed."""
        self._pieces = pieces
        self._engine = engine
        self._thread: ThreadPoolExecutor | None = None

    def __iter__(self) -> Pieces[T]:
        return self

    def __next__(self) -> T:
        return next(self._pieces)

    def close(self) -> None:
        """End the iteration, and what computes the pieces."""
        self._pieces.close()
        self._end_thread()

    def __aiter__(self) -> Pieces[T]:
        return self

    async def __anext__(self) -> T:
        from asyncio import CancelledError

        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "edge-pieces")
        try:
            # A thread refers to its work until after its result is awaited. With a weak reference, an iterator that
            # is dropped after this piece is closed by the task that drops it, and not later by the thread.
            piece = await in_thread(self._thread, partial(_next, ref(self._pieces)), self._engine)
        except CancelledError:
            await self.aclose()
            raise
        except BaseException:
            self._end_thread()
            raise
        if piece is _END:
            self._end_thread()
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """Same as `close`, without blocking the event loop."""
        if self._thread is not None:
            await in_thread(self._thread, self._pieces.close)
        self.close()

    def _end_thread(self) -> None:
        """End the thread, which computes nothing now."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def _next(pieces: ref[Generator[T, None, None]]) -> T:
    computing = pieces()
    return _END if computing is None else next(computing, _END)


async def in_thread(thread: Executor, work: Callable[[], T], engine: Stoppable | None = None) -> T:
    """Return the result of `work`, which the thread runs. If the task is cancelled, it waits until the work has ended.

    engine: is stopped meanwhile, so that the work ends soon.
    """
    import asyncio

    future = asyncio.get_running_loop().run_in_executor(thread, work)
    try:
        await asyncio.wait([future])
    except asyncio.CancelledError:
        if engine is not None:
            engine.stop()
        while not future.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        if engine is not None:
            engine.resume()
        future.exception()  # the task ends with its cancellation instead
        raise
    return future.result()
