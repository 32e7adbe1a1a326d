"""Progress of a long job on standard error: a bar on a terminal, plain lines elsewhere."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edge.tasks import ShowStep, Steps
from quant.text import bytes_text, count_text, printable

PLAIN_AFTER_S = 1.0  # delay of the first line of a step: lines of shorter steps would only fill a log
PLAIN_INTERVAL_S = 5.0  # time between lines while the job reports progress
STILL_S = 10.0  # time between lines while the job reports no progress, to show that it is still running
SHOW_AFTER_S = 0.3  # delay of a bar: shorter ones would only flicker


@contextmanager
def progress(label: str, total: float | None = None, unit: str = "bytes") -> Iterator[ShowStep]:
    """Show `label` and how much of `total` is done, until the block ends. unit: "bytes", or the name of the items."""
    if sys.stderr.isatty():
        with _Bar(label, total, unit) as bar:
            yield bar.update
    else:
        with Lines(label, total, unit) as lines:
            yield lines.update


def say(message: str, command: str = "") -> None:
    """Print a line of a command on standard error, prefixed with the command's name."""
    print(printable(f"{' '.join(filter(None, ('edge', command)))}: {message}"), file=sys.stderr, flush=True)


class ShownSteps(Steps):
    """Steps of a longer job, each with its own progress."""

    def __init__(self, command: str = "") -> None:
        """command: name of the command, for lines of `say`."""
        self._command = command

    step = staticmethod(progress)

    def say(self, line: str) -> None:
        """Print a sentence on standard error."""
        say(line, self._command)


class _Bar:
    def __init__(self, label: str, total: float | None, unit: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[text]}", markup=False),
            TimeElapsedColumn(),  # shows that the job is still running if it reports nothing
        )
        self._rich = Progress(*columns, console=Console(stderr=True), transient=True)
        self._unit = unit
        self._total = total
        self._task = self._rich.add_task(printable(label), total=total, text="")
        self._starter = threading.Timer(SHOW_AFTER_S, self._rich.start)

    def __enter__(self) -> "_Bar":
        self._starter.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._starter.cancel()
        self._starter.join()
        self._rich.stop()

    def update(self, n: float, total: float | None = None, what: str = "") -> None:
        """Report `n` units done, of `total` if that has changed. what: the item in progress."""
        self._total = total or self._total
        text = printable(_text(n, self._total, self._unit, what))
        self._rich.update(self._task, completed=n, total=self._total, text=text)


class Lines:
    """Plain lines of progress: the first after PLAIN_AFTER_S, then one every PLAIN_INTERVAL_S to STILL_S.

    A shorter job prints none.
    """

    def __init__(
        self,
        label: str,
        total: float | None,
        unit: str,
        *,
        clock: Callable[[], float] = lambda: time.monotonic(),
        ticking: bool = True,
    ) -> None:
        """ticking: a thread calls `tick` while the job lasts."""
        self._label, self._total, self._unit = label, total, unit
        self._clock, self._began_s = clock, clock()
        self._next_s, self._still_s = self._began_s + PLAIN_INTERVAL_S, self._began_s + PLAIN_AFTER_S
        self._state = ""  # last reported progress, as text
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
        """Report `n` units done, of `total` if that has changed. what: the item in progress."""
        self._total = total or self._total
        with self._lock:
            self._state = _text(n, self._total, self._unit, what)
            if (now_s := self._clock()) >= self._next_s:
                self._print(now_s, f"{self._label}: {self._state}")

    def tick(self) -> float:
        """Print a line if STILL_S passed without one; return the seconds until the next is due."""
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
    """Return the progress as text: "1.00 GiB of 4.00 GiB, 25 %", "512 of 2.05 K tokens, 25 %, the last"."""
    show, suffix = (bytes_text, "") if unit == "bytes" else (count_text, f" {unit}")
    amount = f"{show(n)} of {show(total)}{suffix}, {100 * n / total:.0f} %" if total else show(n) + suffix
    return f"{amount}, {what}" if what else amount
