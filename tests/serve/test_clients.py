"""Test the official clients of OpenAI and Anthropic with the bundled model on a real server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support.helpers import until

if TYPE_CHECKING:
    from anthropic import Anthropic
    from openai import OpenAI

NAME = "edge-demo-q8_0"
SUM = "What is 27 plus 38?"
HI: Any = [{"role": "user", "content": SUM}]
LONG = "word " * 3000
GREEDY = {"temperature": 0}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "weather", "description": "", "parameters": SCHEMA}}]


def follows(arguments: Any) -> bool:
    return set(arguments) == {"city", "days"} and arguments["city"] in ("Rome", "Oslo") and 1 <= arguments["days"] <= 9


def test_models(openai: OpenAI, anthropic: Anthropic) -> None:
    assert [item.id for item in openai.models.list()] == [NAME]
    assert [item.id for item in anthropic.models.list()] == [NAME]
    assert openai.models.retrieve(NAME).object == "model"
    # The one model that is served answers by any name, and says its own.
    assert openai.models.retrieve("nobody").id == NAME
    assert openai.chat.completions.create(model="nobody", messages=HI, max_tokens=1).model == NAME


def test_a_chat_whole_and_streamed(openai: OpenAI) -> None:
    reply = openai.chat.completions.create(model=NAME, messages=HI, temperature=0)
    text = reply.choices[0].message.content or ""
    assert "65" in text
    assert reply.choices[0].finish_reason == "stop"
    usage = reply.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    chunks = list(
        openai.chat.completions.create(
            model=NAME, messages=HI, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    again = chunks[-1].usage
    assert again is not None
    assert again.prompt_tokens == usage.prompt_tokens
    assert again.completion_tokens == usage.completion_tokens
    assert again.prompt_tokens_details is not None
    assert 0 <= (again.prompt_tokens_details.cached_tokens or 0) < again.prompt_tokens


def test_what_was_computed_is_not_computed_again(openai: OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "You know a lot of towns and rivers. " * 10}, *HI]
    reply = [openai.chat.completions.create(model=NAME, messages=messages, max_tokens=1) for _ in range(2)]
    cached = [
        item.usage.prompt_tokens_details.cached_tokens
        for item in reply
        if item.usage and item.usage.prompt_tokens_details
    ]
    assert (cached[1] or 0) > (cached[0] or 0)


def test_several_answers(openai: OpenAI) -> None:
    three = openai.chat.completions.create(model=NAME, messages=HI, n=3, temperature=0)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert all("65" in (choice.message.content or "") for choice in three.choices)


def test_stops_and_limits(openai: OpenAI, anthropic: Anthropic) -> None:
    cut = openai.chat.completions.create(model=NAME, messages=HI, temperature=0, max_tokens=2)
    assert (cut.choices[0].finish_reason, cut.usage and cut.usage.completion_tokens) == ("length", 2)
    stopped = openai.chat.completions.create(model=NAME, messages=HI, temperature=0, stop=["65"])
    assert (stopped.choices[0].finish_reason, "65" in (stopped.choices[0].message.content or "")) == ("stop", False)
    message = anthropic.messages.create(
        model=NAME, max_tokens=50, messages=HI, extra_body=GREEDY, stop_sequences=["65"]
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "65")


def test_probabilities(openai: OpenAI) -> None:
    reply = openai.chat.completions.create(
        model=NAME, messages=HI, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.content or ()) == 5
    for item in logprobs.content or ():
        assert len(item.top_logprobs) == 3
        assert item.top_logprobs[0].logprob >= item.top_logprobs[1].logprob
        assert item.token == item.top_logprobs[0].token  # at temperature 0
        assert item.logprob <= 0
    assert (
        b"".join(bytes(entry.bytes or ()) for entry in logprobs.content or ()).decode()
        == reply.choices[0].message.content
    )


def test_a_bias_forbids_a_token(openai: OpenAI, server: str) -> None:
    text = openai.chat.completions.create(model=NAME, messages=HI, temperature=0).choices[0].message.content or ""
    tokens = httpx.post(f"{server}/tokenize", json={"content": text}).json()["tokens"]
    bias = {str(token): -100 for token in tokens}
    other = openai.chat.completions.create(model=NAME, messages=HI, temperature=0, logit_bias=bias, max_tokens=20)
    assert other.choices[0].message.content != text


@pytest.mark.parametrize(
    "parsed_type",
    [{"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}, {"type": "json_object"}],
    ids=lambda expected: expected["type"],
)
def test_an_answer_in_json(openai: OpenAI, parsed_type: Any) -> None:
    reply = openai.chat.completions.create(
        model=NAME, messages=HI, response_format=parsed_type, seed=1, temperature=0, max_tokens=300
    )
    if reply.choices[0].finish_reason == "stop":
        value = json.loads(reply.choices[0].message.content or "")
        assert isinstance(value, dict)
        assert follows(value) or parsed_type["type"] == "json_object"
    else:
        assert parsed_type["type"] == "json_object"  # which may go on for ever
        assert (reply.choices[0].message.content or "").lstrip().startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_a_tool_that_must_be_called(openai: OpenAI, choice: Any) -> None:
    request = {
        "model": NAME,
        "messages": HI,
        "tools": CHAT_TOOLS,
        "tool_choice": choice,
        "temperature": 0,
        "max_tokens": 200,
    }
    reply = openai.chat.completions.create(**request).choices[0]
    assert reply.finish_reason == "tool_calls"
    [call] = reply.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    assert follows(json.loads(call.function.arguments))
    with openai.chat.completions.stream(**request) as stream:
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls or ()  # type: ignore[misc]
    assert streamed.function.arguments == call.function.arguments
    answer: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages: Any = [*HI, reply.message.model_dump(exclude_none=True), answer]
    more = openai.chat.completions.create(model=NAME, messages=messages, tools=CHAT_TOOLS, max_tokens=10)
    assert more.choices[0].finish_reason in ("stop", "length")


def test_text_with_tools_that_need_not_be_called(openai: OpenAI) -> None:
    for choice in ("auto", "none"):
        reply = openai.chat.completions.create(
            model=NAME, messages=HI, tools=CHAT_TOOLS, tool_choice=choice, temperature=0, max_tokens=40
        )
        assert reply.choices[0].message.content


def test_a_strict_tool_that_need_not_be_called(openai: OpenAI) -> None:
    strict: Any = [{"type": "function", "function": {**CHAT_TOOLS[0]["function"], "strict": True}}]
    reply = openai.chat.completions.create(model=NAME, messages=HI, tools=strict, temperature=0, max_tokens=40)
    assert "65" in (reply.choices[0].message.content or "")
    expected: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
    request: Any = {"response_format": expected, "max_tokens": 200}
    either = openai.chat.completions.create(model=NAME, messages=HI, tools=strict, **request).choices[0]
    calls = either.message.tool_calls or ()
    assert all(call.type == "function" and follows(json.loads(call.function.arguments)) for call in calls)
    assert calls or follows(json.loads(either.message.content or ""))


def test_completions(openai: OpenAI) -> None:
    reply = openai.completions.create(
        model=NAME, prompt=["One kilobyte", "Two"], max_tokens=4, temperature=0, logprobs=2
    )
    assert [choice.index for choice in reply.choices] == [0, 1]
    first = reply.choices[0]
    assert first.logprobs is not None
    assert "".join(first.logprobs.tokens or ()) == first.text
    chunks = openai.completions.create(model=NAME, prompt="One kilobyte", max_tokens=4, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == first.text


def test_completions_of_tokens(openai: OpenAI, server: str) -> None:
    request = {"content": "One kilobyte", "add_special": True}
    tokens = httpx.post(f"{server}/tokenize", json=request).json()["tokens"]
    texts = [
        openai.completions.create(model=NAME, prompt=prompt, max_tokens=4, temperature=0).choices[0].text
        for prompt in ("One kilobyte", tokens)
    ]
    assert texts[0] == texts[1]
    back = httpx.post(f"{server}/detokenize", json={"tokens": tokens}).json()["content"]
    assert back.endswith("One kilobyte")


def test_responses(openai: OpenAI) -> None:
    reply = openai.responses.create(model=NAME, input=SUM, temperature=0)
    assert "65" in reply.output_text
    assert reply.status == "completed"
    with openai.responses.stream(model=NAME, input=SUM, temperature=0) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == reply.output_text
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    tools: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
    called = openai.responses.create(model=NAME, input=SUM, tools=tools, tool_choice="required", max_output_tokens=200)
    [call] = called.output
    assert call.type == "function_call"
    assert follows(json.loads(call.arguments))
    expected: Any = {"format": {"type": "json_schema", "name": "trip", "schema": SCHEMA}}
    assert follows(json.loads(openai.responses.create(model=NAME, input=SUM, text=expected).output_text))


def test_messages(anthropic: Anthropic) -> None:
    reply = anthropic.messages.create(model=NAME, max_tokens=50, messages=HI, extra_body=GREEDY)
    [block] = reply.content
    assert block.type == "text"
    assert "65" in block.text
    assert reply.stop_reason == "end_turn"
    with anthropic.messages.stream(model=NAME, max_tokens=50, messages=HI, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == block.text
        assert stream.get_final_message().usage.output_tokens == reply.usage.output_tokens
    tools: Any = [{"name": "weather", "input_schema": SCHEMA}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        request: Any = {"model": NAME, "max_tokens": 200, "messages": HI, "tools": tools, "tool_choice": choice}
        called = anthropic.messages.create(**request)
        [use] = called.content
        assert use.type == "tool_use"
        assert follows(use.input)
        assert called.stop_reason == "tool_use"
        with anthropic.messages.stream(**request) as stream:
            [use] = stream.get_final_message().content
        assert use.type == "tool_use"
        assert follows(use.input)


def test_tokens_are_counted_as_they_are_used(anthropic: Anthropic) -> None:
    for system in ("", "Answer briefly."):
        counted = anthropic.messages.count_tokens(model=NAME, messages=HI, system=system).input_tokens
        usage = anthropic.messages.create(model=NAME, max_tokens=1, messages=HI, system=system).usage
        assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_embeddings(openai: OpenAI) -> None:
    reply = openai.embeddings.create(model=NAME, input=["One kilobyte", "One kilobyte", "Rome"])  # asks for base64
    plain = openai.embeddings.create(model=NAME, input="One kilobyte", encoding_format="float")
    first, same, other = (item.embedding for item in reply.data)
    assert sum(x * x for x in first) == pytest.approx(1, abs=1e-3)
    assert first == pytest.approx(same, abs=1e-3)
    assert plain.data[0].embedding == pytest.approx(first, abs=1e-3)
    assert other != pytest.approx(first, abs=1e-3)
    assert reply.usage.prompt_tokens > plain.usage.prompt_tokens


def test_a_prompt_longer_than_the_context_is_refused_with_need_and_have(openai: OpenAI, anthropic: Anthropic) -> None:
    from anthropic import BadRequestError as AnthropicBadRequest
    from openai import BadRequestError

    messages: Any = [{"role": "user", "content": LONG}]
    with pytest.raises(BadRequestError, match="1024") as refused:
        openai.chat.completions.create(model=NAME, messages=messages, stream=True)
    assert refused.value.code == "context_length_exceeded"
    for ask in (
        lambda: openai.completions.create(model=NAME, prompt=LONG),
        lambda: openai.responses.create(model=NAME, input=LONG),
        lambda: openai.embeddings.create(model=NAME, input=LONG),
    ):
        with pytest.raises(BadRequestError, match="1024"):
            ask()
    with pytest.raises(AnthropicBadRequest, match="1024"):
        anthropic.messages.create(model=NAME, max_tokens=5, messages=messages)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "http://x/y"}}}},
        {"extra_body": {"grammar": "root ::= ("}},
        {"extra_body": {"regex": "("}},
        {"extra_body": {"lark": "start: nothing"}},
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": 5}}}],
            "tool_choice": "required",
        },
        {"top_p": -1},
        {"temperature": 1e9},
        {"logit_bias": {"999999": 1}},
        {"extra_body": {"repeat_penalty": -1}},
    ],
    ids=range(10),
)
def test_what_an_engine_cannot_do_is_refused(openai: OpenAI, fields: Any) -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError):
        openai.chat.completions.create(model=NAME, messages=HI, **fields)


def test_a_stream_that_is_dropped_ends_its_answer(openai: OpenAI, server: str) -> None:
    def busy() -> int:
        return sum(slot["is_processing"] for slot in httpx.get(f"{server}/slots").json())

    lark: Any = {"lark": "start: /[a-z ]{20000,}/"}  # which does not end by itself before the context is full
    stream = openai.chat.completions.create(model=NAME, messages=HI, stream=True, extra_body=lark)
    next(iter(stream))
    stream.close()
    until(lambda: busy() == 0, "the answer to end")


def test_what_the_server_tells_of_itself(server: str) -> None:
    props = httpx.get(f"{server}/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 1024
    assert "message" in props["chat_template"]
    cluster = httpx.get(f"{server}/v1/cluster").json()
    [model] = cluster["models"]
    assert cluster["names"] == [NAME] == [model["model"]["name"]]
    assert {"slots", "waiting", "tokens_per_s", "devices", "plan", "why", "counters"} <= model.keys()
    figures = httpx.get(f"{server}/metrics").text
    assert f'edge_generated_tokens_total{{model="{NAME}"}}' in figures
    prompt = httpx.post(f"{server}/apply-template", json={"messages": HI}).json()["prompt"]
    assert SUM in prompt


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "What is 27 plus 38?"}]}, "max_tokens"),
        ("/v1/completions", {"prompt": "One kilobyte"}, "max_tokens"),
        ("/v1/responses", {"input": "What is 27 plus 38?"}, "max_output_tokens"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "What is 27 plus 38?"}]}, "max_tokens"),
        ("/completion", {"prompt": "One kilobyte"}, "n_predict"),
        ("/api/chat", {"messages": [{"role": "user", "content": "What is 27 plus 38?"}]}, "num_predict"),
    ],
)
def test_an_answer_goes_on_past_its_end(server: str, path: str, body: dict[str, Any], limit: str) -> None:
    def ask(**fields: Any) -> dict[str, Any]:
        is_ollama = path.startswith("/api/")
        more = {"options": {"temperature": 0, **fields}, "stream": False} if is_ollama else {"temperature": 0, **fields}
        reply: dict[str, Any] = httpx.post(server + path, json={**body, **more}, timeout=300).json()
        return reply

    def n_tokens(reply: dict[str, Any]) -> int:
        usage = reply.get("usage", {})
        names = ("completion_tokens", "output_tokens")
        counts = [usage.get(name) for name in names] + [reply.get(name) for name in ("tokens_predicted", "eval_count")]
        return next(count for count in counts if count is not None)

    assert n_tokens(ask(**{limit: 70}, ignore_eos=True)) == 70
    assert n_tokens(ask(**{limit: 70}, min_tokens=50)) >= 50
    error = str(ask(**{limit: 70}, min_tokens=71)["error"])
    assert "min_tokens is 71, but must not be more than max_tokens, 70" in error


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": [*["text"] * 4, "", "text"]}),
        ("/embedding", {"content": [*["text"] * 4, "", "text"]}),
        ("/api/embed", {"input": [*["text"] * 4, "", "text"]}),
        ("/v1/embeddings", {"input": [*[[300]] * 4, [1 << 20]]}),
    ],
)
def test_a_text_that_cannot_be_embedded_is_named(server: str, path: str, body: dict[str, Any]) -> None:
    reply = httpx.post(server + path, json=body, timeout=300)
    assert (reply.status_code, "input.4: " in str(reply.json()["error"])) == (400, True), reply.text
