"""Earlier turns of conversations, as clients send them back: roles, calls, results.

Validation accepts everything that this server sends, so that a truncated answer does not make the conversation
unusable.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, Field, JsonValue
from pydantic_core import PydanticCustomError, from_json

from edge.serve.apis.fields import Fields
from edge.serve.tools.functions import Message

ROLES = ("system", "user", "assistant", "tool")
# Other names of these roles in OpenAI's APIs and in chat templates.
_SAME_ROLES = {
    "developer": "system", "platform": "system", "human": "user", "model": "assistant", "ai": "assistant",
    "bot": "assistant", "chatbot": "assistant", "gpt": "assistant", "function": "tool", "ipython": "tool",
    "observation": "tool", "tool_response": "tool",
}  # fmt: skip


def _role(name: str) -> str:
    role = name.strip().lower()
    if (role := _SAME_ROLES.get(role, role)) not in ROLES:
        known = ", ".join((*ROLES, *_SAME_ROLES))
        raise PydanticCustomError(
            "role", "the role must be one of {known}, got {role}", {"role": repr(name[:80]), "known": known}
        )
    return role


Role = Annotated[str, AfterValidator(_role), Field(json_schema_extra={"enum": [*ROLES, *_SAME_ROLES]})]
CallId = str | int | None


class PastFunction(Fields):
    """A called function. Its name and arguments may be any text that a model generated."""

    name: str | None = None
    arguments: JsonValue = Field(default=None, description="JSON text of an object, or the object")
    input: JsonValue = Field(default=None, description="arguments of a custom tool")


class PastCall(Fields):
    """An earlier tool call."""

    id: CallId = None
    type: str | None = None
    function: PastFunction | None = None
    custom: PastFunction | None = None

    ignored = frozenset({"index"})

    def to_json(self) -> dict[str, Any]:
        """Return the call in the form that templates use."""
        own = self.function or self.custom or PastFunction()
        return past_call(self.id, own.name, own.input if own.arguments is None else own.arguments)


def past_call(call_id: CallId, name: str | None, arguments: JsonValue) -> dict[str, Any]:
    """Return an earlier call in the form that templates use."""
    function = {"name": name or "", "arguments": object_of(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def object_of(arguments: JsonValue) -> dict[str, Any]:
    """Return the arguments of an earlier call as an object, which templates need.

    Arguments that are not an object, or are truncated text, become the only member of an object.
    """
    value = arguments
    if isinstance(arguments, str):
        try:
            value = from_json(arguments) if arguments.strip() else {}
        except ValueError:
            value = arguments
    value = {} if value is None else value
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):  # a number that JSON cannot represent
        value = str(arguments)
    return value if isinstance(value, dict) else {"arguments": value}


def linked(messages: Iterable[Message]) -> list[Message]:
    """Return messages whose calls have unique ids and whose results have the ids of their calls.

    A result without an id belongs to the first unanswered call, of the same function if the result names one. A result
    without a call becomes text of the user, because some templates refuse it otherwise.
    """
    by_id: dict[str, deque[str]] = {}  # our ids by the client's id; calls of one turn may share a client's id
    # Unanswered ids by function name; None: all functions.
    waiting: defaultdict[str | None, deque[str]] = defaultdict(deque)
    answered: set[str] = set()
    n_calls = 0
    out: list[Message] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            own: list[dict[str, Any]] = []
            new: dict[str, deque[str]] = {}
            for call in calls:
                client_id = "" if call["id"] is None else str(call["id"])
                call_id = client_id if client_id and client_id not in new else f"call{n_calls:05}"
                n_calls += 1
                new.setdefault(client_id, deque()).append(call_id)
                answered.discard(call_id)
                for name in (None, call["function"]["name"]):
                    waiting[name].append(call_id)
                own.append({**call, "id": call_id})
            new.pop("", None)
            by_id |= new
            message = {**message, "tool_calls": own}
        elif message["role"] == "tool":
            answered_id = _call_of(message, by_id, waiting, answered)
            if answered_id is None:
                message = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
            else:
                answered.add(answered_id)
                message = {**message, "tool_call_id": answered_id}
        out.append(message)
    return out


def _call_of(
    result: Message, by_id: dict[str, deque[str]], waiting: defaultdict[str | None, deque[str]], answered: set[str]
) -> str | None:
    """Return the id of the call that a result belongs to, or None if there is none."""
    client_id = result.get("tool_call_id")
    if client_id is not None and client_id != "":
        ids = by_id.get(str(client_id), deque())
        return (ids.popleft() if len(ids) > 1 else ids[0]) if ids else None
    calls = waiting[result.get("name")]
    while calls and calls[0] in answered:
        calls.popleft()
    return calls[0] if calls else None
