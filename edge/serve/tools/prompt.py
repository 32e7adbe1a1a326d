"""Prompts with functions for templates without tools: functions in the system message, calls as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edge.serve.tools.functions import Function, json_text

Message = Mapping[str, Any]
"""A message in the form of templates: `role`, `content`, and for calls `tool_calls`, `tool_call_id`, `name`."""

_INTRODUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def plain_messages(messages: Sequence[Message], functions: Sequence[Function]) -> list[Message]:
    """Return the messages with roles and texts alone: functions in the system message, calls and results in the Hermes
    format."""
    plain = [_plain(message) for message in messages]
    if not functions:
        return plain
    introduction = _INTRODUCTION.format(
        tools="\n".join(json_text(function.to_json(), "tools") for function in functions)
    )
    if plain and plain[0]["role"] == "system":
        return [{"role": "system", "content": f"{plain[0]['content']}\n\n{introduction}"}, *plain[1:]]
    return [{"role": "system", "content": introduction}, *plain]


def _plain(message: Message) -> Message:
    content = str(message.get("content") or "")
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [
        f"<tool_call>\n{json_text(call['function'], 'messages')}\n</tool_call>"
        for call in message.get("tool_calls") or ()
    ]
    return {"role": message["role"], "content": "\n".join([content, *calls] if content else calls)}
