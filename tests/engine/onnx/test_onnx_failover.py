"""Test a pipeline that survives the loss of its stages, in one process: no input is lost or answered twice, and the
order is kept.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.errors import Interrupted
from edge.onnx.failover import MOST_IN_A_ROW, FailoverPipeline, Runner, UnansweredInputs
from edge.onnx.model import OnnxSource
from edge.onnx.pipeline import Result
from edge.onnx.samples import SamplesError
from edge.onnx.stage import LoadedStage
from edge.onnx.wire import Item
from tests.support.helpers import until
from tests.support.links import start
from tests.support.onnx_pipelines import RunningPipeline, mixed, mixed_feeds, owned, running, same, whole
from tests.support.thorough import some
from transport.errors import LinkClosed, TransportError

WAIT_S = 60.0  # never reached: only against a hang
CUTS = [(4, 9), (6,), (), (1, 2, 12), (3, 11)]  # of the pipelines that follow one another


@pytest.fixture(scope="module", name="several")
def several_of_everything(tmp_path_factory: pytest.TempPathFactory) -> OnnxSource:
    return owned(mixed(), tmp_path_factory.mktemp("models") / "mixed.onnx")


class Lives:
    """Pipelines of stages in threads: another one whenever one has lost its links."""

    def __init__(self, model: OnnxSource, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._stack = ExitStack()
        self.recovered = 0
        self.here = self._next()
        self.pipeline = FailoverPipeline(self.here.pipeline, self._recovered)

    def lose(self) -> None:
        """Do what the end of a stage's process does."""
        link = self.here.links[len(self.here.links) // 2]
        for end in link:
            end.close()

    def _next(self) -> RunningPipeline:
        return self._stack.enter_context(running(self._model, self._folder, *CUTS[self.recovered % len(CUTS)]))

    def _recovered(self, error: Exception, check: Callable[[], None]) -> Runner:
        check()
        if not isinstance(error, TransportError):
            raise error
        self.recovered += 1
        self._stack.close()
        self.here = self._next()
        return self.here.pipeline

    def __enter__(self) -> Lives:
        return self

    def __exit__(self, *_: object) -> None:
        self.pipeline.stop()
        self._stack.close()


@pytest.mark.parametrize("seed", range(some(5, 100)))
def test_whenever_stages_are_lost(several: OnnxSource, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    n, window = 60, draw.choice([1, 2, 5, 64])
    moments = {0, *(draw.randrange(n) for _ in range(draw.randrange(1, 9)))}
    buffers = mixed_feeds(1, 0)  # whoever makes inputs writes all of them to the same memory

    def feeds() -> Iterator[dict[str, Any]]:
        for i in range(n):
            for name, array in mixed_feeds(1, i).items():
                buffers[name][...] = array
            yield buffers

    with Lives(several, tmp_path) as lives:
        came = 0
        lives.lose()
        for i, result in enumerate(lives.pipeline.map(feeds(), window=window)):
            same(result.outputs, whole(several.file.model, mixed_feeds(1, i)))
            came += 1
            if came in moments:
                lives.lose()
        assert came == n
        assert lives.pipeline.recoveries == lives.recovered
        # Outputs may come that were under way when a link was lost, and the next link is lost meanwhile.
        assert 1 <= lives.recovered <= len(moments)
    until(lambda: not any(thread.name in ("feed", "stage") for thread in threading.enumerate()), "the end of threads")


def test_recoveries_without_an_answer_come_to_an_end(several: OnnxSource, tmp_path: Path) -> None:
    """The limit counts from the last answer on, and an answer is needed in between."""

    class Broken:
        """Answers so many inputs."""

        def __init__(self, answers: int) -> None:
            self.answers = answers

        def map(self, feeds: Any, window: int, wire: str = "f32") -> Iterator[Result]:
            for _ in islice(feeds, self.answers):
                yield Result({}, 0.0, 0.0, ())
            raise LinkClosed(f"after {self.answers}")

        def stop(self) -> None: ...

        def resume(self) -> None: ...

    answers = iter([1, 1, 1, 1, 0, 2, *[0] * MOST_IN_A_ROW, 99])
    pipeline = FailoverPipeline(Broken(0), lambda error, check: Broken(next(answers)))
    came: list[Result] = []
    with pytest.raises(LinkClosed, match="after 0"):
        came.extend(pipeline.map((mixed_feeds() for _ in count()), window=1))
    assert len(came) == 6
    assert next(answers) == 99


def test_an_error_of_whoever_makes_inputs_is_no_loss(several: OnnxSource, tmp_path: Path) -> None:
    """Not even where they are links' own: inputs may come from another pipeline."""

    def failing() -> Iterator[dict[str, Any]]:
        yield from (mixed_feeds(1, seed) for seed in range(3))
        raise LinkClosed("the camera is gone")

    with Lives(several, tmp_path) as lives:
        results = lives.pipeline.map(failing(), window=2)
        for seed in range(3):
            same(next(results).outputs, whole(several.file.model, mixed_feeds(1, seed)))
        with pytest.raises(LinkClosed, match="the camera is gone"):
            next(results)
        with pytest.raises(SamplesError, match="takes values of type float32"):
            lives.pipeline.run(mixed_feeds() | {"x": np.zeros((1, 8))})
        assert lives.recovered == 0
        same(lives.pipeline.run(mixed_feeds()).outputs, whole(several.file.model, mixed_feeds()))


def test_who_makes_inputs_of_outputs_is_not_waited_for(several: OnnxSource, tmp_path: Path) -> None:
    """The next input comes only after an output that the lost stages owe."""
    may_compute, outputs = threading.Event(), threading.Semaphore(0)

    class Late(LoadedStage):
        def __init__(self, stage: LoadedStage) -> None:
            super().__init__(stage.engine, stage.takes, stage.gives)

        def compute(self, item: Item, feeds: Any) -> Any:
            assert may_compute.wait(WAIT_S)
            return super().compute(item, feeds)

    with running(several, tmp_path, 4, 9, wrap=Late) as here, running(several, tmp_path, 4) as other:

        def feeds() -> Iterator[dict[str, Any]]:
            yield mixed_feeds(1, 0)
            for end in here.links[0]:  # the input is on its way
                end.close()
            may_compute.set()
            for seed in range(1, 5):
                assert outputs.acquire(timeout=WAIT_S)
                yield mixed_feeds(1, seed)

        pipeline = FailoverPipeline(here.pipeline, lambda error, check: other.pipeline)
        for seed, result in enumerate(pipeline.map(feeds(), window=4)):
            same(result.outputs, whole(several.file.model, mixed_feeds(1, seed)))
            outputs.release()
        assert (seed, pipeline.recoveries) == (4, 1)


def test_who_ends_early_may_go_on(several: OnnxSource, tmp_path: Path) -> None:
    with Lives(several, tmp_path) as lives:
        for used in (1, 5):
            with closing(lives.pipeline.map((mixed_feeds(1, i) for i in count()), window=4)) as results:  # type: ignore[type-var]
                for i, result in enumerate(islice(results, used)):
                    same(result.outputs, whole(several.file.model, mixed_feeds(1, i)))
            lives.lose()
        same(lives.pipeline.run(mixed_feeds()).outputs, whole(several.file.model, mixed_feeds()))


def test_figures_are_those_of_one_pipeline(several: OnnxSource, tmp_path: Path) -> None:
    with Lives(several, tmp_path) as lives:

        def stages(flow: Any) -> list[int]:
            counts = []
            for i, result in enumerate(flow((mixed_feeds() for _ in range(9)), 3)):
                counts.append(len(result.compute_s))
                if i == 4 and lives.recovered < 2:
                    lives.lose()
            return counts

        assert lives.pipeline.measured(stages) == [len(CUTS[2]) + 1] * 9


@pytest.mark.parametrize("how", ["stop", "interrupt"])
def test_a_recovery_can_be_ended(several: OnnxSource, tmp_path: Path, how: str) -> None:
    begun = threading.Event()

    def slow(error: Exception, check: Callable[[], None]) -> Runner:
        if how == "interrupt":
            raise KeyboardInterrupt
        begun.set()
        until(lambda: bool(check()), "stop")
        raise AssertionError

    with running(several, tmp_path, 4, 9) as here:
        pipeline = FailoverPipeline(here.pipeline, slow)
        here.links[1][0].close()
        if how == "interrupt":
            with pytest.raises(KeyboardInterrupt):
                pipeline.run(mixed_feeds())
            return
        done = start(pipeline.run, mixed_feeds())
        assert begun.wait(WAIT_S)
        pipeline.stop()
        with pytest.raises(Interrupted):
            done.result(WAIT_S)
        with pytest.raises(Interrupted):
            pipeline.run(mixed_feeds())


class Echo:
    """A runner on one device that returns its inputs. It is lost after `lives` inputs."""

    def __init__(self, lives: int) -> None:
        self.lives, self.is_stopped = lives, False

    def map(self, feeds: Iterable[Any], window: int, wire: str = "f32") -> Iterator[Any]:
        for feed in feeds:
            if self.is_stopped:
                raise Interrupted("stopped")
            if not self.lives:
                raise LinkClosed("lost")
            self.lives -= 1
            yield feed

    def stop(self) -> None:
        self.is_stopped = True

    def resume(self) -> None:
        self.is_stopped = False


@pytest.mark.parametrize("n_stops", [1, 2])
def test_runs_after_resume_are_answered_and_recovered_after_a_loss(n_stops: int) -> None:
    def recovered(error: Exception, check: Callable[[], None]) -> Runner:
        if not isinstance(error, LinkClosed):
            raise error
        check()
        return Echo(3)

    pipeline = FailoverPipeline(Echo(3), recovered)
    for _ in range(n_stops):
        pipeline.stop()
        with pytest.raises(Interrupted):
            next(pipeline.map([{}], window=1))
        pipeline.resume()
        assert len(list(pipeline.map([{}] * 4, window=1))) == 4
    assert pipeline.recoveries == n_stops


def test_what_could_not_go_on_is_tried_again_when_it_is_used_again(several: OnnxSource, tmp_path: Path) -> None:
    with running(several, tmp_path, 4) as here, running(several, tmp_path) as other:
        others: list[Any] = [OSError("no device"), other.pipeline]

        def recovered(error: Exception, check: Callable[[], None]) -> Runner:
            assert isinstance(error, TransportError)
            result = others.pop(0)
            if isinstance(result, Exception):
                raise result
            runner: Runner = result
            return runner

        pipeline = FailoverPipeline(here.pipeline, recovered)
        here.links[1][0].close()
        with pytest.raises(OSError, match="no device"):
            pipeline.run(mixed_feeds())
        same(pipeline.run(mixed_feeds()).outputs, whole(several.file.model, mixed_feeds()))


def test_kept_inputs_are_those_in_flight(several: OnnxSource) -> None:
    inputs = UnansweredInputs(mixed_feeds(1, seed) for seed in range(5))
    first = inputs.unanswered()
    used = [next(first) for _ in range(3)]
    inputs.drop_oldest()
    again = inputs.unanswered()
    for feeds in used[1:]:
        assert all(next_ is array for next_, array in zip(next(again).values(), feeds.values(), strict=True))
    assert len(list(again)) == 2
    for _ in range(4):
        inputs.drop_oldest()
    assert not inputs._inputs_by_number
