"""Test the loss of devices during answers: the answer continues with the tokens of an undisturbed run, and the loss is
reported.
"""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from edge.cluster import connect
from edge.cluster import fleet as fleets
from edge.deployment.deployed import DeployedModel
from edge.errors import EdgeError
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.models.demo import MODEL_PATH
from partition.plan.plan import Plan
from tests.support.deployments import (
    OPTIONS,
    Heard,
    greedy_answers,
    own_folders,
    pipeline,
    plan_for,
    supervised,
    tensor,
    two_workers_to_end,
)
from tests.support.thorough import each_once
from tests.support.workers import Worker

pytestmark = pytest.mark.usefixtures("measured_briefly")

GREEDY = SamplingParams(temperature=0)
TOKEN_BYTES = 4096  # of keys and values
QUESTIONS = ("My name is Ada.", "What is 12 + 30?", "Which is heavier, a phone or a tablet?", "What is my name?")


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folders(monkeypatch, tmp_path / "own")


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[Worker]]:
    with two_workers_to_end(tmp_path) as both:
        yield both


def kill_child(victim: Worker) -> None:
    for child in victim.children():
        os.kill(child.pid, signal.SIGKILL)


def stop_child(victim: Worker) -> None:
    for child in victim.children():
        os.kill(child.pid, signal.SIGSTOP)


def kill_daemon(victim: Worker) -> None:
    victim.kill()


def stop_all(victim: Worker) -> None:
    """As a host that vanishes: nobody there answers any more, and no connection breaks."""
    stop_child(victim)
    psutil.Process(victim.process.pid).suspend()


def go_on(victim: Worker) -> None:
    if victim.process.poll() is None:
        psutil.Process(victim.process.pid).resume()


def answers(model: DeployedModel | Engine, at: dict[int, Callable[[], None]]) -> list[str]:
    """To the questions; at a number of tokens something happens."""
    return greedy_answers(model.engine if isinstance(model, DeployedModel) else model, QUESTIONS, 24, at)


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    with Engine(MODEL_PATH, OPTIONS) as single:
        return answers(single, {})


def placed(two: list[Worker], how: dict[str, Any]) -> tuple[list[Worker], Plan, EngineOptions]:
    """For `supervised`."""
    return two, plan_for(MODEL_PATH, two, how), OPTIONS


@pytest.mark.parametrize(
    ("how", "lose"),
    each_once(
        [pipeline(1, 1, 1), tensor(1, 1, 1)],
        [kill_child, kill_daemon, stop_all, stop_child],
        ids=lambda value: value["parallel"] if isinstance(value, dict) else value.__name__,
    ),
)
def test_an_answer_goes_on_with_the_same_tokens(
    two: list[Worker],
    how: dict[str, Any],
    lose: Callable[[Worker], None],
    undisturbed: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard, waited_for_s = Heard(), list[float]()

    def reach(address: str, *, insecure: bool, timeout_s: float) -> Any:
        waited_for_s.append(timeout_s)
        return connect.reach(address, insecure=insecure, timeout_s=timeout_s)

    monkeypatch.setattr(fleets, "reach", reach)
    with supervised(*placed(two, how), steps=heard) as model:
        try:
            result = answers(model, {7: lambda: lose(two[1])})
        finally:
            go_on(two[1])
        assert result == undisturbed
        assert (
            connect.LOSS_TIMEOUT_S in waited_for_s
        )  # a host that is gone is not waited for as one that was never asked
        assert any("two" in line and "going on with" in line for line in heard.lines), heard.lines


def test_one_after_the_other_until_this_device_is_left(two: list[Worker], undisturbed: list[str]) -> None:
    heard = Heard()
    with supervised(*placed(two, pipeline(1, 1, 1)), steps=heard) as model:
        result = answers(model, {5: two[0].kill, 25: two[1].kill})
        assert result == undisturbed
        assert model.names == ("this device",)
        assert len([line for line in heard.lines if "going on with" in line]) in (1, 2)  # the planner may drop one


def test_many_answers_go_on(two: list[Worker]) -> None:
    questions = [f"What is {a} + {b}?" for a, b in ((12, 30), (7, 8), (45, 5), (60, 21), (9, 9), (31, 2))]
    options = OPTIONS.__class__(threads=1, context=512, batch=64, sequences=3)

    def together(engine: Any, lose: Callable[[], None]) -> list[list[int]]:
        tokens = [engine.model.tokenize(text, add_special=True, parse_special=False) for text in questions]
        scheduler = Scheduler(engine)
        results: dict[int, list[int]] = {}
        numbers = [scheduler.add(Request(prompt, 24, GREEDY, ())) for prompt in tokens]
        seen = 0
        while scheduler.busy:
            for event in scheduler.step():
                seen += 1
                if seen == 20:
                    lose()
                if event.token_id is not None:
                    results.setdefault(event.request, []).append(event.token_id)
        return [results.get(number, []) for number in numbers]

    with Engine(MODEL_PATH, options) as single:
        expected = together(single, lambda: None)
    with supervised(two, plan_for(MODEL_PATH, two, pipeline(1, 1, 1)), options) as model:
        assert together(model.engine, lambda: kill_child(two[0])) == expected


def test_an_error_of_what_was_asked_is_no_loss(two: list[Worker]) -> None:
    heard = Heard()
    with supervised(*placed(two, pipeline(1, 1, 1)), steps=heard) as model:
        with pytest.raises(EdgeError):
            model.engine.decode([1] * 65, 0)
        assert model.engine.decode([5], 0).size
        assert heard.lines == []
