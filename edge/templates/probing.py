"""Probing: conversations with a mark in each message are rendered, and the form in which all marks arrive is chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from edge.errors import TemplateError, TemplateStopped
from edge.templates.calls import CallForm
from edge.templates.forms import Message, MessageForm, Tools

Render = Callable[[Sequence[Message], Tools, MessageForm], str]
"""Returns the prompt of a conversation in a form, or raises TemplateError."""
_CALL_FORMS = tuple(CallForm(*flags[::-1]) for flags in product((False, True), repeat=4))
_ROLES = ("user", "assistant", "system")


def _message(role: str, number: int) -> Message:
    return {"role": role, "content": f"probe_{role}_{number}"}


def _call(number: int) -> dict[str, Any]:
    function = {"name": "probe_function", "arguments": {"probe_key": f"probe_value_{number}"}}
    return {"id": f"call_{number:024}", "type": "function", "function": function}  # as long as those of most servers


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
"""A conversation, and changes of the form, of which the first is taken that lets everything arrive."""
# Most templates write all that these steps ask for.
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
    """Return the form in which a template writes conversations without tools. What no form lets arrive is left as it
    is. TemplateStopped if the template exceeds a limit."""
    form = MessageForm()
    steps = _ENDS if _arrives(render, _EVERYTHING, (), form) else _TURNS + _ENDS
    for messages, alternatives in steps:
        form = _first(render, messages, (), form, alternatives)
    return form


def tools_form(render: Render, form: MessageForm) -> MessageForm:
    """Return the form in which a template writes conversations with tools. form: that without tools."""
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
    """Return the form with the first changes with which everything arrives: none, if that does or nothing helps."""
    changed = (form, *(_with(form, changes) for changes in alternatives))
    return next((own for own in changed if _arrives(render, messages, tools, own)), form)


def _with(form: MessageForm, changes: Changes) -> MessageForm:
    """Return the form with changes; sets of roles grow."""
    return form._replace(
        **{name: getattr(form, name) | value if isinstance(value, set) else value for name, value in changes.items()}
    )


def _calls(render: Render, tools: Tools, form: MessageForm) -> Changes:
    """Return the first form in which a template writes two calls and their results, and no object as Python prints it;
    else one in which it writes the calls; else the calls are text."""
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
    # A template that writes the role of any message may never have heard of results.
    is_text = form._replace(calls=None)
    return {"calls": None, "no_results": form.no_tools or not _arrives(render, messages, tools, is_text)}


def _arrives(render: Render, messages: Sequence[Message], tools: Tools, form: MessageForm) -> bool:
    text = _rendered(render, messages, tools, form).casefold()
    # A list of parts that the template prints as it is does not count.
    return bool(text) and "{'type': 'text'" not in text and all(mark in text for mark in _marks(messages, tools))


def _marks(messages: Sequence[Message], tools: Tools) -> Iterator[str]:
    for message in messages:
        yield message["content"]
        for call in message.get("tool_calls", ()):
            yield call["function"]["arguments"]["probe_key"]
    for tool in tools:
        yield tool["function"]["name"]


def _rendered(render: Render, messages: Sequence[Message], tools: Tools, form: MessageForm) -> str:
    """Return the prompt; empty if the template refuses the messages."""
    try:
        return render(messages, tools, form)
    except TemplateStopped:
        raise
    except TemplateError:
        return ""
