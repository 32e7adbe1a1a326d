"""Test reasoning of a real model: it is separate from the answer, bounded, not constrained, and removed from later
prompts.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge.llm.chat import Chat
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.generate import Response, generate
from edge.llm.interface import TextEngine
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.text.thinking_format import AUTO, thinking_format
from edge.text.thinking_tracker import Thinking, ThoughtTracker
from tests.support.deployments import EXACT, tensor
from tests.support.drafting import Known, one_slot, speculate
from tests.support.ranks_here import ranks_here
from tests.support.thinking import CLOSES, END, OPENS, TEMPLATE, UNOPENED, says, thinker

GREEDY = SamplingParams(temperature=0)
GOES_ON = replace(GREEDY, logit_bias={END: -1e6}, allow_repetition=True)
ROOM = replace(EXACT, context=512, sequences=2, outputs=16)
QUESTION = "What is 27 plus 38?"
FORM = thinking_format(TEMPLATE)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return thinker(tmp_path_factory.mktemp("thinker") / "thinker.gguf")


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    with Engine(path, ROOM) as engine:
        yield engine


def thought(responses: Sequence[Response]) -> str:
    return "".join(response.thought for response in responses)


def text(responses: Sequence[Response]) -> str:
    return "".join(response.text for response in responses)


def tokens(responses: Sequence[Response]) -> list[int]:
    return [response.token_id for response in responses if response.token_id is not None]


def answers(engine: Engine, think: int, sampling: SamplingParams = GREEDY, **more: Any) -> list[Response]:
    template = more.pop("template", None)
    return list(Chat(engine, think=think, template=template).ask(QUESTION, sampling, **more))


@pytest.mark.parametrize("budget", [10, 64])
def test_a_budget_ends_the_thought_by_its_own_words(engine: Engine, budget: int) -> None:
    free = answers(engine, AUTO, GOES_ON, max_tokens=budget + 20)
    assert (text(free), free[-1].usage.thought_tokens) == ("", budget + 20)
    bounded = answers(engine, budget, GOES_ON, max_tokens=budget + 20)
    assert bounded[-1].usage.thought_tokens == budget
    closing = engine.model.tokenize("\n</think>\n\n", add_special=False, parse_special=True)
    assert tokens(bounded)[:budget] == tokens(free)[: budget - len(closing)] + closing
    assert thought(free).startswith(thought(bounded))
    assert text(bounded)
    assert "think>" not in thought(bounded) + text(bounded)


def test_marks_of_several_tokens_fit_into_the_budget_too(demo: Engine) -> None:
    responses = answers(demo, 20, GOES_ON, template=TEMPLATE, max_tokens=30)
    assert responses[-1].usage.thought_tokens == 20
    assert text(responses)
    assert "think>" not in thought(responses) + text(responses)


def test_a_character_is_not_cut_by_a_budget(engine: Engine) -> None:
    letters = engine.model.tokenize("\u20ac" * 40, add_special=False, parse_special=False)
    assert len(letters) > 40
    for budget in (20, 21, 22):
        with says(letters):
            responses = answers(engine, budget, max_tokens=40)
        assert set(thought(responses)) == {"\u20ac"}
        assert responses[-1].usage.thought_tokens <= budget + 2


def test_without_thinking_the_answer_begins_at_once(engine: Engine) -> None:
    off = answers(engine, 0)
    assert (thought(off), off[-1].usage.thought_tokens) == ("", 0)
    assert text(off)
    # A template without a switch opens the thought, which is then closed at once.
    always = TEMPLATE.replace("enable_thinking is defined and not enable_thinking", "false")
    closed = answers(engine, 0, template=always)
    assert (thought(closed), closed[-1].usage.thought_tokens) == ("", 3)
    assert text(closed)


def test_the_model_opens_and_closes_a_thought_itself(engine: Engine) -> None:
    piece = engine.model.tokenize("Hello there", add_special=False, parse_special=False)
    with says([OPENS, *piece, CLOSES, *piece, END]):
        responses = answers(engine, AUTO, template=UNOPENED)
    assert (thought(responses), text(responses)) == ("Hello there", "Hello there")
    assert responses[-1].usage.thought_tokens == 2 + len(piece)
    with says([*piece, END]):
        plain = answers(engine, AUTO, template=UNOPENED)
    assert (thought(plain), text(plain), plain[-1].usage.thought_tokens) == ("", "Hello there", 0)


def test_stop_strings_are_about_the_answer(engine: Engine) -> None:
    piece = engine.model.tokenize("Hello there", add_special=False, parse_special=False)
    with says([*piece, CLOSES, *piece, *piece, END]):
        responses = answers(engine, AUTO, stop=["there"])
    assert (thought(responses), text(responses), responses[-1].finish_reason) == ("Hello there", "Hello ", "stop")


DIGITS = replace(GREEDY, regex="[0-9]{5}")


@pytest.mark.parametrize("template", [TEMPLATE, UNOPENED], ids=["opened", "unopened"])
def test_a_constraint_is_about_the_answer(engine: Engine, template: str) -> None:
    piece = engine.model.tokenize("Hello there", add_special=False, parse_special=False)
    opens = [] if template == TEMPLATE else [OPENS]
    with says([*opens, *piece, CLOSES]):
        responses = answers(engine, AUTO, DIGITS, template=template)
    assert thought(responses) == "Hello there"
    assert re.fullmatch("[0-9]{5}", text(responses))


def test_within_a_budget_an_answer_follows_a_thought_that_would_end_it(engine: Engine) -> None:
    piece = engine.model.tokenize("Hello there", add_special=False, parse_special=False)
    for think, text_ in ((AUTO, ""), (30, "Hello there")):
        with says([*piece, END, *piece, END]):
            responses = answers(engine, think)
        assert (thought(responses), text(responses)) == ("Hello there", text_)


def test_with_a_constraint_an_answer_follows_a_thought_that_would_end_it(engine: Engine) -> None:
    piece = engine.model.tokenize("Hello there", add_special=False, parse_special=False)
    with says([*piece, END]):
        responses = answers(engine, AUTO, DIGITS)
    assert thought(responses) == "Hello there"
    assert re.fullmatch("[0-9]{5}", text(responses))
    with says(piece):  # no thought opens
        plain = answers(engine, AUTO, DIGITS, template=UNOPENED)
    assert (thought(plain), len(text(plain))) == ("", 5)


def request(engine: TextEngine, sampling: SamplingParams, **more: Any) -> Request:
    prompt = engine.model.tokenize(f"<|user|>{QUESTION}<|end|><|assistant|>", add_special=True, parse_special=True)
    assert FORM is not None
    return Request(prompt, 40, sampling, thinking=Thinking(FORM, "thought", 15), **more)


SAMPLINGS = [GOES_ON, replace(GOES_ON, regex="[0-9]{5}")]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["free", "constrained"])
def test_an_answer_that_goes_on_elsewhere_is_the_same(engine: Engine, sampling: SamplingParams) -> None:
    [whole] = _events(engine, request(engine, sampling))
    for n in (3, 13, 14, 16, 18):
        generated = [event.token_id for event in whole[:n] if event.token_id is not None]
        [rest] = _events(engine, request(engine, sampling, generated=generated))
        assert [event.token_id for event in rest] == [event.token_id for event in whole[n:]], n
        assert rest[-1].thought_tokens == whole[-1].thought_tokens == 15
        if n >= 16:
            assert "".join(e.text for e in rest) == "".join(e.text for e in whole[n:]), n


def _events(engine: TextEngine, *requests: Request) -> list[list[Any]]:
    with Scheduler(engine) as scheduler:
        events: dict[int, list[Any]] = {scheduler.add(item): [] for item in requests}
        while scheduler.busy:
            for event in scheduler.step():
                assert event.error is None, event.error
                events[event.request].append(event)
        return list(events.values())


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["free", "constrained"])
def test_drafts_and_ranks_change_nothing(engine: Engine, path: Path, tmp_path: Path, sampling: SamplingParams) -> None:
    own = request(engine, sampling)
    plain = list(generate(one_slot(engine), Request(own.prompt, 40, sampling, thinking=own.thinking)))
    known = {tuple(own.prompt): tokens(plain)}
    with ranks_here(path, tensor(1, 1), ROOM, tmp_path) as ranks:
        for other, drafter in (
            (engine, speculate(Known(known, 5))),
            (ranks, None),
            (ranks, speculate(Known(known, 5))),
        ):
            slot = one_slot(other, drafter)
            responses = list(generate(slot, Request(own.prompt, 40, sampling, thinking=own.thinking)))
            assert tokens(responses) == tokens(plain)
            assert (thought(responses), text(responses)) == (thought(plain), text(plain))


def test_earlier_thoughts_leave_the_prompt_which_is_still_cached(engine: Engine, tmp_path: Path) -> None:
    chat = Chat(engine, think=20)
    first = list(chat.ask(QUESTION, GOES_ON, max_tokens=40))
    answer = chat.messages[-1]
    assert answer == {"role": "assistant", "content": text(first), "reasoning_content": thought(first)}
    assert thought(first)
    second = list(chat.ask("And 3 plus 4?", GOES_ON, max_tokens=30))
    before, usage = first[-1].usage, second[-1].usage
    opened = len(engine.model.tokenize("<think>\n", add_special=False, parse_special=True))
    assert usage.cached_tokens == before.prompt_tokens - opened
    content = len(engine.model.tokenize(text(first), add_special=False, parse_special=False))
    assert usage.prompt_tokens < before.prompt_tokens + content + 20
    chat.save(tmp_path / "chat.json")
    other = Chat(engine)
    other.load(tmp_path / "chat.json")
    assert other.messages == chat.messages


@pytest.mark.parametrize("budget", [AUTO, 40])
def test_tokens_of_an_answer_between_two_thoughts_are_not_counted(engine: Engine, budget: int) -> None:
    form = replace(FORM, again=True)
    closing = engine.model.tokenize(form.closing(), add_special=False, parse_special=True)
    tracker = ThoughtTracker(
        engine.model, Thinking(form, "thought", None if budget == AUTO else budget), constrained=False
    )
    words = engine.model.tokenize("Hello there", add_special=False, parse_special=False)

    def add(tokens: Sequence[int]) -> list[int | None]:
        forced = []
        for token in tokens:
            forced.append(tracker.forced())
            tracker.add(token, engine.model.piece(token, special=True).decode())
        return forced

    add([*words, CLOSES])
    assert (tracker.state, tracker.tokens) == ("answer", len(words) + 1)
    add(words * 20)
    assert (tracker.state, tracker.tokens) == ("answer", len(words) + 1)
    forced = add([OPENS, *words])
    assert (tracker.state, tracker.tokens) == ("thought", 2 * len(words) + 2)
    assert forced == [None] * len(forced), "the budget of the second thought is spent by the answer before it"
    assert budget == AUTO or len(closing) + tracker.tokens < budget
