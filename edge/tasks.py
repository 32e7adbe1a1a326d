"""Work in threads that can be given up: what is to be undone at its end, and the first error of many.

One progress of many parts, which move in threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol, TypeVar

from edge.errors import Interrupted

T = TypeVar("T")


class CancelScope:
    """What is to be undone, last first. Threads may still add while it is undone: theirs is undone at once.

    It is also a context manager, which undoes at its end.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._closed = False

    def then(self, undo: Callable[[], Any]) -> None:
        """Call this at the end."""
        with self._lock:
            if not self._closed:
                self._stack.callback(undo)
                return
        undo()

    def enter(self, manager: AbstractContextManager[T]) -> T:
        """Enter a context now, and leave it at the end."""
        entered = manager.__enter__()
        self.then(lambda: manager.__exit__(None, None, None))
        return entered

    def check(self, *_: object) -> None:
        """Interrupted once all is being undone, for work that nobody waits for any more."""
        if self._closed:
            raise Interrupted("given up")

    def close(self) -> None:
        """Undo it all."""
        with self._lock:
            self._closed = True
        self._stack.close()

    def __enter__(self) -> CancelScope:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def results(futures: Iterable[Future[T]], beside: Iterable[Future[Any]] = ()) -> list[T]:
    """What all came to, in order; or the error of the first that fails, without waiting for the others.

    Those `beside` are not waited for, but their errors count as well.
    """
    futures = list(futures)
    running: set[Future[Any]] = {*futures, *beside}
    while not all(future.done() for future in futures):
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()
    return [future.result() for future in futures]


Progress = Callable[[float, float], None]  # (bytes in place, of)


class AggregateProgress:
    """The sum of parts, told as it grows."""

    def __init__(self, progress: Progress, of: int, check: Callable[[], None]) -> None:
        """check: raises where nobody waits any more; so does every part then."""
        self._progress, self._of, self._check = progress, of, check
        self._done: list[float] = []
        self._lock = threading.Lock()

    @contextmanager
    def part(self, n_bytes: int) -> Iterator[Progress]:
        """Of what is done with so many bytes: called with the bytes done. At the end of the block these are all."""
        self._check()
        with self._lock:
            mine = len(self._done)
            self._done.append(0.0)

        def count(done: float, _: float) -> None:
            self._check()
            with self._lock:
                self._done[mine] = max(self._done[mine], done)
                self._progress(sum(self._done), self._of)

        yield count
        count(n_bytes, n_bytes)


class Repeated:
    """Work that is done in the background again and again, until `close()`; it is also a context manager."""

    def __init__(self, work: Callable[[], None], every_s: float, name: str) -> None:
        """every_s: between the end of one and the beginning of the next. name: of the thread."""
        self._work, self._every_s = work, every_s
        self._over = threading.Event()
        threading.Thread(target=self._run, daemon=True, name=name).start()

    def check(self, *_: object) -> None:
        """Interrupted once it is closed, for work that takes long."""
        if self.is_over:
            raise Interrupted("given up")

    @property
    def is_over(self) -> bool:
        """Whether it was closed."""
        return self._over.is_set()

    def close(self) -> None:
        """No more of it begins. What is under way is not waited for."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self._work()

    def __enter__(self) -> Repeated:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Steps:
    """Steps that are worth showing: each has a label, and tells how far it is. This one shows nothing."""

    @contextmanager
    def step(self, label: str, total: float | None = None, unit: str = "bytes") -> Iterator[ShowStep]:
        """One step, from its first moment to its last. Units: "bytes", or what is counted."""
        yield _unseen

    def say(self, line: str) -> None:
        """A sentence for the person, while it goes on."""


class CheckedSteps(Steps):
    """Steps that nobody sees; they end where `check` raises."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    @contextmanager
    def step(self, label: str, total: float | None = None, unit: str = "bytes") -> Iterator[ShowStep]:
        """Told how far it is, it checks."""
        yield lambda n, total=None, what="": self._check()


class ShowStep(Protocol):
    """How far a step is."""

    def __call__(self, n: float, total: float | None = None, what: str = "") -> None:
        """`n` units are done, of `total` where that is news. what: it is at now."""


def _unseen(n: float, total: float | None = None, what: str = "") -> None:
    """Nobody looks."""


SILENT = Steps()
