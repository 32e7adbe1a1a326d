"""Test several draft windows in flight over stages: answers are those without drafts after any wrong draft and any
loss.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from edge.errors import EngineError
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.generate import GreedyDrafter, generate
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import USED_MEANWHILE, Scheduler
from edge.models.demo import MODEL_PATH
from edge.parallel.engine import DistributedEngine
from edge.planning.measure import windows_s
from edge.speculate.ngrams import NgramDrafts
from edge.speculate.small_model import ModelDrafts
from edge.speculate.speculation import Drafts, Speculation
from partition.predict.drafts import Draft
from tests.support.deployments import pipeline, questions
from tests.support.drafting import (
    GREEDY,
    ROOM,
    AlwaysWindows,
    Answers,
    Known,
    ids,
    one_slot,
    plain_answers,
    run,
    speculate,
    tokens_of,
)
from tests.support.faulty_ranks import Fault, cluster
from tests.support.ranks_here import ranks_here
from tests.support.thorough import some, thorough

SHAPES = ((1, 2), (2, 3), (4, 4))
N_QUESTIONS = some(2, 200)
LENGTH = 24


def speculation(source: Drafts, rows: int = 2, windows: int = 3) -> tuple[Speculation, AlwaysWindows]:
    choice = AlwaysWindows(rows, windows)
    return speculate(source, choice=lambda: choice), choice


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Prompts of held-out questions."""
    return [list(request.prompt) for request in questions(N_QUESTIONS)]


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> Answers:
    return plain_answers(prompts)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DistributedEngine]:
    """Two stages."""
    with ranks_here(MODEL_PATH, pipeline(1, 1), replace(ROOM, sequences=2), tmp_path_factory.mktemp("two")) as engine:
        yield engine


def test_windows_of_a_plan_are_measured(two: DistributedEngine, plain: Answers) -> None:
    """And nothing is left of them."""
    prompt, answer = next(iter(plain.items()))
    assert windows_s(two, 16, Draft("any", 0.8, 4, windows=4)) > 0
    assert two.uncollected == 0
    assert ids(run(two, prompt, None)) == answer


@pytest.mark.parametrize("stages", [2, *thorough(3)])
def test_greedy_answers_are_the_same(stages: int, tmp_path: Path, prompts: list[list[int]], plain: Answers) -> None:
    """With drafts from the text, from a model, and with ones that are right, partly right and never right."""
    with ExitStack() as stack:
        engine = stack.enter_context(ranks_here(MODEL_PATH, pipeline(*[1] * stages), ROOM, tmp_path))
        small = stack.enter_context(Engine(MODEL_PATH, replace(ROOM, context=128, outputs=1)))
        kinds: dict[str, Drafts] = {
            "ngram": NgramDrafts(),
            "model": ModelDrafts(GreedyDrafter(small)),
            **{f"wrong {wrong}": Known(plain, wrong) for wrong in (0, 1, 3)},
        }
        for rows, windows in some(SHAPES[1:], SHAPES):
            accepted, behind = Counter[str](), Counter[str]()
            for name, source in kinds.items():
                drafter, choice = speculation(source, rows, windows)
                for prompt in prompts:
                    assert ids(run(engine, prompt, drafter)) == plain[tuple(prompt)], (name, rows, windows)
                    accepted[name] += drafter.stats.accepted
                    assert engine.uncollected == 0
                behind[name] = choice.behind
            assert accepted["wrong 0"] >= N_QUESTIONS * 3
            assert accepted["wrong 1"] == behind["wrong 1"] == 0
            assert min(behind["wrong 0"], behind["model"], accepted["ngram"]) > 0


@pytest.mark.parametrize(("rows", "windows"), SHAPES)
def test_wherever_a_draft_is_wrong(two: DistributedEngine, plain: Answers, rows: int, windows: int) -> None:
    """At each place of each window: what is behind leaves the caches, and the next question continues from there."""
    prompt, answer = max(plain.items(), key=lambda item: len(item[1]))
    cancelled = 0
    for place in range(1, min(rows * windows + 2, len(answer))):
        drafter, choice = speculation(Known(plain, at=(place,)), rows, windows)
        scheduler = one_slot(two, drafter)
        assert ids(list(generate(scheduler, Request(prompt, LENGTH, GREEDY)))) == answer
        cancelled += choice.cancelled
        expected, current = [*prompt, *answer], tokens_of(scheduler)
        assert current == expected[: len(current)]
        assert two.kv_last(0) == len(current) - 1 >= len(expected) - 2
    assert cancelled > 0


def test_sampling_penalties_and_grammars_hold(two: DistributedEngine, prompts: list[list[int]]) -> None:
    for sampling in (
        *(SamplingParams(temperature=temperature, seed=11) for temperature in (0.5, 1.2, 2.0)),
        replace(GREEDY, repeat_penalty=1.3),
        replace(GREEDY, grammar="root ::= [a-z] root"),
        replace(GREEDY, regex="([0-9][a-z]){12}"),
        SamplingParams(temperature=1.2, seed=12, json_schema='{"type": "string"}'),
    ):
        expected = run(two, prompts[0], None, sampling)
        for wrong in (0, 2, 5):
            drafter, _ = speculation(Known({tuple(prompts[0]): ids(expected)}, wrong))
            result = run(two, prompts[0], drafter, sampling)
            assert [(r.text, r.token_id, r.finish_reason) for r in result] == [
                (r.text, r.token_id, r.finish_reason) for r in expected
            ]


