"""`attention_window`: a request attends to the first tokens and the last ones, on one device as on several."""

from dataclasses import replace
from typing import Any

import pytest

from edge.errors import EngineError
from edge.llm.chat import Chat
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.generate import Response, generate
from edge.llm.interface import TextEngine
from edge.llm.options import SINKS, EngineOptions
from edge.llm.requests import windowed
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.llm.slot import Slot
from edge.models.demo import MODEL_PATH
from tests.conftest import Synthetic
from tests.support.deployments import EXACT, deployed, pipeline, tensor
from tests.support.workers import Worker

WINDOW = 64
OPTIONS = EngineOptions(threads=1, attention_window=WINDOW)
GREEDY = SamplingParams(temperature=0, allow_repetition=True)
PROMPT = [10 + (7 * i * i + 3 * i) % 400 for i in range(100)]


def answered(engine: TextEngine, n: int = 100) -> list[int]:
    """Token ids of an answer that is longer than the window."""
    return Scheduler(engine, slots=1).run([Request(PROMPT, n, GREEDY, ends=False)])[0]


def by_hand(engine: Engine, n: int) -> list[int]:
    """The same, step by step."""
    slot, tokens = Slot(engine), []
    logits = slot.prefill([*PROMPT[:SINKS], *PROMPT[-(WINDOW - WINDOW // 8) :]])
    while len(tokens) < n:
        tokens.append(int(logits.argmax()))
        if len(slot.tokens) == SINKS + WINDOW:
            slot.drop(SINKS, WINDOW // 8)
        logits = slot.decode(tokens[-1:])
    return tokens


def test_an_answer_keeps_the_first_and_the_last_tokens() -> None:
    with Engine(MODEL_PATH, replace(OPTIONS, kv_type="f32", flash_attention="off")) as engine:
        assert engine.context == SINKS + WINDOW
        assert answered(engine) == by_hand(engine, 100)


@pytest.mark.parametrize("how", [tensor(1, 1), pipeline(1, 1)], ids=str)
def test_ranks_and_stages_give_the_tokens_of_one_device(one_worker: Worker, how: dict[str, Any]) -> None:
    options = replace(EXACT, attention_window=WINDOW)
    with deployed(one_worker, MODEL_PATH, how, options) as deployment, Engine(MODEL_PATH, options) as engine:
        assert answered(deployment.engine) == answered(engine)


def test_requests_beside_each_other_have_a_window_each() -> None:
    with Engine(MODEL_PATH, replace(OPTIONS, sequences=2, context=4 * WINDOW)) as engine:
        scheduler, tokens, longest = Scheduler(engine), [0, 0], 0
        for _ in tokens:
            scheduler.add(Request(PROMPT, 100, GREEDY, ends=False))
        while scheduler.busy:
            for event in scheduler.step():
                tokens[event.request] += event.token_id is not None
            longest = max(longest, *(len(slot.tokens) for slot in scheduler.slots.all))
        assert tokens == [100, 100]
        assert longest == SINKS + WINDOW


def test_a_conversation_goes_on_in_place_and_without_end() -> None:
    with Engine(MODEL_PATH, replace(OPTIONS, attention_window=128)) as engine:
        chat = Chat(engine)
        for turn in range(8):
            [*_, last] = chat.ask(f"What is {20 + turn} plus 38?", GREEDY, max_tokens=40)
            assert str(58 + turn) in chat.messages[-1]["content"]
            assert chat.context_used <= SINKS + 128
        assert len(chat.messages) == 16
        assert last.usage.dropped_tokens > 0
        assert last.usage.prompt_tokens - last.usage.cached_tokens < 30  # the question alone was computed


def test_an_answer_without_an_end_ends_at_the_length_of_the_window() -> None:
    endless = replace(GREEDY, grammar="root ::= [a-z] root")
    with Engine(MODEL_PATH, OPTIONS) as engine:
        responses: list[Response] = list(
            generate(Scheduler(engine, slots=1, keep=True), Request(PROMPT, None, endless))
        )
        assert (responses[-1].finish_reason, responses[-1].usage.completion_tokens) == ("length", engine.context)


def test_a_prompt_that_fits_is_left_as_it_is() -> None:
    fitting = list(range(SINKS + WINDOW - WINDOW // 8))
    assert windowed(fitting, WINDOW) is fitting
    assert windowed([*fitting, 99], WINDOW) == [0, 1, 2, 3, *fitting[5:], 99]


@pytest.mark.parametrize("arch", ["gemma2"])
def test_models_that_cannot_drop_tokens_in_place_are_refused(arch: str, synthetic: Synthetic) -> None:
    with (
        Engine(synthetic(arch), OPTIONS) as engine,
        pytest.raises(EngineError, match="cannot have an attention window"),
    ):
        Scheduler(engine)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(EngineError, match="attention_window must be from 64 to"):
        EngineOptions(attention_window=63)
    with pytest.raises(EngineError, match="an attention window of 64 tokens needs a context of 68 tokens, got 67"):
        Engine(MODEL_PATH, replace(OPTIONS, context=67))
    with Engine(MODEL_PATH, OPTIONS) as engine, pytest.raises(EngineError, match="leave out when_full forget"):
        Chat(engine, when_full="forget")
