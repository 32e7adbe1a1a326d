"""Pipelines whose devices are lost while inputs flow: every input is answered, once, in order, by those that remain."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import edge
from edge.cluster.failures import is_loss, loss_reason
from edge.cluster.fleet import Fleet
from edge.cluster.llm_ranks import DEFAULT_EXCHANGE
from edge.cluster.session import RemoteSession
from edge.deployment.deployed_network import DeployedNetwork
from edge.deployment.networks import NetworkReplanner, deploy_network
from edge.deployment.supervisor import MOST_TRIES
from edge.errors import Interrupted, NotEnoughMemory, WorkerError
from edge.onnx.bench import Flow, FlowSpeed, measure
from edge.onnx.model import OnnxSource
from edge.onnx.pipeline import Result
from edge.onnx.samples import Array
from edge.planning.choice import PlanChoice
from edge.tasks import ShowStep, Steps
from partition.plan.onnx_plan import OnnxPlan
from partition.plan.plan import LOCAL
from quant.text import counted
from tests.support.commands import main
from tests.support.deployments import ONE_THREAD, shared_workers, waiting
from tests.support.helpers import until
from tests.support.onnx_files import saved
from tests.support.onnx_pipelines import at, images, mixed, mixed_feeds, owned, residual, same, whole
from tests.support.thorough import some
from tests.support.workers import Worker, running, worker
from transport.errors import LinkClosed, LinkTimeout, Refused

pytestmark = pytest.mark.usefixtures("measured_briefly")

N_INPUTS = 200
BAD_IDS = np.array([[0, 99, 0]])  # a row that the table of `mixed` does not have


@pytest.fixture(scope="module", name="three")
def three_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    """Workers whose daemons live on."""
    with shared_workers(tmp_path_factory, "one", "two", "three") as three:
        yield three


@pytest.fixture(scope="module", name="several")
def several_of_everything(tmp_path_factory: pytest.TempPathFactory) -> OnnxSource:
    return owned(mixed(), tmp_path_factory.mktemp("models") / "mixed.onnx")


class Lines(Steps):
    """Messages to a person. at: called when a step begins."""

    def __init__(self, at: Callable[[str], None] = lambda label: None) -> None:
        self.said: list[str] = []
        self._at = at

    @contextmanager
    def step(self, label: str, total: float | None = None, unit: str = "bytes") -> Iterator[ShowStep]:
        self._at(label)
        with super().step(label, total, unit) as show:
            yield show

    def say(self, line: str) -> None:
        self.said.append(line)

    @property
    def lost(self) -> list[str]:
        """Return the lines about devices that were lost."""
        return [line for line in self.said if " lost (" in line]


PlanAgain = Callable[[OnnxSource, Fleet], tuple[OnnxPlan, str]]


def over_all(model: OnnxSource, fleet: Fleet) -> tuple[OnnxPlan, str]:
    """A stage on this device and on each worker that answers."""
    devices = (LOCAL, *fleet.workers)
    return model.plan(devices, at(model, *sorted((4, 9, 12)[: len(devices) - 1]))), "all of them"


class Reported(NetworkReplanner):
    """Plans as a test says, and measures nothing."""

    def __init__(self, plan_again: PlanAgain, choice: PlanChoice, model: OnnxSource, cluster: edge.Cluster) -> None:
        super().__init__(choice, model, cluster.devices, DEFAULT_EXCHANGE, 1)
        self._plan_again = plan_again

    def over(
        self, fleet: Fleet | None, notes: list[str], steps: Steps, *, several: bool = False
    ) -> tuple[OnnxPlan, str]:
        return super().over(fleet, notes, steps) if fleet is None else self._plan_again(self._model, fleet)


@contextmanager
def deployed(
    model: OnnxSource,
    workers: Sequence[Worker],
    steps: Steps,
    *,
    plan_again: PlanAgain | None = over_all,
    choice: PlanChoice | None = None,
) -> Iterator[DeployedNetwork]:
    """A stage on each of the workers. Nothing of it is left at the end."""
    addresses = [item.address for item in workers]
    plan = model.plan(addresses, at(model, *(4, 9)[: len(workers) - 1]))
    choice = choice or PlanChoice(model.file.path, plan, "at first", keeps_off=True)
    with edge.Cluster(addresses) as cluster:
        deciding = Reported(plan_again, choice, model, cluster) if plan_again else None
        with deploy_network(choice, model, cluster, threads=1, deciding=deciding, steps=steps) as network:
            yield network
    for each in workers:
        if each.process.poll() is None:
            until(lambda: not each.children(), f"the end of the engine processes of {each.folder}")  # noqa: B023
    names = ("feed", "stage", "silence")
    until(lambda: not [t for t in threading.enumerate() if t.name in names] and not waiting(), "the end of threads")


def sessions(deployment: DeployedNetwork) -> list[RemoteSession]:
    """Those that are open now."""
    return list(getattr(deployment.current, "_sessions", []))


# ----------------------------------------------------------------------------------------------- what is lost, and when


@pytest.mark.parametrize("seed", range(some(1, 20)))
def test_engine_processes_end_or_stand_still_at_any_moment(three: list[Worker], several: OnnxSource, seed: int) -> None:
    draw = random.Random(seed)
    moments = [60 * i + draw.randrange(1, 45) for i in range(3)]  # each once what was in flight before is answered
    # A process that stands still takes seconds to be noticed: one of three.
    signals = draw.sample([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP], 3)
    blows = dict(zip(moments, signals, strict=True))
    lines, done = Lines(), 0
    with deployed(several, three, lines) as deployment:
        feeds = (mixed_feeds(1 + i % 3, i) for i in range(N_INPUTS))
        for i, result in enumerate(deployment.pipeline.map(feeds, window=draw.choice([1, 3, 8]))):
            same(result.outputs, whole(several.file.model, mixed_feeds(1 + i % 3, i)))
            done += 1
            if done in blows:
                os.kill(draw.choice(sessions(deployment)).pid, blows[done])
        assert done == N_INPUTS
        assert deployment.pipeline.recoveries == len(lines.lost) == 3
    names = "(one|two|three)"
    for line, (_, how) in zip(lines.lost, sorted(blows.items()), strict=True):
        why = "the engine process was killed by SIGKILL.*" if how == signal.SIGKILL else "stood still for 1.5 s"
        assert re.fullmatch(rf"{names} was lost \({why}\): going on with this device, one, two and three", line), line


def test_a_worker_that_is_told_to_end_is_left(three: list[Worker], several: OnnxSource, tmp_path: Path) -> None:
    lines, done = Lines(), 0
    with (
        worker(tmp_path / "leaves", "--name", "leaves", *ONE_THREAD) as leaving,
        deployed(several, [three[0], leaving], lines) as deployment,
    ):

        def feeds() -> Iterator[Mapping[str, Array]]:
            for i in range(N_INPUTS):
                if i == 50:
                    leaving.process.send_signal(signal.SIGTERM)
                    assert leaving.process.wait(60) == 0
                yield mixed_feeds(1, i)

        for i, result in enumerate(deployment.pipeline.map(feeds(), window=4)):
            same(result.outputs, whole(several.file.model, mixed_feeds(1, i)))
            done += 1
        assert (done, deployment.pipeline.recoveries) == (N_INPUTS, 1)
    [line] = lines.lost
    assert line == "leaves was lost (is about to end): going on with this device and one"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_daemons_end_or_stand_still(
    three: list[Worker], several: OnnxSource, tmp_path: Path, how: signal.Signals
) -> None:
    """Those whose workers do not answer are left out."""
    draw, lines, done = random.Random(how), Lines(), 0
    with worker(tmp_path / "doomed", "--name", "doomed", *ONE_THREAD) as doomed:
        order = [*three[:2], doomed]
        draw.shuffle(order)
        children: list[psutil.Process] = []
        with deployed(several, order, lines) as deployment:
            feeds = (mixed_feeds(1, i) for i in range(N_INPUTS))
            moment = draw.randrange(1, N_INPUTS - 20)
            for i, result in enumerate(deployment.pipeline.map(feeds, window=4)):
                same(result.outputs, whole(several.file.model, mixed_feeds(1, i)))
                done += 1
                if done == moment:
                    children = doomed.children()
                    doomed.process.send_signal(how)
                    if how == signal.SIGSTOP:  # as of a host: all of it
                        for child in children:
                            child.suspend()
            assert (done, deployment.pipeline.recoveries) == (N_INPUTS, 1)
            assert doomed.address not in deployment.plan.devices
            doomed.kill()
            for child in filter(running, children):
                child.resume()
        until(lambda: not any(map(running, children)), "the end of its engine process")
    [line] = lines.lost
    assert re.fullmatch(
        r"(doomed|a device) was lost \(.+\): going on with this device, (one and two|two and one)", line
    )


def test_all_are_lost_and_this_device_goes_on_alone(several: OnnxSource, tmp_path: Path) -> None:
    lines, done = Lines(), 0
    with ExitStack() as stack:
        doomed = [stack.enter_context(worker(tmp_path / name, "--name", name, *ONE_THREAD)) for name in ("a", "b")]
        with deployed(several, doomed, lines, plan_again=None) as deployment:
            for i, result in enumerate(deployment.pipeline.map((mixed_feeds(1, i) for i in range(50)), window=6)):
                same(result.outputs, whole(several.file.model, mixed_feeds(1, i)))
                done += 1
                if done == 20:
                    for item in doomed:
                        item.kill()
            assert done == 50
            assert deployment.plan.devices == (LOCAL,)
            assert deployment.why == "no other device answers"
            [loaded] = deployment.current.loaded
            assert (loaded.device, loaded.threads, deployment.names) == (LOCAL, 1, ("this device",))
            assert len(deployment.pipeline.run(mixed_feeds()).compute_s) == 1
    assert len(lines.lost) == 1
    assert lines.lost[0].endswith("going on with this device")


def test_the_planner_decides_over_those_that_answer(three: list[Worker], several: OnnxSource) -> None:
    """And a person whose plan it was is told."""
    lines, labels = Lines(), []
    lines._at = labels.append
    provided = several.plan([item.address for item in three], at(several, 4, 9))
    choice = PlanChoice(several.file.path, provided, "as plan.json says", is_given=True)
    with deployed(several, three, lines, plan_again=None, choice=choice) as deployment:
        assert deployment.plan == provided
        same(deployment.pipeline.run(mixed_feeds()).outputs, whole(several.file.model, mixed_feeds()))
        os.kill(sessions(deployment)[1].pid, signal.SIGKILL)
        same(deployment.pipeline.run(mixed_feeds()).outputs, whole(several.file.model, mixed_feeds()))
        assert labels[1:] == [
            "Measuring devices",
            f"Loading mixed.onnx on {counted(len(set(deployment.names)), 'device')}",
        ]
        assert re.match("use one device|pipeline of", deployment.why)
    [line] = lines.lost
    assert re.search(r"two was lost \(the engine process was killed by SIGKILL", line)
    assert line.endswith(", by another plan than the one that was given")


def test_a_device_that_was_kept_off_stays_so(three: list[Worker], several: OnnxSource) -> None:
    lines = Lines()
    with deployed(several, three[:2], lines, plan_again=None) as deployment:  # --no-local
        os.kill(sessions(deployment)[0].pid, signal.SIGKILL)
        same(deployment.pipeline.run(mixed_feeds()).outputs, whole(several.file.model, mixed_feeds()))
        assert LOCAL not in deployment.plan.devices
        assert "another plan" not in lines.lost[0]


# --------------------------------------------------------------------------------------------------- what is not a loss


def test_an_input_that_the_model_refuses_is_an_error(three: list[Worker], several: OnnxSource) -> None:
    lines = Lines()
    with deployed(several, three[:2], lines) as deployment:
        feeds = [mixed_feeds(), mixed_feeds() | {"ids": BAD_IDS}, *[mixed_feeds()] * 9]
        with pytest.raises(WorkerError, match=r"(one|two): .*gather") as raised:
            list(deployment.pipeline.map(feeds, window=4))
        assert raised.value.error == "EngineError"
        assert deployment.pipeline.recoveries == 0
    assert lines.lost == []


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (LinkClosed("pi went away"), True),
        (LinkTimeout("pi stood still for 1.5 s"), True),
        (Refused("pi: no such session"), True),
        (WorkerError("pi: the engine process was killed"), True),
        (WorkerError("pi: rank 2 closed the link", "LinkClosed"), True),
        (WorkerError("pi: Gather failed", "EngineError"), False),
        (WorkerError("pi: need 3 GiB", "NotEnoughMemory"), False),
        (Interrupted("stopped"), False),
        (ValueError("a bug"), False),
    ],
)
def test_what_is_a_loss(error: Exception, lost: bool) -> None:
    assert is_loss(error) == lost


def test_the_words_for_it() -> None:
    assert loss_reason(["pi"], LinkClosed("pi went away")) == "pi was lost (went away)"
    assert loss_reason(["pi", "nas"], WorkerError("nas: it ended")) == "pi and nas were lost (it ended)"
    assert loss_reason([], LinkClosed("rank 2 closed the link")) == "a device was lost (rank 2 closed the link)"


# -------------------------------------------------------------------------------------------------------- where it ends


def test_a_model_too_large_for_what_is_left(
    several: OnnxSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = Lines()
    with (
        worker(tmp_path / "doomed", "--name", "doomed", *ONE_THREAD) as doomed,
        deployed(several, [doomed], lines) as deployment,
    ):
        monkeypatch.setattr("edge.cluster.preflight.available_memory", lambda: 100)
        doomed.kill()
        words = (
            r"lost \(.*\), and the model cannot continue without it: this device needs .* MiB or more and has 0: free"
        )
        with pytest.raises(NotEnoughMemory, match=words):
            deployment.pipeline.run(mixed_feeds())
        monkeypatch.undo()  # there is room again
        same(deployment.pipeline.run(mixed_feeds()).outputs, whole(several.file.model, mixed_feeds()))
    assert len(lines.lost) == 2


@pytest.mark.parametrize("how", ["ctrl-c", "stop"])
def test_a_recovery_can_be_ended(three: list[Worker], several: OnnxSource, how: str) -> None:
    """Nothing is left of it: `deployed` looks."""
    struck = False

    def end(label: str) -> None:
        if struck and how == "ctrl-c":
            raise KeyboardInterrupt
        if struck:
            deployment.pipeline.stop()

    with deployed(several, three[:2], Lines(end), plan_again=None) as deployment:
        struck = True
        os.kill(sessions(deployment)[0].pid, signal.SIGKILL)
        with pytest.raises(KeyboardInterrupt if how == "ctrl-c" else Interrupted):
            list(deployment.pipeline.map((mixed_feeds(1, i) for i in count()), window=4))


def test_devices_that_are_lost_again_and_again(three: list[Worker], several: OnnxSource) -> None:
    """While the model is brought up, too: at last this device goes on alone."""
    tries = 0

    def plan_again(model: OnnxSource, fleet: Fleet) -> tuple[OnnxPlan, str]:
        nonlocal tries
        tries += 1
        raise LinkClosed(f"one went away, try {tries}")

    lines = Lines()
    with deployed(several, three[:1], lines, plan_again=plan_again) as deployment:
        os.kill(sessions(deployment)[0].pid, signal.SIGKILL)
        same(deployment.pipeline.run(mixed_feeds()).outputs, whole(several.file.model, mixed_feeds()))
        assert deployment.names == ("this device",)
    assert tries == MOST_TRIES - 1
    assert lines.said == [f"one went away, try {tries}: going on with this device"]


# ------------------------------------------------------------------------------------------ for programs and for people


def test_a_program_hardly_notices(three: list[Worker], tmp_path: Path) -> None:
    model = owned(residual(), tmp_path / "residual.onnx")
    lines = Lines()
    with edge.Cluster([item.address for item in three[:2]]) as cluster:
        plan = model.plan([item.address for item in three[:2]], at(model, 5))
        choice = edge.PlanChoice(model.file.path, plan, "by hand", options=edge.PlanOptions(dims={"batch": 1}))
        with edge.deploy_onnx(choice, cluster, steps=lines) as network:
            outputs = network.map((images(1, i) for i in range(40)), in_flight=4)
            for i, output in enumerate(outputs):
                same(output, whole(model.file.model, images(1, i)))
                if i == 15:
                    for child in three[1].children():
                        child.kill()
            assert i == 39
    assert len(lines.lost) == 1


def test_a_person_is_told_and_figures_are_those_of_one_plan(
    three: list[Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = residual()
    path = saved(model, tmp_path / "residual.onnx")
    np.savez(tmp_path / "input.npz", **images(1, 7))
    measures: list[Flow] = []

    def measured(flow: Flow, *args: Any) -> FlowSpeed:
        def struck(feeds: Iterable[Mapping[str, Array]], window: int) -> Iterator[Result]:
            for result in flow(feeds, window):
                if len(measures) == 1:
                    for child in three[0].children():
                        child.kill()
                yield result

        measures.append(flow)
        return measure(struck, *args)

    monkeypatch.setattr("edge.onnx.bench.measure", measured)
    options = ("--output", tmp_path / "out.npz", "--workers", three[0].address, "--repeats", "30", "--threads", "1")
    code = main("run", path, "--input", tmp_path / "input.npz", *options, "--json")
    said = capsys.readouterr()
    assert code == 0, said.err
    assert len(measures) == 2
    [line] = [line for line in said.err.splitlines() if " lost (" in line]
    words = r"edge: one was lost \(the engine process was killed by SIGKILL.*\): going on with (this device|one|and| )+"
    assert re.fullmatch(words, line), line
    report = json.loads(said.out)
    assert len(report["stages"]) == len(report["plan"]["stages"])
    assert None not in [stage["compute_ms_median"] for stage in report["stages"]]
    assert report["repeats"] == 30
    same(dict(np.load(tmp_path / "out.npz")), whole(model, images(1, 7)))
