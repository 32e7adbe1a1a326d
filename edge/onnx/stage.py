"""Stage of an ONNX model in an engine process: receives items from the previous stage, computes them, and sends them.

Receiving, computing and sending have a thread each, so that a slow link and a slow processor do not delay one another.
SETS sets of buffers circulate between the threads. If all are in use, the stage receives nothing more. A slow stage
thereby throttles the stages before it and the owner.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from devices.probe import cpu_quota, own_rss
from edge.errors import EdgeError, EngineError, NotEnoughMemory
from edge.microbenchmark import BestTime, TimedTask, best_of, sample_s
from edge.onnx.engine import OnnxEngine
from edge.onnx.samples import Array, Feeds, Input, Output, random_feeds
from edge.onnx.wire import Boundary, Item, Op, Receiver, send
from transport.link import IDLE_S, Link

if TYPE_CHECKING:
    from edge.onnx.paged import PagedNetwork

SETS = 3  # one set each for receiving, computing and sending
_COPIES = 2  # copies of a stage's file during loading: the bytes read, and ONNX Runtime's own layout
_SAMPLES = 5  # samples that the runs of a timing are divided into
_MIB = 1 << 20


@dataclass
class Buffers:
    """Buffers of one item: the tensors that the stage received and computed."""

    item: Item = field(default_factory=lambda: Item(Op.END))
    received: dict[str, Array] = field(default_factory=dict)
    computed: dict[str, Array] = field(default_factory=dict)


class StageEngine(Protocol):
    """Part of OnnxEngine's interface that a stage uses."""

    files: frozenset[Path]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    threads: int
    provider: str
    fell_back_from: tuple[str, ...]

    def run(self, feeds: Mapping[str, Array]) -> Feeds:
        """Compute the model and return its outputs by name."""

    def stop(self) -> None:
        """Make a run in another thread, and later runs, fail."""

    def close(self) -> None:
        """Free the model."""


Opener = Callable[[Path, int, "str | None"], StageEngine]  # opens a file with a number of threads and a provider


def open_here(path: Path, threads: int, provider: str | None) -> StageEngine:
    """Return an engine in this process. Raises the errors of OnnxEngine."""
    return OnnxEngine(path, threads, provider, buffers=SETS)


