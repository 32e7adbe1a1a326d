"""Test the official clients with a model on this device and two workers, real daemons on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from edge.api.config import EngineConfig
from edge.models.demo import MODEL_PATH
from edge.serve.app import create_app
from edge.serve.options import ServeOptions
from edge.serve.router import Router
from tests.serve.conftest import OPTIONS
from tests.serve.serving import serving
from tests.serve.test_clients import CHAT_TOOLS, GREEDY, HI, NAME, SCHEMA, follows
from tests.support.helpers import until
from tests.support.workers import worker

if TYPE_CHECKING:
    from anthropic import Anthropic
    from openai import OpenAI

JSON: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address; each of three devices has a part of every layer, and of the vocabulary."""
    folder = tmp_path_factory.mktemp("workers")
    with worker(folder / "a", "--threads", "1") as a, worker(folder / "b", "--threads", "1") as b:
        shares = {"parallel": "tensor", "shares": (2.0, 1.0, 1.0)}
        config = EngineConfig(str(MODEL_PATH), OPTIONS, 0, (a.address, b.address), **shares)  # type: ignore[arg-type]
        router = Router({NAME: config})
        with serving(create_app(router, ServeOptions()), at_end=router.close) as address:
            yield address


def test_a_chat_whole_and_streamed(openai: OpenAI, server: str) -> None:
    response = openai.chat.completions.create(model=NAME, messages=HI, temperature=0)
    text = response.choices[0].message.content or ""
    assert "65" in text
    [model] = httpx.get(f"{server}/v1/cluster").json()["models"]
    assert [device["layers"] for device in model["devices"]] == [[0, 8]] * 3
    usage: Any = {"stream_options": {"include_usage": True}}
    chunks = list(openai.chat.completions.create(model=NAME, messages=HI, temperature=0, stream=True, **usage))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert response.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == response.usage.completion_tokens


def test_a_schema_holds(openai: OpenAI) -> None:
    from openai import BadRequestError

    request: Any = {"model": NAME, "messages": HI, "response_format": JSON, "max_tokens": 300, "n": 3, "seed": 1}
    response = openai.chat.completions.create(**request, logprobs=True, top_logprobs=2)
    for choice in response.choices:
        assert choice.finish_reason == "stop"
        assert follows(json.loads(choice.message.content or ""))
        assert choice.logprobs is not None
        pieces = [bytes(item.bytes or ()) for item in choice.logprobs.content or ()]
        assert b"".join(pieces).decode() == choice.message.content
        assert all(len(item.top_logprobs) == 2 for item in choice.logprobs.content or ())
    with pytest.raises(BadRequestError):
        openai.chat.completions.create(model=NAME, messages=HI, extra_body={"lark": "start: nothing"})


def test_a_tool_is_called(openai: OpenAI, anthropic: Anthropic) -> None:
    request: Any = {"model": NAME, "messages": HI, "max_tokens": 200}
    with openai.chat.completions.stream(**request, tools=CHAT_TOOLS, tool_choice="required", temperature=0) as stream:
        [call] = stream.get_final_completion().choices[0].message.tool_calls or ()  # type: ignore[misc]
    assert follows(json.loads(call.function.arguments))
    tools: Any = [{"name": "weather", "input_schema": SCHEMA}]
    with anthropic.messages.stream(**request, tools=tools, tool_choice={"type": "any"}) as messages:
        [use] = messages.get_final_message().content
    assert use.type == "tool_use"
    assert follows(use.input)


def test_a_message_and_its_tokens(anthropic: Anthropic) -> None:
    response = anthropic.messages.create(model=NAME, max_tokens=50, messages=HI, extra_body=GREEDY)
    [block] = response.content
    assert block.type == "text"
    assert "65" in block.text
    counted = anthropic.messages.count_tokens(model=NAME, messages=HI).input_tokens
    assert counted == response.usage.input_tokens + (response.usage.cache_read_input_tokens or 0)


def test_embeddings_are_refused_with_a_reason(openai: OpenAI) -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match="makes no embeddings"):
        openai.embeddings.create(model=NAME, input="One kilobyte")


def test_a_stream_that_is_dropped_ends_its_answer_alone(openai: OpenAI, server: str) -> None:
    def busy() -> int:
        return len(httpx.get(f"{server}/slots").json())

    lark: Any = {"lark": "start: /[a-z ]{20000,}/"}  # which does not end by itself before the context is full
    dropped, stays = (
        openai.chat.completions.create(model=NAME, messages=HI, stream=True, extra_body=lark) for _ in range(2)
    )
    for stream in (dropped, stays):
        next(iter(stream))
    dropped.close()
    until(lambda: busy() == 1, "the answer to end")
    assert next(iter(stays)).choices
    stays.close()
    until(lambda: busy() == 0, "the other answer to end")
