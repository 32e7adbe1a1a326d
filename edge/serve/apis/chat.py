"""/v1/chat/completions of OpenAI's API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, JsonValue, Tag, model_validator

from edge.serve.apis.api import Api, Event, ParsedRequest, by_index
from edge.serve.apis.fields import (
    MAX_LOGPROBS,
    Fields,
    Items,
    JsonObject,
    SamplingRequest,
    TemplateVariables,
    limit,
    template_variables,
    think_tokens,
)
from edge.serve.apis.history import CallId, PastCall, PastFunction, Role, linked, past_call
from edge.serve.apis.openai_fields import ResponseFormat, chunks, error_event, folded, text_schema, token_logprobs
from edge.serve.apis.other_fields import CHAT_IGNORED, CHAT_REFUSED, Refused
from edge.serve.apis.texts import system_text
from edge.serve.apis.tool_fields import (
    ChosenTool,
    FunctionFields,
    NamedFunction,
    OtherTool,
    function_use,
    tool_tag,
)
from edge.serve.deltas import Begin, Call, Delta, Deltas, End, Text, Thought
from edge.serve.http.errors import BadRequest
from edge.serve.media import Part, attached, joined
from edge.serve.tools.conversation import conversation
from edge.serve.tools.functions import FunctionUse, Message
from edge.serve.tools.parser import CallArguments, CallEnd
from edge.text.templates.template import CONTINUES
from edge.text.thinking_format import AUTO

MAX_EFFORT = 40  # characters


class ChatMessage(Fields):
    role: Role
    content: str | Items[Part] | JsonObject | None = None
    name: str | None = None
    tool_calls: Items[PastCall] | None = None
    tool_call_id: CallId = None
    function_call: PastFunction | None = Field(None, description="as tool_calls, of one call")
    refusal: str | None = Field(None, description="the answer, if content is empty")
    reasoning_content: str | None = Field(None, description="thought before the answer, for templates that include it")

    ignored = frozenset({"annotations", "audio"})  # the text of an earlier spoken answer is in the content


class FunctionTool(Fields):
    type: str = Field("function", description="function")
    function: FunctionFields

    @model_validator(mode="before")
    @classmethod
    def _nest(cls, tool: Any) -> Any:
        """Accept a tool in the form of the responses API, too."""
        is_flat = isinstance(tool, dict) and "name" in tool and "function" not in tool
        return {"function": {key: value for key, value in tool.items() if key != "type"}} if is_flat else tool


Tool = Annotated[Annotated[FunctionTool, Tag("Function")] | Annotated[OtherTool, Tag("Other")], Discriminator(tool_tag)]


class ChatRequest(SamplingRequest):
    messages: Annotated[Items[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, description="as max_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Items[Tool] | None = None
    tool_choice: str | ChosenTool | None = Field(None, description="auto, none, required, or a function")
    functions: Items[FunctionFields] | None = Field(None, description="as tools, in the deprecated form")
    function_call: str | NamedFunction | None = Field(None, description="auto, none, or the function to call")
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most; true: any number")
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = Field(None, max_length=MAX_EFFORT, description="none: turn thinking off")
    reasoning_budget: int | None = Field(None, description="maximum tokens of thoughts; 0: none, below 0: unlimited")
    thinking_budget_tokens: int | None = Field(None, description="as reasoning_budget")
    enable_thinking: bool | None = Field(None, description="template variable of the same name")
    thinking: JsonValue = Field(None, description='{"type": "enabled" or "disabled"}, as enable_thinking')
    reasoning: JsonValue = Field(None, description='{"effort": ...}, as reasoning_effort')
    chat_template_kwargs: TemplateVariables | None = Field(None, description="variables of the model's chat template")
    continue_final_message: bool | None = Field(None, description="true: the last message begins the answer")

    @model_validator(mode="before")
    @classmethod
    def _map_logprobs(cls, values: Any) -> Any:
        """Accept a number of alternatives in `logprobs`, as in the completions API."""
        n = values.get("logprobs") if isinstance(values, dict) else None
        is_number = isinstance(n, int) and not isinstance(n, bool) and n > 1
        return {"top_logprobs": n, **values, "logprobs": True} if is_number else values

    refused: ClassVar[Refused] = {**SamplingRequest.refused, **CHAT_REFUSED}
    ignored = SamplingRequest.ignored | CHAT_IGNORED
    budget_field = "reasoning_budget"

    @property
    def thought_budget(self) -> int | None:
        """Thinking budget in tokens, if the request has one."""
        budget = self.thinking_budget_tokens if self.reasoning_budget is None else self.reasoning_budget
        return None if budget is None else max(budget, AUTO)

    @property
    def variables(self) -> dict[str, Any]:
        """Variables for the model's chat template."""
        kind = self.thinking.get("type") if isinstance(self.thinking, dict) else None
        thinks = {"enabled": True, "disabled": False}.get(kind) if isinstance(kind, str) else None
        enabled = thinks if self.enable_thinking is None else self.enable_thinking
        own = {} if enabled is None else {"enable_thinking": enabled}
        return {**own, **(self.chat_template_kwargs or {})}

    @property
    def effort(self) -> str | None:
        """Reasoning effort, from any of its fields."""
        effort = self.reasoning.get("effort") if isinstance(self.reasoning, dict) else None
        return self.reasoning_effort or (effort[:MAX_EFFORT] if isinstance(effort, str) and effort else None)

    @property
    def has_functions(self) -> bool:
        """True if the request uses the deprecated field `functions`. Its answers have at most one call."""
        return bool(self.functions) and not self.tools


