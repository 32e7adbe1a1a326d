"""Test one stage of an ONNX model over memory links: its inputs, its memory, and its errors."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from edge.errors import EdgeError, EngineError, NotEnoughMemory
from edge.onnx import stage as onnx_stage
from edge.onnx.model import CutStage
from edge.onnx.samples import Array
from edge.onnx.stage import SETS, LoadedStage, follow, load
from edge.onnx.wire import Boundary, Item, Op, Receiver, Tensor, send
from edge.worker import load_stage
from edge.worker.limits import ResourceLimits
from edge.worker.messages import stage_message
from partition.plan.onnx_plan import OnnxPlan, OnnxStage
from partition.plan.plan import Range
from tests.support import memory_link
from tests.support.helpers import until
from tests.support.links import frame, start
from tests.support.onnx_pipelines import QUICK, Feeds, at, loaded, mixed, mixed_feeds, owned, same, whole
from transport import edge_pb2 as pb
from transport.errors import LinkClosed, ProtocolError, Refused, TransportError
from transport.frame import Kind
from transport.link import Link

WAIT_S = 60.0  # never reached: only against a hang
FULL_MODEL = 14  # nodes of `mixed`


@pytest.fixture(scope="module", name="cut")
def cut_in_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[OnnxPlan, list[CutStage], Path]:
    """`mixed`, cut where tensors of all its types cross; a plan, the parts and a folder."""
    folder = tmp_path_factory.mktemp("stages")
    model = owned(mixed(), folder / "mixed.onnx")
    plan = model.plan(["a", "b"], at(model, 4))
    return plan, model.parts(plan), folder


@pytest.fixture(params=[0, 1])
def stage(request: pytest.FixtureRequest, cut: tuple[OnnxPlan, list[CutStage], Path]) -> Iterator[LoadedStage]:
    plan, parts, folder = cut
    item = loaded(parts[request.param], plan, request.param, folder)
    yield item
    item.close()


@pytest.fixture
def first(cut: tuple[OnnxPlan, list[CutStage], Path]) -> Iterator[LoadedStage]:
    plan, parts, folder = cut
    item = loaded(parts[0], plan, 0, folder)
    yield item
    item.close()


class Held(LoadedStage):
    """A stage that computes when it may."""

    def __init__(self, stage: LoadedStage) -> None:
        super().__init__(stage.engine, stage.takes, stage.gives)
        self.may = threading.Semaphore(0)
        self.computed = 0

    def compute(self, item: Item, came: Mapping[str, Array]) -> tuple[Item, dict[str, Array]]:
        assert self.may.acquire(timeout=WAIT_S)
        self.computed += 1
        return super().compute(item, came)


class Around:
    """Sender before a stage and receiver behind it."""

    def __init__(self, stage: LoadedStage, links: list[Link], done: Future[None]) -> None:
        self.stage, self.done = stage, done
        self.before, self.source, self.sink, self.behind = links
        self._receiver = Receiver(self.behind, stage.gives)

    def give(self, feeds: Mapping[str, Array], number: int = 0, op: Op = Op.RUN) -> None:
        send(self.before, self.stage.takes, Item(op, number), feeds)

    def take(self) -> tuple[Item, Feeds]:
        current: Feeds = {}
        item, shapes = self._receiver.item(WAIT_S)
        self._receiver.tensors(item, shapes, current) if item.op is Op.RUN else None
        return item, current


@contextmanager
def around(stage: LoadedStage) -> Iterator[Around]:
    """A stage that follows, in a thread, and its surroundings."""
    before, source = memory_link.pair(("before", "stage"), QUICK)
    sink, behind = memory_link.pair(("stage", "behind"), QUICK)
    with before, source, sink, behind:
        yield Around(stage, [before, source, sink, behind], start(follow, stage, source, sink))


def gives(stage: LoadedStage, feeds: Feeds) -> Feeds:
    """Return the tensors that leave the stage, by their parts in the whole model."""
    return {name: array.copy() for name, array in stage.compute(Item(Op.RUN), feeds)[1].items()}


# ------------------------------------------------------------------------------------------------------------ loading


def test_what_is_loaded(stage: LoadedStage) -> None:
    assert stage.time(1).seconds > 0
    assert stage.engine.threads == 1
    crossing = {(t.type, t.shape) for t in (stage.takes if stage.takes.inner else stage.gives).tensors}
    assert {("float32", (1, 8)), ("float16", (1, 8)), ("bool", (1, 1)), ("float32", ())} <= crossing


def test_threads_are_the_plans_up_to_the_workers(cut: tuple[OnnxPlan, list[CutStage], Path]) -> None:
    _, parts, folder = cut
    path = folder / parts[0].digest
    path.write_bytes(parts[0].content)
    stage = stage_message(OnnxStage("b", Range(0, 1)), parts[0].takes, parts[0].gives)
    for request, borrowed, expected in ((None, 2, 2), (1, 2, 1), (5, 2, 2), (0, 2, 2), (-3, 2, 1)):
        if request is not None:
            stage.threads = request
        item = load_stage.load(pb.Load(path=str(path), stage=stage), 1, ResourceLimits(borrowed), lambda _: None)
        assert item.stage.engine.threads == item.describe().threads == expected
        item.close()


def test_a_stage_without_a_description(cut: tuple[OnnxPlan, list[CutStage], Path]) -> None:
    _, parts, folder = cut
    path = folder / parts[0].digest
    path.write_bytes(parts[0].content)
    with pytest.raises(EdgeError, match=r"the stage lacks the tensors .*; cut it again"):
        load_stage.load(pb.Load(path=str(path), stage=pb.Stage()), 1, ResourceLimits(1), lambda _: None)


def test_boundaries_that_are_not_the_models(first: LoadedStage) -> None:
    x, other = first.takes.tensors[0], Tensor("else", "float32", (1,))
    with pytest.raises(EdgeError, match="the stage lacks the tensors else; cut it again"):
        LoadedStage(first.engine, first.takes, Boundary((*first.gives.tensors, other), True))
    without = Boundary(tuple(tensor for tensor in first.takes.tensors if tensor is not x), False)
    with pytest.raises(EdgeError, match=f"the stage lacks the tensors {x.name}; cut it again"):
        LoadedStage(first.engine, without, first.gives)


def test_a_limit_is_kept(cut: tuple[OnnxPlan, list[CutStage], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _, parts, folder = cut
    path = folder / parts[0].digest
    path.write_bytes(parts[0].content)
    boundaries = parts[0].takes, parts[0].gives
    said = r"the stage needs [\d,]+ MiB or more, this worker has [\d,]+ MiB left of its limit; give it fewer nodes"
    with monkeypatch.context() as patch:  # known by the file already: native code never sees it
        patch.setattr(onnx_stage, "OnnxEngine", None)
        with pytest.raises(NotEnoughMemory, match=said):
            load(str(path), *boundaries, 1, limit_bytes=len(parts[0].content) - 1)
    with pytest.raises(
        NotEnoughMemory, match=r"the stage needs [\d,]+ MiB more than this worker has left of its limit"
    ):
        load(str(path), *boundaries, 1, budget=1)
    sizes = iter((0, 10 << 20))
    monkeypatch.setattr(onnx_stage, "own_rss", lambda: next(sizes))
    with pytest.raises(NotEnoughMemory, match="the stage needs 10 MiB or more, this worker has 9 MiB left"):
        load(str(path), *boundaries, 1, limit_bytes=9 << 20)


# ------------------------------------------------------------------------------------------------------------ running


def test_what_leaves_a_stage(first: LoadedStage) -> None:
    feeds = mixed_feeds()
    item, leaves = first.compute(Item(Op.RUN, 7, "q8", (1.0,)), feeds)
    assert (item.number, item.wire, item.compute_s[0]) == (7, "q8", 1.0)
    assert len(item.compute_s) == 2
    assert item.compute_s[1] > 0
    assert list(leaves) == [tensor.name for tensor in first.gives.tensors]
    assert all(leaves[name] is feeds[name] for name in ("x", "keep", "scale"))  # passed on as they are


def test_items_go_through_in_order(first: LoadedStage) -> None:
    with around(first) as here:
        n = 4 * SETS
        provided = [mixed_feeds(1 + seed % 3, seed) for seed in range(n)]

        def giving() -> None:
            for number, feeds in enumerate(provided):
                here.give(feeds, number)
            here.give({}, op=Op.END)

        giving_ = start(giving)
        used = [here.take() for _ in range(n + 1)]
        giving_.result(WAIT_S)
        here.done.result(WAIT_S)
        assert [item.number for item, _ in used[:n]] == list(range(n))
        assert used[n] == (Item(Op.END), {})
        for feeds, (_, came) in zip(provided, used[:n], strict=True):
            same(came, gives(first, feeds))


def test_what_a_stage_holds_is_bounded(first: LoadedStage) -> None:
    """Whoever is before a slow stage waits: it takes no more than its sets of buffers hold."""
    stage = Held(first)
    with around(stage) as here:
        frames = 1 + len(stage.takes.tensors)
        for number in range(2 * SETS):
            here.give(mixed_feeds(), number)
        for done in range(SETS):
            until(lambda: here.source._received.sequence == (SETS + done) * frames, "the sets are in use")  # noqa: B023
            assert stage.computed == done
            stage.may.release()
            assert here.take()[0].number == done
        until(lambda: here.source._received.sequence == 2 * SETS * frames, "the rest came")
        for _ in range(SETS):
            stage.may.release()


def test_a_receiver_that_is_slow_holds_the_stage_back(first: LoadedStage) -> None:
    """Results that nobody receives keep their buffers: so many items are computed, and no more."""
    stage = Held(first)
    used: queue.SimpleQueue[None] = queue.SimpleQueue()

    class Narrow(memory_link.MemoryLink):
        """A link whose peer takes an item when the test says so."""

        def _write(self, header: bytes, payload: memoryview, timeout_s: float) -> None:
            if header[5] == Kind.CONTROL:
                used.get(timeout=WAIT_S)
            super()._write(header, payload, timeout_s)

    before, source = memory_link.pair(deadlines=QUICK)
    sink, behind = memory_link.pair(deadlines=QUICK)
    narrow = Narrow(sink.peer, sink._incoming, sink._outgoing, QUICK)
    with before, source, behind, narrow:
        for _ in range(4 * SETS):
            stage.may.release()
        following = start(follow, stage, source, narrow)
        for number in range(2 * SETS):
            send(before, stage.takes, Item(Op.RUN, number), mixed_feeds())
        send(before, stage.takes, Item(Op.END), {})
        receiver = Receiver(behind, stage.gives)
        for done in range(2 * SETS):
            until(lambda: stage.computed == min(SETS + done, 2 * SETS), "all that it may")  # noqa: B023
            used.put(None)
            item, shapes = receiver.item(WAIT_S)
            receiver.tensors(item, shapes, {})
            assert item.number == done
        used.put(None)
        assert receiver.item(WAIT_S)[0].op is Op.END
        following.result(WAIT_S)


def test_not_a_number_goes_through(first: LoadedStage) -> None:
    feeds = mixed_feeds()
    feeds["x"][:] = np.nan
    with around(first) as here:
        here.give(feeds)
        item, came = here.take()
        assert item.op is Op.RUN
        assert np.isnan(came["x"]).all()
        here.give(mixed_feeds(seed=1), 1)
        same(here.take()[1], gives(first, mixed_feeds(seed=1)))


# ------------------------------------------------------------------------------------------------------------- faults


def test_an_operator_that_fails_names_its_node(first: LoadedStage) -> None:
    with around(first) as here:
        here.give(mixed_feeds() | {"ids": np.array([[0, 99, 0]])})
        error = here.done.exception(WAIT_S)
        assert isinstance(error, EngineError)
        assert "gather" in str(error)
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("raw", "expected", "words"),
    [
        (frame(b"\x01\0\0\0", Kind.CONTROL), ProtocolError, "but sent 4 of CONTROL"),
        (frame(b"hello"), ProtocolError, "but sent 5 of DATA"),
        (frame(bytes(2000), Kind.CONTROL), ProtocolError, "2000 bytes of CONTROL where at most"),
        (frame(bytes(8), Kind.CONTROL)[:-3], ProtocolError, "announced 8 bytes, got 5"),
        (b"EDGE", ProtocolError, "cut off inside its header"),
        (b"GET / HTTP/1.1\r\n\r\n", ProtocolError, "not our protocol"),
        (frame(bytes(8), Kind.CONTROL, 5), ProtocolError, "expected frame 0, got frame 5"),
        (frame(b"I must go", Kind.ERROR), Refused, "before: I must go"),
        (frame(b"", Kind.CLOSE), LinkClosed, "before closed the link"),
    ],
)
def test_frames_that_are_no_items(first: LoadedStage, raw: bytes, expected: type[TransportError], words: str) -> None:
    with around(first) as here:
        here.before._write(b"", memoryview(raw), WAIT_S)  # type: ignore[attr-defined]
        error = here.done.exception(WAIT_S)
        assert type(error) is expected
        assert words in str(error)


def test_a_link_that_ends_ends_the_stage(first: LoadedStage) -> None:
    for name in ("before", "source", "sink", "behind"):
        with around(first) as here:
            here.give(mixed_feeds())
            here.take()
            getattr(here, name).close()
            if name in ("sink", "behind"):
                here.give(mixed_feeds(), 1)  # it is found out where something is sent there
            assert isinstance(here.done.exception(WAIT_S), LinkClosed)


def test_threads_of_a_stage_end_with_it(first: LoadedStage) -> None:
    def threads() -> int:
        return sum(thread.name == "stage" for thread in threading.enumerate())

    until(lambda: not threads(), "the end of earlier tests' threads")
    with around(first) as here:
        here.give({}, op=Op.END)
        here.done.result(WAIT_S)
        until(lambda: not threads(), "the end of the threads")
    with around(first) as here:  # also where items wait for it
        here.give(mixed_feeds() | {"ids": np.array([[0, 99, 0]])})
        for number in range(SETS):
            here.give(mixed_feeds(), number)
        here.done.exception(WAIT_S)
    until(lambda: not threads(), "the end of the threads")


def test_the_whole_as_one_stage(cut: tuple[OnnxPlan, list[CutStage], Path]) -> None:
    _, _, folder = cut
    model = owned(mixed(), folder / "whole.onnx")
    plan = model.plan(["a"], [])
    assert plan.n_nodes == FULL_MODEL
    [part] = model.parts(plan)
    item = loaded(part, plan, 0, folder)
    feeds = mixed_feeds(4, 2)
    same(item.compute(Item(Op.RUN), feeds)[1], whole(mixed(), feeds))
    item.close()
