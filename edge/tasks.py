"""Cancellable work in threads: an undo stack, waiting for futures, periodic background work, and progress."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol, TypeVar

from edge import log
from edge.closing import Closing
from edge.errors import Interrupted

T = TypeVar("T")


class CancelScope(Closing):
    """Undo stack: runs its callbacks in reverse order when it is closed. A callback added later runs immediately.

    It is also a context manager that closes itself at the end of the block.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._closed = False

    def then(self, undo: Callable[[], Any]) -> None:
        """Run `undo` when the scope closes, or now if it is closed."""
        with self._lock:
            if not self._closed:
                self._stack.callback(undo)
                return
        undo()

    def enter(self, manager: AbstractContextManager[T]) -> T:
        """Enter a context now and leave it when the scope closes."""
        entered = manager.__enter__()
        self.then(lambda: manager.__exit__(None, None, None))
        return entered

    def check(self, *_: object) -> None:
        """Raise Interrupted once the scope is closed, to stop work whose result is no longer needed."""
        if self._closed:
            raise Interrupted("given up")

    def close(self) -> None:
        """Run all undo callbacks."""
        with self._lock:
            self._closed = True
        self._stack.close()


def results(futures: Iterable[Future[T]], also_watched: Iterable[Future[Any]] = ()) -> list[T]:
    """Return the results in order, or raise the error of the first future that fails, without waiting for the others.

    also_watched: futures whose results are not awaited but whose errors are raised, too.
    """
    futures = list(futures)
    running: set[Future[Any]] = {*futures, *also_watched}
    while not all(future.done() for future in futures):
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()
    return [future.result() for future in futures]


@contextmanager
def unwaited_pool(n_threads: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of threads that the end of the block does not wait for.

    If one thread fails or the caller gives up, the other threads end at their next wait or progress report.
    """
    pool = ThreadPoolExecutor(n_threads, name)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


Progress = Callable[[float, float], None]  # (bytes done, bytes in total)


class AggregateProgress:
    """Sum of the progress of several parts."""

    def __init__(self, progress: ShowStep, total: int, check: Callable[[], None]) -> None:
        """total: bytes of all parts. check: raises an error if the work is no longer needed, which ends every part."""
        self._progress, self._total, self._check = progress, total, check
        self._done: list[float] = []
        self._running: dict[int, str] = {}  # descriptions of unfinished parts, the oldest first
        self._lock = threading.Lock()

    @contextmanager
    def part(self, n_bytes: int, what: str) -> Iterator[Progress]:
        """Yield the progress callback of one part, which takes the bytes done. The end of the block completes the part.

        n_bytes: size of the part; 0 for work without bytes.
        what: description, which is shown until the part is complete.
        """
        self._check()
        with self._lock:
            mine = len(self._done)
            self._done.append(0.0)
            self._running[mine] = what

        def count(done: float, _: float) -> None:
            self._check()
            with self._lock:
                self._done[mine] = max(self._done[mine], done)
                self._show()

        with self._lock:
            self._show()
        try:
            yield count
        finally:
            with self._lock:
                del self._running[mine]
        count(n_bytes, n_bytes)

    def _show(self) -> None:
        self._progress(sum(self._done), self._total, next(iter(self._running.values()), ""))


class Repeated(Closing):
    """Background work that is repeated until `close()`. It is also a context manager."""

    def __init__(self, work: Callable[[], None], every_s: float, name: str) -> None:
        """every_s: seconds from the end of one run to the start of the next.
        name: name of the thread.

        If a run fails, its error is logged and the next run follows. The same error is not logged twice in a row.
        """
        self._work, self._every_s, self._name = work, every_s, name
        self._over = threading.Event()
        threading.Thread(target=self._run, daemon=True, name=name).start()

    def check(self, *_: object) -> None:
        """Raise Interrupted once this object is closed. Long work calls it to stop early."""
        if self.is_over:
            raise Interrupted("given up")

    @property
    def is_over(self) -> bool:
        """True once this object is closed."""
        return self._over.is_set()

    def close(self) -> None:
        """Start no further run, without waiting for a run in progress."""
        self._over.set()

    def _run(self) -> None:
        logged = ""
        while not self._over.wait(self._every_s):
            try:
                self._work()
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                if why != logged and not self.is_over:
                    log.warning("background-work-failed", work=self._name, why=why)
                    logged = why


class Steps:
    """Progress of long steps. Each step has a label and reports its progress. This base class shows nothing."""

    @contextmanager
    def step(self, label: str, total: float | None = None, unit: str = "bytes") -> Iterator[ShowStep]:
        """Show one step for the length of the block. unit: "bytes", or a name of the counted items."""
        yield unseen

    def say(self, line: str) -> None:
        """Show a sentence while a step runs."""


class CheckedSteps(Steps):
    """Steps that are aborted when `check` raises an error."""

    def __init__(self, check: Callable[[], None], steps: Steps | None = None) -> None:
        """steps: display of the steps; None shows nothing."""
        self._check, self._steps = check, steps or SILENT

    @contextmanager
    def step(self, label: str, total: float | None = None, unit: str = "bytes") -> Iterator[ShowStep]:
        """Run one step that calls `check` at every progress report."""
        with self._steps.step(label, total, unit) as show:

            def shown(n: float, total: float | None = None, what: str = "") -> None:
                self._check()
                show(n, total, what)

            yield shown

    def say(self, line: str) -> None:
        """Pass the sentence on to the display."""
        self._steps.say(line)


class ShowStep(Protocol):
    """Callback that reports the progress of a step."""

    def __call__(self, n: float, total: float | None = None, what: str = "") -> None:
        """Report `n` units done, of `total` if the total has changed. what: the item in progress."""


def unseen(n: float, total: float | None = None, what: str = "") -> None:
    """Ignore the report."""


SILENT = Steps()
