"""/v1/responses of OpenAI's API, for texts and functions. Responses are not stored."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from edge.serve.apis.api import Api, Event, ParsedRequest
from edge.serve.apis.fields import limit
from edge.serve.apis.openai_fields import Usage, new_id, now, token_logprobs
from edge.serve.apis.responses_fields import LOGPROBS, ResponsesRequest, conversation_of, media_of
from edge.serve.deltas import Call, Deltas, End, Text, Thought
from edge.serve.http.errors import Failure
from edge.serve.tools.parser import CallArguments, CallEnd


def parse(request: ResponsesRequest, template: str) -> ParsedRequest:
    parsed = conversation_of(request, template)
    logprobs = (request.top_logprobs or 0) if LOGPROBS in (request.include or ()) else None
    media = media_of(request)
    return ParsedRequest.of_conversation(
        parsed, request.sampling(), limit(request.max_output_tokens) or None, logprobs, media=media
    )


async def events(request: ResponsesRequest, model: str, deltas: Deltas) -> AsyncGenerator[Event, None]:
    """Yield the created response, its items while they are generated, and the complete response."""
    response = _response(request, model)
    stream = _Stream(response, {name: (space, tool.name) for name, (space, tool) in request.in_namespaces.items()})
    yield stream.event("response.created", response=dict(response))
    yield stream.event("response.in_progress", response=dict(response))
    usage = Usage()
    async for _, delta in deltas:
        usage.add(delta)
        if isinstance(delta, Thought | Text):
            for event in stream.text(delta):
                yield event
        elif isinstance(delta, Call):
            for event in [*stream.end_text(), stream.call(delta)]:
                yield event
        elif isinstance(delta, CallArguments):
            yield stream.arguments(delta.text)
        elif isinstance(delta, CallEnd):
            for event in stream.end_call(delta):
                yield event
        elif isinstance(delta, End):
            cut = delta.reason == "length"
            for event in stream.end_text("incomplete" if cut else "completed"):
                yield event
            response |= {
                "status": "incomplete" if cut else "completed",
                "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
                "completed_at": None if cut else now(),
                "usage": _usage(usage),
                **delta.extra,
            }
            yield stream.event(f"response.{response['status']}", response=dict(response))


def _response(request: ResponsesRequest, model: str) -> dict[str, Any]:
    """Return the response without any items yet."""
    given_fields = request.model_dump(mode="json", by_alias=True, exclude_unset=True)
    echoed: dict[str, Any] = {
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
    }
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": now(),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "usage": None,
        "store": False,
        "previous_response_id": None,
        "truncation": "disabled",
        **{key: default if given_fields.get(key) is None else given_fields[key] for key, default in echoed.items()},
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.thought_tokens},
        "total_tokens": usage.prompt_tokens + usage.generated_tokens,
    }


class _Stream:
    """Numbers the events and adds completed items to the response."""

    def __init__(self, response: dict[str, Any], namespaces: Mapping[str, tuple[str, str]]) -> None:
        """namespaces: namespace and name of functions, by their names in the prompt."""
        self._namespaces = namespaces
        self._output: list[dict[str, Any]] = response["output"]
        self._count = 0
        self._text: list[str] | None = None  # text of the current item
        self._is_thought = False  # True if the current item is a thought
        self._logprobs: list[dict[str, Any]] = []
        self._item = ""  # identifier of the current item
        self._call: dict[str, Any] = {}  # the current call
        self._arguments: list[str] = []  # pieces of the current call's arguments

    def event(self, kind: str, **fields: Any) -> Event:
        self._count += 1
        return {"type": kind, "sequence_number": self._count - 1, **fields}

    def text(self, delta: Thought | Text) -> list[Event]:
        """Return the events for more text or thought. Switching between the two ends the open item."""
        is_thought = isinstance(delta, Thought)
        events = self.end_text() if is_thought != self._is_thought else []
        if self._text is None:
            if not delta.text:
                return events
            self._text, self._logprobs, self._is_thought = [], [], is_thought
            self._item = new_id("rs_" if is_thought else "msg_")
            events += [
                self._item_event("response.output_item.added", item=self._open_item("in_progress", [])),
                self._part_event("response.content_part.added", part=self._part("")),
            ]
        self._text.append(delta.text)
        if isinstance(delta, Thought):
            return [*events, self._part_event("response.reasoning_text.delta", delta=delta.text)]
        logprobs = token_logprobs(delta.pieces)
        self._logprobs += logprobs
        return [*events, self._part_event("response.output_text.delta", delta=delta.text, logprobs=logprobs)]

    def end_text(self, status: str = "completed") -> list[Event]:
        """Return the events that end the open text or thought, if there is one."""
        if self._text is None:
            return []
        text, self._text = "".join(self._text), None
        part = self._part(text)
        item = self._open_item(status, [part])
        done = {"text": text} if self._is_thought else {"text": text, "logprobs": self._logprobs}
        events = [
            self._part_event(f"response.{'reasoning' if self._is_thought else 'output'}_text.done", **done),
            self._part_event("response.content_part.done", part=part),
            self._item_event("response.output_item.done", item=item),
        ]
        self._output.append(item)
        return events

    def call(self, call: Call) -> Event:
        self._item = new_id("fc_")
        self._arguments = []
        namespace, name = self._namespaces.get(call.name, (None, call.name))
        self._call = {"id": self._item, "type": "function_call", "call_id": call.id, "name": name, "arguments": ""}
        if namespace is not None:
            self._call["namespace"] = namespace
        return self._item_event("response.output_item.added", item={**self._call, "status": "in_progress"})

    def arguments(self, text: str) -> Event:
        self._arguments.append(text)
        return self._item_event("response.function_call_arguments.delta", item_id=self._item, delta=text)

    def end_call(self, end: CallEnd) -> list[Event]:
        name, arguments = self._call["name"], "".join(self._arguments)
        kind = "response.function_call_arguments.done"
        done = [self._item_event(kind, item_id=self._item, name=name, arguments=arguments)] if end.is_complete else []
        item = {**self._call, "arguments": arguments, "status": "completed" if end.is_complete else "incomplete"}
        events = [*done, self._item_event("response.output_item.done", item=item)]
        self._output.append(item)
        return events

    def _item_event(self, kind: str, **fields: Any) -> Event:
        return self.event(kind, output_index=len(self._output), **fields)

    def _part_event(self, kind: str, **fields: Any) -> Event:
        return self._item_event(kind, item_id=self._item, content_index=0, **fields)

    def _open_item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the item of the current text or thought."""
        kind = {"type": "reasoning", "summary": []} if self._is_thought else {"type": "message", "role": "assistant"}
        return {"id": self._item, **kind, "status": status, "content": content}

    def _part(self, text: str) -> dict[str, Any]:
        """Return the content part of the current item."""
        if self._is_thought:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}


def fold(events_: Sequence[Event]) -> Event:
    """Return the response in the last event."""
    response: Event = events_[-1]["response"]
    return response


def failed(failure: Failure, count: int) -> Event:
    code = failure.code or "server_error"
    return {"type": "error", "sequence_number": count, "code": code, "message": failure.message, "param": failure.param}


RESPONSES = Api("/v1/responses", "Continue a conversation.", ResponsesRequest, parse, events, fold, failed)
