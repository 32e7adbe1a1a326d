"""A stage of an ONNX model in an engine process: items come from the stage before, are computed, and go on.

Receiving, computing and sending are a thread each, so that a slow link and a slow processor do not wait for one
another. SETS sets of buffers go round between them. When all are in use, nothing more is received; so a slow stage
holds back those before it, up to the owner.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from devices.probe import cpu_quota, own_rss
from edge.errors import EdgeError, EngineError, NotEnoughMemory
from edge.microbenchmark import BestTime, TimedTask, best_of, sample_s
from edge.onnx.engine import OnnxEngine
from edge.onnx.samples import made_up
from edge.onnx.wire import Array, Boundary, Item, Op, Receiver, send
from transport.link import Link

SETS = 3  # one is received, one computed, one sent
IDLE_S = 7 * 86400.0  # for the next item: a person may think for long, and a link that breaks is noticed
_COPIES = 2  # of a stage's file while it is loaded: as it was read, and as ONNX Runtime lays it out
_PIECES = 5  # that the runs of a timing are done in
_MIB = 1 << 20


@dataclass
class Held:
    """An item with what belongs to it: the tensors that came, and those that the stage made."""

    item: Item = field(default_factory=lambda: Item(Op.END))
    came: dict[str, Array] = field(default_factory=dict)
    made: dict[str, Array] = field(default_factory=dict)


class LoadedStage:
    """A loaded stage. `close()` frees it."""

    def __init__(self, engine: OnnxEngine, takes: Boundary, gives: Boundary) -> None:
        """EdgeError where the boundaries are not those of the model; then the engine is closed."""
        self.engine = engine
        self._last: dict[str, Array] = {}  # what was computed last
        self.takes, self.gives = takes, gives
        self.inputs = tuple(value.name for value in engine.inputs)
        came = {tensor.name for tensor in takes.tensors}
        made = {value.name for value in engine.outputs}
        lacking = sorted({*self.inputs} - came) or sorted({t.name for t in gives.tensors} - came - made)
        if lacking:
            engine.close()
            raise EdgeError(f"the stage lacks the tensors {', '.join(lacking)!s:.200}; cut it again")

    def compute(self, item: Item, came: Mapping[str, Array]) -> tuple[Item, dict[str, Array]]:
        """What leaves the stage for what came: the item with the seconds this took, and the tensors by name."""
        self._last = {name: came[name] for name in self.inputs}
        began = time.perf_counter()
        made = self.engine.run(self._last)
        seconds = time.perf_counter() - began
        leaves = {t.name: made[t.name] if t.name in made else came[t.name] for t in self.gives.tensors}
        return replace(item, compute_s=(*item.compute_s, seconds)), leaves

    def time(self, repeats: int) -> BestTime:
        """What the last input takes, by the best piece of so many runs or more; without a last input, of seeded noise.
        Errors as of `warm_up`."""
        feeds = self.warm_up()

        def step() -> None:
            self.engine.run(feeds)

        n = min(_PIECES, max(1, repeats))
        quota = cpu_quota()
        least_s = 0.0 if quota is None or quota >= self.engine.threads else sample_s(self.engine.threads)
        return best_of([TimedTask(step)], least_s, least_steps=-(-repeats // n), samples=n)[0]

    def warm_up(self) -> Mapping[str, Array]:
        """Run once, with the last input or with seeded noise; what it was.

        EngineError where the model does not take noise, for instance where a shape is among its inputs.
        """
        shapes = {tensor.name: tensor.shape for tensor in self.takes.tensors}
        noise = made_up(tuple(replace(one, shape=shapes[one.name]) for one in self.engine.inputs), 1)
        feeds = self._last or next(noise)
        self.engine.run(feeds)
        return feeds

    def close(self) -> None:
        """Free the model."""
        self.engine.close()


def load(
    path: str, takes: Boundary, gives: Boundary, threads: int, provider: str | None = None, limit_bytes: int = 0
) -> tuple[LoadedStage, int]:
    """The stage in the file `path`, and the bytes of memory it takes. provider: None for the best one. limit_bytes: 0
    for none.

    EdgeError where the boundaries are not those of the model, NotEnoughMemory where it takes more than the limit; the
    errors of OnnxEngine.
    """
    before, size = own_rss(), Path(path).stat().st_size
    crossing = sum(tensor.n_bytes for boundary in (takes, gives) for tensor in boundary.tensors)
    _check_limit(_COPIES * size + crossing, limit_bytes)  # at least: before native code reads it
    try:
        engine = OnnxEngine(Path(path), threads, provider, buffers=SETS)
    except ModuleNotFoundError as error:
        raise EngineError(f'{error.name} is not installed there: pip install "edge-runtime[onnx]"') from error
    stage = LoadedStage(engine, takes, gives)
    try:
        if len(engine.files) > 1:  # in a worker's store that would be somebody's slice
            raise EdgeError("a stage has its weights in its own file; this one names another")
        with suppress(EngineError):  # of what is not for noise to be: it shows when it runs
            stage.warm_up()  # buffers are made as it first runs
        need = max(own_rss() - before, size)  # memory that an earlier stage left behind is used again
        _check_limit(need, limit_bytes)
    except BaseException:
        engine.close()
        raise
    return stage, need


def follow(stage: LoadedStage, source: Link, sink: Link) -> None:
    """Compute the items that come from `source` and send them to `sink`, until an END has passed. The first error of
    any thread is raised: those of links and of the engine."""
    free: queue.SimpleQueue[Held | None] = queue.SimpleQueue()
    for _ in range(SETS):
        free.put(Held())
    come: queue.SimpleQueue[Held | Exception] = queue.SimpleQueue()
    go: queue.SimpleQueue[Held | None] = queue.SimpleQueue()
    _thread(lambda: _receive(Receiver(source, stage.takes), free, come), come.put)
    sending = _thread(lambda: _send(sink, stage.gives, go, free), come.put)
    try:
        while True:
            held = come.get()
            if isinstance(held, Exception):
                raise held
            if held.item.op is Op.RUN:
                held.item, held.made = stage.compute(held.item, held.came)
            go.put(held)
            if held.item.op is Op.END:
                break
        sending.join()
        with suppress(queue.Empty):  # what the sender said last
            raise cast(Exception, come.get_nowait())
    finally:
        go.put(None)
        free.put(None)  # or the receiver would wait here, and not end with its link


def _receive(
    receiver: Receiver, free: queue.SimpleQueue[Held | None], come: queue.SimpleQueue[Held | Exception]
) -> None:
    while (held := free.get()) is not None:
        held.item, shapes = receiver.item(IDLE_S)
        if held.item.op is Op.RUN:
            receiver.tensors(held.item, shapes, held.came)
        come.put(held)
        if held.item.op is Op.END:
            return


def _send(
    sink: Link, gives: Boundary, go: queue.SimpleQueue[Held | None], free: queue.SimpleQueue[Held | None]
) -> None:
    while (held := go.get()) is not None:
        send(sink, gives, held.item, held.made)
        if held.item.op is Op.END:
            return
        held.made = {}
        free.put(held)


def _thread(work: Callable[[], None], failed: Callable[[Exception], None]) -> threading.Thread:
    """A running thread that hands over its error."""

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
