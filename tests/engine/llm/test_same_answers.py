"""The held-out questions, answered by shards, stages and stages of shards as by one device."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from edge.llm.engine import Engine
from edge.llm.scheduler import Scheduler
from edge.models.demo import MODEL_PATH
from tests.support.deployments import (
    OPTIONS,
    QUESTIONS,
    Grouped,
    deployed,
    differences,
    noise,
    pipeline,
    questions,
    stages,
    tensor,
)
from tests.support.thorough import thorough
from tests.support.workers import Worker

TOGETHER = replace(OPTIONS, context=1536, sequences=20)
FEWER = (4, 6, 7, 8)  # ranks that are asked half of them: many ranks on few cores take long
MOST_DIFFERENCES = 2  # answers in QUESTIONS, where two tokens are as likely as rounding can tell
MOST_NOISE = 0.2  # deviations of the logits: what rounding of activations to 8 bits may make of another order of sums

Expected = Callable[[int], tuple[Engine, list[list[int]]]]


@pytest.fixture(scope="module")
def expected() -> Iterator[Expected]:
    """Expected answers by number of stages: those of one device with as many groups of requests."""
    with ExitStack() as stack:
        built: dict[int, tuple[Engine, list[list[int]]]] = {}

        def answers_over(n_stages: int) -> tuple[Engine, list[list[int]]]:
            if n_stages not in built:
                engine = stack.enter_context(Grouped(MODEL_PATH, TOGETHER, n_stages))
                built[n_stages] = engine, Scheduler(engine).run(questions(QUESTIONS))
            return built[n_stages]

        yield answers_over


def test_the_questions_are_answered_at_length(expected: Expected) -> None:
    _, answers = expected(1)
    assert len(answers) == QUESTIONS
    assert sum(len(answer) > 5 for answer in answers) > QUESTIONS // 2
    assert len({tuple(answer) for answer in answers}) > QUESTIONS // 2


@pytest.mark.parametrize(
    "shares",
    [(3, 1), *thorough(*((1,) * n for n in (2, 3, 4, 8)), (1, 3), (5, 2, 1), (1, 2, 3, 2), (2, 1, 1, 2, 1, 1))],
    ids=str,
)
def test_shards_answer_as_one_device(one_worker: Worker, expected: Expected, shares: tuple[int, ...]) -> None:
    answered_alike(one_worker, expected, tensor(*shares), MOST_DIFFERENCES)


@pytest.mark.parametrize("shares", [(1, 1, 1), (0, 1, 1), *thorough((1, 1), (0, 1), (1, 1, 1, 1), (1, 3, 2))], ids=str)
def test_stages_answer_as_one_device(one_worker: Worker, expected: Expected, shares: tuple[int, ...]) -> None:
    answered_alike(one_worker, expected, pipeline(*shares), most=0)


@pytest.mark.parametrize("ranks", [(1, 3), *thorough((2, 2), (3, 1), (2, 3))], ids=str)
def test_stages_of_shards_answer_as_one_device(one_worker: Worker, expected: Expected, ranks: tuple[int, ...]) -> None:
    answered_alike(one_worker, expected, stages(*ranks), MOST_DIFFERENCES)


def answered_alike(item: Worker, expected: Expected, how: dict[str, Any], most: int) -> None:
    ranks = len(how["shares"])
    requests = questions(QUESTIONS)
    with deployed(item, MODEL_PATH, how, TOGETHER) as deployment:
        engine = deployment.engine
        single, answers = expected(engine.stages)
        if ranks in FEWER:
            requests, answers = requests[::2], Scheduler(single).run(requests[::2])
        parted = differences(single, requests, answers, Scheduler(engine).run(requests))
        rounding = noise(single, engine, [request.prompt for request in requests[::50]])
    assert rounding == 0 if most == 0 else rounding < MOST_NOISE
    for one_of_them in parted:
        print(one_of_them)
    assert len(parted) <= most, f"{len(parted)} of {len(requests)} answers part: {parted}"
    assert all(there.gap <= rounding for there in parted), f"noise of {rounding}, but answers part so: {parted}"
