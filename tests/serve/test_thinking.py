"""Test reasoning on a real server: separate from answers in each API, streamed and not, and in conversations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from edge.api.config import EngineConfig
from edge.serve.apis.messages import UNSIGNED
from edge.serve.app import create_app
from edge.serve.options import ServeOptions
from edge.serve.router import Router
from tests.serve.conftest import OPTIONS
from tests.serve.scripted import ScriptedModels
from tests.serve.serving import events_of, serving
from tests.support.thinking import END, NAMES_TOOLS, TEMPLATE, thinker

if TYPE_CHECKING:
    from anthropic import Anthropic
    from openai import OpenAI

NAME, BUDGET = "thinker", 12
HI: Any = [{"role": "user", "content": "What is 27 plus 38?"}]
GREEDY = {"temperature": 0}
LOOP: Any = {"id": "1", "type": "function", "function": {"name": "time", "arguments": "{}"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its model thinks BUDGET tokens where a request does not say."""
    path = thinker(tmp_path_factory.mktemp("thinker") / f"{NAME}.gguf", f"{NAMES_TOOLS}{TEMPLATE}")
    router = Router({NAME: EngineConfig(str(path), OPTIONS, prefix_cache=0, think=BUDGET)})
    with serving(create_app(router, ServeOptions()), at_end=router.close) as address:
        yield address


def chat(server: str, **more: Any) -> dict[str, Any]:
    response = httpx.post(f"{server}/v1/chat/completions", json={"messages": HI, **GREEDY, **more}, timeout=300)
    assert response.status_code == 200, response.text
    return dict(response.json())


def thought_tokens(response: dict[str, Any]) -> int:
    return int(response["usage"]["completion_tokens_details"]["reasoning_tokens"])


def test_a_chat(openai: OpenAI) -> None:
    reply = openai.chat.completions.create(model=NAME, messages=HI, temperature=0)
    message = reply.choices[0].message
    thought = message.model_extra and message.model_extra["reasoning_content"]
    assert thought
    assert message.content
    assert "think>" not in thought + message.content
    details = reply.usage and reply.usage.completion_tokens_details
    assert details
    assert details.reasoning_tokens == BUDGET
    request: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(openai.chat.completions.create(model=NAME, messages=HI, temperature=0, **request))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    kinds = ["content" if delta.content else "thought" for delta in deltas if delta.content or delta.model_extra]
    assert kinds == sorted(kinds, reverse=True)  # a thought comes before its answer
    assert "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas) == thought
    assert "".join(delta.content or "" for delta in deltas) == message.content


def test_messages(anthropic: Anthropic) -> None:
    reply = anthropic.messages.create(model=NAME, max_tokens=60, messages=HI, extra_body=GREEDY)
    thought, text = reply.content
    assert (thought.type, text.type, reply.stop_reason) == ("thinking", "text", "end_turn")
    assert thought.signature == UNSIGNED  # clients drop thoughts without one
    with anthropic.messages.stream(model=NAME, max_tokens=60, messages=HI, extra_body=GREEDY) as stream:
        kinds = [event.delta.type for event in stream if event.type == "content_block_delta"]
        streamed = stream.get_final_message().content
    fields = {"thinking", "text", "signature"}
    assert [block.model_dump(include=fields) for block in streamed] == [
        block.model_dump(include=fields) for block in reply.content
    ]
    assert list(dict.fromkeys(kinds)) == ["thinking_delta", "signature_delta", "text_delta"]
    off = anthropic.messages.create(
        model=NAME, max_tokens=60, messages=HI, thinking={"type": "disabled"}, extra_body=GREEDY
    )
    assert [block.type for block in off.content] == ["text"]
    hidden: Any = {"type": "enabled", "budget_tokens": 10, "display": "omitted"}
    block = anthropic.messages.create(model=NAME, max_tokens=60, messages=HI, thinking=hidden).content[0]
    assert (block.type, getattr(block, "thinking", None)) == ("thinking", "")
    again: Any = [*HI, {"role": "assistant", "content": reply.content}, {"role": "user", "content": "And 3 plus 4?"}]
    assert anthropic.messages.create(model=NAME, max_tokens=20, messages=again).content


def test_responses(openai: OpenAI) -> None:
    reply = openai.responses.create(model=NAME, input=HI[0]["content"], temperature=0)
    thought, message = reply.output
    assert (thought.type, message.type) == ("reasoning", "message")
    assert thought.content
    assert thought.content[0].text
    assert reply.output_text
    assert reply.usage
    assert reply.usage.output_tokens_details.reasoning_tokens == BUDGET
    with openai.responses.stream(model=NAME, input=HI[0]["content"], temperature=0) as stream:
        kinds = list(dict.fromkeys(event.type for event in stream))
        streamed = stream.get_final_response()
    assert [item.type for item in streamed.output] == ["reasoning", "message"]
    assert streamed.output_text == reply.output_text
    assert kinds.index("response.reasoning_text.delta") < kinds.index("response.reasoning_text.done")
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    items: Any = [item.model_dump(exclude_none=True) for item in reply.output]
    again: Any = [*HI, *items, {"role": "user", "content": "And 3 plus 4?"}]
    assert openai.responses.create(model=NAME, input=again, max_output_tokens=20).output


