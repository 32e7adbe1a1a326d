"""ONNX pipelines inside one process: the same outputs as the whole model, in order, at most a window of them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.errors import EngineError, Interrupted
from edge.onnx import pipeline
from edge.onnx.model import OnnxSource
from edge.onnx.pipeline import MOST_WINDOW, Pipeline, PipelineEnds, Result
from edge.onnx.samples import Array, SamplesError
from edge.onnx.stage import LoadedStage
from edge.onnx.wire import Boundary, Item, Op, Receiver, send
from tests.support import memory_link
from tests.support.helpers import until
from tests.support.links import frame, start
from tests.support.onnx_pipelines import (
    QUICK,
    Feeds,
    RunningPipeline,
    images,
    mixed,
    mixed_feeds,
    owned,
    residual,
    running,
    same,
    whole,
)
from transport.errors import LinkClosed, ProtocolError, Refused, TransportError
from transport.frame import Kind

WAIT_S = 60.0  # never reached: only against a hang
N_MIXED, N_RESIDUAL = 14, 12  # nodes
FLOATS = ("y", "early", "peak")  # outputs of `mixed` that are float32


@pytest.fixture(scope="module", name="folder")
def one_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipelines")


@pytest.fixture(scope="module", name="several")
def several_of_everything(folder: Path) -> OnnxSource:
    return owned(mixed(), folder / "mixed.onnx")


@pytest.fixture(scope="module", name="skips")
def skip_connections(folder: Path) -> OnnxSource:
    return owned(residual(), folder / "residual.onnx")


@pytest.fixture
def three(several: OnnxSource, folder: Path) -> Iterator[RunningPipeline]:
    """`mixed` in three stages, none of which is the owner's."""
    with running(several, folder, 4, 9) as here:
        yield here


class Held(LoadedStage):
    """A stage that computes when it may."""

    may: threading.Semaphore

    def __init__(self, stage: LoadedStage) -> None:
        super().__init__(stage.engine, stage.takes, stage.gives)
        self.may = threading.Semaphore(0)

    def compute(self, item: Item, came: Mapping[str, Array]) -> tuple[Item, dict[str, Array]]:
        assert self.may.acquire(timeout=WAIT_S)
        return super().compute(item, came)


# ---------------------------------------------------------------------------------------------------- the same outputs


@pytest.mark.parametrize("own", [False, True], ids=["workers", "own"])
def test_every_cut_gives_what_the_whole_gives(several: OnnxSource, skips: OnnxSource, folder: Path, own: bool) -> None:
    rng = random.Random(0)
    for model, n, make in ((several, N_MIXED, mixed_feeds), (skips, N_RESIDUAL, images)):
        assert len(model.graph.nodes) == n
        batches = [make(batch, seed) for seed, batch in enumerate((1, 3, 2))]
        expected = [whole(model.file.model, feeds) for feeds in batches]
        assert not np.array_equal(expected[0]["y"], whole(model.file.model, make(1, 9))["y"])
        several_cuts = [tuple(sorted(rng.sample(range(1, n), k))) for k in (2, 3, n - 1)]
        for positions in [*((at,) for at in range(1, n)), *several_cuts, *(() if own else [()])]:
            with running(model, folder, *positions, own=own) as here:
                for result, outputs in zip(here.pipeline.map(batches, window=2), expected, strict=True):
                    same(result.outputs, outputs)
                    assert len(result.compute_s) == len(positions) + 1
                    assert 0 < sum(result.compute_s) < result.seconds


@pytest.mark.parametrize("wire", ["f16", "q8"])
def test_what_the_wire_changes(several: OnnxSource, folder: Path, wire: str) -> None:
    feeds = mixed_feeds(8, 4)
    expected = whole(several.file.model, feeds)
    bound = {"f16": 2e-3, "q8": 3e-2}[wire]
    with running(several, folder, 3, 13) as here:
        plain, result = (here.pipeline.run(feeds, how).outputs for how in ("f32", wire))
        assert list(result) == list(expected)
        for name, array in expected.items():
            if name in FLOATS:
                off = np.abs(result[name] - array).max() / np.abs(array).max()
                assert 0 < off < bound, name
        for name in ("half", "top"):  # what is no float32 crosses as it is
            assert result[name].tobytes() == plain[name].tobytes()
        same(here.pipeline.run(feeds).outputs, expected)  # the wire is the item's
    with running(several, folder) as here:  # to the first stage and from the last all goes as it is
        same(here.pipeline.run(feeds, wire).outputs, expected)


