"""Whole copies of a network on several devices: each input goes to the copy that will finish it soonest.

If a copy is lost, the others compute its unanswered inputs, and it is loaded again when its device returns.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TypeVar

from edge.errors import EdgeError, Interrupted
from edge.onnx.bench import Flow
from edge.onnx.failover import Runner, copied
from edge.onnx.pipeline import Result
from edge.onnx.samples import Array

T = TypeVar("T")

RETRY_S = 5.0  # time after the loss of a copy before it is opened again
_AHEAD = 2  # inputs in flight at one copy: one computes while the next one travels
_NEW = 0.3  # weight of a new time in the mean time of a copy

Feed = Mapping[str, Array]


class Copy:
    """One copy of the network on a device."""

    def __init__(self, name: str, load: Callable[[ExitStack], Runner]) -> None:
        """load: loads the copy, and puts what must be closed on the stack."""
        self.name, self._load = name, load
        self.runner: Runner | None = None  # None if the copy is lost
        self.seconds = 0.0  # mean time of an input; 0 before the first one
        self.lost_at = 0.0  # time.monotonic()
        self.loss: Exception | None = None  # error of the last loss, or of the last attempt to load the copy again
        self._stack = ExitStack()

    def open(self) -> Runner:
        """Load the copy if it is not loaded. Raises the errors of `load`."""
        if self.runner is None:
            with ExitStack() as stack:
                self.runner = self._load(stack)
                self._stack = stack.pop_all()
        return self.runner

    def close(self) -> None:
        """Unload the copy. Its device may be lost."""
        self.runner = None
        with suppress(EdgeError, OSError):
            self._stack.close()


class ReplicaPipeline:
    """Copies of a network, with the methods of `FailoverPipeline`. Only one thread may use it; any thread may call
    `stop`."""

    def __init__(
        self,
        copies: Sequence[Copy],
        last_resort: Copy,
        is_loss: Callable[[Exception], bool],
        say: Callable[[str], None],
    ) -> None:
        """Load the copies. Raises the errors of loading; all copies are unloaded then.

        last_resort: a copy that is loaded if all others are lost.
        is_loss: returns True if an error means that a device was lost.
        say: called with a message about a lost or returned copy.
        """
        self.copies, self._last_resort, self._is_loss, self._say = list(copies), last_resort, is_loss, say
        self._is_stopped = False
        self._flight: _Flight | None = None
        try:
            for copy in self.copies:
                copy.open()
        except BaseException:
            self.close()
            raise

    def run(self, feeds: Feed, wire: str = "f32") -> Result:
        """Return the outputs for one input. Raises the errors of `map`."""
        [result] = self.map([feeds], window=1, wire=wire)
        return result

    def map(self, feeds: Iterable[Feed], window: int, wire: str = "f32") -> Iterator[Result]:
        """Yield the results of many inputs, in order, with up to `window` of them in flight. Raises the errors of
        `completed`."""
        early: dict[int, Result] = {}  # results that wait for the result of an earlier input
        n_yielded = 0
        for number, completed in self.completed(feeds, window, wire):
            early[number] = completed
            while (result := early.pop(n_yielded, None)) is not None:
                n_yielded += 1
                yield result

    def completed(self, feeds: Iterable[Feed], window: int, wire: str = "f32") -> Iterator[tuple[int, Result]]:
        """Yield the number of each input and its result, as soon as it is complete. Up to `window` inputs are in
        flight. Inputs are copied.

        Raises the errors of a copy that refuses an input, Interrupted after `stop`, and the error of the last lost copy
        if no copy can be loaded.
        """
        if window < 1:
            raise ValueError(f"a window of {window}; expected 1 or more")
        if self._is_stopped:
            raise Interrupted("the computation was stopped")
        flight = self._flight = _Flight(iter(feeds), window)
        for copy in self.copies:
            flight.add(copy)
        # No other thread waits for the end of this one, because the iterator `feeds` may block forever.
        threading.Thread(target=flight.read, daemon=True, name="read").start()
        threads = [self._thread(copy, flight, wire) for copy in self.copies]
        try:
            while True:
                result = flight.next(lambda: self._all_lost(flight, threads, wire))
                if result is None:
                    return
                yield result
        finally:
            flight.end()
            for thread in threads:
                thread.join()

    def measured(self, measure: Callable[[Flow], T], wire: str = "f32") -> T:
        """Return the result of `measure` for the flow, which `measure` may use more than once."""
        return measure(partial(self.map, wire=wire))

    def stop(self) -> None:
        """Make the current run and all later runs raise Interrupted."""
        self._is_stopped = True
        for copy in self.copies:
            if (runner := copy.runner) is not None:
                runner.stop()
        if self._flight is not None:
            self._flight.fail(Interrupted("the computation was stopped"))

    def resume(self) -> None:
        """Allow runs again after `stop`, if the copies support it."""
        self._is_stopped = False
        for copy in self.copies:
            if copy.runner is not None:
                copy.runner.resume()

    def close(self) -> None:
        """Unload all copies."""
        for copy in self.copies:
            copy.close()

    def _all_lost(self, flight: _Flight, threads: list[threading.Thread], wire: str) -> None:
        """Load the copy for the last resort. Raises the error of the last loss if that copy is lost, too, or
        cannot be loaded."""
        loss = max(self.copies, key=lambda copy: copy.lost_at).loss
        assert loss is not None
        if self._last_resort in self.copies:
            raise loss
        self._say(f"no other device answers: going on with {self._last_resort.name}")
        try:
            self._last_resort.open()
        except (EdgeError, OSError) as error:
            self._say(f"{self._last_resort.name} does not load it: {error}")
            raise loss from error
        self.copies.append(self._last_resort)
        flight.add(self._last_resort)
        threads.append(self._thread(self._last_resort, flight, wire))

    def _thread(self, copy: Copy, flight: _Flight, wire: str) -> threading.Thread:
        thread = threading.Thread(target=self._compute, args=(copy, flight, wire), daemon=True, name="copy")
        thread.start()
        return thread

    def _compute(self, copy: Copy, flight: _Flight, wire: str) -> None:
        """Compute inputs on one copy until the end of the flight. Runs in a thread of its own."""
        while not flight.ended:
            try:
                if copy.runner is None:
                    if not flight.wait_until(copy.lost_at + RETRY_S):
                        return
                    copy.open()
                    flight.add(copy)
                    self._say(f"{copy.name} computes again")
                assert copy.runner is not None
                for result in copy.runner.map(flight.inputs(copy), _AHEAD, wire):
                    flight.answer(copy, result)
                return
            except Exception as error:
                was_loaded = copy.runner is not None
                if was_loaded and (self._is_stopped or not self._is_loss(error)):
                    flight.fail(Interrupted("the computation was stopped") if self._is_stopped else error)
                    return
                copy.close()
                copy.lost_at, copy.loss = time.monotonic(), error
                if was_loaded:
                    self._say(f"{copy.name} was lost ({error}): the other copies go on")
                flight.lose(copy)


class _Flight:
    """Inputs of one `map`, shared by the threads of all copies."""

    def __init__(self, feeds: Iterator[Feed], window: int) -> None:
        self._feeds, self._window = feeds, window
        self._changed = threading.Condition()
        self._own: dict[Copy, list[int]] = {}  # inputs in flight at each loaded copy, oldest first
        self._inputs: dict[int, Feed] = {}  # inputs without outputs
        self._waiting: list[int] = []  # heap of inputs that no copy computes: new ones, and those of lost copies
        self._results: deque[tuple[int, Result]] = deque()
        self._began: dict[int, float] = {}
        self._n_read = 0
        self._no_more = False
        self._error: Exception | None = None
        self._feeds_error: BaseException | None = None  # raised after the outputs of earlier inputs
        self._ready: set[Copy] = set()  # copies that wait for an input
        self.ended = False

    # --- called by the caller of `map` ---

    def next(self, all_lost: Callable[[], None]) -> tuple[int, Result] | None:
        """Wait for the next number and result. Return None after the last one.

        all_lost: called if all copies are lost; raises an error if no copy can replace them.
        """
        while True:
            with self._changed:
                self._changed.wait_for(self._has_news)
                if self._results:
                    self._changed.notify_all()  # there is room for one more input
                    return self._results.popleft()
                if self._error is not None:
                    raise self._error
                if self._is_over():
                    if self._feeds_error is not None:
                        raise self._feeds_error
                    return None
            all_lost()

    def end(self) -> None:
        """Make all threads end."""
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def _has_news(self) -> bool:
        return bool(self._results) or self._error is not None or self._is_over() or not self._own

    def _is_over(self) -> bool:
        """Return True if all inputs have outputs."""
        return self._no_more and not self._inputs

    # --- called by a thread of its own ---

    def read(self) -> None:
        """Read inputs, one at a time, while a copy waits for one."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.ended or self._needs_input())
                if self.ended:
                    return
            feed = None
            try:
                feed = {name: copied(array) for name, array in next(self._feeds).items()}
            except StopIteration:
                pass
            except BaseException as error:  # the iterator of inputs failed
                self._feeds_error = error
            with self._changed:
                self._changed.notify_all()
                if feed is None:
                    self._no_more = True
                    return
                self._inputs[self._n_read] = feed
                heapq.heappush(self._waiting, self._n_read)
                self._n_read += 1

    def _needs_input(self) -> bool:
        # Results that the caller has not taken count, so that a slow caller does not fill the memory.
        n_in_flight = len(self._inputs) + len(self._results)
        return bool(self._ready) and not self._waiting and n_in_flight < self._window

    # --- called by the threads of copies ---

    def add(self, copy: Copy) -> None:
        """Add a copy that is loaded."""
        with self._changed:
            if copy.runner is not None:
                self._own[copy] = []
            self._changed.notify_all()

    def inputs(self, copy: Copy) -> Iterator[Feed]:
        """Yield the inputs that this copy will finish soonest."""
        with self._changed:
            numbers = self._own.get(copy, [])
        while (number := self._take(copy, numbers)) is not None:
            yield self._inputs[number]

    def _take(self, copy: Copy, numbers: list[int]) -> int | None:
        """Return the number of the next input of a copy, or None at the end.

        numbers: the copy's inputs in flight. If the copy was lost since then, it gets no more inputs.
        """

        def is_over() -> bool:
            return self.ended or self._own.get(copy) is not numbers

        with self._changed:
            if is_over():  # a thread of a lost runner, which must not speak for the runner that has replaced it
                return None
            self._ready.add(copy)
            self._changed.notify_all()
            self._changed.wait_for(lambda: is_over() or self._may_take(copy))
            if is_over():
                return None
            self._ready.discard(copy)
            if not self._waiting:
                return None
            number = heapq.heappop(self._waiting)
            self._began[number] = time.perf_counter()
            numbers.append(number)
            self._changed.notify_all()  # this copy no longer competes for inputs, and there is room for one more
            return number

    def _may_take(self, copy: Copy) -> bool:
        """Return True if an input may go to this copy now, or if all inputs have outputs."""
        if not self._waiting:
            return self._is_over()  # until the last output, an input of a lost copy may come back
        others = (other for other, numbers in self._own.items() if other in self._ready or not numbers)
        return self._finish_s(copy) <= min(map(self._finish_s, others))

    def _finish_s(self, copy: Copy) -> float:
        """Return the seconds until a copy would finish another input."""
        return (len(self._own[copy]) + 1) * copy.seconds

    def answer(self, copy: Copy, result: Result) -> None:
        """Record the outputs of the oldest input of a copy."""
        with self._changed:
            number = self._own[copy].pop(0)
            del self._inputs[number]
            began = self._began.pop(number)
            self._results.append((number, Result(result.outputs, began, result.ended, result.compute_s)))
            seconds = sum(result.compute_s) or result.seconds
            copy.seconds = seconds if not copy.seconds else copy.seconds + _NEW * (seconds - copy.seconds)
            self._changed.notify_all()

    def lose(self, copy: Copy) -> None:
        """Give the inputs of a lost copy to the others."""
        with self._changed:
            self._ready.discard(copy)
            for number in self._own.pop(copy, []):
                heapq.heappush(self._waiting, number)
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """End the flight with an error."""
        with self._changed:
            self._error = self._error or error
            self.ended = True
            self._changed.notify_all()

    def wait_until(self, moment: float) -> bool:
        """Wait until a moment of time.monotonic(). Return False if the flight ends before it."""
        with self._changed:
            return not self._changed.wait_for(lambda: self.ended, max(0.0, moment - time.monotonic()))
