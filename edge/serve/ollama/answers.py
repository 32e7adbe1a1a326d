"""/api/chat and /api/generate of Ollama's API."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import reduce
from typing import Any

from edge.serve.apis.api import Api, Event, ParsedRequest, accumulated
from edge.serve.apis.chat import FunctionTool
from edge.serve.apis.fields import constrained, template_variables, think_tokens
from edge.serve.apis.history import linked
from edge.serve.apis.openai_fields import token_logprobs
from edge.serve.deltas import Begin, Call, Deltas, End, Text, Thought
from edge.serve.http.errors import BadRequest, Failure, error_body
from edge.serve.media import Attached, Content, Part, attached, joined
from edge.serve.ollama.fields import AnswerRequest, OllamaChatRequest, OllamaTextRequest, pictures
from edge.serve.served import Generation, Infill
from edge.serve.tools.conversation import Conversation, conversation
from edge.serve.tools.functions import FunctionUse, Message, json_text
from edge.serve.tools.parser import CallArguments, CallEnd
from edge.text.thinking_format import AUTO

_clock = time.monotonic_ns


def timestamp() -> str:
    """Return the current time in UTC in the format of RFC 3339."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat().replace("+00:00", "Z")


def parse_chat(request: OllamaChatRequest, template: str) -> ParsedRequest:
    functions = [tool.function.to_function() for tool in request.tools or () if isinstance(tool, FunctionTool)]
    turns = [(f"messages.{n}", message.role, message.to_content()) for n, message in enumerate(request.messages or ())]
    return _chat(request, _messages(request, turns), FunctionUse(functions), template, attached(turns))


def parse_text(request: OllamaTextRequest, template: str) -> ParsedRequest:
    """Parse a text request: a chat of one question, or plain text if it is raw or has a gap. Raises BadRequest."""
    if not (request.raw or request.suffix):
        prompt = [*pictures(request.images), Part(type="text", text=request.prompt)]
        system = [{"role": "system", "content": request.system}] if request.system else []
        messages = [*system, {"role": "user", "content": joined(prompt)}]
        return _chat(request, messages, FunctionUse(), template, attached([("images", "user", prompt)]))
    if request.images:
        raise BadRequest("pictures need a chat, and are not possible with raw or suffix; leave these out", "images")
    schema = request.text_schema
    constraint = {} if schema is None else {"json_schema": json_text(schema, "format")}
    generation = Generation(
        prompt=None if request.suffix else request.prompt,
        infill=Infill(request.prompt or "", request.suffix) if request.suffix else None,
        max_tokens=request.max_tokens,
        sampling=constrained(request.given_options.sampling(), constraint),
        logprobs=request.n_alternatives,
    )
    return ParsedRequest([generation])


def _chat(
    request: AnswerRequest, messages: Sequence[Message], use: FunctionUse, template: str, media: Attached
) -> ParsedRequest:
    effort = request.think if isinstance(request.think, str) else None
    budget = None if request.think is None or effort else AUTO if request.think else 0
    parsed: Conversation = conversation(
        messages,
        use,
        template,
        request.text_schema,
        template_variables(template, None, effort),
        think_tokens(request, template, None, effort, budget),
        continues=True,
    )
    sampling = request.given_options.sampling()
    return ParsedRequest.of_conversation(parsed, sampling, request.max_tokens, request.n_alternatives, media=media)


def _messages(request: OllamaChatRequest, turns: Sequence[tuple[str, str, Content]]) -> list[Message]:
    """Return messages in the form that templates use. turns: arguments of `attached` for these messages."""
    messages: list[Message] = []
    for message, (_, role, content) in zip(request.messages or (), turns, strict=True):
        values: dict[str, Any] = {"role": role, "content": joined(content)}
        if message.thinking:
            values["reasoning_content"] = message.thinking
        if message.tool_calls and role == "assistant":
            values["tool_calls"] = [call.to_json() for call in message.tool_calls]
        if role == "tool":
            names = {"tool_call_id": message.tool_call_id, "name": message.tool_name or message.name}
            values |= {key: value for key, value in names.items() if value is not None}
        messages.append(values)
    return linked(messages)


async def chat_events(request: OllamaChatRequest, model: str, deltas: Deltas) -> AsyncGenerator[Event, None]:
    """Yield the lines of a chat. The last line has the durations. Calls are sent complete."""
    name, arguments = "", ""
    async for event in _events(request, model, deltas):
        if isinstance(event, Call):
            name, arguments = event.name, ""
        elif isinstance(event, CallArguments):
            arguments += event.text
        elif isinstance(event, CallEnd):
            call = {"function": {"name": name, "arguments": json.loads(arguments or "{}")}}
            yield {**_head(model), "message": {"role": "assistant", "content": "", "tool_calls": [call]}, "done": False}
        elif isinstance(event, Mapping):
            own = {key: event[key] for key in ("content", "thinking") if key in event}
            rest = {key: value for key, value in event.items() if key not in own}
            yield {**_head(model), "message": {"role": "assistant", **own}, **rest}


async def text_events(request: OllamaTextRequest, model: str, deltas: Deltas) -> AsyncGenerator[Event, None]:
    """Yield the lines of a text. The last line has the durations."""
    async for event in _events(request, model, deltas):
        if isinstance(event, Mapping):
            rest = {key: value for key, value in event.items() if key != "content"}
            yield {**_head(model), "response": event["content"], **rest}


async def _events(
    request: AnswerRequest, model: str, deltas: Deltas
) -> AsyncGenerator[Event | Call | CallArguments | CallEnd, None]:
    """Yield the events common to chats and texts, with the text as `content`. Calls are passed on unchanged."""
    begin, begun = Begin(0, 0), request._loaded
    async for _, delta in deltas:
        if isinstance(delta, Begin):
            begin, begun = delta, _clock()
        elif isinstance(delta, Thought):
            yield {"content": "", "thinking": delta.text, "done": False}
        elif isinstance(delta, Text):
            tokens = token_logprobs(delta.pieces)
            yield {"content": delta.text, **({"logprobs": tokens} if tokens else {}), "done": False}
        elif isinstance(delta, End):
            now, context = _clock(), request.given_options.num_ctx or 0
            yield {
                "content": "",
                "done": True,
                "done_reason": "length" if delta.reason == "length" else "stop",
                **delta.extra,
                "total_duration": now - request._arrived,
                "load_duration": request._loaded - request._arrived,
                "prompt_eval_count": begin.prompt_tokens,
                "prompt_eval_duration": begun - request._loaded,
                "eval_count": delta.generated_tokens,
                "eval_duration": now - begun,
                **({"num_ctx": request._context} if context > request._context else {}),
            }
        else:
            yield delta


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": timestamp()}


def fold(events: Sequence[Event]) -> Event:
    joined = ("message", "response", "thinking", "logprobs")
    whole = {
        **events[-1],
        **reduce(accumulated, ({key: event[key] for key in joined if key in event} for event in events)),
    }
    if "message" in whole:
        whole["message"]["role"] = "assistant"
    return whole


def failed(failure: Failure, _count: int) -> Event:
    return error_body(failure, CHAT.path)


CHAT = Api(
    "/api/chat", "Continue a conversation (Ollama's API).", OllamaChatRequest, parse_chat, chat_events, fold, failed,
    lines=True,
)  # fmt: skip
TEXT = Api(
    "/api/generate", "Answer a prompt (Ollama's API).", OllamaTextRequest, parse_text, text_events, fold, failed,
    lines=True,
)  # fmt: skip
