"""Rank 0 of an ONNX pipeline: sends inputs, keeps a window of them in flight, and receives the outputs.

Outputs arrive in the order of inputs. Latency is the time of one input through an idle pipeline. Throughput is the
number of inputs completed per second while the window is full and inputs wait behind others.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from edge.errors import Interrupted
from edge.onnx.samples import Array, Feeds, Input
from edge.onnx.signature import fit
from edge.onnx.stage import LoadedStage
from edge.onnx.wire import Boundary, Item, Op, Receiver, send
from transport.errors import ProtocolError, TransportError
from transport.link import Link

ANSWER_TIMEOUT_S = 600.0  # timeout for the outputs of the oldest item in flight
MOST_WINDOW = 64  # limit of items in flight
_POLL_S = 0.1  # interval in which a waiting thread checks whether it should end


@dataclass(frozen=True, slots=True)
class Result:
    """Outputs of one input with its timestamps."""

    outputs: Feeds  # outputs by name, which the caller may keep
    began: float  # time.perf_counter() when the pipeline took the input
    ended: float  # time.perf_counter() when the outputs were complete
    compute_s: tuple[float, ...]  # computing seconds of each stage

    @property
    def seconds(self) -> float:
        """Seconds from taking the input to complete outputs."""
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class PipelineEnds:
    """Links and boundaries at the ends of a pipeline."""

    inputs: tuple[Input, ...]  # inputs of the model
    entry: Boundary  # tensors that the first worker receives
    first: Link
    exit: Boundary  # tensors that the last worker sends: the model's outputs
    last: Link
    own: LoadedStage | None = None  # first stage, if this process computes it


class Pipeline:
    """A model on several devices. Only one thread may use it; any thread may call `stop`."""

    def __init__(self, ends: PipelineEnds, explained: Callable[[Exception], Exception] = lambda error: error) -> None:
        """explained: returns the failure that a worker reported, for an error of a link"""
        self.inputs = ends.inputs
        self._ends = ends
        self._receiver = Receiver(ends.last, ends.exit)
        self._explained = explained
        self._number = 0
        self._stopped = False
        self.is_busy = False  # true while a caller waits for outputs

    def run(self, feeds: Mapping[str, Array], wire: str = "f32") -> Result:
        """Return the outputs for one input through the idle pipeline. Raises the errors of `map`."""
        [result] = self.map([feeds], window=1, wire=wire)
        return result

    def map(self, feeds: Iterable[Mapping[str, Array]], window: int, wire: str = "f32") -> Iterator[Result]:
        """Yield the results of many inputs, in order, with up to `window` of them in flight.

        If the caller ends the iteration early, the results in flight are dropped.

        Raises SamplesError if an input does not fit the model; the pipeline stays usable. Errors of links and workers,
        and Interrupted after `stop`, end the pipeline.
        """
        if not 1 <= window <= MOST_WINDOW:
            raise ValueError(f"a window of {window}; expected 1 to {MOST_WINDOW}")
        flight = _Flight(window)
        self.is_busy = True
        feeder = threading.Thread(target=self._feed, args=(feeds, wire, flight), daemon=True, name="feed")
        feeder.start()
        try:
            while (sent := flight.next()) is not None:
                result = self._result(*sent)
                flight.landed()
                yield result
        except GeneratorExit:
            self._drain(flight, feeder)
            raise
        except TransportError as error:
            self._break()
            if self._stopped:
                raise Interrupted("the computation was stopped") from error
            raise self._explained(error) from error
        except KeyboardInterrupt:  # it may come in the middle of a frame
            self._break()
            raise
        finally:
            self.is_busy = False
            flight.ended = True
            while feeder.is_alive() and not flight.wants_input:  # the iterator `feeds` may block forever
                feeder.join(_POLL_S)

    def stop(self) -> None:
        """Make the current run and all later runs raise Interrupted."""
        self._stopped = True
        if self._ends.own is not None:
            self._ends.own.engine.stop()
        self._break()

    def resume(self) -> None:
        """Do nothing, because closed links cannot be reopened and open links need no action."""

    def end(self) -> None:
        """Announce the end of items to all stages and wait until it has passed. If a link breaks, the workers report
        why."""
        with suppress(TransportError):
            send(self._ends.first, self._ends.entry, Item(Op.END), {})
            if self._receiver.item(ANSWER_TIMEOUT_S)[0].op is not Op.END:
                self._break()

    # --- inside ---

    def _feed(self, feeds: Iterable[Mapping[str, Array]], wire: str, flight: _Flight) -> None:
        """Send inputs while the window has room. Runs in a thread of its own."""
        try:
            for feed in flight.noted(feeds):
                if not flight.room():
                    return
                fit(self._ends.inputs, feed)
                self._submit(feed, wire, flight)
            flight.done(None)
        except BaseException as error:  # errors of links, of inputs, or of the iterator that makes inputs
            flight.done(error)

    def _submit(self, feeds: Mapping[str, Array], wire: str, flight: _Flight) -> None:
        began = time.perf_counter()
        item, leaves = Item(Op.RUN, self._number, wire), feeds
        if self._ends.own is not None:
            item, leaves = self._ends.own.compute(item, feeds)
        self._number = (self._number + 1) % (1 << 32)
        flight.sent(item.number, began)
        send(self._ends.first, self._ends.entry, item, leaves)

    def _result(self, number: int, began: float) -> Result:
        item, shapes = self._receiver.item(ANSWER_TIMEOUT_S)
        if item.op is not Op.RUN or item.number != number:
            came = f"item {item.number}" if item.op is Op.RUN else "the end"
            raise ProtocolError(f"{self._ends.last.peer} sent {came} where item {number} was expected")
        outputs: Feeds = {}
        try:
            self._receiver.tensors(item, shapes, outputs)
        # After a failure such as exhausted memory, the rest of the item would be taken for the next one.
        except BaseException:
            self._break()
            raise
        return Result(outputs, began, time.perf_counter(), item.compute_s)

    def _drain(self, flight: _Flight, feeder: threading.Thread) -> None:
        """Receive and drop the results in flight, so that the next item finds an idle pipeline."""
        flight.ended = True
        try:
            while feeder.is_alive() or flight.under_way:
                with suppress(queue.Empty):
                    self._result(*flight.wait(_POLL_S))
        except TransportError:
            self._break()  # ends the feeder, which would otherwise keep sending

    def _break(self) -> None:
        """Close the links, so that a thread that sends or receives gets an error."""
        self._ends.first.close()
        self._ends.last.close()


class _Flight:
    """Items in flight, shared by the thread that sends inputs and the thread that receives outputs."""

    def __init__(self, window: int) -> None:
        self.ended = False
        self.wants_input = False  # true while `feeds` makes the next input, which is not sent after the end
        self._room = threading.Semaphore(window)
        self._sent: queue.SimpleQueue[tuple[int, float] | BaseException | None] = queue.SimpleQueue()

    # Called by the sending thread.

    def noted(self, feeds: Iterable[Mapping[str, Array]]) -> Iterator[Mapping[str, Array]]:
        """Yield the same inputs. `wants_input` is true while the next one is made."""
        self.wants_input = True
        for feed in feeds:
            self.wants_input = False
            yield feed
            self.wants_input = True
        self.wants_input = False

    def room(self) -> bool:
        """Wait for room for one more item; return False if outputs are no longer received."""
        while not self.ended:
            if self._room.acquire(timeout=_POLL_S):
                return True
        return False

    def sent(self, number: int, began: float) -> None:
        self._sent.put((number, began))

    def done(self, error: BaseException | None) -> None:
        """Record that no more items follow. error: the reason, None at the regular end."""
        self._sent.put(error)

    # Called by the receiving thread.

    def next(self) -> tuple[int, float] | None:
        """Return number and start time of the oldest item in flight; None at the end. Raises the error that ended the
        items."""
        sent = self._sent.get()
        if isinstance(sent, BaseException):
            raise sent
        return sent

    def landed(self) -> None:
        self._room.release()

    @property
    def under_way(self) -> bool:
        """Return whether results may still be outstanding."""
        return not self._sent.empty()

    def wait(self, timeout_s: float) -> tuple[int, float]:
        """Return the oldest item in flight. Raises queue.Empty if there is none."""
        sent = self._sent.get(timeout=timeout_s)
        if isinstance(sent, tuple):
            return sent
        raise queue.Empty
