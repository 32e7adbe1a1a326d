"""A pipeline that outlives the devices it runs on: inputs are kept until their outputs are there, and where a device is
lost they go through another pipeline. None is lost, none is answered twice, and their order stays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from edge.errors import Interrupted
from edge.onnx.bench import Flow
from edge.onnx.pipeline import Result
from edge.onnx.wire import Array

T = TypeVar("T")

MOST_IN_A_ROW = 3  # recoveries without an answer between them: then something else is wrong


class Runner(Protocol):
    """What computes inputs, as `Pipeline` does."""

    def map(self, feeds: Iterable[Mapping[str, Array]], window: int, wire: str = "f32") -> Iterator[Result]:
        """The results of inputs, in order."""

    def stop(self) -> None:
        """Make what runs, and all that follows, raise Interrupted."""

    def resume(self) -> None:
        """Compute again."""


class SurvivingPipeline:
    """As `Pipeline`. One thread at a time uses it; `stop` may be called from any."""

    def __init__(self, runner: Runner, recovered: Callable[[Exception, Callable[[], None]], Runner]) -> None:
        """recovered: told why a runner failed, gives another one of the same model; where nothing was lost, it raises
        that error. What it raises is raised. Its second argument is to be called now and then: it raises Interrupted
        after `stop`."""
        self._runner, self._recovered = runner, recovered
        self._is_stopped = False
        self._in_a_row = 0
        self.recoveries = 0

    def run(self, feeds: Mapping[str, Array], wire: str = "f32") -> Result:
        """The outputs for one input. Errors as of `map`."""
        [result] = self.map([feeds], window=1, wire=wire)
        return result

    def map(self, feeds: Iterable[Mapping[str, Array]], window: int, wire: str = "f32") -> Iterator[Result]:
        """The results of many inputs, in order, with up to `window` of them in flight, of which copies are kept.

        Errors as of `Pipeline.map`, but those of devices that are lost only where no other can take over, or after
        MOST_IN_A_ROW recoveries without an answer. What `feeds` raises comes after the outputs of the inputs before.
        """
        inputs = KeptInputs(feeds)
        self._in_a_row = 0
        while True:
            try:
                for result in self._runner.map(inputs.unanswered(), window, wire):
                    inputs.drop_oldest()
                    self._in_a_row = 0
                    yield result
                break
            except Exception as error:
                self._take_over(error)
        inputs.check()

    def measured(self, measure: Callable[[Flow], T], wire: str = "f32") -> T:
        """What `measure` says of the flow, which it may use more than once. It begins again where a device was lost
        meanwhile, so that figures are those of one pipeline. Errors as of `map`."""
        self._in_a_row = 0
        while True:
            try:
                return measure(partial(self._runner.map, wire=wire))
            except Exception as error:
                self._take_over(error)

    def stop(self) -> None:
        """Make what runs, and all that follows, raise Interrupted. Also a recovery ends."""
        self._is_stopped = True
        self._runner.stop()

    def resume(self) -> None:
        """Compute again after `stop`, as far as the runner does."""
        self._is_stopped = False
        self._runner.resume()

    def _take_over(self, error: Exception) -> None:
        """Have another runner in place of one that failed. What keeps it from being there is raised."""
        if self._in_a_row == MOST_IN_A_ROW:
            raise error
        try:
            self._runner = self._recovered(error, self._check)
        except Exception as failed:
            if failed is not error:  # the devices may be back when it is used again
                self._runner = _Lost(error)
            raise
        self._in_a_row += 1
        self.recoveries += 1
        self._check()

    def _check(self) -> None:
        if self._is_stopped:
            raise Interrupted("the computation was stopped")


class _Lost:
    """Nothing that computes: there was no other runner when one had failed."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def map(self, feeds: Iterable[Mapping[str, Array]], window: int, wire: str = "f32") -> Iterator[Result]:
        """Why the runner failed."""
        raise self._error

    def stop(self) -> None:
        """Nothing runs."""

    def resume(self) -> None:
        """Nothing runs."""


class KeptInputs:
    """Inputs on their way: a copy of each is kept until its outputs are there."""

    def __init__(self, feeds: Iterable[Mapping[str, Array]]) -> None:
        self._feeds = iter(feeds)
        self._kept: dict[int, dict[str, Array]] = {}  # by number
        self._taken = self._answered = 0  # how many
        self._ended = False
        self._error: Exception | None = None
        self._taking = threading.Lock()  # a runner that failed may still wait for the next input when another begins

    def unanswered(self) -> Iterator[Mapping[str, Array]]:
        """Those without outputs, in order, and then new ones."""
        n = self._answered
        while self._have(n):
            yield self._kept[n]
            n += 1

    def drop_oldest(self) -> None:
        """The outputs of the oldest are there."""
        del self._kept[self._answered]
        self._answered += 1

    def check(self) -> None:
        """Raise why no more inputs came, where that was an error."""
        if self._error is not None:
            raise self._error

    def _have(self, n: int) -> bool:
        """Wait for an input; False where there are no more."""
        if n < self._taken:
            return True
        with self._taking:
            if n == self._taken and not self._ended:
                try:
                    self._kept[n] = {name: _copied(array) for name, array in next(self._feeds).items()}
                    self._taken += 1
                except StopIteration:
                    self._ended = True
                except Exception as error:  # not the runner's
                    self._ended, self._error = True, error
            return n < self._taken


def _copied(array: Array) -> Array:
    """The same values in memory of their own: whoever made them may write the next ones there."""
    return np.array(array) if isinstance(array, np.ndarray) else array  # what is none is refused later