def test_inputs_may_lie_anyhow(three: RunningPipeline, several: OnnxSource) -> None:
    feeds = mixed_feeds(3)
    expected = whole(several.file.model, feeds)
    turned = {name: np.array(array, order="F") for name, array in feeds.items()}
    spread = {name: np.repeat(array, 2, axis=0)[::2] if array.ndim else array for name, array in feeds.items()}
    for item in (turned, spread):
        for array in item.values():
            array.setflags(write=False)
        same(three.pipeline.run(item).outputs, expected)


def test_outputs_are_the_callers_to_keep(three: RunningPipeline, several: OnnxSource) -> None:
    saved = [three.pipeline.run(mixed_feeds(1, seed)).outputs for seed in range(6)]
    for seed, outputs in enumerate(saved):
        same(outputs, whole(several.file.model, mixed_feeds(1, seed)))
        assert all(array.flags.writeable for array in outputs.values())


def test_not_a_number_is_an_output_like_any_other(three: RunningPipeline, several: OnnxSource) -> None:
    feeds = mixed_feeds(2)
    feeds["x"][0] = np.nan
    assert np.isnan(three.pipeline.run(feeds).outputs["y"]).any()
    same(three.pipeline.run(mixed_feeds()).outputs, whole(several.file.model, mixed_feeds()))


# ---------------------------------------------------------------------------------------------------- order and window


@pytest.mark.parametrize("own", [False, True], ids=["workers", "own"])
@pytest.mark.parametrize("window", [1, 2, 3, 7, MOST_WINDOW])
def test_results_come_in_order(several: OnnxSource, folder: Path, window: int, own: bool) -> None:
    with running(several, folder, 4, 9, own=own) as here:
        provided = [mixed_feeds(1 + seed % 2, seed) for seed in range(2 * window % 49 + 9)]
        results = list(here.pipeline.map(iter(provided), window=window))
        assert len(results) == len(provided)
        for feeds, result in zip(provided, results, strict=True):
            same(result.outputs, whole(several.file.model, feeds))
        assert all(a.ended < b.ended and a.began < b.began for a, b in pairwise(results))
        assert list(here.pipeline.map([], window=window)) == []


@pytest.mark.parametrize("window", [1, 2, 5])
def test_no_more_are_in_flight_than_the_window(several: OnnxSource, folder: Path, window: int) -> None:
    stages: list[Held] = []

    def wrap(stage: LoadedStage) -> LoadedStage:
        stages.append(Held(stage))
        return stages[-1]

    used = 0

    def feed() -> Iterator[Feeds]:
        nonlocal used
        for seed in count():
            used += 1
            yield mixed_feeds(1, seed)

    with running(several, folder, wrap=wrap) as here:
        entry = here.links[0][0]
        frames = 1 + len(here.parts[0].takes.tensors)
        with closing(here.pipeline.map(feed(), window=window)) as results:
            first = start(next, results)
            for landed in range(6):
                # The next input is there, and not handed over.
                until(lambda: used == window + landed + 1, "an input that waits")  # noqa: B023
                assert entry._sent == (window + landed) * frames
                stages[0].may.release()
                same(
                    (first.result(WAIT_S) if not landed else next(results)).outputs,
                    whole(several.file.model, mixed_feeds(1, landed)),
                )
            for _ in range(window + 1):
                stages[0].may.release()


@pytest.mark.parametrize("window", [0, -1, MOST_WINDOW + 1])
def test_windows_that_cannot_be(three: RunningPipeline, window: int) -> None:
    with pytest.raises(ValueError, match=f"a window of {window}; expected 1 to 64"):
        list(three.pipeline.map([mixed_feeds()], window=window))


@pytest.mark.parametrize("own", [False, True], ids=["workers", "own"])
@pytest.mark.parametrize("outputs_read", [1, 3])
def test_whoever_ends_early_may_go_on(several: OnnxSource, folder: Path, outputs_read: int, own: bool) -> None:
    with running(several, folder, 4, 9, own=own) as here:
        for again in range(3):
            endless = (mixed_feeds(1, seed) for seed in count())
            with closing(here.pipeline.map(endless, window=6)) as results:
                for seed, result in enumerate(islice(results, outputs_read)):
                    same(result.outputs, whole(several.file.model, mixed_feeds(1, seed)))
            same(here.pipeline.run(mixed_feeds(2, again)).outputs, whole(several.file.model, mixed_feeds(2, again)))
            assert here.links[0][0]._sent == here.links[0][1]._received.sequence  # nothing is left on the way
        assert not any(thread.name == "feed" for thread in threading.enumerate())