def parse(request: ChatRequest, template: str) -> ParsedRequest:
    """Parse a request to a conversation with n answers. Raises BadRequest."""
    if request.top_logprobs and not request.logprobs:
        request.ignore("top_logprobs")
    parsed = conversation(
        linked(_message(message) for message in request.messages),
        _use(request),
        template,
        text_schema(request.response_format, request.json_schema),
        template_variables(template, request.variables, request.effort),
        think_tokens(request, template, request.variables, request.effort, request.thought_budget),
        continues=bool(request.continue_final_message),
    )
    if request.continue_final_message and CONTINUES not in parsed.messages[-1]:
        raise BadRequest(
            "continue_final_message needs a last message of the assistant with text only, another message before it,"
            " no response_format, and no tool that is strict or must be called",
            "continue_final_message",
        )
    max_tokens = limit(request.max_completion_tokens or request.max_tokens) or None
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    media = attached(
        [(f"messages.{n}.content", message.role, message.content) for n, message in enumerate(request.messages)]
    )
    return ParsedRequest.of_conversation(parsed, request.sampling(), max_tokens, logprobs, request.n or 1, media)


def _use(request: ChatRequest) -> FunctionUse:
    if request.has_functions:
        call = request.function_call
        named = ChosenTool(type="function", function=call) if isinstance(call, NamedFunction) else call
        functions = [function.to_function() for function in request.functions or ()]
        return function_use(request, functions, named, parallel=False, has_others=False)
    tools = [tool.function.to_function() for tool in request.tools or () if isinstance(tool, FunctionTool)]
    has_others = len(tools) < len(request.tools or ())
    return function_use(request, tools, request.tool_choice, request.parallel_tool_calls, has_others=has_others)


def _message(message: ChatMessage) -> Message:
    content = system_text(message.content) if message.role == "system" else joined(message.content)
    values: dict[str, Any] = {"role": message.role, "content": content or message.refusal or ""}
    calls = [call.to_json() for call in message.tool_calls or ()]
    if message.function_call is not None and not calls:
        calls = [past_call(None, message.function_call.name, message.function_call.arguments)]
    if calls and message.role == "assistant":
        values["tool_calls"] = calls
    if message.tool_call_id is not None:
        values["tool_call_id"] = message.tool_call_id
    for key in ("name", "reasoning_content"):
        if (value := getattr(message, key)) is not None:
            values[key] = value
    return values


def events(request: ChatRequest, model: str, deltas: Deltas) -> AsyncGenerator[Event, None]:
    calls = [0] * (request.n or 1)
    is_older = request.has_functions

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
            if is_older:
                return {"delta": {"function_call": function}}
            begun = {"index": calls[index], "id": delta.id, "type": "function", "function": function}
            return {"delta": {"tool_calls": [begun]}}
        if isinstance(delta, CallArguments):
            if is_older:
                return {"delta": {"function_call": {"arguments": delta.text}}}
            return {"delta": {"tool_calls": [{"index": calls[index], "function": {"arguments": delta.text}}]}}
        if isinstance(delta, CallEnd):
            calls[index] += 1
            return None
        older = is_older and isinstance(delta, End) and delta.reason == "tool_calls"
        return {"delta": {}, **({"finish_reason": "function_call"} if older else {})}

    return chunks(request, model, deltas, ("chatcmpl-", "chat.completion.chunk"), part)


def fold(events_: Sequence[Event]) -> Event:
    response = folded(events_, "chat.completion")
    for choice in response["choices"]:
        delta = choice.pop("delta")
        calls = by_index(delta.pop("tool_calls", ()))
        for call in calls:
            del call["index"]
        choice["message"] = {"role": "assistant", "refusal": None, **delta}
        if calls or "function_call" in delta:
            choice["message"] |= {"content": delta["content"] or None, **({"tool_calls": calls} if calls else {})}
    return response


CHAT = Api("/v1/chat/completions", "Continue a conversation.", ChatRequest, parse, events, fold, error_event, "[DONE]")
