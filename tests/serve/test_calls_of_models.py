"""Test tool calls of models with control tokens on a real server: a grammar forces them, in each kind of format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from edge.api.config import EngineConfig
from edge.llm.engine import Engine
from edge.serve.app import create_app
from edge.serve.engine.inputs import InputProcessor
from edge.serve.messages import generation_json
from edge.serve.options import ServeOptions
from edge.serve.router import Router
from edge.serve.served import Generation
from edge.serve.tools.conversation import conversation
from edge.serve.tools.functions import Function, FunctionUse
from edge.text.templates.formats import FORMATS
from tests.serve.conftest import OPTIONS
from tests.serve.serving import events_of, serving
from tests.support.deployments import EXACT
from tests.support.thinking import NAMES_TOOLS, TEMPLATE, thinker

BY_NAME = {form.name: form for form in reversed(FORMATS)}
# A format of each style and notation, with the tokens of its vocabulary.
CONTROL = {
    "kimi": (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    "gemma": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "harmony": ("<|channel|>", "<|message|>", "<|constrain|>"),
    "mistral": ("[TOOL_CALLS]",),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "deepseek-dsml": ("｜DSML｜",),
    "qwen-xml": (),
    "gpt-oss": ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>"),
}
GPT_OSS = NAMES_TOOLS + (
    "{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m.role + '<|message|>' + m.content }}{% endfor %}"
    "{# tools tool_calls <|channel|>analysis<|message|> <|channel|>commentary #}{{ '<|start|>assistant' }}"
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
HI = [{"role": "user", "content": "What is the weather?"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]


@pytest.fixture(scope="module", params=CONTROL)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    name = request.param
    marks = {2045 - number: mark for number, mark in enumerate(CONTROL[name])}
    template = GPT_OSS
    if name in BY_NAME:
        template = f"{NAMES_TOOLS}{TEMPLATE}{{# tools tool_calls {' '.join(BY_NAME[name].signs)} #}}"
    path = thinker(tmp_path_factory.mktemp(name) / f"{name}.gguf", template, marks)
    router = Router({name: EngineConfig(str(path), OPTIONS, prefix_cache=0, think=0)})
    with serving(create_app(router, ServeOptions()), at_end=router.close) as address:
        yield address


def follows(arguments: Any) -> bool:
    days = arguments["days"]
    return arguments["city"] in ("Rome", "Oslo") and isinstance(days, int)


@pytest.mark.parametrize("budget", [0, 25])
def test_a_call_that_must_come_arrives_whole_and_streamed(server: str, budget: int) -> None:
    """Behind a thought, too."""
    body = {"messages": HI, "tools": TOOLS, "tool_choice": "required", "temperature": 0, "max_tokens": 200}
    body["reasoning_budget"] = budget
    response = httpx.post(f"{server}/v1/chat/completions", json=body, timeout=300).json()
    assert response["choices"][0]["finish_reason"] == "tool_calls", response
    [call] = response["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert follows(json.loads(call["function"]["arguments"]))
    assert not response["choices"][0]["message"]["content"]
    text = httpx.post(f"{server}/v1/chat/completions", json={**body, "stream": True}, timeout=300).text
    deltas = [choice["delta"] for event in events_of(text) for choice in event["choices"]]
    calls = [part["function"]["arguments"] for delta in deltas for part in delta.get("tool_calls", ())]
    assert "".join(calls) == call["function"]["arguments"]
    assert len(calls) > 2


def test_a_grammar_of_calls_names_control_tokens(tmp_path: Path) -> None:
    path = thinker(
        tmp_path / "kimi.gguf", f"{TEMPLATE}{{# tools {' '.join(BY_NAME['kimi'].signs)} #}}", {2040: CONTROL["kimi"][0]}
    )
    use = FunctionUse([Function("weather", "", SCHEMA)], "required")
    parsed = conversation(HI, use, "tools <|tool_call_begin|>")
    generation = Generation(messages=HI, tools=parsed.tools, sampling=parsed.sampling, marks=parsed.marks)
    with Engine(path, replace(EXACT, context=512)) as engine:
        processor = InputProcessor(EngineConfig(str(engine.path)), engine)
        request = processor.request(generation_json(generation, []))
        processor.close()
    assert tuple(request.marks) == tuple(parsed.marks)
    assert "<[2040]>" in str(request.sampling.lark)
    assert '"<|tool_call_begin|>"' in str(request.sampling.lark)  # which this vocabulary does not have
