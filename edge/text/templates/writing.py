"""Tool calls as text in a format, and the system text that introduces functions to a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from edge.text.templates.formats import HERMES, CallFormat, Notation

Message = Mapping[str, Any]
Calls = Sequence[tuple[str, Mapping[str, Any]]]
"""Names and arguments of calls."""


def written_calls(form: CallFormat, calls: Calls) -> str:
    """Return these calls as a model of this format writes them. Arguments are JSON values."""
    texts = [_call(form, index, name, arguments) for index, (name, arguments) in enumerate(calls)]
    opens = "" if form.begins in form.opens or form.bare else next(iter(form.opens), "")
    if form.is_list or form.style == "pythonic":
        return f"{opens}[{form.between.join(texts)}]{form.closes if opens else ''}"
    if form.is_section:
        return f"{opens}{form.space}{form.between.join(texts)}{form.space}{form.closes}"
    inside = form.space if opens and form.begins else ""
    return form.between.join(f"{opens}{inside}{text}{inside}{form.closes}" for text in texts)


def _call(form: CallFormat, index: int, name: str, arguments: Mapping[str, Any]) -> str:
    if form.style == "json":
        text = json.dumps({form.name_key: name, form.arguments_key: arguments}, ensure_ascii=False)
        return f"{form.space}{text}{form.space}"
    if form.style == "pythonic":
        inner = form.notation.item.join(f"{key}={written(value, form.notation)}" for key, value in arguments.items())
        return f"{name}({inner})"
    if form.style == "named":
        header = form.header.format(name=name, index=index)
        return f"{form.begins or form.space}{header}{form.before}{written(arguments, form.notation)}{form.ends}"
    inner = "".join(_parameter(form, key, value) for key, value in arguments.items())
    return f"{form.begins}{name}{form.name_end}{form.space}{inner}{form.ends}"


def _parameter(form: CallFormat, key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    text = value if is_text else json.dumps(value, ensure_ascii=False)
    key_end = form.key_end if is_text else form.other_key_end or form.key_end
    between = f"{form.space}{form.value}" if form.value else ""
    return f"{form.key}{key}{key_end}{between}{form.padding}{text}{form.padding}{form.value_end}{form.space}"


def written(value: Any, notation: Notation) -> str:
    """Return a JSON value in a notation."""
    if isinstance(value, Mapping):
        quote = "" if notation.bare_keys else notation.quotes[0]
        items = (f"{_text(key, quote, notation)}{notation.key}{written(own, notation)}" for key, own in value.items())
        return f"{{{notation.item.join(items)}}}"
    if isinstance(value, list):
        return f"[{notation.item.join(written(own, notation) for own in value)}]"
    if isinstance(value, str):
        return _text(value, notation.quotes[0], notation)
    words = {"true": notation.true, "false": notation.false, "null": notation.null}
    text = json.dumps(value)
    return words.get(text, text)


def _text(text: str, quote: str, notation: Notation) -> str:
    if notation.escapes and quote:
        inner = json.dumps(text, ensure_ascii=False)[1:-1]
        text = inner if quote == '"' else inner.replace('\\"', '"').replace(quote, f"\\{quote}")
    return f"{quote}{text}{quote}"


_INTRODUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

{how}"""
_HOW_HERMES = """For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


def introduced(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], form: CallFormat) -> list[Message]:
    """Return messages that begin with a system message. It describes the functions and the format of calls."""
    how = _HOW_HERMES
    if form is not HERMES:
        example = written_calls(form, [("<function-name>", {"<argument>": "<value>"})])
        how = f"To call a function, write its name and its arguments in this form:\n{example}"
    text = _INTRODUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools), how=how)
    if messages and messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def with_calls_as_text(message: Message, form: CallFormat) -> Message:
    """Return a message with its calls moved into its text."""
    functions = [call["function"] for call in message["tool_calls"]]
    calls = written_calls(form, [(function["name"], function["arguments"]) for function in functions])
    content = "\n".join(filter(None, (str(message.get("content") or ""), calls)))
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}
