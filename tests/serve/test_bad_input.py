"""Test bad requests: they get a status and an error that states the remedy, in the form of the API; never a 500."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ValidationError

from edge.serve.apis.chat import ChatRequest
from edge.serve.apis.completions import CompletionRequest
from edge.serve.apis.embeddings import EmbeddingsRequest
from edge.serve.apis.messages import MessagesRequest
from edge.serve.apis.responses_fields import ResponsesRequest
from edge.serve.app import create_app
from edge.serve.ollama.fields import OllamaChatRequest
from edge.serve.options import ServeOptions
from tests.serve.scripted import ScriptedModels
from tests.serve.serving import serving

HI = [{"role": "user", "content": "Hi"}]
CHAT = ("/v1/chat/completions", {"messages": HI})
COMPLETIONS = ("/v1/completions", {"prompt": "Hi"})
RESPONSES = ("/v1/responses", {"input": "Hi"})
MESSAGES = ("/v1/messages", {"messages": HI, "max_tokens": 5})
COUNT = ("/v1/messages/count_tokens", {"messages": HI})
EMBEDDINGS = ("/v1/embeddings", {"input": "Hi"})
TOKENIZE = ("/tokenize", {"content": "Hi"})
DETOKENIZE = ("/detokenize", {"tokens": [1]})
TEMPLATE = ("/apply-template", {"messages": HI})
PLAN = ("/v1/plan", {"plan": {}})
MEMORY = ("/v1/memory", {"memory": 5})
ALL = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT, EMBEDDINGS, TOKENIZE, DETOKENIZE, TEMPLATE, PLAN, MEMORY)
Api = tuple[str, dict[str, Any]]
every_api = pytest.mark.parametrize("api", ALL, ids=lambda api: api[0])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(create_app(ScriptedModels(), ServeOptions())) as address:
        yield address


def refused(url: str, path: str, body: bytes | dict[str, Any], status: int = 400) -> dict[str, Any]:
    """The error that is told, whichever form the API has for it."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = httpx.post(url + path, content=content, timeout=60)
    assert reply.status_code == status, reply.text
    answer = reply.json()
    assert (answer.get("type") == "error") == path.startswith("/v1/messages")
    error: dict[str, Any] = answer["error"]
    assert error["message"]
    assert len(error["message"]) < 2000
    return error


@every_api
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"5",
        b'"text"',
        b"{}",
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"model": "\\ud800"}',
    ],
    ids=range(11),
)
def test_what_is_no_request(url: str, api: Api, body: bytes) -> None:
    refused(url, api[0], body)


@pytest.mark.parametrize("api", [api for api in ALL if api is not MEMORY], ids=lambda api: api[0])
def test_a_model_that_is_not_there(url: str, api: Api) -> None:
    if api is not PLAN:
        assert "nobody" in refused(url, api[0], {**api[1], "model": "nobody"}, 404)["message"]
    refused(url, api[0], {**api[1], "model": 5})


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FLAT_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CLAUDE_TOOL = {"name": "f", "input_schema": {"type": "object"}}
ANY_JSON = {"type": "json_object"}
NESTED: Any = {}
for _ in range(150):
    NESTED = {"properties": {"x": NESTED}}


@pytest.mark.parametrize(
    ("api", "fields", "word"),
    [
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "Hi"}, "messages"),
        (CHAT, {"messages": [{"role": "nobody", "content": "x"}]}, "messages.0.role"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "messages.0.content"),
        (CHAT, {"max_tokens": "five"}, "max_tokens"),
        (CHAT, {"n": 1000}, "n"),
        (CHAT, {"temperature": "warm"}, "temperature"),
        (CHAT, {"stream": "yes"}, "stream"),
        (CHAT, {"seed": 1.5}, "seed"),
        (CHAT, {"stop": [5]}, "stop"),
        (CHAT, {"stop": ["x"] * 1000}, "stop"),
        (CHAT, {"logprobs": True, "top_logprobs": 100}, "top_logprobs"),
        (CHAT, {"logit_bias": {"x": 1}}, "logit_bias"),
        (CHAT, {"functions": [{}]}, "functions"),
        (CHAT, {"tools": [TOOL, TOOL]}, "'f'"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "object"),
        (CHAT, {"tool_choice": "required"}, "tool"),
        (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "'g'"),
        (CHAT, {"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        (CHAT, {"tools": [TOOL], "tool_choice": "required", "response_format": ANY_JSON}, "one of the two"),
        (CHAT, {"tools": [TOOL], "tool_choice": "required", "regex": "a+"}, "only one constraint"),
        (CHAT, {"regex": "a+", "grammar": 'root ::= "a"'}, "only one constraint"),
        (CHAT, {"response_format": {"type": "yaml"}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": [1 << 40]}, "prompt"),
        (COMPLETIONS, {"prompt": ["a"] * 65}, "64"),
        (COMPLETIONS, {"prompt": ["a"] * 20, "n": 20}, "64"),
        (COMPLETIONS, {"echo": True}, "echo"),
        (COMPLETIONS, {"logprobs": "many"}, "logprobs"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": [{"type": "reasoning"}]}, "message"),
        (RESPONSES, {"input": [{"type": "image"}]}, "input"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"tools": [FLAT_TOOL], "tool_choice": {"type": "function", "name": "g"}}, "'g'"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format"),
        (MESSAGES, {"max_tokens": 0.5}, "max_tokens"),
        (MESSAGES, {"messages": [{"role": "nobody", "content": "x"}]}, "messages.0.role"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "container_upload"}]}]}, "container_upload"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content"),
        (MESSAGES, {"tool_choice": {"type": "tool"}, "tools": [CLAUDE_TOOL]}, "name"),
        (MESSAGES, {"tool_choice": {"type": "tool", "name": "g"}, "tools": [CLAUDE_TOOL]}, "'g'"),
        (MESSAGES, {"tools": [{"name": "f"}]}, "input_schema"),
        (MESSAGES, {"stop_sequences": [5]}, "stop_sequences"),
        (EMBEDDINGS, {"input": []}, "input"),
        (EMBEDDINGS, {"dimensions": 7}, "dimensions"),
        (EMBEDDINGS, {"encoding_format": "binary"}, "encoding_format"),
        (DETOKENIZE, {"tokens": ["a"]}, "tokens"),
        (PLAN, {"plan": []}, "plan"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered(url: str, api: Api, fields: dict[str, Any], word: str) -> None:
    assert word in refused(url, api[0], {**api[1], **fields})["message"]


@pytest.mark.parametrize(
    "more",
    [
        {"guided_choice": [""]},
        {"guided_choice": [5]},
        {"guided_choice": "a"},
        {"guided_json": "{"},
        {"guided_json": "[" * 100_000},
        {"structured_outputs": {"structural_tag": "{}"}},
        {"structured_outputs": "json"},
        {"guided_regex": "a", "regex": 5},
        {"logit_bias": [[5]]},
        {"logit_bias": [["word", 1]]},
        {"functions": [{"name": "f"}], "function_call": "sometimes"},
        {"thinking": [[[]]], "n": -1},
        {"dry_sequence_breakers": 5},
        {"max_tokens": "many"},
    ],
    ids=lambda more: str(more)[:40],
)
def test_constraint_that_cannot_be_held_is_refused(url: str, more: dict[str, Any]) -> None:
    refused(url, CHAT[0], {**CHAT[1], **more})


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"1e999"])
def test_numbers_that_are_none(url: str, number: bytes) -> None:
    for body in (
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": %s}',
        b'{"messages": [{"role": "user", "content": "a"}], "logit_bias": {"5": %s}}',
        b'{"messages": [{"role": "user", "content": "a"}],'
        b' "response_format": {"type": "json_schema", "json_schema": {"schema": {"maximum": %s}}}}',
        b'{"messages": [{"role": "user", "content": "a"}],'
        b' "tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": %s}}}]}',
    ):
        refused(url, CHAT[0], body % number)


