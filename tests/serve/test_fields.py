"""Test that each known field of a request works, is ignored because it changes nothing, or returns a 400."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from edge.errors import SamplingError
from edge.llm.sampler import MAX_BIAS, SamplingParams
from edge.models.demo import MODEL_PATH
from edge.serve import media
from edge.serve.apis import (
    chat,
    fields,
    messages,
    messages_fields,
    native,
    openai_fields,
    responses_fields,
    tool_fields,
)
from edge.serve.apis.completions import CompletionRequest
from edge.serve.apis.embeddings import EmbeddingsRequest
from edge.serve.apis.other_fields import is_neutral
from edge.serve.app import create_app
from edge.serve.options import ServeOptions
from edge.text.templates.template import CONTINUES
from tests.serve.scripted import ScriptedModels
from tests.serve.serving import serving

if TYPE_CHECKING:
    from pydantic import BaseModel

HI = [{"role": "user", "content": "Hi"}]
CHAT = ("/v1/chat/completions", {"messages": HI})
COMPLETIONS = ("/v1/completions", {"prompt": "Hi"})
RESPONSES = ("/v1/responses", {"input": "Hi"})
MESSAGES = ("/v1/messages", {"messages": HI, "max_tokens": 5})
NATIVE = ("/completion", {"prompt": "Hi"})
OLLAMA = ("/api/chat", {"messages": HI, "stream": False})
Api = tuple[str, dict[str, Any]]
# The options of /completion in the README of llama.cpp's server.
LLAMA = """prompt temperature dynatemp_range dynatemp_exponent top_k top_p min_p n_predict n_indent n_keep n_cmpl
n_cache_reuse stream stop repeat_penalty repeat_last_n presence_penalty frequency_penalty mirostat mirostat_tau
mirostat_eta grammar json_schema seed ignore_eos logit_bias n_probs min_keep t_max_predict_ms id_slot cache_prompt
return_tokens samplers timings_per_token return_progress sse_ping_interval post_sampling_probs response_fields
lora""".split()


def names(request: type[BaseModel]) -> set[str]:
    """All fields of a part of a request that something is known of."""
    own = {model_field.alias or name for name, model_field in request.model_fields.items()}
    assert issubclass(request, fields.Fields)
    return own | set(request.refused) | request.ignored | set(request.other_names)


def test_no_field_of_the_official_clients_is_unknown() -> None:
    import anthropic.types as claude
    from anthropic.types import message_count_tokens_params, message_create_params
    from anthropic.types.beta import message_create_params as beta
    from openai.types import chat as gpt
    from openai.types import completion_create_params, embedding_create_params, responses, shared_params
    from openai.types.chat import completion_create_params as chat_params
    from openai.types.responses import response_create_params, response_input_item_param
    from openai.types.shared_params import response_format_json_schema

    pairs: list[tuple[type[BaseModel], Any]] = [
        (chat.ChatRequest, chat_params.CompletionCreateParamsBase),
        (chat.ChatMessage, gpt.ChatCompletionUserMessageParam),
        (chat.ChatMessage, gpt.ChatCompletionAssistantMessageParam),
        (chat.ChatMessage, gpt.ChatCompletionToolMessageParam),
        (media.Part, gpt.ChatCompletionContentPartTextParam),
        (media.Part, gpt.ChatCompletionContentPartImageParam),
        (media.Part, responses.ResponseInputImageParam),
        (media.Part, claude.ImageBlockParam),
        (tool_fields.FunctionFields, shared_params.FunctionDefinition),
        (fields.StreamOptions, gpt.ChatCompletionStreamOptionsParam),
        (openai_fields.ResponseFormat, response_format_json_schema.JSONSchema),
        (CompletionRequest, completion_create_params.CompletionCreateParamsBase),
        (EmbeddingsRequest, embedding_create_params.EmbeddingCreateParams),
        (responses_fields.ResponsesRequest, response_create_params.ResponseCreateParamsBase),
        (responses_fields.FunctionTool, responses.FunctionToolParam),
        (responses_fields.MessageItem, responses.EasyInputMessageParam),
        (responses_fields.MessageItem, responses.ResponseOutputMessageParam),
        (media.Part, responses.ResponseInputTextParam),
        (media.Part, responses.ResponseOutputTextParam),
        (responses_fields.FunctionCallItem, responses.ResponseFunctionToolCallParam),
        (responses_fields.FunctionOutputItem, response_input_item_param.FunctionCallOutput),
        (responses_fields.TextFields, responses.ResponseTextConfigParam),
        (openai_fields.ResponseFormat, responses.ResponseFormatTextJSONSchemaConfigParam),
        (responses_fields.Reasoning, shared_params.Reasoning),
        (fields.StreamOptions, response_create_params.StreamOptions),
        (messages.MessagesRequest, message_create_params.MessageCreateParamsBase),
        (messages.MessagesRequest, beta.MessageCreateParamsBase),
        (messages_fields.MessagesInput, message_count_tokens_params.MessageCountTokensParams),
        (media.Part, claude.TextBlockParam),
        (messages_fields.ToolUseBlock, claude.ToolUseBlockParam),
        (messages_fields.ToolResultBlock, claude.ToolResultBlockParam),
        (messages_fields.AnthropicTool, claude.ToolParam),
        (messages_fields.OutputConfig, claude.OutputConfigParam),
        (messages_fields.ToolChoice, claude.ToolChoiceToolParam),
    ]
    dropped = {
        f"{request.__name__}.{name}"
        for request, theirs in pairs
        for name in set(theirs.__annotations__) - names(request)
    }
    assert not dropped, "say of each whether it works, changes nothing, or is refused (edge/serve/apis/other_fields.py)"


def test_no_option_of_llama_server_is_unknown() -> None:
    others = (chat.ChatRequest, CompletionRequest, responses_fields.ResponsesRequest, messages.MessagesRequest)
    assert set(LLAMA) <= names(native.NativeRequest)
    for request in others:
        assert set(LLAMA) <= names(request), request


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(create_app(ScriptedModels(), ServeOptions())) as address:
        yield address


def post(url: str, api: Api, **more: Any) -> httpx.Response:
    return httpx.post(url + api[0], json={**api[1], **more}, timeout=60)


@pytest.mark.parametrize("api", [CHAT, COMPLETIONS, RESPONSES, MESSAGES], ids=lambda api: api[0])
def test_what_would_change_the_answer_is_refused_by_name(url: str, api: Api) -> None:
    request = {
        CHAT[0]: chat.ChatRequest,
        COMPLETIONS[0]: CompletionRequest,
        RESPONSES[0]: responses_fields.ResponsesRequest,
        MESSAGES[0]: messages.MessagesRequest,
    }[api[0]]
    with httpx.Client(base_url=url, timeout=60) as client:
        for name in request.refused:  # type: ignore[attr-defined]
            response = client.post(api[0], json={**api[1], name: "something"})
            assert response.status_code == 400, name
            error = response.json()["error"]
            assert error["message"].startswith(f"{name} is not supported")
            assert error.get("param", name) == name  # Anthropic's form has no place for it
        harmless = {name: (neutral or (None,))[0] for name, neutral in request.refused.items()}  # type: ignore[attr-defined]
        ignored = dict.fromkeys(request.ignored - request.model_fields.keys(), "something")  # type: ignore[attr-defined]
        response = client.post(api[0], json={**api[1], **harmless, **ignored})
        assert response.status_code == 200, response.text
        named = response.headers["X-Edge-Ignored"].split(", ")
        assert len(named) == 20
        assert set(named) <= set(ignored)


def test_a_value_that_is_neutral() -> None:
    assert is_neutral(None, ())
    assert is_neutral(False, ())
    assert is_neutral(0.0, (0,))
    assert not is_neutral(True, (1,))
    assert not is_neutral(0.1, (0,))
    assert not is_neutral([1], ([],))


@pytest.mark.parametrize(
    ("api", "body", "word"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "url"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "source"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "no files"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": 5}]}]}, "content.0"),
    ],
    ids=range(5),
)  # fmt: skip
def test_parts_that_are_no_parts_are_refused_in_words(url: str, api: Api, body: dict[str, Any], word: str) -> None:
    message = post(url, api, **body).json()["error"]["message"]
    assert word in message


@pytest.mark.parametrize(
    ("api", "more", "word"),
    [
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "messages"),
        (CHAT, {"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": {f"a{n}": 1 for n in range(65)}}, "chat_template_kwargs"),
        (NATIVE, {"logit_bias": [["word", 1]]}, "logit_bias"),
        (NATIVE, {"logit_bias": [[5, True]]}, "logit_bias"),
        (NATIVE, {"logit_bias": [[5]]}, "logit_bias"),
        (NATIVE, {"n_cmpl": 65}, "n_cmpl"),
        (NATIVE, {"prompt": ["a"] * 33, "n_cmpl": 2}, "64"),
        (CHAT, {"continue_final_message": True}, "text only"),
        (("/embedding", {}), {}, "content"),
        (("/embedding", {"content": "a"}), {"encoding_format": "base64"}, "encoding_format"),
    ],
)  # fmt: skip
def test_what_cannot_be_done(url: str, api: Api, more: dict[str, Any], word: str) -> None:
    response = post(url, api, **more)
    assert (response.status_code, word in response.json()["error"]["message"]) == (400, True), response.text


def test_variables_come_to_the_template() -> None:
    models = ScriptedModels()
    models.scripted.template = "{{ enable_thinking }} {{ reasoning_effort }} {{ tools }}"
    with serving(create_app(models, ServeOptions())) as url:
        for api, more, variables, think in (
            (CHAT, {"chat_template_kwargs": {"a": False, "x": [1]}}, {"a": False, "x": [1]}, None),
            (CHAT, {"reasoning_effort": "low"}, {"reasoning_effort": "low"}, -1),
            (CHAT, {"reasoning_effort": "none"}, {"reasoning_effort": "none"}, 0),
            (RESPONSES, {"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}, -1),
            (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 9}}, {}, 9),
            (MESSAGES, {"thinking": {"type": "disabled"}}, {}, 0),
            (MESSAGES, {"thinking": {"type": "adaptive"}}, {}, None),
        ):  # fmt: skip
            assert post(url, api, **more).status_code == 200
            assert (models.scripted.requests[-1].variables, models.scripted.requests[-1].think) == (variables, think)
        thought = {"role": "assistant", "content": "b", "reasoning_content": "because"}
        assert post(url, CHAT, messages=[*HI, thought]).status_code == 200
        assert (models.scripted.requests[-1].messages or [])[-1]["reasoning_content"] == "because"


BEGUN = {"role": "assistant", "content": '{"a":'}
FORMAT = {"type": "json_schema", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("api", "more", "continues"),
    [
        (CHAT, {"messages": [*HI, BEGUN], "continue_final_message": True, "add_generation_prompt": False}, True),
        (CHAT, {"messages": [*HI, BEGUN]}, False),
        (MESSAGES, {"messages": [*HI, BEGUN]}, True),
        (MESSAGES, {"messages": [*HI, BEGUN, *HI]}, False),
        (MESSAGES, {"messages": [BEGUN]}, False),
        (MESSAGES, {"messages": [*HI, BEGUN], "output_config": {"format": FORMAT}}, False),
        (OLLAMA, {"messages": [*HI, BEGUN]}, True),
        (OLLAMA, {"messages": [*HI, {**BEGUN, "thinking": "Hm."}]}, False),
        (OLLAMA, {"messages": [*HI, BEGUN], "format": "json"}, False),
        (OLLAMA, {"messages": [*HI, {"role": "assistant", "content": ""}]}, False),
    ],
    ids=range(10),
)  # fmt: skip
def test_an_answer_goes_on_behind_its_beginning(api: Api, more: dict[str, Any], continues: bool) -> None:
    models = ScriptedModels()
    with serving(create_app(models, ServeOptions())) as url:
        assert post(url, api, **more).status_code == 200
    messages = models.scripted.requests[-1].messages or ()
    assert [CONTINUES in message for message in messages] == [*[False] * (len(messages) - 1), continues]


def test_turns_of_one_role_are_one_in_anthropics_api() -> None:
    models, use = ScriptedModels(), {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "5"}
    turns = [
        *HI,
        {"role": "user", "content": [{"type": "text", "text": "there"}]},
        {"role": "assistant", "content": [use]},
        {"role": "assistant", "content": "Well."},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
        {"role": "user", "content": "And?"},
    ]
    with serving(create_app(models, ServeOptions())) as url:
        assert post(url, MESSAGES, messages=turns).status_code == 200
    messages = [(message["role"], message["content"]) for message in models.scripted.requests[-1].messages or ()]
    assert messages[0] == ("user", "Hi\n\nthere")
    assert messages[2:] == [("assistant", "Well."), messages[3], ("user", "So?\n\nAnd?")]


def test_seeds_have_64_bits_and_one_of_them_is_any() -> None:
    models = ScriptedModels()
    with serving(create_app(models, ServeOptions())) as url:
        for seed, used in (
            (5, 5),
            (5.0, 5),
            (-1, None),
            (-2, 2**32 - 3),
            (2**70, 2**70 % (2**32 - 1)),
            (2**40, 2**40 % (2**32 - 1)),
            (2**63 - 1, 2**31 - 1),
        ):
            for api in (CHAT, COMPLETIONS, RESPONSES):
                assert post(url, api, seed=seed).status_code == 200
                assert models.scripted.requests[-1].sampling.get("seed") == used


def test_a_template_renders_variables() -> None:
    from edge.errors import TemplateError
    from edge.text.templates.template import ChatTemplate

    template = ChatTemplate("{{ 'on' if enable_thinking else 'off' }} {{ bos_token }}", bos="<s>")
    assert template.render(HI) == "off <s>"
    assert template.render(HI, variables={"enable_thinking": True}) == "on <s>"
    with pytest.raises(TemplateError, match="bos_token"):
        template.render(HI, variables={"bos_token": "x"})


@pytest.mark.parametrize(
    "options",
    [{"logit_bias": {5: 1e308}}, {"logit_bias": {5: -MAX_BIAS * 2}}, {"temperature": 1e308}, {"repeat_penalty": 1e308},
     {"repeat_penalty": 1e-320}],
    ids=str,
)  # fmt: skip
def test_numbers_that_no_logit_can_take(options: dict[str, Any]) -> None:
    with pytest.raises(SamplingError, match=f"{next(iter(options))}.* must be from"):
        SamplingParams(**options)


def test_a_constraint_that_nothing_follows_is_told_in_words(server: str) -> None:
    response = post(server, CHAT, regex=r"[^\s\S]")
    assert response.status_code == 400
    assert "NoExtension" not in response.text
    assert "no text can follow it" in response.json()["error"]["message"]


def test_models_tell_their_context_and_when_they_were_written(server: str) -> None:
    [model] = httpx.get(f"{server}/v1/models").json()["data"]
    assert model["created"] == int(MODEL_PATH.stat().st_mtime)
    assert model["created_at"].startswith("20")
    assert model["input_modalities"] == ["text"]
    assert model["context_length"] == model["max_model_len"] == model["meta"]["n_ctx_train"] == 1024
    assert model["meta"]["size"] == MODEL_PATH.stat().st_size
    assert httpx.get(f"{server}/v1/models/{model['id']}").json() == model
    assert httpx.get(f"{server}/models").json()["data"] == [model]
