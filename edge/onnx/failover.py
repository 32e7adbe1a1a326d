"""Failover of a pipeline: each input is kept until its outputs are complete.

If a device is lost, unanswered inputs are sent through another pipeline. No input is lost or answered twice, and the
order of inputs is preserved.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from edge.errors import Interrupted
from edge.onnx.bench import Flow
from edge.onnx.pipeline import Result
from edge.onnx.samples import Array

T = TypeVar("T")

MOST_IN_A_ROW = 3  # recoveries without a result between them; after this many, the cause is probably not a lost device


class Runner(Protocol):
    """Interface of pipelines that compute inputs, such as `Pipeline`."""

    def map(self, feeds: Iterable[Mapping[str, Array]], window: int, wire: str = "f32") -> Iterator[Result]:
        """Yield the results of inputs, in order."""

    def stop(self) -> None:
        """Make the current run and all later runs raise Interrupted."""

    def resume(self) -> None:
        """Allow runs again after `stop`."""


class FailoverPipeline:
    """Pipeline with failover, with the methods of `Pipeline`. Only one thread may use it; any thread may call
    `stop`."""

    def __init__(self, runner: Runner, recover: Callable[[Exception, Callable[[], None]], Runner]) -> None:
        """recover: a function that gets a runner's error and returns another runner of the same model. It raises that
        error if no device was lost. Its second argument raises Interrupted after `stop`; `recover` must call it
        regularly.
        """
        self._runner, self._recover = runner, recover
        self._failed: Exception | None = None  # error of a runner that could not be replaced
        self._is_stopped = False
        self._in_a_row = 0
        self.recoveries = 0

    @property
    def losses_in_a_row(self) -> int:
        """Consecutive losses without a result between them, including the current loss, while a recovery is in
        progress."""
        return self._in_a_row + 1

    def run(self, feeds: Mapping[str, Array], wire: str = "f32") -> Result:
        """Return the outputs for one input. Raises the errors of `map`."""
        [result] = self.map([feeds], window=1, wire=wire)
        return result

    def map(self, feeds: Iterable[Mapping[str, Array]], window: int, wire: str = "f32") -> Iterator[Result]:
        """Yield the results of many inputs, in order, with up to `window` of them in flight. Inputs in flight are
        copied.

        Raises the errors of `Pipeline.map`. An error of a lost device is raised only if no other runner can take over,
        or after MOST_IN_A_ROW recoveries without a result. An error of `feeds` is raised after the results of earlier
        inputs.
        """
        inputs = UnansweredInputs(feeds)
        self._in_a_row = 0
        while True:
            try:
                for result in self._working().map(inputs.unanswered(), window, wire):
                    inputs.drop_oldest()
                    self._in_a_row = 0
                    yield result
                break
            except Exception as error:
                self._take_over(error)
        inputs.check()

    def measured(self, measure: Callable[[Flow], T], wire: str = "f32") -> T:
        """Return the result of `measure` for the flow, which `measure` may use more than once.

        If a device is lost, the measurement starts again, so that all figures belong to one pipeline. Raises the errors
        of `map`.
        """
        self._in_a_row = 0
        while True:
            try:
                return measure(partial(self._working().map, wire=wire))
            except Exception as error:
                self._take_over(error)

    def stop(self) -> None:
        """Make the current run and all later runs raise Interrupted. A recovery in progress ends, too."""
        self._is_stopped = True
        self._runner.stop()

    def resume(self) -> None:
        """Allow runs again after `stop`, if the runner supports it."""
        self._is_stopped = False
        self._runner.resume()

    def _working(self) -> Runner:
        """Return the runner. Raises the error of a runner that failed and could not be replaced."""
        if self._failed is not None:
            raise self._failed
        return self._runner

    def _take_over(self, error: Exception) -> None:
        """Replace a runner that failed. Raises an error if no runner can take over."""
        if self._in_a_row == MOST_IN_A_ROW:
            raise error
        try:
            self._runner, self._failed = self._recover(error, self._check), None
        except Exception as failed:
            if failed is not error:  # the next use tries again because the devices may have returned
                self._failed = error
            raise
        self._in_a_row += 1
        self.recoveries += 1
        self._check()

    def _check(self) -> None:
        if self._is_stopped:
            raise Interrupted("the computation was stopped")


class UnansweredInputs:
    """Inputs in flight. A copy of each input is kept until its outputs are complete."""

    def __init__(self, feeds: Iterable[Mapping[str, Array]]) -> None:
        self._feeds = iter(feeds)
        self._inputs_by_number: dict[int, dict[str, Array]] = {}
        self._n_taken = self._n_answered = 0
        self._ended = False
        self._error: Exception | None = None
        self._feeds_lock = threading.Lock()  # a failed runner may still wait for an input when its replacement starts

    def unanswered(self) -> Iterator[Mapping[str, Array]]:
        """Yield the inputs without outputs, in order, and then new inputs."""
        n = self._n_answered
        while self._have(n):
            yield self._inputs_by_number[n]
            n += 1

    def drop_oldest(self) -> None:
        """Drop the oldest input after its outputs are complete."""
        del self._inputs_by_number[self._n_answered]
        self._n_answered += 1

    def check(self) -> None:
        """Raise the error that ended the iteration over inputs, if there was one."""
        if self._error is not None:
            raise self._error

    def _have(self, n: int) -> bool:
        """Wait for input number `n`; return False if there are no more."""
        if n < self._n_taken:
            return True
        with self._feeds_lock:
            if n == self._n_taken and not self._ended:
                try:
                    self._inputs_by_number[n] = {name: copied(array) for name, array in next(self._feeds).items()}
                    self._n_taken += 1
                except StopIteration:
                    self._ended = True
                except Exception as error:  # the iterator of inputs failed, not the runner
                    self._ended, self._error = True, error
            return n < self._n_taken


def copied(array: Array) -> Array:
    """Return a copy of the array, because the caller may write the next input into the same memory."""
    return np.array(array) if isinstance(array, np.ndarray) else array  # other types are refused later
