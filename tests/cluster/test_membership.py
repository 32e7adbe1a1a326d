"""Test workers that leave and return while a model runs on them: answers continue, and no request is lost."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from devices.cluster_file import Cluster
from edge.cluster.fleet import Fleet
from edge.cluster.llm_ranks import LlmRanks
from edge.deployment import supervisor, watch
from edge.deployment.deployed import DeployedModel
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.models.demo import MODEL_PATH
from edge.parallel import shard
from edge.parallel.replacements import Replacements
from edge.profiling.straggler_watch import IN_A_ROW, LEAST_STEPS
from partition.model.file import ModelFile
from tests.support.clock import Clock
from tests.support.deployments import (
    ONE_THREAD,
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
from tests.support.workers import Worker, sessions, worker
from transport.errors import Refused

GREEDY = SamplingParams(temperature=0)
QUESTIONS = ("My name is Ada.", "What is 12 + 30?", "What is my name?")


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folders(monkeypatch, tmp_path / "own")


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[Worker]]:
    with two_workers_to_end(tmp_path) as both:
        yield both


def answers(engine: TextEngine, at: dict[int, Callable[[], None]]) -> list[str]:
    """To the questions; at a number of tokens something happens."""
    return greedy_answers(engine, QUESTIONS, 16, at)


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    with Engine(MODEL_PATH, OPTIONS) as single:
        return answers(single, {})


def replacements(model: DeployedModel) -> Replacements:
    use = model.engine.states.use
    assert isinstance(use, Replacements)
    return use


@pytest.mark.parametrize("how", [pipeline(1, 1, 1), tensor(1, 1, 1)], ids=lambda how: how["parallel"])
def test_a_worker_that_is_told_to_end_is_left_between_two_steps(
    two: list[Worker], how: dict[str, Any], undisturbed: list[str]
) -> None:
    heard = Heard()
    with supervised(two, plan_for(MODEL_PATH, two, how), steps=heard) as model:
        engines = replacements(model)

        def leave() -> None:
            two[1].process.send_signal(signal.SIGTERM)
            until(lambda: engines.is_moving, "a plan without it")

        assert answers(model.engine, {7: leave}) == undisturbed
        assert (engines.moves, engines.recoveries) == (1, 0)
        assert two[1].process.wait(60) == 0
        assert "INFO leaving sessions=1" in two[1].log()
        assert model.names == ("this device", "one")
        assert heard.lines == ["two is about to end: going on with this device and one"]


def test_a_worker_is_left_while_nobody_asks(two: list[Worker], undisturbed: list[str]) -> None:
    with supervised(two, plan_for(MODEL_PATH, two, pipeline(1, 1, 1))) as model:
        engines = replacements(model)
        for item, left in zip(two, (2, 1), strict=True):
            item.process.send_signal(signal.SIGTERM)
            assert item.process.wait(60) == 0
            until(lambda: len(model.names) == left, "the end of the move")  # noqa: B023
        assert answers(model.engine, {}) == undisturbed
        assert engines.recoveries == 0


def test_a_worker_that_is_there_again_is_taken_between_answers(
    two: list[Worker], undisturbed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "OFFER_S", 0.2)
    monkeypatch.setattr(watch, "QUIET_S", 0.4)
    heard = Heard()
    with supervised(two, plan_for(MODEL_PATH, two, pipeline(1, 1, 1)), steps=heard) as model:
        engines = replacements(model)
        assert answers(model.engine, {7: two[1].kill}) == undisturbed
        assert model.names == ("this device", "one")
        with worker(tmp_path / "again", "--name", "two", *ONE_THREAD, listen=two[1].address):
            until(lambda: len(model.names) == 3, "the worker that is back")
            assert heard.lines[-1] == "two is there again: going on with this device, one and two"
            assert answers(model.engine, {}) == undisturbed
            assert (engines.recoveries, engines.moves) == (1, 1)


def test_who_ends_waits_for_no_look_at_who_is_there(two: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "OFFER_S", 0.0)
    monkeypatch.setattr(watch, "QUIET_S", 0.0)
    checks, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    @contextmanager
    def reachable(_: Cluster, **__: Any) -> Iterator[tuple[None, list[str]]]:
        checks.set()
        assert may_end.wait(60)
        ended.set()
        yield None, []

    with supervised(two, plan_for(MODEL_PATH, two, pipeline(1, 1, 1))) as model:
        assert answers(model.engine, {7: two[1].kill})
        monkeypatch.setattr(supervisor, "reachable", reachable)
        until(checks.is_set, "a look at who is there")
    assert not ended.is_set()
    may_end.set()
    until(ended.is_set, "the end of the look")


def test_a_device_that_became_slow_is_named(two: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOK_S", 0.02)
    monkeypatch.setattr(watch, "REST_S", 0.05)
    clock, heard = Clock(1e-3).install(monkeypatch, shard), Heard()  # rank 0 takes as long as it says
    plan = plan_for(MODEL_PATH, two[:1], pipeline(1, 1))
    with supervised(two[:1], plan, steps=heard) as model:
        engine, members = model.engine, model.watch
        assert members is not None
        for window, tick_ms in enumerate((1, 1, 1, 10, 1, 10, 10, 10), 1):
            assert not any("this device" in line for line in heard.lines)
            clock.tick_s = tick_ms * 1e-3
            engine.kv_clear()
            for position in range(LEAST_STEPS):
                engine.decode([5], position)
            until(lambda: members.slow.windows >= window, "a look at the ranks")  # noqa: B023
        until(lambda: any("this device" in line for line in heard.lines), "a word about it")
    assert any("this device computes 10.0 times as long as it did" in line for line in heard.lines), heard.lines
    assert heard.lines[-1].endswith("; the plan stays as it is")


def test_a_device_that_became_slow_is_named_where_nobody_is_ever_quiet(
    two: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "LOOK_S", 0.02)
    monkeypatch.setattr(watch, "REST_S", 3600.0)
    monkeypatch.setattr(watch, "BUSY_S", 0.05)
    clock, heard = Clock(1e-3).install(monkeypatch, shard), Heard()
    plan, options = plan_for(MODEL_PATH, two[:1], pipeline(1, 1)), replace(OPTIONS, sequences=2)
    with supervised(two[:1], plan, options, steps=heard) as model, Scheduler(model.engine) as scheduler:
        members = model.watch
        assert members is not None

        def ask_until(is_true: Callable[[], bool], what: str) -> None:
            def drains() -> bool:
                while scheduler.busy and not is_true():
                    scheduler.step()
                for _ in range(options.sequences):
                    scheduler.add(Request([5, 6, 7], 100, GREEDY, ends=False))
                return is_true()

            until(drains, what)

        ask_until(lambda: members.slow.windows >= IN_A_ROW, "what to expect")
        assert not any("this device" in line for line in heard.lines)
        clock.tick_s = 10e-3
        ask_until(lambda: any("this device computes" in line for line in heard.lines), "a word about it")
    assert any("this device computes 10.0 times as long as it did" in line for line in heard.lines), heard.lines


def test_who_leaves_takes_nothing_new_and_ends_when_told_again(two: list[Worker]) -> None:
    plan = plan_for(MODEL_PATH, two[:1], pipeline(1, 1))
    first, file = two[0], ModelFile.open(MODEL_PATH)
    with (
        first.remote() as remote,
        Fleet([first.address]) as fleet,
        LlmRanks(fleet, plan, file, OPTIONS) as deployment,
    ):
        assert deployment.engine.decode([5], 0).size  # from now on it takes part in steps
        first.process.send_signal(signal.SIGTERM)
        until(lambda: deployment.leaving == ["one"], "word of it")
        assert deployment.engine.decode([6], 1).size  # it serves meanwhile
        assert remote.describe()[1].leaving
        with pytest.raises(Refused, match="accepts no new session"), sessions([remote], 1):
            pass
        with pytest.raises(Refused, match="is stopping and accepts no new sessions"):
            Fleet([first.address])
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(60) == 0