def test_the_end_is_the_same(tmp_path: Path, prompts: list[list[int]]) -> None:
    """At the last token that was asked for, at a stop string, and where the context is full."""
    endless = replace(GREEDY, grammar="root ::= [a-z] root")
    prompt = prompts[0][-30:]
    with ranks_here(MODEL_PATH, pipeline(1, 1), replace(ROOM, context=64), tmp_path) as engine:
        text = "".join(r.text for r in run(engine, prompt, None))
        for sampling, more in (
            *((GREEDY, {"max_tokens": n}) for n in (1, 2, 7)),
            (GREEDY, {"stop": [text[6:9]]}),
            (endless, {"max_tokens": None}),
        ):
            expected = run(engine, prompt, None, sampling, **more)
            for wrong in (0, 5):
                drafter, _ = speculation(Known({tuple(prompt): ids(expected) + [7] * 20}, wrong))
                result = run(engine, prompt, drafter, sampling, **more)
                assert [(r.text, r.token_id, r.finish_reason, r.usage) for r in result] == [
                    (r.text, r.token_id, r.finish_reason, r.usage) for r in expected
                ]


def test_an_answer_is_left_while_windows_are_under_way(two: DistributedEngine, plain: Answers) -> None:
    """Their results reach nobody else, and they leave no rows."""
    scheduler = one_slot(two)
    for prompt, answer in [item for item in plain.items() if len(item[1]) > 3]:
        scheduler.drafts.drafter, _ = speculation(Known(plain))
        responses = generate(scheduler, Request(prompt, LENGTH, GREEDY))
        assert [next(responses).token_id for _ in range(3)] == answer[:3]
        assert two.uncollected > 0
        responses.close()  # type: ignore[attr-defined]
        assert two.uncollected == 0
        current = tokens_of(scheduler)
        assert current == [*prompt, *answer][: len(current)]
        assert two.kv_last(0) == len(current) - 1
        assert ids(run(two, prompt, None)) == answer


def test_others_use_the_model_while_windows_are_under_way(
    two: DistributedEngine, prompts: list[list[int]], plain: Answers
) -> None:
    """They get what they would without. An answer goes on beside another request of its scheduler; where another
    scheduler had the engine, it says so."""
    prompt, answer = prompts[0], plain[tuple(prompts[0])]
    drafter, choice = speculation(Known(plain))
    with Scheduler(two, drafter=drafter) as scheduler:
        reported: dict[int, list[int]] = {}
        first = scheduler.add(Request(prompt, LENGTH))
        second = None
        while scheduler.busy:
            for event in scheduler.step():
                if event.token_id is not None:
                    reported.setdefault(event.request, []).append(event.token_id)
            if second is None and len(reported.get(first, [])) >= 2:
                assert two.uncollected > 0
                second = scheduler.add(Request(prompts[1], LENGTH))
        assert second is not None
        assert [reported[first], reported[second]] == [answer, plain[tuple(prompts[1])]]
        assert choice.behind > 0
    for other in (
        lambda: ids(run(two, prompts[1], None)),
        lambda: Scheduler(two).run([Request(prompts[1], LENGTH)])[0],
    ):
        drafter, _ = speculation(Known(plain))
        responses = generate(one_slot(two, drafter), Request(prompt, LENGTH, GREEDY))
        assert [next(responses).token_id for _ in range(2)] == answer[:2]
        assert two.uncollected > 0
        assert other() == plain[tuple(prompts[1])]
        with pytest.raises(EngineError, match=USED_MEANWHILE[:30]):
            list(responses)


def test_an_answer_ends_where_the_next_of_its_scheduler_begins(
    two: DistributedEngine, prompts: list[list[int]], plain: Answers
) -> None:
    drafter, _ = speculation(Known(plain))
    scheduler = one_slot(two, drafter)
    responses = generate(scheduler, Request(prompts[0], LENGTH, GREEDY))
    assert next(responses).token_id == plain[tuple(prompts[0])][0]
    assert ids(list(generate(scheduler, Request(prompts[1], LENGTH, GREEDY)))) == plain[tuple(prompts[1])]
    with pytest.raises(EngineError, match=USED_MEANWHILE[:30]):
        list(responses)
    assert ids(list(generate(scheduler, Request(prompts[0], LENGTH, GREEDY)))) == plain[tuple(prompts[0])]


@pytest.mark.parametrize("frames", some((4, 8), tuple(range(1, 12))))
def test_a_stage_is_lost_while_windows_are_under_way(
    frames: int, tmp_path: Path, prompts: list[list[int]], plain: Answers
) -> None:
    """At a frame that it was to send: the others go on with the same tokens."""
    with cluster(MODEL_PATH, tmp_path, 2) as devices, devices.running(pipeline(1, 1, 1), ROOM) as engine:
        drafter, choice = speculation(Known(plain, 4))
        responses = generate(one_slot(engine, drafter), Request(prompts[0], LENGTH, GREEDY))
        results = [next(responses).token_id for _ in range(2)]
        devices.fault(devices.others[0], Fault(frames, "kill"))
        results += ids(list(responses))
        assert results == plain[tuple(prompts[0])]
        assert engine.replacements.recoveries == 1
        assert choice.behind > 0
        assert engine.uncollected == 0
        assert ids(run(engine, prompts[1], drafter)) == plain[tuple(prompts[1])]
