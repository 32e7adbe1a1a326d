"""Earlier tool calls in the form that a chat template accepts."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Message = Mapping[str, Any]


class CallForm(NamedTuple):
    """Form of tool calls in messages."""

    text_arguments: bool = False  # arguments are JSON text instead of an object
    no_content: bool = False  # a message with calls but no text has None as its content
    single: bool = False  # a message has a single call, and the call's result follows it
    short_ids: bool = False  # identifiers have nine letters and digits, as Mistral's do


def in_form(messages: Sequence[Message], form: CallForm) -> list[Message]:
    """Return messages with their tool calls in a form."""
    if form.text_arguments:
        messages = [_with_text_arguments(message) for message in messages]
    if form.no_content:
        messages = [
            {**message, "content": None} if message.get("tool_calls") and not message.get("content") else message
            for message in messages
        ]
    if form.single:
        messages = _single(messages)
    if form.short_ids:
        messages = [_with_short_ids(message) for message in messages]
    return list(messages)


def _with_text_arguments(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _as_text(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _with_short_ids(message: Message) -> Message:
    if message.get("tool_calls"):
        return {**message, "tool_calls": [{**call, "id": _short(call.get("id"))} for call in message["tool_calls"]]}
    return {**message, "tool_call_id": _short(message["tool_call_id"])} if "tool_call_id" in message else message


def _short(identifier: Any) -> str:
    text = str(identifier)
    is_short = re.fullmatch("[a-zA-Z0-9]{9}", text)
    return text if is_short else hashlib.sha256(text.encode(errors="replace")).hexdigest()[:9]


def _single(messages: Sequence[Message]) -> list[Message]:
    """Return messages with at most one call each, followed by the call's result."""
    split: list[Message] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            split.append(message)
            continue
        n_results = next((n for n, result in enumerate(rest) if result["role"] != "tool"), len(rest))
        results, rest = rest[:n_results], rest[n_results:]
        for number, call in enumerate(calls):
            own = message if number == 0 else {"role": message["role"], "content": ""}
            split.append({**own, "tool_calls": [call]})
            matching = [result for result in results if result.get("tool_call_id") == call.get("id")] or results[:1]
            split += matching[:1]
            results = [result for result in results if result not in matching[:1]]
        split += results
    return split
