"""Test workers that join a running model: they are measured and used at moments without requests."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edge.deployment.deploy import Resilience
from edge.deployment.deployed import DeployedModel
from edge.llm.engine import Engine
from edge.models.demo import MODEL_PATH
from edge.parallel.replaceable import ReplaceableEngine
from tests.support.deployments import OPTIONS, Heard, greedy_answers, own_folders, supervised
from tests.support.helpers import TIMEOUT_S, until
from tests.support.network import FAST, SLOW, USUAL, Network
from transport.errors import LinkClosed

pytestmark = pytest.mark.usefixtures("measured_briefly")

QUESTIONS = ("My name is Ada.", "What is my name?")


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    own_folders(monkeypatch, tmp_path / "own")
    built = Network(tmp_path, monkeypatch)
    with built.stack:
        yield built


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    with Engine(MODEL_PATH, OPTIONS) as single:
        return greedy_answers(single, QUESTIONS, 16, {})


@contextmanager
def running(
    network: Network, heard: Heard, *, joining: bool = True
) -> Iterator[tuple[DeployedModel, ReplaceableEngine]]:
    """The model on the first worker and this device."""
    first = network.start("one", USUAL)
    resilience = Resilience(seek=network.seek if joining else None)
    with supervised([first], None, resilience=resilience, steps=heard) as model:
        assert isinstance(model.engine, ReplaceableEngine)
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
        assert (engine.replacements.moves, engine.replacements.recoveries) == (0, 0)
        network.hold = lambda: None
        answered.set()
        until(lambda: "new" in model.names, "a plan with it")
        assert heard.lines[-1].startswith("new joined: going on with this device")
        assert greedy_answers(engine, QUESTIONS, 16, {}) == undisturbed
        assert (engine.replacements.moves, engine.replacements.recoveries) == (1, 0)
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
        assert (model.names[1:], engine.replacements.moves) == (("one",), 0)


def test_workers_that_were_named_are_all(network: Network) -> None:
    heard = Heard()
    with running(network, heard, joining=False) as (_, engine):
        network.start("new", FAST)
        quiet_s = engine.replacements.quiet_s
        until(lambda: engine.replacements.quiet_s > quiet_s + 1, "time for looks")
        assert network.timed.count("new") == 0
        assert (network.seeks, heard.lines) == (0, [])
