"""How far a long job is: a bar on a terminal, a plain line now and then elsewhere. All on stderr."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edge.tasks import ShowStep, Steps
from quant.text import bytes_text, count_text, printable

PLAIN_AFTER_S = 1.0  # the first line of a step: less would only fill a log
PLAIN_INTERVAL_S = 5.0  # between lines, where it goes on
STILL_S = 10.0  # between lines, where nothing is told: it is not dead
SHOW_AFTER_S = 0.3  # a bar for less would only flicker


@contextmanager
def progress(label: str, total: float | None = None, unit: str = "bytes") -> Iterator[ShowStep]:
    """Show `label` and how much of `total` is done, until the block ends. Units: "bytes", or what is counted."""
    if sys.stderr.isatty():
        with _Bar(label, total, unit) as bar:
            yield bar.update
    else:
        with Lines(label, total, unit) as lines:
            yield lines.update


def say(words: str, command: str = "") -> None:
    """A line of a command on standard error, above what is drawn there and on standard output."""
    print(printable(f"{' '.join(filter(None, ('edge', command)))}: {words}"), file=sys.stderr, flush=True)


class ShownSteps(Steps):
    """Steps of a longer job, each with a progress of its own."""

    def __init__(self, command: str = "") -> None:
        """command: whose job it is, for what is said."""
        self._command = command

    step = staticmethod(progress)

    def say(self, line: str) -> None:
        """A sentence on standard error."""
        say(line, self._command)


class _Bar:
    """A line that is drawn over."""

    def __init__(self, label: str, total: float | None, unit: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            TimeRemainingColumn(compact=True),
        )
        self._rich = Progress(*columns, console=Console(stderr=True), transient=True)
        self._unit = unit
        self._total = total
        self._task = self._rich.add_task(label, total=total, text="")
        self._starter = threading.Timer(SHOW_AFTER_S, self._rich.start)

    def __enter__(self) -> "_Bar":
        self._starter.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._starter.cancel()
        self._starter.join()
        self._rich.stop()

    def update(self, n: float, total: float | None = None, what: str = "") -> None:
        """`n` units are done, of `total` where that is news. what: it is at now."""
        self._total = total or self._total
        self._rich.update(self._task, completed=n, total=self._total, text=_text(n, self._total, self._unit, what))


class Lines:
    """A line when it has gone on for PLAIN_AFTER_S, then one at most every PLAIN_INTERVAL_S and at least every STILL_S.
    None for what is over before the first."""

    def __init__(
        self,
        label: str,
        total: float | None,
        unit: str,
        *,
        clock: Callable[[], float] = lambda: time.monotonic(),
        ticking: bool = True,
    ) -> None:
        """ticking: a thread calls `tick` while it lasts."""
        self._label, self._total, self._unit = label, total, unit
        self._clock, self._began_s = clock, clock()
        self._next_s, self._still_s = self._began_s + PLAIN_INTERVAL_S, self._began_s + PLAIN_AFTER_S
        self._state = ""  # how far it is, in words
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True) if ticking else None

    def __enter__(self) -> "Lines":
        if self._thread:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread:
            self._thread.join()

    def update(self, n: float, total: float | None = None, what: str = "") -> None:
        """`n` units are done, of `total` where that is news. what: it is at now."""
        self._total = total or self._total
        with self._lock:
            self._state = _text(n, self._total, self._unit, what)
            if (now_s := self._clock()) >= self._next_s:
                self._print(now_s, f"{self._label}: {self._state}")

    def tick(self) -> float:
        """Print a line where none was for too long: the seconds until the next is due."""
        with self._lock:
            now_s = self._clock()
            if now_s >= self._still_s:
                so_far = f", {now_s - self._began_s:.0f} s so far" if now_s - self._began_s >= STILL_S else ""
                self._print(now_s, f"{self._label}: {self._state or 'begun'}{so_far}")
            return self._still_s - now_s

    def _print(self, now_s: float, line: str) -> None:
        self._next_s, self._still_s = now_s + PLAIN_INTERVAL_S, now_s + STILL_S
        print(printable(line), file=sys.stderr, flush=True)

    def _run(self) -> None:
        while not self._over.wait(self.tick()):
            pass


def _text(n: float, total: float | None, unit: str, what: str) -> str:
    """How much is done, in words: "1.00 GiB of 4.00 GiB, 25 %", "512 of 2.05 K tokens, 25 %, the last"."""
    show, suffix = (bytes_text, "") if unit == "bytes" else (count_text, f" {unit}")
    amount = f"{show(n)} of {show(total)}{suffix}, {100 * n / total:.0f} %" if total else show(n) + suffix
    return f"{amount}, {what}" if what else amount
