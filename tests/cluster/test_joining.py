"""Workers that join while a model runs are measured and taken in moments in which nobody waits."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from edge.cluster.session import EngineSession
from edge.demo import MODEL_PATH
from edge.llm.engine import Engine
from edge.parallel.surviving import SurvivingEngine
from edge.planning import supervisor
from edge.planning.deployed import Deployed, Placement, deployed
from edge.survey import llm_survey
from edge.survey.layer_times import LayerTimes
from partition.predict.speeds import Curve
from tests.support.deployments import ONE_THREAD, OPTIONS, Heard, greedy_answers, own_folders
from tests.support.helpers import TIMEOUT_S, until
from tests.support.workers import Worker, worker
from transport.errors import LinkClosed

pytestmark = pytest.mark.usefixtures("measured_briefly")

QUESTIONS = ("My name is Ada.", "What is my name?")
FAST, USUAL, SLOW = 1e-3, 1e-1, 10.0  # seconds of a layer


class Network:
    """Workers that can be found, and what each is measured to take. The measurement itself can be held up."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.stack, self.folder = ExitStack(), folder
        self.workers: list[Worker] = []
        self.seeks = 0
        self.seconds: dict[str, float] = {}
        self.timed: list[str] = []
        self.hold: Callable[[], None] = lambda: None
        patch.setattr(llm_survey, "timed", self._timed)  # how long a test takes is not to decide what pays

    def start(self, name: str, seconds: float) -> Worker:
        self.seconds[name] = seconds
        self.workers.append(self.stack.enter_context(worker(self.folder / name, "--name", name, *ONE_THREAD)))
        return self.workers[-1]

    def seek(self) -> list[str]:
        self.seeks += 1
        return [one.address for one in self.workers]

    def _timed(self, session: EngineSession, *_: Any, **__: Any) -> LayerTimes:
        self.timed.append(session.device)
        if len(self.timed) > 2:
            self.hold()
        took = self.seconds.get(session.device, USUAL)
        curves = {name: Curve(((1, n * took),)) for name, n in (("layers", 1), ("more", 2), ("head", 1))}
        return LayerTimes(1, curves, 0.0, 1, None)


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    own_folders(monkeypatch, tmp_path / "own")
    for name, value in (("OFFER_S", 0.2), ("QUIET_S", 0.4), ("LOOK_S", 0.05)):
        monkeypatch.setattr(supervisor, name, value)
    made = Network(tmp_path, monkeypatch)
    with made.stack:
        yield made


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    with Engine(MODEL_PATH, OPTIONS) as single:
        return greedy_answers(single, QUESTIONS, 16, {})


@contextmanager
def running(network: Network, heard: Heard, *, joining: bool = True) -> Iterator[tuple[Deployed, SurvivingEngine]]:
    """The model on the first worker and this device."""
    first = network.start("one", USUAL)
    placement = Placement((first.address,), seek=network.seek if joining else None)
    with deployed(MODEL_PATH, placement, OPTIONS, steps=heard) as model:
        assert isinstance(model.engine, SurvivingEngine)
        assert model.names[1:] == ("one",)
        yield model, model.engine


def test_a_worker_that_starts_later_is_taken_once_nobody_asks(network: Network, undisturbed: list[str]) -> None:
    heard, measuring, answered = Heard(), threading.Event(), threading.Event()

    def hold() -> None:
        measuring.set()
        assert answered.wait(TIMEOUT_S)
        raise LinkClosed("as a session that is closed says")

    with running(network, heard) as (model, engine):
        network.hold = hold
        new = network.start("new", FAST)
        until(measuring.is_set, "the measurement of the worker that is new")
        # An answer begins: the measurement ends, and leaves no session on the worker, long before its own time is over.
        ended = {3: lambda: until(lambda: not new.children(), "the end of its session")}
        assert greedy_answers(engine, QUESTIONS, 16, ended) == undisturbed
        assert (engine.moves, engine.recoveries) == (0, 0)
        network.hold = lambda: None
        answered.set()
        until(lambda: "new" in model.names, "a plan with it")
        assert heard.lines[-1].startswith("new joined: going on with this device")
        assert greedy_answers(engine, QUESTIONS, 16, {}) == undisturbed
        assert (engine.moves, engine.recoveries) == (1, 0)
        assert network.timed.count("new") == 2  # once in vain
        assert network.timed.count("one") == 1


def test_a_worker_that_does_not_pay_is_named_and_left(network: Network) -> None:
    heard = Heard()
    with running(network, heard) as (model, engine):
        network.start("new", SLOW)
        line = "new joined; the plan stays as it is"
        until(lambda: line in heard.lines, "word of it")
        seeks = network.seeks
        until(lambda: network.seeks >= seeks + 2, "further looks")
        assert heard.lines.count(line) == 1
        assert network.timed.count("new") == 1
        assert (model.names[1:], engine.moves) == (("one",), 0)


def test_workers_that_were_named_are_all(network: Network) -> None:
    heard = Heard()
    with running(network, heard, joining=False) as (_, engine):
        network.start("new", FAST)
        quiet_s = engine.quiet_s
        until(lambda: engine.quiet_s > quiet_s + 1, "time for looks")
        assert network.timed.count("new") == 0
        assert (network.seeks, heard.lines) == (0, [])
