"""Test lenient fields: a field that requests nothing is accepted, a hint is ignored and reported, others are errors."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from edge.serve.apis.api import Api
from edge.serve.apis.chat import CHAT
from edge.serve.apis.completions import COMPLETIONS
from edge.serve.apis.fields import MAX_STOPS, Fields, _required_and_boolean
from edge.serve.apis.infill import INFILL
from edge.serve.apis.messages import MESSAGES
from edge.serve.apis.native import NATIVE
from edge.serve.apis.other_fields import is_empty
from edge.serve.apis.responses import RESPONSES
from edge.serve.app import create_app
from edge.serve.http.errors import BadRequest
from edge.serve.ollama.answers import CHAT as OLLAMA_CHAT
from edge.serve.ollama.answers import TEXT as OLLAMA_TEXT
from edge.serve.options import ServeOptions
from edge.serve.served import Generation
from tests.serve.scripted import ScriptedModels
from tests.serve.serving import events_of, serving
from tests.support import ROOT

PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"name": "f", "description": "F.", "parameters": PARAMETERS}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":"b"}'}}
HI = [{"role": "user", "content": "Hi"}]
TEXT_PART = {"type": "text", "text": "Hi"}
# A request of each API with as many kinds of parts as fit together.
RICH: tuple[tuple[Api[Any], dict[str, Any]], ...] = (
    (
        CHAT,
        {
            "messages": [
                {"role": "user", "content": [TEXT_PART]},
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "content": "b", "tool_call_id": "c1"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}, {"type": "web_search"}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "stream_options": {"include_usage": True},
            "response_format": {"type": "text"},
        },
    ),
    (COMPLETIONS, {"prompt": "Hi", "response_format": {"type": "json_object"}, "lora": [{"id": 0, "scale": 0.5}]}),
    (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm"}]},
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "b"},
                {"type": "web_search_call", "action": {"query": "q"}},
            ],
            "tools": [{"type": "function", **FUNCTION}, {"type": "local_shell"}],
            "reasoning": {"summary": "auto"},
            "text": {"format": {"type": "json_schema", "schema": PARAMETERS}},
        },
    ),
    (
        MESSAGES,
        {
            "max_tokens": 5,
            "system": [TEXT_PART],
            "messages": [
                {"role": "user", "content": [TEXT_PART]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm"},
                        {"type": "tool_use", "id": "c1", "name": "f", "input": {}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [TEXT_PART]}]},
            ],
            "tools": [{"name": "f", "input_schema": PARAMETERS}, {"type": "bash_20250124", "name": "bash"}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "adaptive"},
            "output_config": {},
        },
    ),
    (NATIVE, {"prompt": "Hi", "n_predict": 5}),
    (INFILL, {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "c"}]}),
    (
        OLLAMA_CHAT,
        {
            "messages": [*HI, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, {"role": "tool"}],
            "tools": [{"type": "function", "function": FUNCTION}],
            "options": {"num_ctx": 100},
        },
    ),
    (OLLAMA_TEXT, {"prompt": "Hi", "options": {"top_k": 3}}),
)
IDS = [api.path for api, _ in RICH]
# A request of each API without any optional field.
PLAIN: dict[Api[Any], dict[str, Any]] = {
    CHAT: {"messages": HI},
    COMPLETIONS: {"prompt": "Hi"},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"messages": HI, "max_tokens": 5},
    NATIVE: {"prompt": "Hi"},
    INFILL: {"input_prefix": "a", "input_suffix": "b"},
    OLLAMA_CHAT: {"messages": HI, "stream": False},
    OLLAMA_TEXT: {"prompt": "Hi", "stream": False},
}
REQUESTS = ROOT / "tests" / "data" / "requests"


def generations(api: Api[Any], body: dict[str, Any], template: str = "") -> list[Generation]:
    return list(api.parse(api.request.model_validate_json(json.dumps(body)), template).generations)


def parts(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Fields]]:
    """All parts of a request, each with its place."""
    if isinstance(value, Fields):
        yield place, value
        for name, field in type(value).model_fields.items():
            if name in value.model_fields_set:
                yield from parts(getattr(value, name), (*place, field.alias or name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from parts(item, (*place, index))


@pytest.mark.parametrize(("api", "body"), RICH, ids=IDS)
def test_neutral_value_of_any_optional_field_is_not_set(api: Api[Any], body: dict[str, Any]) -> None:
    expected = generations(api, body)
    tried = 0
    for place, part in parts(api.request.model_validate_json(json.dumps(body))):
        names = {field.alias or name for name, field in type(part).model_fields.items() if not field.is_required()}
        names |= {*part.refused, *part.ignored, *part.other_names, "unheard_of"}
        sent = body
        for step in place:
            sent = sent[step]
        for name in sorted(names - sent.keys()):
            for value in (None, "", [], {}, False):
                if name in part.empty_values and isinstance(value, part.empty_values[name]):
                    continue  # this empty value says something
                if value is False and name in _required_and_boolean(type(part))[1]:
                    continue
                changed = deepcopy(body)
                inner = changed
                for step in place:
                    inner = inner[step]
                inner[name] = value
                request = api.request.model_validate_json(json.dumps(changed))
                assert list(api.parse(request, "").generations) == expected, (place, name, value)
                assert not [named for named in request.ignored_names() if named.rpartition(".")[2] == name]
                tried += 1
    assert tried > 100


def test_what_is_empty() -> None:
    assert all(map(is_empty, (None, False, "", [], {})))
    assert not any(map(is_empty, (0, 0.0, True, " ", [None], {"a": None})))


@pytest.mark.parametrize(
    ("more", "limit"),
    [
        ({"max_tokens": -1}, None),
        ({"max_tokens": -2}, None),
        ({"max_tokens": 150.0}, 150),
        ({"max_tokens": 10**12}, 10**12),
        ({"n_predict": 7}, 7),
        ({"n_predict": -1}, None),
        ({"n_predict": 7, "max_tokens": 8}, 8),
    ],
    ids=str,
)
def test_limits_of_tokens(more: dict[str, Any], limit: int | None) -> None:
    for api, base in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "Hi"}), (RESPONSES, {"input": "Hi"})):
        assert generations(api, {**base, **more})[0].max_tokens == limit, api.path
    if "n_predict" not in more:
        assert generations(MESSAGES, {"messages": HI, **more})[0].max_tokens == limit
    ollama = {"prompt": "Hi", "options": {"num_predict": next(iter(more.values()))}}
    assert len(more) > 1 or generations(OLLAMA_TEXT, ollama)[0].max_tokens == limit


def test_fraction_is_no_whole_number() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        generations(CHAT, {"messages": HI, "max_tokens": 150.5})


@pytest.mark.parametrize(
    ("more", "sampling"),
    [
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 2**40}, {"top_k": 0}),
        ({"temperature": -0.5}, {"temperature": 0}),
        ({"top_p": 1.5}, {"top_p": 1.0}),
        ({"repetition_penalty": 1.3}, {"repeat_penalty": 1.3}),
        ({"repetition_penalty": 1.3, "repeat_penalty": 1.2}, {"repeat_penalty": 1.2}),
        ({"repeat_penalty": 0}, {}),
        ({"stop": ["", "a", None]}, {"stop": ["a"]}),
        ({"logit_bias": [[1, 2], [3, False]]}, {"logit_bias": {1: 2.0, 3: -1e6}}),
        ({"dry_multiplier": 0, "dry_base": 0.5, "dry_sequence_breakers": ["a"]}, {}),
        (
            {"dry_multiplier": 1, "dry_sequence_breakers": '["a", "b"]'},
            {"dry_multiplier": 1.0, "dry_sequence_breakers": ["a", "b"]},
        ),
        ({"xtc_probability": 0, "xtc_threshold": 7}, {}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a.b", "c"]}, {"regex": r"a\.b|c"}),
        ({"structured_outputs": {"regex": "a"}}, {"regex": "a"}),
        ({"guided_grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"guided_grammar": 'start: "a"'}, {"lark": 'start: "a"'}),
        ({"guided_json": {"type": "array"}}, {"json_schema": '{"type": "array"}'}),
        ({"guided_json": '{"type": "array"}'}, {"json_schema": '{"type": "array"}'}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": '{"type": "object"}'}),
        ({"response_format": "json"}, {"json_schema": '{"type": "object"}'}),
        ({"response_format": {"type": "json"}}, {"json_schema": '{"type": "object"}'}),
        ({"response_format": {"type": "json", "value": {"type": "array"}}}, {"json_schema": '{"type": "array"}'}),
        ({"response_format": "text"}, {}),
        ({"temperature": "0.5", "top_k": "40", "seed": " 7 "}, {"temperature": 0.5, "top_k": 40, "seed": 7}),
        ({"top_p": "1", "min_p": "0", "ignore_eos": "True"}, {"top_p": 1.0, "min_p": 0.0, "ignore_eos": True}),
        ({"ignore_eos": 1, "allow_repetition": 0.0}, {"ignore_eos": True, "allow_repetition": False}),
        ({"stop": ["a"] * 200}, {"stop": ["a"] * 200}),
    ],
    ids=str,
)
def test_sampling_in_other_forms(more: dict[str, Any], sampling: dict[str, Any]) -> None:
    for api, base in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "Hi"})):
        plain = generations(api, base)[0].sampling
        assert generations(api, {**base, **more})[0].sampling == {**plain, **sampling}, api.path


def with_sampling(api: Api[Any], body: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """A request with more sampling fields, in the place that the API has for them."""
    if api in (OLLAMA_CHAT, OLLAMA_TEXT):
        return {**body, "options": {**body.get("options", {}), **more}}
    return {**body, **more}


@pytest.mark.parametrize(("api", "body"), RICH, ids=IDS)
def test_values_beyond_off_are_off_in_every_api(api: Api[Any], body: dict[str, Any]) -> None:
    off = {"temperature": 0.0, "top_k": 0, "min_p": 0.0, "top_p": 1.0, "typical_p": 1.0}
    beyond = {"temperature": -0.5, "top_k": -2, "min_p": -0.1, "top_p": 1.5, "typical_p": 2.0}
    for name, value in beyond.items():
        sampling = generations(api, with_sampling(api, body, {name: value}), "{{ tools }}")[0].sampling
        assert sampling[name] == off[name], name


@pytest.mark.parametrize(("api", "body"), RICH, ids=IDS)
def test_as_many_stop_strings_as_are_allowed_are_taken_and_no_more(api: Api[Any], body: dict[str, Any]) -> None:
    stops = [f"stop {number}" for number in range(MAX_STOPS)]
    sampling = generations(api, with_sampling(api, body, {"stop": stops}), "{{ tools }}")[0].sampling
    assert sampling["stop"] == stops
    with pytest.raises((BadRequest, ValidationError), match=str(MAX_STOPS)):
        generations(api, with_sampling(api, body, {"stop": [*stops, "one more"]}), "{{ tools }}")


@pytest.mark.parametrize(("api", "body"), RICH, ids=IDS)
def test_seed_of_zero_is_a_seed_and_one_below_is_not(api: Api[Any], body: dict[str, Any]) -> None:
    for seed, own in ((0, {"seed": 0}), (7, {"seed": 7}), (-1, {})):
        sampling = generations(api, with_sampling(api, body, {"seed": seed}), "{{ tools }}")[0].sampling
        assert {name: value for name, value in sampling.items() if name == "seed"} == own, seed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in ("warm", "0,7", "nan", "1e999", "true", "1" * 65, "[1]", True)),
        *(("seed", value) for value in ("4.5", "x", True)),
        *(("stream", value) for value in ("maybe", "1.5", 2, 0.5, "[]")),
        ("logprobs", 21),
        ("stop", ["a"] * 257),
    ],
)
def test_text_that_is_no_number_or_boolean_is_refused_by_name(url: str, name: str, value: Any) -> None:
    response = httpx.post(f"{url}/v1/chat/completions", json={"messages": HI, name: value}, timeout=60)
    assert response.status_code == 400, response.text
    assert name in response.json()["error"]["param"]


def test_text_fields_keep_texts_that_look_like_numbers() -> None:
    request = CHAT.request.model_validate({"messages": [{"role": "user", "content": "5"}], "stop": "1", "model": "7"})
    assert (request.messages[0].content, request.stop, request.model) == ("5", "1", "7")


@pytest.mark.parametrize(
    ("api", "sent", "n"),
    [
        (CHAT, {"logprobs": 5}, 5),
        (CHAT, {"logprobs": 5, "top_logprobs": 2}, 2),
        (CHAT, {"logprobs": 1}, 0),
        (CHAT, {"logprobs": 0, "top_logprobs": 3}, None),
        (COMPLETIONS, {"logprobs": True}, 0),
        (COMPLETIONS, {"logprobs": True, "top_logprobs": 4}, 4),
        (COMPLETIONS, {"logprobs": 3}, 3),
        (COMPLETIONS, {"logprobs": False}, None),
    ],
)
def test_probabilities_are_asked_for_in_the_form_of_either_api(api: Api[Any], sent: dict[str, Any], n: Any) -> None:
    base = {"messages": HI} if api is CHAT else {"prompt": "Hi"}
    assert generations(api, {**base, **sent})[0].logprobs == n


ARRAY = {"type": "array", "items": {"type": "string"}}


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "schema": ARRAY},
        {"type": "json_schema", "schema": ARRAY},
        {"type": "json_schema", "json_schema": ARRAY},
        {"type": "json_object", "json_schema": ARRAY},
        {"type": "json_schema", "json_schema": {"schema": ARRAY}},
        {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": ARRAY}},
        {"type": "json_object", "json_schema": {"name": "a", "schema": ARRAY}, "schema": ARRAY},
    ],
    ids=json.dumps,
)
def test_schema_of_a_format_holds_wherever_it_is(form: dict[str, Any]) -> None:
    bodies = (
        (CHAT, {"messages": HI, "response_format": form}),
        (COMPLETIONS, {"prompt": "Hi", "response_format": form}),
        (NATIVE, {"prompt": "Hi", "response_format": form}),
        (RESPONSES, {"input": "Hi", "text": {"format": form}}),
        (MESSAGES, {"messages": HI, "max_tokens": 5, "output_config": {"format": form}}),
        (MESSAGES, {"messages": HI, "max_tokens": 5, "output_format": form}),
    )
    for api, body in bodies:
        assert json.loads(generations(api, body)[0].sampling["json_schema"]) == ARRAY, api.path


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": "a"}},
        {"type": "json_schema", "schema": ARRAY, "json_schema": {"type": "object"}},
        {"type": "text", "schema": ARRAY},
        {"type": "xml"},
    ],
    ids=json.dumps,
)
def test_format_that_is_not_clear_is_refused(url: str, form: dict[str, Any]) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": HI, "response_format": form}),
        ("/v1/responses", {"input": "Hi", "text": {"format": form}}),
        ("/v1/messages", {"messages": HI, "max_tokens": 5, "output_config": {"format": form}}),
    ):
        response = httpx.post(url + path, json=body, timeout=60)
        assert response.status_code == 400, response.text
        assert "format" in response.text


@pytest.fixture(scope="module")
def models() -> ScriptedModels:
    return ScriptedModels()


@pytest.fixture(scope="module")
def url(models: ScriptedModels) -> Iterator[str]:
    with serving(create_app(models, ServeOptions())) as address:
        yield address


CLAUDE = json.loads((REQUESTS / "claude_code.json").read_text())


def test_claude_code_is_answered_without_tools_of_its_provider(url: str, models: ScriptedModels) -> None:
    response = httpx.post(f"{url}/v1/messages?beta=true", json=CLAUDE, timeout=60)
    assert response.status_code == 200, response.text
    assert events_of(response.text)[-1]["type"] == "message_stop"
    named = response.headers["X-Edge-Ignored"].split(", ")
    assert len(named) == 20
    assert {"tool_choice", "output_config.effort", "thinking", "tools.web_search_20250305"} <= set(named)
    generation = models.scripted.requests[-1]
    text = json.dumps([generation.messages, generation.tools])
    assert "billing" not in text
    assert "bash_20250124" not in text
    assert "Bash" in text
    assert "You are Claude Code." in text
    assert all(word in text for word in ("web_search", "weather", "Rain", "It rains."))
    assert "xyz" not in text
    counted = httpx.post(f"{url}/v1/messages/count_tokens", json=CLAUDE, timeout=60)
    assert counted.status_code == 200, counted.text
    assert "tools.bash_20250124" in counted.headers["X-Edge-Ignored"]


def test_prompt_does_not_change_with_a_line_of_metadata() -> None:
    prompts = []
    for line in ("x-anthropic-billing-header: cch=1;", "x-anthropic-billing-header: cch=22;", None):
        system = "Be brief." if line is None else f"{line}\nBe brief."
        parts_of_system = [{"type": "text", "text": text} for text in (line, "Be brief.") if text]
        for api, body in (
            (MESSAGES, {"system": system, "messages": HI, "max_tokens": 5}),
            (MESSAGES, {"system": parts_of_system, "messages": HI, "max_tokens": 5}),
            (CHAT, {"messages": [{"role": "system", "content": system}, *HI]}),
            (RESPONSES, {"instructions": system, "input": HI}),
        ):
            prompts.append(generations(api, body)[0].messages)
    assert all(prompt == prompts[0] for prompt in prompts)


CODEX = json.loads((REQUESTS / "codex.json").read_text())


def test_codex_is_answered_without_tools_that_are_no_functions(url: str, models: ScriptedModels) -> None:
    response = httpx.post(f"{url}/v1/responses", json=CODEX, timeout=60)
    assert response.status_code == 200, response.text
    assert events_of(response.text)[-1]["type"] == "response.completed"
    named = response.headers["X-Edge-Ignored"].split(", ")
    assert {"reasoning.effort", "text.verbosity", "tools.local_shell", "tools.web_search"} <= set(named)
    generation = models.scripted.requests[-1]
    text = json.dumps(generation.messages)
    assert all(word in text for word in ("ls", "apply_patch", "*** Begin Patch", "Done!", "weather"))
    assert "abc" not in text
    assert [tool for tool in json.dumps(generation.tools) if "web_search" in tool] == []


SILLY = json.loads((REQUESTS / "neutral_values.json").read_text())


def test_values_that_ask_for_nothing_change_no_answer_of_any_api(url: str) -> None:
    for api, rich in RICH:
        body = {name: value for name, value in rich.items() if name != "lora"}  # this model has none
        plain, silly = (
            httpx.post(url + api.path, json={**body, "stream": False, **more}, timeout=60)
            for more in ({}, {name: value for name, value in SILLY.items() if name not in body})
        )
        assert plain.status_code == 200, plain.text
        assert silly.status_code == 200, (api.path, silly.text)
        said = [str(response.json()).count("Hello there.") for response in (plain, silly)]
        assert said[0] == said[1], api.path
        others = set(silly.headers.get("X-Edge-Ignored", "").split(", ")) - set(
            plain.headers.get("X-Edge-Ignored", "").split(", ")
        )
        assert others <= {"samplers", ""}, (api.path, others)


@pytest.mark.parametrize(
    ("more", "callable_"),
    [
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]},
                }
            },
            ["g"],
        ),
        ({"tool_choice": {"type": "custom", "custom": {"name": "x"}}}, ["f", "g"]),
        ({"tool_choice": {"type": "function", "name": "g"}}, ["f", "g"]),
        ({"tool_choice": {"type": "auto"}}, ["f", "g"]),
        ({"tool_choice": "none"}, []),
        ({"tool_choice": "g"}, ["f", "g"]),
    ],
    ids=str,
)
def test_choices_of_tools(more: dict[str, Any], callable_: list[str]) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    body = {"messages": HI, "tools": [*tools, {"type": "custom", "custom": {"name": "x"}}], **more}
    generation = generations(CHAT, body, "{{ tools }}")[0]
    assert [tool["function"]["name"] for tool in generation.tools] == callable_


@pytest.mark.parametrize("choice", ["sometimes", {"type": "function"}, {"type": "function", "function": {"name": "h"}}])
def test_choice_of_no_tool_is_refused(url: str, choice: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": HI, "tools": tools, "tool_choice": choice}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")


def test_functions_of_older_clients_are_tools_and_their_calls_have_the_older_form() -> None:
    models = ScriptedModels()
    models.scripted.template = "{{ tools }} {{ tool_calls }} <tool_call>"
    models.scripted.says = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
    history = [
        *HI,
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a":"b"}'}},
        {"role": "function", "name": "f", "content": "c"},
    ]
    body = {"messages": history, "functions": [FUNCTION], "function_call": "auto"}
    with serving(create_app(models, ServeOptions())) as url:
        whole = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        streamed = httpx.post(f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=60)
    assert whole.status_code == 200, whole.text
    [choice] = whole.json()["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"]["name"] == "f"
    assert json.loads(choice["message"]["function_call"]["arguments"]) == {"a": "b"}
    deltas = [
        event["choices"][0]["delta"].get("function_call", {}) for event in events_of(streamed.text) if event["choices"]
    ]
    assert json.loads("".join(delta.get("arguments", "") for delta in deltas)) == {"a": "b"}
    generation = models.scripted.requests[0].messages or ()
    assert generation[1]["tool_calls"][0]["function"]["name"] == "f"
    assert generation[2]["role"] == "tool"


def test_stop_string_is_in_the_output_if_it_is_to_be(url: str, models: ScriptedModels) -> None:
    models.scripted.stop_string = "END"
    try:
        for path, body in (("/v1/chat/completions", {"messages": HI}), ("/v1/completions", {"prompt": "Hi"})):
            for included in (True, False):
                more = {"stop": ["END"], "include_stop_str_in_output": included}
                response = httpx.post(url + path, json={**body, **more}, timeout=60)
                assert ("Hello there.END" in response.text) is included
    finally:
        models.scripted.stop_string = None


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_compute_the_prompt_alone(url: str, stream: bool) -> None:
    for path, body, used in (
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 0}, "completion_tokens"),
        ("/v1/messages", {"messages": HI, "max_tokens": 0}, "output_tokens"),
        ("/completion", {"prompt": "Hi", "n_predict": 0}, "tokens_predicted"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 0}, "tokens_predicted"),
    ):
        more = {"stream": stream, **({"stream_options": {"include_usage": True}} if "completions" in path else {})}
        response = httpx.post(url + path, json={**body, **more}, timeout=60)
        assert response.status_code == 200, response.text
        assert "Hel" not in response.text
        assert f'"{used}":0' in response.text


def test_names_of_clients_are_bounded_and_logged_once(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from edge.serve.http import ignored, openapi

    monkeypatch.setattr(openapi, "_ignored", ignored.IgnoredFields())
    hostile = {"a\r\nX-Evil: 1": 1, "ü\u202e": 1, "n" * 10_000: 1, **{f"f{number}": 1 for number in range(300)}}
    with caplog.at_level(logging.WARNING, "edge"):
        monkeypatch.setattr(logging.getLogger("edge"), "propagate", True)
        for stream in (False, True, False):
            body = {"messages": HI, "stream": stream, "plain_hint": 1, **hostile}
            response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
            names = response.headers["X-Edge-Ignored"].split(", ")
            assert len(names) == 20
            assert all(len(name) <= 80 and name.isascii() for name in names)
            assert "X-Evil" not in response.headers
        lines = [record for record in caplog.records if "plain_hint" in record.getMessage()]
    assert len(lines) == 1
    assert "\n" not in lines[0].getMessage()


def test_log_of_ignored_fields_forgets_the_client_that_asked_last_of_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from edge.serve.http import ignored

    monkeypatch.setattr(ignored, "MAX_CLIENTS", 2)
    monkeypatch.setattr(ignored, "MAX_LOGGED", 3)
    fields = ignored.IgnoredFields()

    def logged(client: str, *names: str) -> str:
        caplog.clear()
        scope = {"type": "http", "path": "/v1/chat/completions", "headers": [], "client": (client, 1)}
        fields.tell(Request(scope), Fields.model_validate(dict.fromkeys(names, 1)), Response())
        return " ".join(record.getMessage() for record in caplog.records)

    with caplog.at_level(logging.INFO, "edge"):
        monkeypatch.setattr(logging.getLogger("edge"), "propagate", True)
        assert "hint" in logged("a", "hint")
        assert "hint" in logged("b", "hint")
        assert not logged("a", "hint")
        assert "hint" in logged("c", "hint")  # b, which asked before a, is forgotten
        assert not logged("a", "hint")
        assert not logged("c", "hint")
        assert "hint" in logged("b", "hint")
        several = [logged("b", f"f{number}") for number in range(5)]
        assert [bool(line) for line in several] == [True, True, False, False, False]


def test_functions_in_a_namespace_are_called_by_their_own_names() -> None:
    models = ScriptedModels()
    models.scripted.template = "{{ tools }} {{ tool_calls }} <tool_call>"
    models.scripted.says = '<tool_call>\n{"name": "mcp__x__f", "arguments": {"a": "b"}}\n</tool_call>'
    earlier = {"type": "function_call", "call_id": "1", "name": "f", "namespace": "mcp__x", "arguments": "{}"}
    space = {"type": "namespace", "name": "mcp__x", "tools": [{"type": "function", **FUNCTION}, {"type": "custom"}]}
    result = {"type": "function_call_output", "call_id": "1", "output": "c"}
    with serving(create_app(models, ServeOptions())) as url:
        body = {"input": [*HI, earlier, result], "tools": [space]}
        response = httpx.post(f"{url}/v1/responses", json=body, timeout=60)
    assert response.status_code == 200, response.text
    [item] = response.json()["output"]
    assert (item["name"], item["namespace"], item["arguments"]) == ("f", "mcp__x", '{"a": "b"}')
    assert response.headers["X-Edge-Ignored"] == "tools.tools.custom"
    generation = models.scripted.requests[0]
    assert [tool["function"]["name"] for tool in generation.tools] == ["mcp__x__f"]
    assert (generation.messages or [])[1]["tool_calls"][0]["function"]["name"] == "mcp__x__f"


def test_forms_of_thinking_of_other_servers() -> None:
    template = "{{ enable_thinking }}"
    for more, think in (
        ({"enable_thinking": False}, 0),
        ({"thinking": {"type": "disabled"}}, 0),
        ({"thinking": {"type": "enabled"}}, -1),
        ({"reasoning": {"effort": "low"}}, 1024),
        ({"reasoning": {"effort": ""}}, None),
        ({"thinking": True, "reasoning": "a lot"}, None),
    ):
        assert generations(CHAT, {"messages": HI, **more}, template)[0].think == think, more


SPECS = [{"type": "function", "function": FUNCTION}, {"type": "web_search"}]
# Fields that depend on others or on the model, which has no thoughts. The header names each of them.
WITHOUT_EFFECT: list[tuple[Api[Any], dict[str, Any], str]] = [
    (CHAT, {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"reasoning_budget": 9}, "reasoning_budget"),
    (CHAT, {"thinking_budget_tokens": 9}, "reasoning_budget"),
    (CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),
    (CHAT, {"reasoning_effort": "unheard-of"}, "reasoning_effort"),
    (CHAT, {"tools": SPECS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
    (CHAT, {"tools": SPECS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    (CHAT, {"tools": SPECS[1:], "tool_choice": "required"}, "tool_choice"),
    (RESPONSES, {"top_logprobs": 3}, "top_logprobs"),
    (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
    (RESPONSES, {"tools": SPECS[1:], "tool_choice": "required"}, "tool_choice"),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking"),
    (MESSAGES, {"output_config": {"effort": "low"}}, "output_config.effort"),
    (OLLAMA_CHAT, {"top_logprobs": 3}, "top_logprobs"),
    (OLLAMA_CHAT, {"think": "low"}, "think"),
    (OLLAMA_TEXT, {"top_logprobs": 3}, "top_logprobs"),
    (OLLAMA_TEXT, {"think": True}, "think"),
]


@pytest.mark.parametrize(
    ("api", "more", "name"), WITHOUT_EFFECT, ids=lambda value: value.path if isinstance(value, Api) else str(value)
)
def test_field_that_has_no_effect_beside_others_is_named_once(
    url: str, api: Api[Any], more: dict[str, Any], name: str
) -> None:
    base = PLAIN[api]
    plain = httpx.post(url + api.path, json=base, timeout=60)
    assert "X-Edge-Ignored" not in plain.headers, plain.headers["X-Edge-Ignored"]
    response = httpx.post(url + api.path, json={**base, **more}, timeout=60)
    assert response.status_code == 200, response.text
    assert response.headers["X-Edge-Ignored"].split(", ").count(name) == 1


@pytest.mark.parametrize("api", [api for api, _ in RICH], ids=lambda api: api.path)
def test_priority_of_a_key_that_may_not_push_ahead_is_named(api: Api[Any]) -> None:
    models = ScriptedModels()
    options = ServeOptions(api_keys=("sk-a",), admin_keys=("sk-admin",))
    with serving(create_app(models, options)) as url:
        for key, priority, own, is_named in (
            ("sk-a", -1, 0, True),
            ("sk-a", 0, 0, False),
            ("sk-a", 3, 3, False),
            ("sk-admin", -1, -1, False),
        ):
            body = {**PLAIN[api], "priority": priority}
            response = httpx.post(url + api.path, json=body, headers={"x-api-key": key}, timeout=60)
            assert response.status_code == 200, response.text
            assert models.scripted.requests[-1].priority == own
            names = response.headers.get("X-Edge-Ignored", "").split(", ")
            assert ("priority" in names) is is_named, (key, priority)


@pytest.mark.parametrize("is_nested", [True, False])
@pytest.mark.parametrize("api", [CHAT, RESPONSES], ids=lambda api: api.path)
def test_mode_of_allowed_tools_holds(api: Api[Any], is_nested: bool) -> None:
    f, g = ({"name": name} for name in ("f", "g"))
    tools = [{"type": "function", **({"function": own} if api is CHAT else own)} for own in (f, g)]
    for mode, must_call in (("required", True), ("auto", False), (None, False)):
        inner = {"mode": mode, "tools": tools[1:]}
        choice = {"type": "allowed_tools", **({"allowed_tools": inner} if is_nested else inner)}
        body = {**PLAIN[api], "tools": tools, "tool_choice": choice}
        generation = generations(api, body, "{{ tools }}")[0]
        assert [tool["function"]["name"] for tool in generation.tools] == ["g"]
        assert ("lark" in generation.sampling) is must_call, mode