# ------------------------------------------------------------------------------------------------------- wrong inputs


def _edited(**changed: Any) -> Feeds:
    """Inputs, some of which are other ones; None: it is not there."""
    return {name: array for name, array in (mixed_feeds(2) | changed).items() if array is not None}


WRONG = [
    ({}, "takes 'x', 'ids', 'keep', 'scale'; nothing given"),
    (_edited(x=None), "takes 'x', 'ids', 'keep', 'scale'; 'ids', 'keep', 'scale' given"),
    (_edited(more=np.zeros(1)), "'more' given"),
    (_edited(x=np.zeros((2, 8))), "input 'x' takes values of type float32, got float64"),
    (_edited(x=np.zeros((2, 8), ">f4")), "input 'x' takes values of type float32, got >f4"),
    (_edited(x=[[0.0] * 8] * 2), "input 'x' takes values of type float32, got list"),
    (_edited(x=np.zeros((2, 9), np.float32)), "input 'x' takes the shape (batch, 8), got (2, 9)"),
    (_edited(x=np.zeros(8, np.float32)), "input 'x' takes the shape (batch, 8), got (8)"),
    (_edited(scale=np.zeros(1, np.float32)), "input 'scale' takes the shape (), got (1)"),
    (_edited(ids=np.zeros((1, 3), np.int64)), "the dimension 'batch' is one number for all inputs; it is 2 in 'x' and"),
    (_edited(keep=np.ones((2, 1), np.uint8)), "input 'keep' takes values of type bool, got uint8"),
]


def test_wrong_inputs_are_told_and_do_no_harm(three: RunningPipeline, several: OnnxSource) -> None:
    expected = whole(several.file.model, mixed_feeds())
    for feeds, words in WRONG:
        with pytest.raises(SamplesError) as raised:
            three.pipeline.run(feeds)
        assert words in str(raised.value)
        came: list[object] = []
        with pytest.raises(SamplesError):
            came.extend(three.pipeline.map([mixed_feeds(), mixed_feeds(), feeds], 3))
        assert len(came) == 2  # those before it
        same(three.pipeline.run(mixed_feeds()).outputs, expected)


@pytest.mark.parametrize("window", [1, 4])
def test_whoever_makes_inputs_may_fail(three: RunningPipeline, several: OnnxSource, window: int) -> None:
    def failing() -> Iterator[Feeds]:
        yield mixed_feeds()
        yield mixed_feeds()
        raise RuntimeError("the camera is gone")

    came: list[Result] = []
    with pytest.raises(RuntimeError, match="the camera is gone"):
        came.extend(three.pipeline.map(failing(), window=window))
    assert len(came) == 2
    same(three.pipeline.run(mixed_feeds()).outputs, whole(several.file.model, mixed_feeds()))


def test_a_stage_of_the_owners_that_fails_does_no_harm(several: OnnxSource, folder: Path) -> None:
    with running(several, folder, 5, own=True) as here:
        for _ in range(2):
            with pytest.raises(EngineError, match="gather"):
                here.pipeline.run(mixed_feeds() | {"ids": np.array([[0, 99, 0]])})
            same(here.pipeline.run(mixed_feeds()).outputs, whole(several.file.model, mixed_feeds()))


# -------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("window", [1, 8])
def test_an_operator_that_fails_ends_it_and_is_named(three: RunningPipeline, window: int) -> None:
    bad = mixed_feeds() | {"ids": np.array([[0, 99, 0]])}
    with pytest.raises(Refused, match="gather"):
        list(three.pipeline.map([mixed_feeds(), *[bad] * 3, *[mixed_feeds()] * 20], window=window))
    with pytest.raises(LinkClosed):
        three.pipeline.run(mixed_feeds())
    for done in three.done:
        assert isinstance(done.exception(WAIT_S), (EngineError, TransportError))