def test_a_schema_that_is_nested_deep_is_taken_or_refused(url: str) -> None:
    format_ = {"type": "json_schema", "json_schema": {"schema": NESTED}}
    reply = httpx.post(url + CHAT[0], json={"messages": HI, "response_format": format_})
    assert reply.status_code in (200, 400)


def test_paths_and_methods_that_are_not_there(url: str) -> None:
    for path, anthropic in (("/v1/nothing", False), ("/v1/messages/nothing", True), ("/v1/models/nobody", False)):
        reply = httpx.get(url + path)
        assert reply.status_code == 404
        assert (reply.json().get("type") == "error") == anthropic
    near = httpx.get(url + "/v1/chat/completion").json()["error"]["message"]
    assert "no /v1/chat/completion here" in near
    assert "did you mean /v1/chat/completions?" in near
    assert "/openapi.json" in near
    empty = httpx.post(url + "/v1/responses", json={"input": []}).json()["error"]
    assert empty["param"] == "input"
    assert "valid string or: List should have at least 1 item" in empty["message"]
    reply = httpx.get(url + "/v1/chat/completions")
    assert (reply.status_code, reply.json()["error"]["message"]) == (
        405,
        "/v1/chat/completions takes POST, not GET",
    )
    assert httpx.delete(url + "/v1/models").status_code == 405


def test_a_front_that_cannot_be_read(tmp_path: Any) -> None:
    file = tmp_path / "front.json"
    with serving(create_app(ScriptedModels(), ServeOptions(front=file))) as address:
        for text in (None, "{", "[" * 100_000):
            if text is not None:
                file.write_text(text)
            assert httpx.get(address + "/v1/front").status_code == 404
        file.write_text('{"points": []}')
        assert httpx.get(address + "/v1/front").json() == {"points": []}


@pytest.mark.parametrize(
    ("request_type", "body"),
    [
        (EmbeddingsRequest, {"input": [[]] * 1000}),
        (CompletionRequest, {"prompt": [1, "a"] * 1000}),
        (CompletionRequest, {"prompt": "a", "stop": [5] * 1000}),
        (CompletionRequest, {"prompt": "a", "logit_bias": {f"{n}a": "b" for n in range(5000)}}),
        (ChatRequest, {"messages": [{}] * 1000, "tools": [{}] * 1000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 1000}]}),
        (MessagesRequest, {"messages": [{"role": "user", "content": [{}] * 1000}], "max_tokens": 1}),
        (ResponsesRequest, {"input": [{"type": "message"}] * 1000}),
        (OllamaChatRequest, {"messages": [{}] * 1000}),
    ],
    ids=range(9),
)  # fmt: skip
def test_a_body_of_many_errors_has_few_of_them(request_type: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as raised:
        request_type.model_validate_json(json.dumps(body))
    assert raised.value.error_count() < 20


def test_biases_are_by_numbers_of_tokens() -> None:
    request = CompletionRequest.model_validate_json('{"prompt": "a", "logit_bias": {"5": 1}}')
    assert request.logit_bias == {5: 1}
    for wrong in ('{"5.5": 1}', '{"5": "1"}', '{"a": 1}'):
        with pytest.raises(ValidationError):
            CompletionRequest.model_validate_json(f'{{"prompt": "a", "logit_bias": {wrong}}}')
