"""Reports complete turns to the model that answered them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from edge.errors import EdgeError
from edge.serve.deltas import Call, Delta, End, Text
from edge.serve.served import Generation, ServedModel
from edge.serve.tools.conversation import Conversation
from edge.serve.tools.functions import Message
from edge.serve.tools.parser import CallArguments

PLACEHOLDERS = ("a", "1")  # two texts without a common beginning
_tasks: set[asyncio.Task[None]] = set()  # references that protect the tasks from garbage collection


@dataclass(frozen=True)
class Chat:
    """A chat that one model answers once."""

    model: ServedModel
    conversation: Conversation
    generation: Generation
    at: float  # arrival time of its request in seconds since the epoch


async def noted(deltas: AsyncGenerator[tuple[int, Delta], None], chat: Chat) -> AsyncGenerator[tuple[int, Delta], None]:
    """Yield the deltas of a chat's answer. When it is complete, report the turn to the model."""
    text, calls = "", []
    async with aclosing(deltas):
        async for index, delta in deltas:
            if isinstance(delta, Text):
                text += delta.text
            elif isinstance(delta, Call):
                calls.append({"id": delta.id, "name": delta.name, "arguments": ""})
            elif isinstance(delta, CallArguments):
                calls[-1]["arguments"] += delta.text
            elif isinstance(delta, End):
                task = asyncio.ensure_future(_tell(chat, text, calls))
                _tasks.add(task)
                task.add_done_callback(_tasks.discard)
            yield index, delta


async def _tell(chat: Chat, text: str, calls: Sequence[Mapping[str, str]]) -> None:
    with suppress(EdgeError, ValueError):  # if a call's arguments are not valid JSON, the turn is not reported
        answer, following = turn(text, calls)
        generation = chat.generation
        await chat.model.turn(
            {
                "messages": [*(generation.messages or ()), answer],
                "following": following,
                "tools": generation.tools,
                "variables": generation.variables,
                "think": generation.think,
                "namespace": generation.namespace,
                "adapters": generation.adapters,
                "at": chat.at,
            }
        )


def turn(text: str, calls: Sequence[Mapping[str, str]]) -> tuple[Message, list[list[Message]]]:
    """Return an answer as clients send it back, and two possible continuations.

    The continuations are results of its calls, or questions. Raises ValueError for arguments that are not valid JSON.
    """
    answer: dict[str, Any] = {"role": "assistant", "content": text}
    if not calls:
        return answer, [[{"role": "user", "content": placeholder}] for placeholder in PLACEHOLDERS]
    functions = [{"name": call["name"], "arguments": json.loads(call["arguments"] or "{}")} for call in calls]
    answer["tool_calls"] = [
        {"id": call["id"], "type": "function", "function": function}
        for call, function in zip(calls, functions, strict=True)
    ]
    return answer, [
        [{"role": "tool", "tool_call_id": call["id"], "content": placeholder} for call in calls]
        for placeholder in PLACEHOLDERS
    ]