class LoadedStage:
    """A loaded stage. `close()` frees it."""

    def __init__(self, engine: StageEngine, takes: Boundary, gives: Boundary) -> None:
        """Raises EdgeError, and closes the engine, if the boundaries do not fit the model."""
        self.engine = engine
        self._last: dict[str, Array] = {}  # last input
        self.takes, self.gives = takes, gives
        self.inputs = tuple(value.name for value in engine.inputs)
        received = {tensor.name for tensor in takes.tensors}
        computed = {value.name for value in engine.outputs}
        lacking = sorted({*self.inputs} - received) or sorted({t.name for t in gives.tensors} - received - computed)
        if lacking:
            engine.close()
            raise EdgeError(f"the stage lacks the tensors {', '.join(lacking)!s:.200}; cut it again")

    def compute(self, item: Item, received: Mapping[str, Array]) -> tuple[Item, dict[str, Array]]:
        """Compute a received item. Return the item with the computing seconds added, and the tensors to send by
        name."""
        self._last = {name: received[name] for name in self.inputs}
        began = time.perf_counter()
        computed = self.engine.run(self._last)
        seconds = time.perf_counter() - began
        leaves = {t.name: computed[t.name] if t.name in computed else received[t.name] for t in self.gives.tensors}
        return replace(item, compute_s=(*item.compute_s, seconds)), leaves

    def time(self, repeats: int) -> BestTime:
        """Time the stage with its last input, or with seeded noise if there was none.

        The fastest sample of at least `repeats` runs counts. Raises the errors of `warm_up`.
        """
        feeds = self.warm_up()

        def step() -> None:
            self.engine.run(feeds)

        n = min(_SAMPLES, max(1, repeats))
        quota = cpu_quota()
        least_s = 0.0 if quota is None or quota >= self.engine.threads else sample_s(self.engine.threads)
        return best_of([TimedTask(step)], least_s, least_steps=-(-repeats // n), samples=n)[0]

    def warm_up(self) -> Mapping[str, Array]:
        """Run the stage once with its last input, or with seeded noise, and return that input.

        Raises EngineError if the model does not accept noise, for instance if an input is a shape.
        """
        shapes = {tensor.name: tensor.shape for tensor in self.takes.tensors}
        noise = random_feeds(tuple(replace(input_, shape=shapes[input_.name]) for input_ in self.engine.inputs), 1)
        feeds = self._last or next(noise)
        self.engine.run(feeds)
        return feeds

    def close(self) -> None:
        self.engine.close()


def need_bytes(path: str, takes: Boundary, gives: Boundary) -> int:
    """Return the minimum of memory, in bytes, that the stage in the file `path` needs if all its weights are loaded."""
    crossing = sum(tensor.n_bytes for boundary in (takes, gives) for tensor in boundary.tensors)
    return _COPIES * Path(path).stat().st_size + crossing


def load(
    path: str,
    takes: Boundary,
    gives: Boundary,
    threads: int,
    provider: str | None = None,
    limit_bytes: int = 0,
    opener: Opener = open_here,
    *,
    budget: int = 0,
) -> tuple[LoadedStage, int]:
    """Load the stage in the file `path`. Return the stage and the memory that it takes, in bytes.

    provider: short name of the execution provider; None: the best one
    limit_bytes: memory limit; 0: no limit
    opener: opens the engine
    budget: bytes of this whole process: weights that do not fit are read from disk in every run, and the CPU computes.
        0: load all weights

    Raises EdgeError if the boundaries do not fit the model, NotEnoughMemory if the need exceeds the limit, and the
    errors of `opener` and `PagedNetwork`.
    """
    before, size = own_rss(), Path(path).stat().st_size
    if not budget:
        _check_limit(need_bytes(path, takes, gives), limit_bytes)  # checked before native code reads the file
    paged: PagedNetwork | None = None
    try:
        if budget:
            engine: StageEngine = (paged := _paged(Path(path), takes, budget, threads))
        else:
            engine = opener(Path(path), threads, provider)
    except ModuleNotFoundError as error:
        raise EngineError(f'{error.name} is not installed there: pip install "edge-runtime[onnx]"') from error
    stage = LoadedStage(engine, takes, gives)
    try:
        if len(engine.files) > 1:  # in a worker's store, another file could be the slice of another owner
            raise EdgeError("a stage has its weights in its own file; this one names another")
        with suppress(EngineError):  # some inputs cannot be noise; real errors come back in the first run
            stage.warm_up()  # the first run allocates buffers
        if paged is not None:
            return stage, sum(paged.uses.values()) - before
        need = max(own_rss() - before, size)  # the process may reuse memory of an earlier stage
        _check_limit(need, limit_bytes)
    except BaseException:
        engine.close()
        raise
    return stage, need


def _paged(path: Path, takes: Boundary, budget: int, threads: int) -> PagedNetwork:
    """Return an engine whose process keeps within a budget in bytes."""
    from edge.onnx.lean import load_lean
    from edge.onnx.model import declared_inputs, noise
    from edge.onnx.paged import LARGE, PagedNetwork

    lean = load_lean(path, LARGE)
    shapes = {tensor.name: tensor.shape for tensor in takes.tensors}
    inputs = tuple(
        replace(tensor, shape=shapes.get(tensor.name, tensor.shape)) for tensor in declared_inputs(lean.file)
    )
    try:
        return PagedNetwork(lean, budget, threads, feeds=noise(inputs))
    except NotEnoughMemory as error:
        least = (error.least or budget) - budget
        raise NotEnoughMemory(
            f"the stage needs {least / _MIB:,.0f} MiB more than this worker has left of its limit, even if it reads"
            " weights from disk; give it fewer nodes"
        ) from error


def follow(stage: LoadedStage, source: Link, sink: Link) -> None:
    """Compute items from `source` and send them to `sink`, until an END has passed.

    Raises the first error of any thread: an error of a link or of the engine.
    """
    free: queue.SimpleQueue[Buffers | None] = queue.SimpleQueue()
    for _ in range(SETS):
        free.put(Buffers())
    come: queue.SimpleQueue[Buffers | Exception] = queue.SimpleQueue()
    go: queue.SimpleQueue[Buffers | None] = queue.SimpleQueue()
    _thread(lambda: _receive(Receiver(source, stage.takes), free, come), come.put)
    sending = _thread(lambda: _send(sink, stage.gives, go, free), come.put)
    try:
        while True:
            slot = come.get()
            if isinstance(slot, Exception):
                raise slot
            if slot.item.op is Op.RUN:
                slot.item, slot.computed = stage.compute(slot.item, slot.received)
            go.put(slot)
            if slot.item.op is Op.END:
                break
        sending.join()
        with suppress(queue.Empty):  # last error of the sender
            raise cast(Exception, come.get_nowait())
    finally:
        go.put(None)
        free.put(None)  # ends a receiver that waits here and would not notice a closed link


def _receive(
    receiver: Receiver, free: queue.SimpleQueue[Buffers | None], come: queue.SimpleQueue[Buffers | Exception]
) -> None:
    while (slot := free.get()) is not None:
        slot.item, shapes = receiver.item(IDLE_S)
        if slot.item.op is Op.RUN:
            receiver.tensors(slot.item, shapes, slot.received)
        come.put(slot)
        if slot.item.op is Op.END:
            return


def _send(
    sink: Link, gives: Boundary, go: queue.SimpleQueue[Buffers | None], free: queue.SimpleQueue[Buffers | None]
) -> None:
    while (slot := go.get()) is not None:
        send(sink, gives, slot.item, slot.computed)
        if slot.item.op is Op.END:
            return
        slot.computed = {}
        free.put(slot)


def _thread(work: Callable[[], None], failed: Callable[[Exception], None]) -> threading.Thread:
    """Start and return a daemon thread. It passes its error to `failed`."""

    def run() -> None:
        try:
            work()
        except Exception as error:
            failed(error)

    thread = threading.Thread(target=run, daemon=True, name="stage")
    thread.start()
    return thread


def _check_limit(need: int, limit: int) -> None:
    if limit and need > limit:
        raise NotEnoughMemory(
            f"the stage needs {need / _MIB:,.0f} MiB or more, this worker has {limit / _MIB:,.0f} MiB left of its"
            " limit; give it fewer nodes"
        )
