"""/v1/messages of Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from pydantic import Field

from edge.serve.apis.api import Api, Event, ParsedRequest
from edge.serve.apis.fields import MAX_STOPS, Stop, given_sampling
from edge.serve.apis.messages_fields import MessagesInput, conversation_of
from edge.serve.apis.openai_fields import new_id
from edge.serve.deltas import Begin, Call, Deltas, End, Text
from edge.serve.http.errors import Failure, error_body

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesRequest(MessagesInput):
    max_tokens: int = Field(ge=1)
    stop_sequences: list[Stop] | None = Field(None, max_length=MAX_STOPS)
    temperature: float | None = Field(None, description="0: always the likeliest token; default 1")
    top_k: int | None = None
    top_p: float | None = None


def parse(request: MessagesRequest, template: str) -> ParsedRequest:
    """Parse a request. BadRequest."""
    parsed = conversation_of(request, template)
    sampling = given_sampling(request, ("temperature", "top_k", "top_p"))
    if request.stop_sequences:
        sampling["stop"] = request.stop_sequences
    return ParsedRequest.of_conversation(parsed, sampling, request.max_tokens)


async def events(_request: MessagesRequest, model: str, deltas: Deltas) -> AsyncGenerator[Event, None]:
    """Yield the start of a message, blocks of text and calls, and its end."""
    blocks, in_text = 0, False
    usage: dict[str, int] = {}

    def stop_text() -> list[Event]:
        nonlocal blocks, in_text
        if not in_text:
            return []
        in_text, blocks = False, blocks + 1
        return [{"type": "content_block_stop", "index": blocks - 1}]

    async for _, delta in deltas:
        if isinstance(delta, Begin):
            usage = _usage(delta)
            yield {"type": "message_start", "message": _message(model, usage)}
        elif isinstance(delta, Text) and delta.text:
            if not in_text:
                in_text = True
                yield {"type": "content_block_start", "index": blocks, "content_block": {"type": "text", "text": ""}}
            yield _block_delta(blocks, "text_delta", "text", delta.text)
        elif isinstance(delta, Call):
            for event in stop_text():
                yield event
            block = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
            yield {"type": "content_block_start", "index": blocks, "content_block": block}
            yield _block_delta(blocks, "input_json_delta", "partial_json", delta.arguments)
            yield {"type": "content_block_stop", "index": blocks}
            blocks += 1
        elif isinstance(delta, End):
            for event in stop_text():
                yield event
            is_string = delta.stop_string is not None and delta.reason == "stop"
            reason = "stop_sequence" if is_string else _REASONS[delta.reason]
            ended = {"stop_reason": reason, "stop_sequence": delta.stop_string, **delta.extra}
            total = {**usage, "output_tokens": delta.generated_tokens}
            yield {"type": "message_delta", "delta": ended, "usage": total}
            yield {"type": "message_stop"}


def _usage(begin: Begin) -> dict[str, int]:
    """Return the usage: cached tokens of the prompt are separate from computed ones."""
    computed = begin.prompt_tokens - begin.cached_tokens
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": begin.cached_tokens}
    return {"input_tokens": computed, **cached, "output_tokens": 0}


def _message(model: str, usage: dict[str, int]) -> dict[str, Any]:
    ended = {"stop_reason": None, "stop_sequence": None, "usage": usage}
    return {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": model, "content": [], **ended}


def _block_delta(index: int, kind: str, key: str, text: str) -> Event:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, key: text}}


def fold(events_: Sequence[Event]) -> Event:
    """Return the message that the events add up to."""
    message: dict[str, Any] = {}
    texts: list[list[str]] = []  # of each block
    for event in events_:
        if event["type"] == "message_start":
            message = {**event["message"], "content": []}
        elif event["type"] == "content_block_start":
            message["content"].append(dict(event["content_block"]))
            texts.append([])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            texts[-1].append(delta["text"] if delta["type"] == "text_delta" else delta["partial_json"])
        elif event["type"] == "message_delta":
            message |= {**event["delta"], "usage": event["usage"]}
    for block, parts in zip(message["content"], texts, strict=True):
        text = "".join(parts)
        block |= {"text": text} if block["type"] == "text" else {"input": json.loads(text)}
    return message


def failed(failure: Failure, _count: int) -> Event:
    """Return the last event of a stream that fails."""
    return error_body(failure, anthropic=True)


MESSAGES = Api("/v1/messages", "Continue a conversation.", MessagesRequest, parse, events, fold, failed)
