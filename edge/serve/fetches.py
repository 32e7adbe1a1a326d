"""Models that are being fetched, each in its own thread, so that a stalled fetch blocks no shared thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Generic, TypeVar

from edge.errors import HubError, Interrupted, NotAllowed, Overloaded
from edge.models.wheels import Progress

MOST = 4  # maximum threads, including those of abandoned fetches that have not ended yet
STALLED_S = 300.0  # seconds without progress until a fetch fails; the hub's library reports every 10 MB
_LOOK_S = 0.25
T = TypeVar("T")


class Fetches(Generic[T]):
    """Fetches by name. A request for a name that is already being fetched waits for that fetch.

    Use it in one event loop.
    """

    def __init__(self, fetch: Callable[[str, Progress], T] | None) -> None:
        """fetch: fetches an object by its name; None: fetching is not allowed."""
        self._fetch = fetch
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._done: dict[str, tuple[int, int]] = {}  # bytes done and in total, by name
        self._cancelled: set[str] = set()
        self._threads = 0
        self._is_closed = False

    @property
    def allowed(self) -> bool:
        """True if the server's options allow fetching."""
        return self._fetch is not None

    @property
    def running(self) -> Mapping[str, tuple[int, int]]:
        """The running fetches: bytes done and in total by name. Both are 0 until the hub has answered."""
        return {name: self._done.get(name, (0, 0)) for name in self._tasks}

    def cancel(self, name: str) -> bool:
        """End a fetch. Its callers get Interrupted, and the next fetch continues the download. Return False if there is
        no fetch of this name.
        """
        if name in self._tasks:
            self._cancelled.add(name)
        return name in self._tasks

    async def have(self, name: str, progress: Progress, use: Callable[[T], None]) -> None:
        """Fetch an object by its name and pass it to `use`. The fetch continues if the client disconnects.

        progress: called in any thread; only the first caller's function is used. Raises NotAllowed, Overloaded if too
        many fetches are running, HubError if a fetch stalls, Interrupted after `cancel`, and the errors of `fetch`.
        """
        if self._fetch is None:
            raise NotAllowed("this server does not fetch models; start it with --allow-pull, or run edge model pull")
        if name not in self._tasks:
            if self._threads >= MOST:
                raise Overloaded(f"{self._threads} models are being fetched, which is the maximum; try again later")
            self._threads += 1
            self._tasks[name] = asyncio.create_task(self._fetched(name, self._fetch, progress, use))
            # Marks the error as retrieved.
            self._tasks[name].add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._tasks[name])

    async def close(self) -> None:
        """Abandon all fetches. Their threads end at their next progress report, or with the process."""
        self._is_closed = True
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _fetched(
        self, name: str, fetch: Callable[[str, Progress], T], progress: Progress, use: Callable[[T], None]
    ) -> None:
        loop, ended = asyncio.get_running_loop(), threading.Event()
        result: asyncio.Future[T] = loop.create_future()
        newest, n_bytes = time.monotonic(), -1

        def report(done: int, total: int) -> None:
            nonlocal newest, n_bytes
            if self._is_closed or ended.is_set():
                raise NotAllowed("the server is ending" if self._is_closed else "the fetch was abandoned")
            if done > n_bytes:
                newest, n_bytes = time.monotonic(), done
            self._done[name] = (done, total)
            progress(done, total)

        def settle(value: T | None, error: BaseException | None) -> None:
            self._threads -= 1
            if result.done():
                return
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(value)  # type: ignore[arg-type]

        def work() -> None:
            value, error = None, None
            try:
                value = fetch(name, report)
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, value, error)

        threading.Thread(target=work, name=f"fetch {name}"[:60], daemon=True).start()
        try:
            while not (await asyncio.wait({result}, timeout=_LOOK_S))[0]:
                if self._is_closed:
                    raise NotAllowed("the server is ending")
                if name in self._cancelled:
                    raise Interrupted(f"{name}: the download was cancelled; the next pull continues it")
                if time.monotonic() - newest >= STALLED_S:
                    raise HubError(f"{name}: no data came for {STALLED_S:g} s; try again to continue the download")
            use(result.result())
        finally:
            ended.set()
            result.cancel()
            del self._tasks[name]
            self._done.pop(name, None)
            self._cancelled.discard(name)
