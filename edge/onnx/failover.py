"""Failover of a pipeline: inputs are kept until their outputs are complete, and sent through another pipeline when a
device is lost. None is lost, none is answered twice, and their order stays."""

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

MOST_IN_A_ROW = 3  # recoveries without an answer between them: after that many, something else is wrong


class Runner(Protocol):
    """Interface of pipelines that compute inputs, such as `Pipeline`."""

    def map(self, feeds: Iterable[Mapping[str, Array]], window: int, wire: str = "f32") -> Iterator[Result]:
        """Yield the results of inputs, in order."""

    def stop(self) -> None:
        """Make the current run, and all after it, raise Interrupted."""

    def resume(self) -> None:
        """Allow runs again after `stop`."""


class FailoverPipeline:
    """Pipeline with failover; used as `Pipeline`. One thread at a time uses it; `stop` may be called from any."""

    def __init__(self, runner: Runner, recover: Callable[[Exception, Callable[[], None]], Runner]) -> None:
        """recover: gets a runner's error, and returns another runner of the same model; raises that error if nothing
        was lost. Its errors are raised. It must call its second argument now and then, which raises Interrupted after
        `stop`."""
        self._runner, self._recover = runner, recover
        self._failed: Exception | None = None  # of a runner that could not be replaced
        self._is_stopped = False
        self._in_a_row = 0
        self.recoveries = 0

    @property
    def losses_in_a_row(self) -> int:
        """Losses since the last answer, where another runner is asked for: this one included."""
        return self._in_a_row + 1

    def run(self, feeds: Mapping[str, Array], wire: str = "f32") -> Result:
        """Return the outputs for one input. Errors as of `map`."""
        [result] = self.map([feeds], window=1, wire=wire)
        return result

    def map(self, feeds: Iterable[Mapping[str, Array]], window: int, wire: str = "f32") -> Iterator[Result]:
        """Yield the results of many inputs, in order, with up to `window` of them in flight. Copies of these are kept.

        Errors as of `Pipeline.map`, but those of lost devices only if no other runner can take over, or after
        MOST_IN_A_ROW recoveries without an answer. An error of `feeds` follows the outputs of the inputs before it.
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
        """Return what `measure` returns for the flow, which it may use more than once. It begins again if a device was
        lost meanwhile, so that figures are those of one pipeline. Errors as of `map`."""
        self._in_a_row = 0
        while True:
            try:
                return measure(partial(self._working().map, wire=wire))
            except Exception as error:
                self._take_over(error)

    def stop(self) -> None:
        """Make the current run, and all after it, raise Interrupted; a recovery ends, too."""
        self._is_stopped = True
        self._runner.stop()

    def resume(self) -> None:
        """Allow runs again after `stop`, as far as the runner does."""
        self._is_stopped = False
        self._runner.resume()

    def _working(self) -> Runner:
        """Return the runner. Raises the error of one that failed and could not be replaced."""
        if self._failed is not None:
            raise self._failed
        return self._runner

    def _take_over(self, error: Exception) -> None:
        """Replace a runner that failed. Raises the error that keeps another one from running."""
        if self._in_a_row == MOST_IN_A_ROW:
            raise error
        try:
            self._runner, self._failed = self._recover(error, self._check), None
        except Exception as failed:
            if failed is not error:  # the next use tries again: the devices may be back
                self._failed = error
            raise
        self._in_a_row += 1
        self.recoveries += 1
        self._check()

    def _check(self) -> None:
        if self._is_stopped:
            raise Interrupted("the computation was stopped")


class UnansweredInputs:
    """Inputs on their way: a copy of each is kept until its outputs are complete."""

    def __init__(self, feeds: Iterable[Mapping[str, Array]]) -> None:
        self._feeds = iter(feeds)
        self._inputs_by_number: dict[int, dict[str, Array]] = {}
        self._n_taken = self._n_answered = 0
        self._ended = False
        self._error: Exception | None = None
        self._feeds_lock = threading.Lock()  # a runner that failed may still wait for an input when another begins

    def unanswered(self) -> Iterator[Mapping[str, Array]]:
        """Yield the inputs without outputs, in order, and then new ones."""
        n = self._n_answered
        while self._have(n):
            yield self._inputs_by_number[n]
            n += 1

    def drop_oldest(self) -> None:
        """Drop the oldest input: its outputs are complete."""
        del self._inputs_by_number[self._n_answered]
        self._n_answered += 1

    def check(self) -> None:
        """Raise the error that ended the inputs, if there was one."""
        if self._error is not None:
            raise self._error

    def _have(self, n: int) -> bool:
        """Wait for input number `n`; return False if there are no more."""
        if n < self._n_taken:
            return True
        with self._feeds_lock:
            if n == self._n_taken and not self._ended:
                try:
                    self._inputs_by_number[n] = {name: _copied(array) for name, array in next(self._feeds).items()}
                    self._n_taken += 1
                except StopIteration:
                    self._ended = True
                except Exception as error:  # an error of the inputs, not of the runner
                    self._ended, self._error = True, error
            return n < self._n_taken


def _copied(array: Array) -> Array:
    """Return the same values in memory of their own, because the caller may write the next input into its arrays."""
    return np.array(array) if isinstance(array, np.ndarray) else array  # what is none is refused later
