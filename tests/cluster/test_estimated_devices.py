"""A model starts from estimates. Its devices are measured while no request runs, and a better plan takes over."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edge.deployment.deployed import DeployedModel
from edge.llm.engine import Engine
from edge.models.demo import MODEL_PATH
from edge.parallel.replaceable import ReplaceableEngine
from tests.support.deployments import OPTIONS, Heard, greedy_answers, own_folders, supervised
from tests.support.helpers import TIMEOUT_S, until
from tests.support.network import FAST, SLOW, Network
from tests.support.workers import Worker
from transport.errors import LinkClosed

pytestmark = pytest.mark.usefixtures("measured_briefly")

QUESTIONS = ("My name is Ada.", "What is my name?")


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    own_folders(monkeypatch, tmp_path / "own")
    built = Network(tmp_path, monkeypatch, held_after=0)
    with built.stack:
        yield built


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    with Engine(MODEL_PATH, OPTIONS) as single:
        return greedy_answers(single, QUESTIONS, 16, {})


@contextmanager
def running(first: Worker, heard: Heard) -> Iterator[tuple[DeployedModel, ReplaceableEngine]]:
    """The model, which starts on this device: by the estimates, the worker is no faster."""
    with supervised([first], None, steps=heard, measures=False) as model:
        assert model.names == ("this device",)
        assert model.why.endswith("; from estimates")
        assert isinstance(model.engine, ReplaceableEngine)
        yield model, model.engine


def test_devices_are_measured_later_and_a_better_plan_takes_over(network: Network, undisturbed: list[str]) -> None:
    heard, measuring, answered = Heard(), threading.Event(), threading.Event()

    def hold() -> None:
        measuring.set()
        assert answered.wait(TIMEOUT_S)
        raise LinkClosed("as a session that is closed says")

    network.hold = hold
    first = network.start("one", FAST)
    with running(first, heard) as (model, engine):
        until(measuring.is_set, "the first measurement")
        # An answer begins: the measurement ends, and leaves no session on the worker, long before its own time is over.
        ended = {3: lambda: until(lambda: not first.children(), "the end of its session")}
        assert greedy_answers(engine, QUESTIONS, 16, ended) == undisturbed
        assert engine.replacements.moves == 0
        network.hold = lambda: None
        answered.set()
        until(lambda: "one" in model.names, "a plan with the worker")
        assert heard.lines[-1].startswith("devices are measured now: going on with this device")
        assert greedy_answers(engine, QUESTIONS, 16, {}) == undisturbed
        assert (engine.replacements.moves, engine.replacements.recoveries) == (1, 0)
    # The figures are remembered: the next start knows the better plan at once, and measures nothing.
    timed = len(network.timed)
    with supervised([first], None, steps=heard, measures=False) as model:
        assert "one" in model.names
        assert not model.why.endswith("; from estimates")
    assert len(network.timed) == timed


def test_a_plan_that_stays_is_not_mentioned(network: Network) -> None:
    heard = Heard()
    first = network.start("one", SLOW)
    with running(first, heard) as (model, engine):
        until(lambda: network.timed.count("one") == 1, "the measurement")
        quiet_s = engine.replacements.quiet_s
        until(lambda: engine.replacements.quiet_s > quiet_s + 1, "further looks")
        assert network.timed.count("one") == 1
        assert (model.names, heard.lines) == (("this device",), [])
