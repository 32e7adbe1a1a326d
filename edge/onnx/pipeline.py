"""Rank 0 of an ONNX pipeline: hands over inputs, keeps a window of them in flight, and receives the outputs.

Outputs come in the order of inputs. Latency is that of one input through an idle pipeline. With the window full each
input waits behind others, and throughput is how many complete in a second.
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

ANSWER_TIMEOUT_S = 600.0  # for the outputs of the oldest item in flight
MOST_WINDOW = 64  # items in flight
_POLL_S = 0.1  # between checks of a waiting thread whether it should end


@dataclass(frozen=True, slots=True)
class Result:
    """Outputs of one input, and their times."""

    outputs: Feeds  # by name; the caller's to keep
    began: float  # time.perf_counter() when the input was taken
    ended: float  # time.perf_counter() when its outputs were complete
    compute_s: tuple[float, ...]  # computing seconds of each stage

    @property
    def seconds(self) -> float:
        """Seconds from taking the input to having its outputs."""
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class PipelineEnds:
    """Links and boundaries at the ends of a pipeline."""

    inputs: tuple[Input, ...]  # of the model
    entry: Boundary  # what goes to the first worker
    first: Link
    exit: Boundary  # what the last worker sends: the model's outputs
    last: Link
    own: LoadedStage | None = None  # the first stage, if this process computes it


class Pipeline:
    """A model on several devices. One thread at a time uses it; `stop` may be called from any."""

    def __init__(self, ends: PipelineEnds, explained: Callable[[Exception], Exception] = lambda error: error) -> None:
        """explained: returns the reason that a worker gave for its end, for an error of a link."""
        self.inputs = ends.inputs
        self._ends = ends
        self._receiver = Receiver(ends.last, ends.exit)
        self._explained = explained
        self._number = 0
        self._stopped = False
        self.is_busy = False  # whether a caller waits for outputs

    def run(self, feeds: Mapping[str, Array], wire: str = "f32") -> Result:
        """Return the outputs for one input, through the idle pipeline. Errors as of `map`."""
        [result] = self.map([feeds], window=1, wire=wire)
        return result

    def map(self, feeds: Iterable[Mapping[str, Array]], window: int, wire: str = "f32") -> Iterator[Result]:
        """Yield the results of many inputs, in order, with up to `window` of them in flight.

        The results in flight are lost if the caller ends the iteration early.

        SamplesError for inputs that are not the model's; the pipeline may be used again then. Errors of links and of
        workers, and Interrupted after `stop`, are its end.
        """
        if not 1 <= window <= MOST_WINDOW:
            raise ValueError(f"a window of {window}; needed is 1 to {MOST_WINDOW}")
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
        except KeyboardInterrupt:  # anywhere, also in the middle of a frame
            self._break()
            raise
        finally:
            self.is_busy = False
            flight.ended = True
            while feeder.is_alive() and not flight.wants_input:  # `feeds` may take for ever to make the next input
                feeder.join(_POLL_S)

    def stop(self) -> None:
        """Make the current run, and all after it, raise Interrupted."""
        self._stopped = True
        if self._ends.own is not None:
            self._ends.own.engine.stop()
        self._break()

    def resume(self) -> None:
        """Do nothing: closed links cannot be opened again, and open ones need nothing."""

    def end(self) -> None:
        """Tell the stages that no more items come, and wait until all know. If a link breaks, the workers say why."""
        with suppress(TransportError):
            send(self._ends.first, self._ends.entry, Item(Op.END), {})
            if self._receiver.item(ANSWER_TIMEOUT_S)[0].op is not Op.END:
                self._break()

    # --- inside ---

    def _feed(self, feeds: Iterable[Mapping[str, Array]], wire: str, flight: _Flight) -> None:
        """Hand over inputs while there is room, in a thread."""
        try:
            for feed in flight.noted(feeds):
                if not flight.room():
                    return
                fit(self._ends.inputs, feed)
                self._submit(feed, wire, flight)
            flight.done(None)
        except BaseException as error:  # of the links, of the inputs, or of the iterator that makes them
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
        except BaseException:  # memory may run out: what is left of the item would be taken for the next one
            self._break()
            raise
        return Result(outputs, began, time.perf_counter(), item.compute_s)

    def _drain(self, flight: _Flight, feeder: threading.Thread) -> None:
        """Receive and drop the results in flight, so that the next item meets an idle pipeline."""
        flight.ended = True
        try:
            while feeder.is_alive() or flight.under_way:
                with suppress(queue.Empty):
                    self._result(*flight.wait(_POLL_S))
        except TransportError:
            self._break()  # ends the feeder, which would go on sending

    def _break(self) -> None:
        """Close the links: a thread that sends or receives gets an error."""
        self._ends.first.close()
        self._ends.last.close()


class _Flight:
    """Items in flight, between the thread that hands over inputs and the one that receives outputs."""

    def __init__(self, window: int) -> None:
        self.ended = False
        self.wants_input = False  # whether the next input is being made; after the end it is not sent
        self._room = threading.Semaphore(window)
        self._sent: queue.SimpleQueue[tuple[int, float] | BaseException | None] = queue.SimpleQueue()

    # Called by the thread that hands over inputs.

    def noted(self, feeds: Iterable[Mapping[str, Array]]) -> Iterator[Mapping[str, Array]]:
        """Yield the same inputs, and set `wants_input` while the next one is made."""
        self.wants_input = True
        for feed in feeds:
            self.wants_input = False
            yield feed
            self.wants_input = True
        self.wants_input = False

    def room(self) -> bool:
        """Wait for room for one more; return False if nobody receives outputs any more."""
        while not self.ended:
            if self._room.acquire(timeout=_POLL_S):
                return True
        return False

    def sent(self, number: int, began: float) -> None:
        self._sent.put((number, began))

    def done(self, error: BaseException | None) -> None:
        """Note that no more items follow; error: why not."""
        self._sent.put(error)

    # Called by the thread that receives outputs.

    def next(self) -> tuple[int, float] | None:
        """Return the oldest item in flight: its number, and when it began. Return None at the end; raise the error that
        ended it."""
        sent = self._sent.get()
        if isinstance(sent, BaseException):
            raise sent
        return sent

    def landed(self) -> None:
        self._room.release()

    @property
    def under_way(self) -> bool:
        """Return whether there may be items whose results were not received yet."""
        return not self._sent.empty()

    def wait(self, timeout_s: float) -> tuple[int, float]:
        """Return the oldest item in flight. queue.Empty if there is none."""
        sent = self._sent.get(timeout=timeout_s)
        if isinstance(sent, tuple):
            return sent
        raise queue.Empty
