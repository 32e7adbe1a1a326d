"""Devices are lost while they answer: the answer goes on, with the tokens of an undisturbed run, and a word is said."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from edge.cluster import connect
from edge.cluster import fleet as fleets
from edge.demo import MODEL_PATH
from edge.deployment.deploy import Resilience
from edge.deployment.deployed import DeployedModel
from edge.errors import EdgeError
from edge.llm.chat import Chat
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.llm.states import READ_TOKENS
from edge.parallel import replacements
from edge.parallel.replacements import ReplaceableEngine
from edge.planning.arrange import work_shares
from edge.slices.local import OwnSlices
from partition.errors import PlanError
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan
from partition.slices.gguf_slice import limits, slice_recipe
from quant.gguf.file import GgufFile
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
from tests.support.helpers import until
from tests.support.thorough import THOROUGH, each_once
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


def placed(
    two: list[Worker], how: dict[str, Any], spare: int = 0
) -> tuple[list[Worker], Plan, EngineOptions, Resilience]:
    """For `supervised`."""
    return two, plan_for(MODEL_PATH, two, how), OPTIONS, Resilience(spare)


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


@pytest.mark.parametrize(
    "how", [pipeline(1, 1, 1), *([tensor(1, 1, 1)] if THOROUGH else [])], ids=lambda how: how["parallel"]
)
def test_with_a_spare_the_history_is_not_computed_again(
    two: list[Worker], how: dict[str, Any], undisturbed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacements, "AFTER_S", 0.0)  # so that all is left to who looks in the background
    heard = Heard()
    with supervised(*placed(two, how, spare=1), steps=heard) as model:
        assert isinstance(model.engine, ReplaceableEngine)
        assert model.standby is not None
        assert model.standby.mirror is not None
        mirror = model.standby.mirror
        chat, said = Chat(model.engine), []
        for question in QUESTIONS:
            current = chat.context_used
            if question == QUESTIONS[-1]:
                all_of_it = current // READ_TOKENS * READ_TOKENS * TOKEN_BYTES
                until(lambda: mirror.held_bytes >= all_of_it, "all is copied")  # noqa: B023
                two[1].kill()
            responses = list(chat.ask(question, GREEDY, max_tokens=24))
            said.append("".join(response.text for response in responses))
        assert said == undisturbed
        assert model.engine.replacements.recoveries == 1
        assert mirror.restored_tokens > current - 2 * READ_TOKENS > 0
        # Of the history less than a block; beside it parts of the question that were under way.
        assert model.engine.replacements.computed_again < READ_TOKENS + responses[-1].usage.prompt_tokens - current
        assert model.to_json([])["standby"]["mirror"]["restored_tokens"] == mirror.restored_tokens


def test_slices_for_a_loss_are_there_before_it(two: list[Worker]) -> None:
    file, heard = GgufFile.open(MODEL_PATH), Heard()
    own = OwnSlices()
    with supervised(*placed(two, pipeline(1, 1, 1), spare=2), steps=heard) as model:
        assert model.standby is not None
        digest, shares = own.model_digest(MODEL_PATH), work_shares(model.plan)
        needed: dict[str, dict[str, int]] = {}
        for item in two:  # goes on with this device; where both are lost it has the model's file itself
            devices = [LOCAL, item.address]
            plan = make_plan(limits(file), "", digest, devices, "pipeline", [shares[device] for device in devices])
            for rank, name in enumerate(("this device", item.folder.name)):
                recipe = slice_recipe(file, digest, plan.slice(rank))
                needed.setdefault(name, {})[own.digest(recipe, MODEL_PATH)] = recipe.n_bytes
            assert {f"{name}.slice" for name in needed[item.folder.name]} <= {
                path.name for path in item.slices.iterdir()
            }
        running = [slice_recipe(file, digest, model.plan.slice(rank)) for rank in range(3)]
        for recipe, current in zip(running, needed.values(), strict=True):
            current.pop(own.digest(recipe, MODEL_PATH), None)
        results = {name.partition(" at ")[0]: size for name, size in model.standby.slice_bytes.items()}
        assert results == {name: sum(slices.values()) for name, slices in needed.items() if slices}
        assert model.standby.missing == []
    (line,) = [line for line in heard.lines if "ready for the loss of 2 devices" in line]
    assert "4.00 KiB a token, at most 2.00 MiB" in line


def test_nobody_can_be_ready_for_more_losses_than_there_are_workers(two: list[Worker]) -> None:
    words = r"ready for the loss of .* has 2 workers: ask for 0 to 2"
    for spare in (3, -1):
        with pytest.raises(PlanError, match=words), supervised(*placed(two, pipeline(1, 1, 1), spare)):
            raise AssertionError("it was loaded")


def test_an_error_of_what_was_asked_is_no_loss(two: list[Worker]) -> None:
    heard = Heard()
    with supervised(*placed(two, pipeline(1, 1, 1)), steps=heard) as model:
        with pytest.raises(EdgeError):
            model.engine.decode([1] * 65, 0)
        assert model.engine.decode([5], 0).size
        assert heard.lines == []
