"""Devices are lost while they answer: the answer goes on, with the tokens of an undisturbed run, and a word is said."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from edge.demo import MODEL_PATH
from edge.errors import EdgeError
from edge.llm.chat import Chat
from edge.llm.engine import Engine
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Request, Scheduler
from edge.planning.deployed import Deployed, Placement, deployed
from edge.tasks import Steps
from tests.support.deployments import ONE_THREAD, OPTIONS, own_folders, pipeline, plan_for, tensor
from tests.support.workers import Worker, worker

GREEDY = SamplingParams(temperature=0)
QUESTIONS = ("My name is Ada.", "What is 12 + 30?", "Which is heavier, a phone or a tablet?", "What is my name?")


class Heard(Steps):
    """What was said."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def say(self, words: str) -> None:
        self.lines.append(words)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folders(monkeypatch, tmp_path / "own")


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[Worker]]:
    """Two workers that a test may end."""
    with ExitStack() as stack:
        yield [stack.enter_context(worker(tmp_path / name, "--name", name, *ONE_THREAD)) for name in ("one", "two")]


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


def answers(model: Deployed | Engine, at: dict[int, Callable[[], None]]) -> list[str]:
    """Greedy answers to the questions of one conversation; at a number of tokens something happens."""
    chat, seen, said = Chat(model.engine if isinstance(model, Deployed) else model), 0, []
    for question in QUESTIONS:
        text = ""
        for response in chat.ask(question, GREEDY, max_tokens=24):
            text += response.text
            seen += 1
            at.get(seen, lambda: None)()
        said.append(text)
    return said


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    with Engine(MODEL_PATH, OPTIONS) as single:
        return answers(single, {})


def placed(two: list[Worker], how: dict[str, Any]) -> Placement:
    return Placement(tuple(one.address for one in two), plan_for(MODEL_PATH, two, how))


@pytest.mark.parametrize("how", [pipeline(1, 1, 1), tensor(1, 1, 1)], ids=lambda how: how["parallel"])
@pytest.mark.parametrize("lose", [kill_child, kill_daemon, stop_child, stop_all])
def test_an_answer_goes_on_with_the_same_tokens(
    two: list[Worker], how: dict[str, Any], lose: Callable[[Worker], None], undisturbed: list[str]
) -> None:
    heard = Heard()
    with deployed(MODEL_PATH, placed(two, how), OPTIONS, steps=heard) as model:
        try:
            found = answers(model, {7: lambda: lose(two[1])})
        finally:
            go_on(two[1])
        assert found == undisturbed
        assert any("two" in line and "going on with" in line for line in heard.lines), heard.lines


def test_one_after_the_other_until_this_device_is_left(two: list[Worker], undisturbed: list[str]) -> None:
    heard = Heard()
    with deployed(MODEL_PATH, placed(two, pipeline(1, 1, 1)), OPTIONS, steps=heard) as model:
        found = answers(model, {5: two[0].kill, 25: two[1].kill})
        assert found == undisturbed
        assert model.names == ("this device",)
        assert len([line for line in heard.lines if "going on with" in line]) in (1, 2)  # the planner may drop one


def test_many_answers_go_on(two: list[Worker]) -> None:
    questions = [f"What is {a} + {b}?" for a, b in ((12, 30), (7, 8), (45, 5), (60, 21), (9, 9), (31, 2))]
    options = OPTIONS.__class__(threads=1, context=512, batch=64, sequences=3)

    def together(engine: Any, lose: Callable[[], None]) -> list[list[int]]:
        tokens = [engine.model.tokenize(text, add_special=True, parse_special=False) for text in questions]
        scheduler = Scheduler(engine)
        found: dict[int, list[int]] = {}
        numbers = [scheduler.add(Request(prompt, 24, GREEDY, ())) for prompt in tokens]
        seen = 0
        while scheduler.busy:
            for event in scheduler.step():
                seen += 1
                if seen == 20:
                    lose()
                if event.token_id is not None:
                    found.setdefault(event.request, []).append(event.token_id)
        return [found.get(number, []) for number in numbers]

    with Engine(MODEL_PATH, options) as single:
        wanted = together(single, lambda: None)
    with deployed(MODEL_PATH, placed(two, pipeline(1, 1, 1)), options) as model:
        assert together(model.engine, lambda: kill_child(two[0])) == wanted


def test_an_error_of_what_was_asked_is_no_loss(two: list[Worker]) -> None:
    heard = Heard()
    with deployed(MODEL_PATH, placed(two, pipeline(1, 1, 1)), OPTIONS, steps=heard) as model:
        with pytest.raises(EdgeError):
            model.engine.decode([1] * 65, 0)
        assert model.engine.decode([5], 0).size
        assert heard.lines == []
