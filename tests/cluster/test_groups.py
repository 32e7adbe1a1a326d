"""Two groups of requests over ranks on workers: the same answers, memory for both, and losses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edge.demo import MODEL_PATH
from edge.errors import EdgeError, EngineError
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.scheduler import Scheduler
from edge.parallel.engine import DistributedEngine
from edge.parallel.grouped import GroupedEngine
from tests.support.deployments import (
    ONE_THREAD,
    OPTIONS,
    deployed,
    own_folders,
    pipeline,
    plan_for,
    questions,
    supervised,
    tensor,
    two_workers_to_end,
)
from tests.support.workers import Worker, worker

GROUPS = replace(OPTIONS, sequences=4, groups=2)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return [replace(request, max_tokens=16) for request in questions(6)]


@pytest.fixture(scope="module")
def plain(requests: list[Request]) -> list[list[int]]:
    with Engine(MODEL_PATH, OPTIONS) as single:
        return [Scheduler(single).run([request])[0] for request in requests]


def test_answers_are_those_of_one_device(one_worker: Worker, requests: list[Request], plain: list[list[int]]) -> None:
    """Times of steps are there, and the worker was granted the memory of two contexts."""
    with deployed(one_worker, MODEL_PATH, tensor(1, 1), replace(GROUPS, groups=1)) as single:
        granted = single.memory_bytes[one_worker.address]
        assert type(single.engine) is DistributedEngine
    with deployed(one_worker, MODEL_PATH, tensor(1, 1), GROUPS) as deployment:
        engine = deployment.engine
        assert isinstance(engine, GroupedEngine)
        assert Scheduler(engine).run(requests) == plain
        assert [rank["decode"].steps > 0 for rank in engine.times()] == [True, True]
        assert engine.links == {1: "tcp"}
        context_bytes = engine.memory.parts["KV cache"] // 2
        assert (
            deployment.memory_bytes[one_worker.address] - granted >= context_bytes // 2
        )  # of half of the heads, or more


def test_a_plan_says_how_many_groups_there_are(
    one_worker: Worker, requests: list[Request], plain: list[list[int]]
) -> None:
    plan = replace(plan_for(MODEL_PATH, [one_worker], tensor(1, 1)), microbatches=2)
    with deployed(one_worker, MODEL_PATH, {}, replace(GROUPS, groups=None), plan=plan) as deployment:
        assert isinstance(deployment.engine, GroupedEngine)
        assert Scheduler(deployment.engine).run(requests) == plain


def test_groups_are_for_ranks_that_share_every_layer(
    one_worker: Worker, requests: list[Request], plain: list[list[int]]
) -> None:
    """Stages have one of their own kind for each; and one request alone makes no two groups."""
    with deployed(one_worker, MODEL_PATH, pipeline(1, 1), GROUPS) as deployment:
        assert type(deployment.engine) is DistributedEngine
        assert (deployment.engine.contexts, deployment.engine.sequences) == (1, 4)
        assert Scheduler(deployment.engine).run(requests) == plain
    with (
        pytest.raises(EngineError, match="2 groups need as many sequences, and there is 1"),
        deployed(one_worker, MODEL_PATH, tensor(1, 1), replace(GROUPS, sequences=1)),
    ):
        pass


def test_a_loss_in_the_middle_ends_both_groups(
    tmp_path: Path, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an error, and nothing hangs."""
    own_folders(monkeypatch, tmp_path / "own")
    with (
        worker(tmp_path / "mortal", "--name", "mortal", *ONE_THREAD) as mortal,
        deployed(mortal, MODEL_PATH, tensor(1, 1), GROUPS) as deployment,
    ):
        scheduler = Scheduler(deployment.engine)
        for request in requests:
            scheduler.add(request)
        for _ in range(8):
            scheduler.step()
        mortal.kill()
        with pytest.raises(EdgeError):
            answered(scheduler)
        assert deployment.engine.failed is not None


def answered(scheduler: Scheduler) -> None:
    while scheduler.busy:
        scheduler.step()


@pytest.mark.usefixtures("measured_briefly")
@pytest.mark.parametrize("groups", [None, 2])
def test_many_answers_go_on_after_a_loss(
    groups: int | None,
    tmp_path: Path,
    requests: list[Request],
    plain: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From two groups over three ranks to two groups over two, as the plan or the options say: the same tokens."""
    own_folders(monkeypatch, tmp_path / "own")
    with two_workers_to_end(tmp_path) as two:
        plan = replace(plan_for(MODEL_PATH, two, tensor(1, 1, 1)), microbatches=2)
        with supervised(two, plan, replace(GROUPS, groups=groups)) as model:
            tokens: list[list[int]] = [[] for _ in requests]
            with Scheduler(model.engine) as scheduler:
                for request in requests:
                    scheduler.add(request)
                assert model.engine.contexts == 2
                while scheduler.busy:
                    for event in scheduler.step():
                        if event.token_id is not None:
                            tokens[event.request].append(event.token_id)
                    if two[1].process.poll() is None and sum(map(len, tokens)) > 12:
                        two[1].kill()
            assert len(model.plan.devices) == 2
            assert model.engine.contexts == 2
    assert tokens == plain
