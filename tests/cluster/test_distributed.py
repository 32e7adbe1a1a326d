"""Test a model on several ranks in use: chats, errors, steps, times, and one transfer of weights."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.cluster.fleet import Fleet
from edge.cluster.llm_ranks import LlmRanks
from edge.errors import ContextFull, EngineError, Interrupted
from edge.llm.chat import Chat
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.generate import generate
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from edge.models.demo import MODEL_PATH
from edge.speculate.choice import MOST_ROWS
from edge.speculate.factory import with_room
from edge.speculate.speculation import Drafts, Speculation
from partition.model.file import ModelFile
from tests.support.deployments import (
    ONE_THREAD,
    OPTIONS,
    QUESTIONS,
    deployed,
    idle,
    pipeline,
    plan_for,
    questions,
    stages,
    tensor,
)
from tests.support.drafting import one_slot, speculate
from tests.support.workers import Worker, worker

GREEDY = SamplingParams(temperature=0)


# As people use it.


@pytest.mark.parametrize("how", [tensor(2, 1), pipeline(1, 1), pipeline(0, 1)], ids=str)
def test_a_conversation_uses_the_cache(one_worker: Worker, how: dict[str, Any]) -> None:
    """Also one that is too long, so that the beginning of it is forgotten."""
    options = replace(OPTIONS, context=160)
    with deployed(one_worker, MODEL_PATH, how, options) as deployment, Engine(MODEL_PATH, options) as single:
        result, expected = conversation(deployment.engine), conversation(single)
    assert result == expected
    assert any(cached > 20 for _, cached, _ in expected)
    assert any(dropped for *_, dropped in expected)


def conversation(engine: TextEngine) -> list[tuple[str, int, int]]:
    """Answers, with the tokens that were in the cache and the messages that were forgotten."""
    chat = Chat(engine, system="Answer briefly.")
    said = []
    for question in (
        "My name is Ada.",
        "What is 12 + 30?",
        "What is my name?",
        "Which is heavier, a phone or a tablet?",
    ) * 2:
        usage = None
        pieces = []
        for response in chat.ask(question, GREEDY, max_tokens=20):
            pieces.append(response.text)
            usage = response.usage
        assert usage is not None
        said.append(("".join(pieces), usage.cached_tokens, chat.dropped))
    return said


@pytest.mark.parametrize("how", [tensor(1, 1), pipeline(1, 1), pipeline(0, 1, 1)], ids=str)
def test_drafted_tokens_are_checked_by_all_ranks(one_worker: Worker, how: dict[str, Any]) -> None:
    prompts = [list(request.prompt) for request in questions(QUESTIONS)[:3]]
    with (
        deployed(one_worker, MODEL_PATH, how, with_room(OPTIONS, "ngram")) as deployment,
        Engine(MODEL_PATH, OPTIONS) as single,
    ):
        assert deployment.engine.outputs == MOST_ROWS
        for prompt in prompts:
            expected = answered(single, prompt)
            drafter = speculate(EveryOther(expected))
            assert answered(deployment.engine, prompt, drafter) == expected
            assert 0 < drafter.stats.accepted < drafter.stats.drafted


class EveryOther(Drafts):
    """Drafts an answer, of which every other token is wrong."""

    free = False

    def __init__(self, answer: list[int]) -> None:
        self._answer, self._at = [token ^ (place % 2) for place, token in enumerate(answer)], 0

    def begin(self, prompt: Sequence[int]) -> None:
        self._at = 0

    def extend(self, tokens: Sequence[int]) -> None:
        self._at += len(tokens)

    def draft(self, n: int, assumed: Sequence[int] = ()) -> list[int]:
        start = self._at + len(assumed)
        return self._answer[start : start + n]


def answered(engine: TextEngine, prompt: list[int], drafter: Speculation | None = None) -> list[int]:
    """The tokens of a greedy answer."""
    responses = generate(one_slot(engine, drafter), Request(prompt, 20, GREEDY))
    return [r.token_id for r in responses if r.token_id is not None]


def test_what_an_engine_refuses_changes_nothing(one_worker: Worker) -> None:
    with deployed(one_worker, MODEL_PATH, stages(1, 2)) as deployment:
        engine = deployment.engine
        prompt = questions(QUESTIONS)[0].prompt
        expected = engine.decode(prompt, 0).copy()
        with pytest.raises(EngineError, match=r"1 to 64 tokens, got 65"):
            engine.decode([1] * 65, 0)
        with pytest.raises(ContextFull, match=r"520 tokens .* context of 512"):
            engine.decode([1] * 20, 500)
        with pytest.raises(EngineError, match="rows should produce logits, but the engine was made for 1"):
            engine.decode([1, 2], len(prompt), outputs="all")
        with pytest.raises(EngineError, match="token ids are from 0 to"):
            engine.decode([1 << 20], 3)
        engine.stop()
        with pytest.raises(Interrupted):
            engine.decode([1], len(prompt))
        engine.resume()
        engine.submit([5], np.array([len(prompt)]), np.array([0]), np.ones(1, np.int8))
        with pytest.raises(EngineError, match="collect their logits first"):
            engine.times()
        engine.collect()
        engine.kv_clear()
        np.testing.assert_array_equal(engine.decode(prompt, 0), expected)
    with pytest.raises(EngineError, match="closed"):
        engine.decode([1], 0)


@pytest.mark.parametrize("how", [tensor(1, 1), pipeline(1, 1)], ids=lambda how: how["parallel"])
def test_an_interrupted_step_is_not_taken_for_another(
    one_worker: Worker, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logits may still be on their way: whoever would read them as the next step's gets an error."""
    with deployed(one_worker, MODEL_PATH, how) as deployment:
        engine = deployment.engine
        link = engine.group.links[1]

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        engine.submit([5], np.array([0]), np.array([0]), np.ones(1, np.int8))
        with monkeypatch.context() as patch:
            patch.setattr(link, "receive_into", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.collect()
        with pytest.raises(EngineError, match="a step was interrupted"):
            engine.decode([6], 1)
        with pytest.raises(EngineError, match="a step was interrupted"):
            engine.kv_clear()


def test_one_stage_has_one_step_under_way(one_worker: Worker) -> None:
    with deployed(one_worker, MODEL_PATH, tensor(1, 1)) as deployment:
        engine = deployment.engine
        expected = engine.decode([5, 6], 0).copy()
        engine.kv_clear()
        engine.submit([5, 6], np.arange(2), np.zeros(2), np.array([0, 1]))
        with pytest.raises(EngineError, match="collect the logits of the last step first"):
            engine.submit([7], np.array([2]), np.array([0]), np.zeros(1, np.int8))
        np.testing.assert_array_equal(engine.collect()[0], expected)
        engine.decode([7], 2)


def test_every_rank_says_how_long_its_steps_took(one_worker: Worker) -> None:
    with deployed(one_worker, MODEL_PATH, stages(2, 1)) as deployment:
        engine = deployment.engine
        prompt = questions(QUESTIONS)[-1].prompt
        engine.decode(prompt, 0)
        for position in range(5):
            engine.decode([3], len(prompt) + position)
        ranks = engine.times(clear=True)
        assert [sorted(rank) for rank in ranks] == [["decode", "prefill"]] * 3
        for rank in ranks:
            assert (rank["decode"].steps, rank["prefill"].steps) == (5, 1)
            for summary in rank.values():
                assert 0 < summary.compute_ms.median <= summary.compute_ms.p99 < 60_000
                assert 0 <= summary.stall_ms.median <= summary.communication_ms.median + 60_000
        state = 4 * engine.shape.n_embd
        assert ranks[2]["decode"].sent_bytes.median == 4 * engine.shape.n_vocab
        assert state <= ranks[2]["decode"].received_bytes.median < state + 100
        assert ranks[0]["prefill"].sent_bytes.median > len(prompt) * state
        assert engine.times() == [{}, {}, {}]


# Weights are sent once.


def test_a_second_deployment_sends_nothing(tmp_path: Path, one_worker: Worker) -> None:
    with worker(tmp_path / "new", *ONE_THREAD) as new:
        for expected_uploads in (2, 2):
            with deployed(new, MODEL_PATH, tensor(1, 1, 1)) as deployment:
                assert deployment.engine.decode([5], 0).argmax() >= 0
            assert new.log().count("slice-received") == expected_uploads
        with deployed(new, MODEL_PATH, tensor(1, 2, 1)):  # another cut is other bytes
            pass
        assert new.log().count("slice-received") > 2


def test_progress_ends_at_the_whole(one_worker: Worker) -> None:
    seen: list[tuple[float, float, str]] = []
    plan = plan_for(MODEL_PATH, [one_worker], tensor(1, 1))
    with Fleet([one_worker.address]) as fleet:
        options: EngineOptions = OPTIONS
        with LlmRanks(fleet, plan, ModelFile.open(MODEL_PATH), options, progress=lambda *at: seen.append(at)):
            pass
        idle([one_worker], fleet)
    done = [at for at, *_ in seen]
    assert done == sorted(done)
    assert len({total for _, total, _ in seen}) == 1
    assert done[-1] == pytest.approx(seen[-1][1])
    assert any(what.startswith("loading on") for *_, what in seen)
