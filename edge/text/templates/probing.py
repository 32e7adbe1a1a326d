"""Probing: detects the message form of a template by rendering conversations with a unique mark in each message.

A form fits if all marks reach the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from edge.errors import TemplateError, TemplateStopped
from edge.text.templates.calls import CallForm
from edge.text.templates.forms import Message, MessageForm, Tools

Render = Callable[[Sequence[Message], Tools, MessageForm], str]
"""Renders a conversation in a form and returns the prompt. Raises TemplateError."""
_CALL_FORMS = tuple(CallForm(*flags[::-1]) for flags in product((False, True), repeat=4))
_ROLES = ("user", "assistant", "system")


def _message(role: str, number: int) -> Message:
    return {"role": role, "content": f"probe_{role}_{number}"}


def _call(number: int) -> dict[str, Any]:
    function = {"name": "probe_function", "arguments": {"probe_key": f"probe_value_{number}"}}
    # As long as the identifiers of most servers.
    return {"id": f"call_{number:024}", "type": "function", "function": function}


def _result(number: int) -> Message:
    content = f"probe_result_{number}"
    return {"role": "tool", "content": content, "tool_call_id": f"call_{number:024}", "name": "probe_function"}


_U, _U2, _A, _A2, _S, _S2 = (_message(role, number) for role in _ROLES for number in (0, 1))
_EMPTY: Message = {"role": "assistant", "content": ""}
_CALLS: Message = {**_EMPTY, "tool_calls": [_call(0), _call(1)]}
_ONE_CALL: Message = {**_CALLS, "tool_calls": [_call(0)]}
_PARAMETERS = {"type": "object", "properties": {"probe_property": {"type": "string", "description": "probe"}}}
_FUNCTION = {"name": "probe_tool", "description": "probe", "parameters": _PARAMETERS}
_TOOLS: Tools = ({"type": "function", "function": _FUNCTION},)

Changes = Mapping[str, Any]
Step = tuple[Sequence[Message], Sequence[Changes]]
"""A conversation, and alternative changes of the form. The first change that lets all marks arrive is adopted."""
# Most templates render this conversation completely. The individual steps of _TURNS are then unnecessary.
_EVERYTHING = (_S, _S2, _U, _U2, _A, _EMPTY, _A2, _message("system", 2), _message("user", 2))
_TURNS: tuple[Step, ...] = (
    ([_U], [{"parts": {"user"}}, {"empty_tools": True}, {"parts": {"user"}, "empty_tools": True}]),
    ([_U, _A, _U2], [{"parts": {"assistant"}}]),
    ([_S, _U], [{"parts": {"system"}}, {"no_system": True}]),
    ([_S, _S2, _U], [{"one_system": True}]),
    ([_U, _A, _S, _U2], [{"no_late_system": True}]),
    ([_S, _U, _A, _S2, _U2], [{"no_second_system": True}]),
    ([_U, _U2], [{"joined": {"user"}}]),
    ([_U, _A, _A2, _U2], [{"joined": {"assistant"}}]),
    ([_S, _U, _S2], [{"no_last_system": True}]),
    ([_U, _EMPTY, _U2], [{"no_empty": True}, {"no_empty": True, "joined": {"user"}}]),
)
_ENDS: tuple[Step, ...] = (
    ([_A, _U], [{"user_first": True}]),
    ([_A], [{"needs_user": True}]),
    ([_S], [{"needs_turn": True}]),
    ([_U, _A], [{"user_last": True}]),
    ([_S, _U, _A], [{"system_by_last_user": True}]),
)
_EXCHANGE = (_U, _ONE_CALL, _result(0))
_EXCHANGES: tuple[Step, ...] = (
    ([_U, {**_ONE_CALL, "content": _A["content"]}, _result(0)], [{"beside_calls": "apart"}, {"beside_calls": "text"}]),
    ([_S, *_EXCHANGE], [{"system_by_last_user": True}]),
    ([*_EXCHANGE, _U2], [{"no_user_behind_results": True}]),
    (_EXCHANGE[1:], [{"user_before_calls": True}]),
    ([_U, _result(0), _U2], [{"no_stray_results": True}]),
)


def turns_form(render: Render) -> MessageForm:
    """Return the form of conversations without tools. Content that arrives in no form is ignored.

    Raises TemplateStopped if the template exceeds a limit.
    """
    form = MessageForm()
    steps = _ENDS if _arrives(render, _EVERYTHING, (), form) else _TURNS + _ENDS
    for messages, alternatives in steps:
        form = _first(render, messages, (), form, alternatives)
    return form


def tools_form(render: Render, form: MessageForm) -> MessageForm:
    """Return the form of conversations with tools. form: the form without tools."""
    for beginning in ([_U], [_S, _U]):
        form = _first(render, beginning, _TOOLS, form, [{"no_tools": True}])
    if not form.no_tools:
        form = _first(render, [_S], _TOOLS, form, [{"tools_need_turn": True}])
    tools: Tools = () if form.no_tools else _TOOLS
    form = form._replace(**_calls(render, tools, form))
    for messages, alternatives in _EXCHANGES:
        form = _first(render, messages, tools, form, alternatives)
    return form


def _first(
    render: Render, messages: Sequence[Message], tools: Tools, form: MessageForm, alternatives: Sequence[Changes]
) -> MessageForm:
    """Return the form with the first changes that let all marks arrive.

    Return it unchanged if none are needed or help.
    """
    changed = (form, *(_with(form, changes) for changes in alternatives))
    return next((own for own in changed if _arrives(render, messages, tools, own)), form)


def _with(form: MessageForm, changes: Changes) -> MessageForm:
    """Return the form with changes. Sets of roles are united with the present ones."""
    return form._replace(
        **{name: getattr(form, name) | value if isinstance(value, set) else value for name, value in changes.items()}
    )


def _calls(render: Render, tools: Tools, form: MessageForm) -> Changes:
    """Return the changes for a conversation with two calls and their results.

    Preferred is a form that writes calls and results, without an object in Python's notation. The next choice writes
    only the calls. Otherwise the calls become text.
    """
    messages = [_U, _CALLS, _result(0), _result(1)]
    lost_results: Changes | None = None
    for calls in _CALL_FORMS:
        text = _rendered(render, messages, tools, form._replace(calls=calls))
        if "'probe_key'" in text or not all(f"probe_value_{number}" in text for number in (0, 1)):
            continue
        if all(f"probe_result_{number}" in text for number in (0, 1)):
            return {"calls": calls}
        lost_results = lost_results or {"calls": calls, "no_results": True}
    if lost_results is not None:
        return lost_results
    # A template that writes the role of any message may not know the role of results.
    is_text = form._replace(calls=None)
    return {"calls": None, "no_results": form.no_tools or not _arrives(render, messages, tools, is_text)}


def _arrives(render: Render, messages: Sequence[Message], tools: Tools, form: MessageForm) -> bool:
    text = _rendered(render, messages, tools, form).casefold()
    # A template that prints a list of parts in Python's notation does not support parts.
    return bool(text) and "{'type': 'text'" not in text and all(mark in text for mark in _marks(messages, tools))


def _marks(messages: Sequence[Message], tools: Tools) -> Iterator[str]:
    for message in messages:
        yield message["content"]
        for call in message.get("tool_calls", ()):
            yield call["function"]["arguments"]["probe_key"]
    for tool in tools:
        yield tool["function"]["name"]


def _rendered(render: Render, messages: Sequence[Message], tools: Tools, form: MessageForm) -> str:
    """Return the prompt, or "" if the template refuses the messages."""
    try:
        return render(messages, tools, form)
    except TemplateStopped:
        raise
    except TemplateError:
        return ""
