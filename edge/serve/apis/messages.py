"""/v1/messages of Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from edge.serve.apis.api import Api, Event, ParsedRequest
from edge.serve.apis.fields import MAX_STOPS, SamplingFields, Stops, limit
from edge.serve.apis.messages_fields import MessagesInput, conversation_of, media_of
from edge.serve.apis.openai_fields import new_id
from edge.serve.deltas import Begin, Call, Deltas, End, Text, Thought
from edge.serve.http.errors import Failure, error_body
from edge.serve.tools.parser import CallArguments, CallEnd

UNSIGNED = "unsigned"  # signature of all thoughts
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesRequest(MessagesInput, SamplingFields):
    max_tokens: int = Field(description="0: only compute the prompt; below 0: until the context is full")
    stop_sequences: Stops | None = Field(None, max_length=MAX_STOPS)

    other_names: ClassVar[Mapping[str, str]] = {
        **SamplingFields.other_names, **MessagesInput.other_names, "stop": "stop_sequences",
        "n_predict": "max_tokens", "n_cmpl": "n",
    }  # fmt: skip


def parse(request: MessagesRequest, template: str) -> ParsedRequest:
    parsed = conversation_of(request, template)
    sampling = request.sampling()
    if request.stop_sequences:
        sampling["stop"] = request.stop_sequences
    return ParsedRequest.of_conversation(parsed, sampling, limit(request.max_tokens), media=media_of(request))


class _Blocks:
    """Numbers the content blocks of a message. At most one block is open."""

    def __init__(self) -> None:
        self._count = 0
        self._open: str | None = None  # type of the open block

    def add(self, kind: str, text: str) -> list[Event]:
        begun: list[Event] = []
        if self._open != kind:
            block = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
            begun = [*self.end(), self._start(block)]
            self._open = kind
        return [*begun, _block_delta(self._count, f"{kind}_delta", kind, text)] if text else begun

    def call(self, call: Call) -> list[Event]:
        events = [
            *self.end(),
            self._start({"type": "tool_use", "id": call.id, "name": call.name, "input": {}}),
        ]
        self._open = "tool_use"
        return events

    def arguments(self, text: str) -> Event:
        return _block_delta(self._count, "input_json_delta", "partial_json", text)

    def end(self) -> list[Event]:
        """Return the events that end the open block, if there is one."""
        if self._open is None:
            return []
        # Without a signature, clients drop the thought when they send the conversation back.
        signed = [_block_delta(self._count, "signature_delta", "signature", UNSIGNED)]
        events = [*(signed if self._open == "thinking" else ()), {"type": "content_block_stop", "index": self._count}]
        self._open, self._count = None, self._count + 1
        return events

    def _start(self, block: dict[str, Any]) -> Event:
        return {"type": "content_block_start", "index": self._count, "content_block": block}


async def events(request: MessagesRequest, model: str, deltas: Deltas) -> AsyncGenerator[Event, None]:
    """Yield the start of a message, its blocks of thoughts, text and calls, and its end."""
    blocks = _Blocks()
    omits = request.thinking is not None and request.thinking.display == "omitted"
    usage: dict[str, int] = {}
    async for _, delta in deltas:
        if isinstance(delta, Begin):
            usage = _usage(delta)
            yield {"type": "message_start", "message": _message(model, usage)}
        elif isinstance(delta, Thought):
            for event in blocks.add("thinking", "" if omits else delta.text):
                yield event
        elif isinstance(delta, Text) and delta.text:
            for event in blocks.add("text", delta.text):
                yield event
        elif isinstance(delta, Call):
            for event in blocks.call(delta):
                yield event
        elif isinstance(delta, CallArguments):
            yield blocks.arguments(delta.text)
        elif isinstance(delta, CallEnd):
            for event in blocks.end():
                yield event
        elif isinstance(delta, End):
            for event in blocks.end():
                yield event
            is_string = delta.stop_string is not None and delta.reason == "stop"
            reason = "stop_sequence" if is_string else _REASONS[delta.reason]
            ended = {"stop_reason": reason, "stop_sequence": delta.stop_string, **delta.extra}
            total = {**usage, "output_tokens": delta.generated_tokens}
            yield {"type": "message_delta", "delta": ended, "usage": total}
            yield {"type": "message_stop"}


def _usage(begin: Begin) -> dict[str, int]:
    """Return the usage. Cached prompt tokens are separate from computed ones."""
    computed = begin.prompt_tokens - begin.cached_tokens
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": begin.cached_tokens}
    return {"input_tokens": computed, **cached, "output_tokens": 0}


def _message(model: str, usage: dict[str, int]) -> dict[str, Any]:
    ended = {"stop_reason": None, "stop_sequence": None, "usage": usage}
    return {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": model, "content": [], **ended}


def _block_delta(index: int, kind: str, key: str, text: str) -> Event:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, key: text}}


def fold(events_: Sequence[Event]) -> Event:
    message: dict[str, Any] = {}
    for event in events_:
        if event["type"] == "message_start":
            message = {**event["message"], "content": []}
        elif event["type"] == "content_block_start":
            message["content"].append({**event["content_block"]})
        elif event["type"] == "content_block_delta":
            block, (_, (key, text)) = message["content"][-1], event["delta"].items()
            block[key] = block.get(key, "") + text
        elif event["type"] == "message_delta":
            message |= {**event["delta"], "usage": event["usage"]}
    for block in message["content"]:
        if "partial_json" in block:
            block["input"] = json.loads(block.pop("partial_json"))
    return message


def failed(failure: Failure, _count: int) -> Event:
    return error_body(failure, MESSAGES.path)


MESSAGES = Api("/v1/messages", "Continue a conversation.", MessagesRequest, parse, events, fold, failed)