def test_how_much_is_thought(server: str) -> None:
    goes_on = {"logit_bias": {str(END): -1e6}, "max_tokens": 90, "allow_repetition": True}
    assert thought_tokens(chat(server, **goes_on, reasoning_budget=64)) == 64
    assert thought_tokens(chat(server, **goes_on, reasoning_budget=-1)) == 90
    assert thought_tokens(chat(server, **goes_on, reasoning_effort="high")) == 90
    off: dict[str, Any]
    for off in (
        {"reasoning_effort": "none"},
        {"thinking_budget_tokens": 0},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ):
        response = chat(server, **off)
        assert thought_tokens(response) == 0
        message = response["choices"][0]["message"]
        assert message["content"]
        assert "reasoning_content" not in message


def test_probabilities_are_those_of_the_answer(server: str) -> None:
    choice = chat(server, logprobs=True)["choices"][0]
    tokens = choice["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in tokens).decode().strip() == choice["message"]["content"]


def test_an_answer_by_a_schema_is_thought_about(server: str) -> None:
    number = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer", "maximum": 99}}}
    message = chat(server, response_format=number)["choices"][0]["message"]
    assert message["reasoning_content"]
    assert re.fullmatch(r"-?\d+", message["content"])
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "time", "parameters": nothing}}
    called = chat(server, tools=[tool], tool_choice="required", max_tokens=60)["choices"][0]["message"]
    assert called["reasoning_content"]
    assert called["tool_calls"][0]["function"]["name"] == "time"


def test_the_template_gets_the_thoughts_of_the_conversation(server: str) -> None:
    """Which stay in a loop of tools, and leave with the next question."""
    answer = {"role": "assistant", "content": "", "reasoning_content": "Because.", "tool_calls": [LOOP]}
    loop = [*HI, answer, {"role": "tool", "tool_call_id": "1", "content": "7"}]
    for messages, is_there in ((loop, True), ([*loop, HI[0]], False)):
        prompt = httpx.post(f"{server}/apply-template", json={"messages": messages}).json()["prompt"]
        assert ("Because." in prompt) == is_there
        assert prompt.endswith("<think>\n")


@pytest.mark.parametrize(
    ("path", "body", "think"),
    [
        ("chat/completions", {"messages": HI}, None),
        ("chat/completions", {"messages": HI, "reasoning_effort": "low"}, 1024),
        ("chat/completions", {"messages": HI, "reasoning_effort": "low", "reasoning_budget": 5}, 5),
        ("chat/completions", {"messages": HI, "chat_template_kwargs": {"enable_thinking": True}}, -1),
        ("responses", {"input": "Hi", "reasoning": {"effort": "medium"}}, 4096),
        ("messages", {"messages": HI, "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 7}}, 7),
        ("messages", {"messages": HI, "max_tokens": 9, "thinking": {"type": "adaptive"}}, None),
        ("messages", {"messages": HI, "max_tokens": 9, "output_config": {"effort": "low"}}, 1024),
    ],
)
def test_what_requests_say_of_thinking(path: str, body: dict[str, Any], think: int | None) -> None:
    models = ScriptedModels()
    models.scripted.template = TEMPLATE
    with serving(create_app(models, ServeOptions())) as url:
        assert httpx.post(f"{url}/v1/{path}", json=body).status_code == 200
        assert models.scripted.requests[-1].think == think


def test_thoughts_come_back_in_each_api() -> None:
    models = ScriptedModels()
    models.scripted.template = TEMPLATE
    with serving(create_app(models, ServeOptions())) as url:
        thought = {"type": "thinking", "thinking": "So.", "signature": UNSIGNED}
        blocks = [thought, {"type": "text", "text": "Hi"}]
        item = {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "So."}],
        }
        call = {"type": "function_call", "call_id": "1", "name": "time", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "1", "output": "7"}
        answer = {"role": "assistant", "content": "Hi"}
        for path, body, place in (
            ("chat/completions", {"messages": [*HI, {**answer, "reasoning_content": "So."}]}, 1),
            ("messages", {"messages": [*HI, {"role": "assistant", "content": blocks}], "max_tokens": 9}, 1),
            ("responses", {"input": [*HI, item, answer]}, 1),
            ("responses", {"input": [*HI, item, call, output]}, 1),
        ):
            assert httpx.post(f"{url}/v1/{path}", json=body).status_code == 200
            messages = models.scripted.requests[-1].messages or ()
            assert messages[place]["reasoning_content"] == "So.", path


def test_the_stream_of_a_message_has_blocks_that_begin_and_end(server: str) -> None:
    body = {"messages": HI, "max_tokens": 60, "stream": True, **GREEDY}
    events = events_of(httpx.post(f"{server}/v1/messages", json=body, timeout=300).text)
    kinds = [event["type"] for event in events if event["type"] != "content_block_delta"]
    blocks = ["content_block_start", "content_block_stop"]
    assert kinds == ["message_start", *blocks, *blocks, "message_delta", "message_stop"]
    assert [event["index"] for event in events if event["type"] == "content_block_start"] == [0, 1]
