"""/v1/chat/completions of OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from edge.serve.apis.api import Api, Event, ParsedRequest, by_index
from edge.serve.apis.fields import (
    MAX_LOGPROBS,
    Fields,
    FunctionName,
    Items,
    JsonObject,
    SamplingRequest,
    TemplateVariables,
    template_variables,
    think_tokens,
)
from edge.serve.apis.openai_fields import ResponseFormat, chunks, error_event, folded, text_schema, token_logprobs
from edge.serve.apis.other_fields import CHAT_REFUSED, OPENAI_IGNORED, Refused
from edge.serve.deltas import Begin, Call, Delta, Deltas, Text, Thought
from edge.serve.http.errors import BadRequest
from edge.serve.media import Part, joined, media_in
from edge.serve.tools.conversation import conversation
from edge.serve.tools.functions import Function, FunctionUse, Message
from edge.serve.tools.parser import CallArguments, CallEnd
from edge.templates.template import CONTINUES

Choice = Literal["auto", "none", "required"]


class CalledFunction(Fields):
    name: FunctionName
    arguments: str = Field(description="JSON of an object")


class ToolCall(Fields):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Fields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[Part] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(None, description="thought before it, for templates that keep it")

    refused: ClassVar[Refused] = {"audio": (), "function_call": (), "refusal": ("",)}
    ignored = frozenset({"annotations"})


class OfFunction(Fields):
    type: Literal["function"]


class FunctionFields(Fields):
    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    def to_function(self) -> Function:
        """Return the function, in the form of a conversation."""
        return Function(self.name, self.description or "", self.parameters or {}, bool(self.strict))


class Tool(OfFunction):
    function: FunctionFields


class NamedFunction(Fields):
    name: FunctionName


class NamedTool(OfFunction):
    function: NamedFunction


class ChatRequest(SamplingRequest):
    messages: Annotated[Items[ChatMessage], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Items[Tool] | None = None
    tool_choice: Choice | NamedTool | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most; true: any number")
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = Field(None, max_length=40, description="none: do not think")
    reasoning_budget: int | None = Field(None, ge=-1, description="tokens of thoughts; 0: none, -1: any number")
    thinking_budget_tokens: int | None = Field(None, ge=-1, description="as reasoning_budget")
    chat_template_kwargs: TemplateVariables | None = Field(None, description="variables of the model's chat template")
    continue_final_message: bool | None = Field(None, description="true: the last message begins the answer")

    refused: ClassVar[Refused] = {**SamplingRequest.refused, **CHAT_REFUSED}
    ignored = SamplingRequest.ignored | OPENAI_IGNORED | {"prediction"}

    @property
    def thought_budget(self) -> int | None:
        """Tokens of thoughts, if the request names a number."""
        return self.thinking_budget_tokens if self.reasoning_budget is None else self.reasoning_budget


def parse(request: ChatRequest, template: str) -> ParsedRequest:
    """Parse a request: the conversation, once for each of n answers. BadRequest."""
    if request.top_logprobs is not None and not request.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", "top_logprobs")
    parsed = conversation(
        [_message(message) for message in request.messages],
        _use(request),
        template,
        text_schema(request.response_format),
        template_variables(template, request.chat_template_kwargs, request.reasoning_effort),
        think_tokens(template, request.chat_template_kwargs, request.reasoning_effort, request.thought_budget),
        continues=bool(request.continue_final_message),
    )
    if request.continue_final_message and CONTINUES not in parsed.messages[-1]:
        raise BadRequest(
            "continue_final_message needs a text of the assistant alone as the last message, behind another one, and no"
            " response_format or tool that must be called or is strict",
            "continue_final_message",
        )
    max_tokens = request.max_completion_tokens or request.max_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    media = media_in(message.content for message in request.messages)
    return ParsedRequest.of_conversation(parsed, request.sampling(), max_tokens, logprobs, request.n or 1, media)


def _use(request: ChatRequest) -> FunctionUse:
    functions = [tool.function.to_function() for tool in request.tools or ()]
    choice = request.tool_choice
    named = choice.function if isinstance(choice, NamedTool) else choice
    return function_use(functions, named, request.parallel_tool_calls)


def function_use(
    functions: Sequence[Function], choice: Choice | NamedFunction | None, parallel: bool | None
) -> FunctionUse:
    """Return the functions of a request, and which of them must be called. BadRequest."""
    if isinstance(choice, NamedFunction):
        return FunctionUse(functions, name=choice.name)
    return FunctionUse(functions, choice or "auto", several=parallel)


def _message(message: ChatMessage) -> Message:
    values: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": joined(message.content),
    }
    if message.tool_calls:
        values["tool_calls"] = [
            {"id": call.id, "type": "function", "function": called(call.function.name, call.function.arguments)}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        values["tool_call_id"] = message.tool_call_id
    for key in ("name", "reasoning_content"):
        if (value := getattr(message, key)) is not None:
            values[key] = value
    return values


def called(name: str, arguments: str) -> dict[str, Any]:
    """Return a call in the form of templates. BadRequest if its arguments are no JSON object."""
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise BadRequest(f"the arguments of a call of {name!r} are no JSON of an object", "messages")
    return {"name": name, "arguments": parsed}


def events(request: ChatRequest, model: str, deltas: Deltas) -> AsyncGenerator[Event, None]:
    calls = [0] * (request.n or 1)

    def part(index: int, delta: Delta) -> dict[str, Any] | None:
        if isinstance(delta, Begin):
            return {"delta": {"role": "assistant", "content": ""}}
        if isinstance(delta, Thought):
            return {"delta": {"reasoning_content": delta.text}}
        if isinstance(delta, Text):
            tokens = token_logprobs(delta.pieces)
            return {"delta": {"content": delta.text}, "logprobs": {"content": tokens} if tokens else None}
        if isinstance(delta, Call):
            function = {"name": delta.name, "arguments": ""}
            begun = {"index": calls[index], "id": delta.id, "type": "function", "function": function}
            return {"delta": {"tool_calls": [begun]}}
        if isinstance(delta, CallArguments):
            return {"delta": {"tool_calls": [{"index": calls[index], "function": {"arguments": delta.text}}]}}
        if isinstance(delta, CallEnd):
            calls[index] += 1
            return None
        return {"delta": {}}

    return chunks(request, model, deltas, ("chatcmpl-", "chat.completion.chunk"), part)


def fold(events_: Sequence[Event]) -> Event:
    response = folded(events_, "chat.completion")
    for choice in response["choices"]:
        delta = choice.pop("delta")
        calls = by_index(delta.pop("tool_calls", ()))
        for call in calls:
            del call["index"]
        choice["message"] = {"role": "assistant", "refusal": None, **delta}
        if calls:
            choice["message"] |= {"content": delta["content"] or None, "tool_calls": calls}
    return response


CHAT = Api("/v1/chat/completions", "Continue a conversation.", ChatRequest, parse, events, fold, error_event, "[DONE]")
