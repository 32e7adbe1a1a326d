"""Marks of calls that are control tokens: they have text where a request says so, and end a thought."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from edge.llm.engine import Engine
from edge.llm.requests import Request
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.thinking.format import thinking_format
from edge.thinking.tracker import Thinking
from tests.support.deployments import EXACT
from tests.support.thinking import END, TEMPLATE, says, thinker

MARKS = {2045: "<|tool_call_begin|>", 2044: "<|tool_call_end|>"}
FORM = thinking_format(TEMPLATE)
assert FORM is not None


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path: Path = thinker(tmp_path_factory.mktemp("marks") / "marks.gguf", marks=MARKS)
    with Engine(path, replace(EXACT, context=256, sequences=2, outputs=16)) as engine:
        yield engine


def answer(engine: Engine, marks: Sequence[str], thinking: Thinking | None) -> tuple[str, str]:
    """Return the thought and the text of an answer whose tokens are `a`, a mark, `b`, a mark."""
    a, b = (engine.model.tokenize(text, add_special=False, parse_special=False) for text in ("Hello", "there"))
    prompt = engine.model.tokenize("Hi", add_special=True, parse_special=False)
    request = Request(prompt, 20, SamplingParams(temperature=0), marks=marks, thinking=thinking)
    with says([*a, 2045, *b, 2044, END]):
        scheduler = Scheduler(engine)
        scheduler.add(request)
        events = [event for _ in range(30) for event in scheduler.step()]
        scheduler.close()
    return "".join(event.thought for event in events), "".join(event.text for event in events)


def test_control_tokens_have_text_where_a_request_has_functions(engine: Engine) -> None:
    assert answer(engine, (), None) == ("", "Hellothere")
    assert answer(engine, tuple(MARKS.values()), None) == ("", "Hello<|tool_call_begin|>there<|tool_call_end|>")


def test_a_call_ends_the_thought_that_it_is_in(engine: Engine) -> None:
    marks = tuple(MARKS.values())
    assert FORM is not None
    plain, ended = Thinking(FORM, "thought"), Thinking(replace(FORM, calls=marks[:1]), "thought")
    assert answer(engine, marks, plain) == ("Hello<|tool_call_begin|>there<|tool_call_end|>", "")
    assert answer(engine, marks, ended) == ("Hello", "<|tool_call_begin|>there<|tool_call_end|>")
