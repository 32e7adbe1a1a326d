"""Test whole copies of a network: which copy gets an input, order, lost copies, errors and ends."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from edge.cluster.failures import is_loss
from edge.errors import EngineError, Interrupted, NotEnoughMemory, WorkerError
from edge.onnx import replicas
from edge.onnx.pipeline import Result
from edge.onnx.replicas import Copy, ReplicaPipeline, _Flight
from tests.support.helpers import until

TIMEOUT_S = 60


class Device:
    """A device that adds 1 to its input when the test allows it."""

    def __init__(self, name: str, seconds: float = 1.0, is_open: bool = True) -> None:
        self.name, self.seconds = name, seconds
        self.began: list[int] = []
        self.wires: list[str] = []
        self.error: Exception | None = None  # raised instead of the next result
        self.n_loads = self.n_loaded = 0
        self.gate = threading.Semaphore(10**6 if is_open else 0)
        self.load_error: Exception | None = None
        self.stopped = False

    def copy(self) -> Copy:
        return Copy(self.name, self.load)

    def load(self, stack: ExitStack) -> Any:
        if self.load_error is not None:
            raise self.load_error
        self.n_loads += 1
        self.n_loaded += 1
        stack.callback(self.unload)
        return self

    def unload(self) -> None:
        self.n_loaded -= 1

    def map(self, feeds: Iterable[Any], window: int, wire: str = "f32") -> Iterator[Result]:
        self.wires.append(wire)
        for feed in feeds:
            value = int(feed["x"][0])
            self.began.append(value)
            assert self.gate.acquire(timeout=TIMEOUT_S)
            if self.stopped:
                raise Interrupted("stopped")
            if self.error is not None:
                error, self.error = self.error, None
                raise error
            yield Result({"y": feed["x"] + 1}, 0, self.seconds, (self.seconds,))

    def stop(self) -> None:
        self.stopped = True
        self.gate.release()

    def resume(self) -> None:
        self.stopped = False


def inputs(n: int) -> list[dict[str, Any]]:
    return [{"x": np.array([i])} for i in range(n)]


def pipeline(*devices: Device, here: Device | None = None, said: list[str] | None = None) -> ReplicaPipeline:
    say = (said if said is not None else []).append
    return ReplicaPipeline([device.copy() for device in devices], (here or Device("here")).copy(), is_loss, say)


def values(results: Iterable[Result]) -> list[int]:
    return [int(result.outputs["y"][0]) for result in results]


def test_outputs_have_the_order_of_inputs_and_every_copy_computes() -> None:
    slow, quick = Device("slow", is_open=False), Device("quick")
    copies = pipeline(slow, quick)

    def opened() -> Iterator[dict[str, Any]]:
        for i, feed in enumerate(inputs(20)):
            if i == 10:  # the slow copy still computes its first input
                until(lambda: len(quick.began) == 9, "the quick copy's inputs")
                slow.gate.release(100)
            yield feed

    assert values(copies.map(opened(), 4)) == list(range(1, 21))
    assert len(slow.began) >= 1
    assert sorted(slow.began + quick.began) == list(range(20))


def test_first_complete_result_comes_first() -> None:
    slow, quick = Device("slow", is_open=False), Device("quick")
    completed = pipeline(slow, quick).completed(iter(inputs(4)), 4)
    first = [next(completed)[0] for _ in range(3)]
    assert set(first) == set(range(4)) - set(slow.began)
    slow.gate.release()
    assert [number for number, _ in completed] == slow.began


def test_single_input_goes_to_the_copy_that_finishes_it_soonest() -> None:
    slow, quick = Device("slow", 3.0), Device("quick", 1.0)
    copies = pipeline(slow, quick)
    values(copies.map(inputs(8), 2))  # measures both
    assert slow.began
    assert quick.began
    before = len(quick.began)
    for _ in range(5):
        values(copies.map(inputs(1), 1))
    assert len(quick.began) - before == 5


def test_window_limits_inputs_in_flight() -> None:
    devices = [Device(str(i), is_open=False) for i in range(4)]
    copies = pipeline(*devices)
    started: list[int] = []

    def feeds() -> Iterator[dict[str, Any]]:
        for i, feed in enumerate(inputs(9)):
            started.append(i)
            yield feed

    results: list[int] = []
    thread = threading.Thread(target=lambda: results.extend(values(copies.map(feeds(), 3))))
    thread.start()
    until(lambda: sum(len(device.began) for device in devices) == 3, "three inputs in flight")
    assert len(started) == 3
    for device in devices:
        device.gate.release(100)
    thread.join(TIMEOUT_S)
    assert results == list(range(1, 10))


def test_inputs_of_a_lost_copy_are_computed_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "RETRY_S", 0.0)
    lost, other, said = Device("pi"), Device("laptop"), list[str]()
    lost.error = WorkerError("pi went away")
    assert values(pipeline(lost, other, said=said).map(inputs(12), 4)) == list(range(1, 13))
    assert said[0] == "pi was lost (pi went away): the other copies go on"


@pytest.mark.parametrize("n_others", [1, 2])
def test_inputs_of_a_lost_copy_are_computed_before_the_next_input_comes(
    monkeypatch: pytest.MonkeyPatch, n_others: int
) -> None:
    """The next one may come much later, as requests do."""
    monkeypatch.setattr(replicas, "RETRY_S", 10 * TIMEOUT_S)
    lost, others = Device("pi", is_open=False), [Device(str(i)) for i in range(n_others)]
    lost.error, outputs = WorkerError("pi went away"), list[int]()

    def feeds() -> Iterator[dict[str, Any]]:
        yield from inputs(6)
        lost.gate.release(100)
        until(lambda: len(outputs) == 6, "the outputs of all inputs before this one")

    for result in pipeline(lost, *others).map(feeds(), 12):
        outputs.append(int(result.outputs["y"][0]))
    assert lost.began
    assert outputs == [1, 2, 3, 4, 5, 6]


def test_input_that_comes_after_the_loss_of_its_copy_goes_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "RETRY_S", TIMEOUT_S)
    other, said = Device("laptop", is_open=False), list[str]()

    class Ahead(Device):
        """A device that asks for its next input in a thread of its own, as pipelines do."""

        def map(self, feeds: Iterable[Any], window: int, wire: str = "f32") -> Iterator[Result]:
            inputs_ahead = iter(feeds)
            next(inputs_ahead)
            threading.Thread(target=next, args=(inputs_ahead, None), daemon=True).start()
            until(lambda: "second" in said, "the request for a second input")
            raise WorkerError("pi went away")
            yield

    def feeds() -> Iterator[dict[str, Any]]:
        first, second = inputs(2)
        yield first
        said.append("second")
        until(lambda: any("pi was lost" in line for line in said), "the loss")
        other.gate.release(100)
        yield second

    copies = pipeline(Ahead("pi"), other, said=said)
    copies.copies[1].seconds = 9.0  # the first input goes to the other copy
    assert values(copies.map(feeds(), 4)) == [1, 2]


def test_lost_copy_returns_while_inputs_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "RETRY_S", 0.0)
    lost, other, said = Device("pi"), Device("laptop"), list[str]()
    lost.error = WorkerError("pi went away")

    def feeds() -> Iterator[dict[str, Any]]:
        for i, feed in enumerate(inputs(30)):
            if i == 15:
                until(lambda: "pi computes again" in said, "the return of the lost copy")
                n_began.append(len(lost.began))
            yield feed

    n_began: list[int] = []
    copies = pipeline(lost, other, said=said)
    assert values(copies.map(feeds(), 4)) == list(range(1, 31))
    assert len(lost.began) > n_began[0]
    assert (lost.n_loads, lost.n_loaded) == (2, 1)
    copies.close()
    assert (lost.n_loaded, other.n_loaded) == (0, 0)


def test_this_device_computes_if_all_copies_are_lost() -> None:
    first, two, here, said = Device("one"), Device("two"), Device("here"), list[str]()
    for device in (first, two):
        device.error = WorkerError("gone")
        device.load_error = None
    copies = pipeline(first, two, here=here, said=said)
    for device in (first, two):
        device.load_error = WorkerError("gone")
    assert values(copies.map(inputs(6), 4)) == list(range(1, 7))
    assert "no other device answers: going on with here" in said
    assert values(copies.map(inputs(3), 2)) == [1, 2, 3]
    assert here.n_loads == 1


def test_error_of_an_input_is_raised_and_the_copies_stay() -> None:
    first, two = Device("one"), Device("two")
    copies = pipeline(first, two)
    first.error = two.error = EngineError("cannot compute this")
    with pytest.raises(EngineError, match="cannot compute this"):
        values(copies.map(inputs(6), 2))
    first.error = two.error = None
    assert values(copies.map(inputs(3), 2)) == [1, 2, 3]


def test_error_of_the_inputs_comes_after_the_outputs_of_earlier_inputs() -> None:
    def failing() -> Iterator[dict[str, Any]]:
        yield from inputs(5)
        raise OSError("no more files")

    results = pipeline(Device("one"), Device("two")).map(failing(), 4)
    assert values(next(results) for _ in range(5)) == [1, 2, 3, 4, 5]
    with pytest.raises(OSError, match="no more files"):
        next(results)


@pytest.mark.parametrize("computes", [False, True])
def test_stop_ends_a_run_that_waits_for_inputs_or_computes(computes: bool) -> None:
    first = Device("one", is_open=not computes)
    copies, ended = pipeline(first), threading.Event()

    def feeds() -> Iterator[dict[str, Any]]:
        yield from inputs(1)
        assert ended.wait(TIMEOUT_S)

    def stop() -> None:
        until(lambda: bool(first.began), "an input")
        copies.stop()

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Interrupted):
        values(copies.map(feeds(), 2))
    thread.join(TIMEOUT_S)
    ended.set()
    with pytest.raises(Interrupted):
        values(copies.map(inputs(1), 1))
    copies.resume()
    first.gate.release(10)
    assert values(copies.map(inputs(3), 2)) == [1, 2, 3]


def test_copies_that_cannot_be_loaded_leave_nothing_loaded() -> None:
    first, two = Device("one"), Device("two")
    two.load_error = WorkerError("refused")
    closed: list[str] = []

    def load(stack: ExitStack) -> Any:
        stack.callback(closed.append, "one")
        return first

    with pytest.raises(WorkerError, match="refused"):
        ReplicaPipeline([Copy("one", load), two.copy()], Device("here").copy(), is_loss, print)
    assert closed == ["one"]


def test_failed_last_resort_raises_the_loss_and_the_next_run_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "RETRY_S", 10 * TIMEOUT_S)
    only, here, said = Device("pi"), Device("here"), list[str]()
    only.error, here.load_error = WorkerError("pi went away"), NotEnoughMemory("too large")
    copies = pipeline(only, here=here, said=said)
    for _ in range(2):
        with pytest.raises(WorkerError, match="pi went away"):
            values(copies.map(inputs(3), 2))
        assert said[-1] == "here does not load it: too large"
    here.load_error = None
    assert values(copies.map(inputs(3), 2)) == [1, 2, 3]
    assert only.n_loads == 1


def test_loss_of_this_device_too_is_raised_by_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "RETRY_S", 10 * TIMEOUT_S)
    here = Device("here")
    here.error = WorkerError("here went away")
    alone = here.copy()
    copies = ReplicaPipeline([alone], alone, is_loss, print)
    for _ in range(2):
        with pytest.raises(WorkerError, match="here went away"):
            values(copies.map(inputs(3), 2))


@pytest.mark.parametrize("window", [1, 3])
def test_slow_caller_limits_the_results_that_wait(window: int) -> None:
    copies, started = pipeline(Device("one")), list[int]()

    def feeds() -> Iterator[dict[str, Any]]:
        for i, feed in enumerate(inputs(12)):
            assert i <= len(outputs) + window  # the caller has one result more than it has recorded
            started.append(i)
            yield feed

    outputs: list[int] = []

    def is_full() -> bool:
        return len(started) == min(12, len(outputs) + 1 + window)

    for result in copies.map(feeds(), window):
        until(is_full, "as many inputs as the window allows")
        outputs += values([result])
    assert outputs == list(range(1, 13))
    with pytest.raises(ValueError, match="a window of 0"):
        next(copies.completed(iter(inputs(1)), 0))


@pytest.mark.parametrize("error", [OSError("no more files"), SystemExit(3)], ids=str)
def test_any_error_of_the_inputs_ends_the_run(error: BaseException) -> None:
    def failing() -> Iterator[dict[str, Any]]:
        yield from inputs(2)
        raise error

    copies = pipeline(Device("one"))
    with pytest.raises(type(error)):
        values(copies.map(failing(), 4))
    assert values(copies.map(inputs(3), 2)) == [1, 2, 3]


def test_thread_of_a_replaced_runner_does_not_speak_for_the_new_one() -> None:
    copy = Device("pi").copy()
    copy.open()
    flight = _Flight(iter(inputs(4)), 4)
    flight.add(copy)
    reader = threading.Thread(target=flight.read, daemon=True)
    reader.start()
    former = flight.inputs(copy)
    first = next(former)
    flight.lose(copy)
    flight.add(copy)
    present = flight.inputs(copy)
    assert next(present) is first  # its copy was lost
    later: list[Any] = []
    flight._window = 1  # no input may be read now
    thread = threading.Thread(target=lambda: later.append(next(present)), daemon=True)
    thread.start()
    until(lambda: copy in flight._ready, "the new runner to wait for an input")
    assert list(former) == []
    with flight._changed:
        flight._window = 4
        flight._changed.notify_all()
    thread.join(TIMEOUT_S)
    flight._window = 1
    thread = threading.Thread(target=lambda: later.extend(present), daemon=True)
    thread.start()
    until(lambda: copy in flight._ready, "the new runner to wait again")
    flight.lose(copy)
    thread.join(TIMEOUT_S)
    assert not flight._ready
    flight.end()
    reader.join(TIMEOUT_S)
    assert [int(feed["x"][0]) for feed in later] == [1]


def test_inputs_are_copied_because_the_caller_may_use_their_memory_again() -> None:
    slow, quick = Device("slow", is_open=False), Device("quick")

    def feeds() -> Iterator[dict[str, Any]]:
        memory = np.array([0])
        for i in range(6):
            memory[0] = i
            yield {"x": memory}
        slow.gate.release(100)

    assert values(pipeline(slow, quick).map(feeds(), 4)) == list(range(1, 7))


def test_caller_that_leaves_early_leaves_no_copy_at_work() -> None:
    device = Device("one", is_open=False)
    copies = pipeline(device)
    results = copies.completed(iter(inputs(9)), 4)
    device.gate.release()
    assert next(results)[0] == 0
    until(lambda: device.began == [0, 1], "the next input")

    def go_on() -> None:
        flight = copies._flight
        assert flight is not None
        until(lambda: flight.ended, "the end")
        device.gate.release(100)

    thread = threading.Thread(target=go_on)
    thread.start()
    results.close()  # type: ignore[attr-defined]
    assert "copy" not in [thread.name for thread in threading.enumerate()]
    assert device.began == [0, 1]
    thread.join(TIMEOUT_S)


def test_oldest_input_of_a_lost_copy_is_computed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "RETRY_S", 10 * TIMEOUT_S)
    other = Device("laptop")

    class Ahead(Device):
        """A device that is lost with several inputs in flight."""

        def map(self, feeds: Iterable[Any], window: int, wire: str = "f32") -> Iterator[Result]:
            inputs_ahead = iter(feeds)
            for _ in range(4):
                next(inputs_ahead)
            raise WorkerError("pi went away")
            yield

    copies = pipeline(Ahead("pi"), other)
    copies.copies[1].seconds = 9.0  # the first inputs go to the other copy
    assert values(copies.map(inputs(6), 4)) == [1, 2, 3, 4, 5, 6]
    assert other.began == [0, 1, 2, 3, 4, 5]


def test_time_of_a_copy_is_a_mean_that_follows_slowly() -> None:
    device = Device("one")
    copies = pipeline(device)
    for seconds, mean in ((1.0, 1.0), (2.0, 1.3), (1.3, 1.3)):
        device.seconds = seconds
        copies.run(inputs(1)[0])
        assert copies.copies[0].seconds == pytest.approx(mean)


def test_first_of_several_errors_is_raised() -> None:
    flight = _Flight(iter(()), 1)
    for error in (EngineError("first"), EngineError("second")):
        flight.fail(error)
    with pytest.raises(EngineError, match="first"):
        flight.next(lambda: None)
    assert flight.ended


def test_measurements_use_the_wire_type_and_the_time_at_which_an_input_was_taken() -> None:
    device = Device("one")
    [result] = pipeline(device).measured(lambda flow: list(flow(inputs(1), 1)), "f16")
    assert device.wires == ["f16"]
    assert result.began > 0  # the device reports 0