@pytest.mark.parametrize("own", [False, True], ids=["workers", "own"])
def test_it_can_be_stopped_from_another_thread(several: OnnxSource, folder: Path, own: bool) -> None:
    with running(several, folder, 4, 9, own=own) as here:
        came = 0

        def run() -> None:
            nonlocal came
            for _ in here.pipeline.map((mixed_feeds(1, seed) for seed in count()), window=4):
                came += 1

        running_ = start(run)
        until(lambda: came > 5, "some results")
        here.pipeline.stop()
        assert isinstance(running_.exception(WAIT_S), Interrupted)
        for _ in range(2):
            with pytest.raises(Interrupted):
                here.pipeline.run(mixed_feeds())


def test_the_end_reaches_all_stages(three: RunningPipeline) -> None:
    list(three.pipeline.map([mixed_feeds()] * 4, window=4))
    three.pipeline.end()
    for done in three.done:
        assert done.result(WAIT_S) is None


class Liar:
    """Stand-in that answers in the place of the workers."""

    def __init__(self, model: OnnxSource) -> None:
        [part] = model.parts(model.plan(["w"], []))
        ours, self.link = memory_link.pair(("owner", "rank 1"), QUICK)
        self.takes, self.gives = part.takes, part.gives
        self.pipeline = Pipeline(PipelineEnds(model.inputs, part.takes, ours, part.gives, ours))

    def raw(self, data: bytes) -> None:
        """Send any bytes."""
        self.link._write(b"", memoryview(data), WAIT_S)

    def answer(self, boundary: Boundary | None = None, number: int = 0, op: Op = Op.RUN, **changed: Array) -> None:
        """Send an item."""
        feeds = {t.name: np.zeros(t.shape, t.type) for t in self.gives.tensors} | changed
        send(self.link, boundary or self.gives, Item(op, number, compute_s=(0.1,)), feeds)


@pytest.mark.parametrize(
    ("lie", "expected", "words"),
    [
        (lambda liar: liar.answer(number=1), ProtocolError, "rank 1 sent item 1 where item 0 was expected"),
        (lambda liar: liar.answer(op=Op.END), ProtocolError, "rank 1 sent the end where item 0 was expected"),
        (lambda liar: liar.answer(y=np.zeros((1, 6), np.float32)), ProtocolError, "sent 'y' of shape [1, 6]"),
        (lambda liar: liar.answer(y=np.zeros((1, 5), np.float64)), ProtocolError, "40 bytes of DATA where at most 20"),
        (lambda liar: liar.raw(b"EDGE"), ProtocolError, "cut off inside its header"),
        (lambda liar: liar.raw(b"HTTP/1.1 200 OK\r\n"), ProtocolError, "not our protocol"),
        (lambda liar: liar.raw(frame(b"?", Kind.CONTROL)), ProtocolError, "but sent 1 of CONTROL"),
        (lambda liar: liar.raw(frame(bytes(9))), ProtocolError, "but sent 9 of DATA"),
        (lambda liar: liar.raw(frame(bytes(99999), Kind.CONTROL)), ProtocolError, "99999 bytes of CONTROL where at"),
        (lambda liar: liar.raw(frame(b"my node\nfailed", Kind.ERROR)), Refused, "rank 1: my node failed"),
        (lambda liar: liar.link.close("bye"), LinkClosed, "rank 1 closed the link: bye"),
        (lambda liar: liar.link._end(), LinkClosed, "rank 1 went away"),
    ],
)
def test_answers_that_are_none(
    several: OnnxSource, lie: Callable[[Liar], None], expected: type[TransportError], words: str
) -> None:
    liar = Liar(several)
    result = start(liar.pipeline.run, mixed_feeds())
    receiver = Receiver(liar.link, liar.takes)
    item, shapes = receiver.item(WAIT_S)
    receiver.tensors(item, shapes, {})
    lie(liar)
    error = result.exception(WAIT_S)
    assert type(error) is expected
    assert words in str(error)
    assert "\n" not in str(error)
    with pytest.raises(LinkClosed):
        liar.pipeline.run(mixed_feeds())


def test_an_answer_that_does_not_come(several: OnnxSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "ANSWER_TIMEOUT_S", 0.05)
    liar = Liar(several)
    with pytest.raises(TransportError, match=r"rank 1 sent nothing for 0.05 s"):
        liar.pipeline.run(mixed_feeds())


def test_errors_are_explained(several: OnnxSource) -> None:
    class OwnError(Exception):
        pass

    liar = Liar(several)
    liar.pipeline._explained = lambda error: OwnError(f"because: {error}")
    liar.link.close()
    with pytest.raises(OwnError, match=r"because: .*rank 1"):
        liar.pipeline.run(mixed_feeds())
