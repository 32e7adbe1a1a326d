"""Marks of calls that are control tokens: they have text where a request says so, and end a thought."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.serve.engine.grammars import with_control_tokens
from edge.serve.tools.constraint import constraint
from edge.serve.tools.functions import Function, FunctionUse
from edge.text.templates.formats import FORMATS
from edge.text.thinking_format import thinking_format
from edge.text.thinking_tracker import Thinking
from tests.support.deployments import EXACT
from tests.support.thinking import END, TEMPLATE, says, thinker

MARKS = {
    2045: "<|tool_call_begin|>", 2044: "<|tool_call_end|>",
    2043: "<|channel|>", 2042: "<|message|>", 2041: "<|constrain|>", 2040: "<|start|>", 2039: "<|stop|>",
}  # fmt: skip
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


HARMONY = next(form for form in FORMATS if form.name == "harmony")
ANALYSIS = thinking_format("<|channel|>analysis")
SCHEMA = {"properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"], "additionalProperties": False}


@pytest.mark.parametrize("city", ["Oslo", "Bonn"])
@pytest.mark.parametrize("thinks", [False, True])
def test_a_grammar_reads_a_call_that_begins_as_a_header_does(engine: Engine, city: str, thinks: bool) -> None:
    """The channel of gpt-oss, of which a header of texts is one, too."""
    assert ANALYSIS is not None
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"city": "%s"}'
    # As in gpt-oss, but for <|end|>, which ends an answer of this model.
    form = replace(ANALYSIS, closes="<|stop|>", skipped=("<|start|>assistant", "<|stop|>"), answers=(HARMONY.answer,))
    thought = "<|channel|>analysis<|message|>Hello<|stop|><|start|>assistant" if thinks else ""
    script = engine.model.tokenize(thought + call % city, add_special=False, parse_special=True)
    lark = constraint(HARMONY, FunctionUse([Function("f", "", SCHEMA, strict=True)])) or ""
    sampling = SamplingParams(temperature=0, lark=with_control_tokens(lark, engine.model))
    prompt = engine.model.tokenize("Hi", add_special=True, parse_special=False)
    request = Request(prompt, 90, sampling, marks=HARMONY.marks, thinking=Thinking(form))
    with says([*script, END]):
        scheduler = Scheduler(engine)
        scheduler.add(request)
        events = [event for _ in range(100) for event in scheduler.step()]
        scheduler.close()
    text = "".join(event.text for event in events)
    assert "".join(event.thought for event in events) == ("Hello" if thinks else "")
    if city == "Oslo":
        assert text == call % city
    else:  # what was drawn is not allowed
        assert text.startswith(call.partition("%s")[0])
        assert text.partition('"}')[0].endswith(("Oslo", "Rome"))
