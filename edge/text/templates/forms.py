"""Message forms: the changes that a template needs so that every message of a conversation reaches the prompt.

Messages stay unchanged if the template can render them. `edge.text.templates.probing` detects the form of a template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from edge.text.templates.calls import CallForm, in_form
from edge.text.templates.formats import CallFormat
from edge.text.templates.writing import introduced, with_calls_as_text

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
# User turns that are added if a template needs one and the conversation has none.
_BEGIN, _CONTINUE = "Begin.", "Continue."


class MessageForm(NamedTuple):
    """Changes of messages that a template needs."""

    # Content
    parts: frozenset[str] = frozenset()  # roles whose content is a list of parts
    no_empty: bool = False  # answers without text and calls are left out
    # System messages
    no_system: bool = False  # system messages are unsupported: their text goes before a user turn
    one_system: bool = False  # system messages at the beginning are joined
    no_late_system: bool = False  # the text of a later system message goes before the next user turn
    no_second_system: bool = False  # the same, if there is another system message
    no_last_system: bool = False  # both rules also apply to a system message at the end of the conversation
    system_by_last_user: bool = False  # system text goes before the last user turn if other turns follow that one
    # Turns
    joined: frozenset[str] = frozenset()  # roles whose consecutive turns are joined
    user_first: bool = False  # the first turn must be the user's
    user_last: bool = False  # the last turn must be the user's or a tool's
    user_before_calls: bool = False  # the first turn must be the user's if it would otherwise have calls
    needs_user: bool = False  # some turn must be the user's
    needs_turn: bool = False  # some turn must exist: a system message alone becomes a user turn
    # Tools and calls
    empty_tools: bool = False  # a conversation without tools has an empty list of tools
    no_tools: bool = False  # tools are unsupported: the system message introduces them
    tools_need_turn: bool = False  # with tools, some turn must exist
    calls: CallForm | None = CallForm()  # form of calls; None: calls become text
    # Handling of the text in a message with calls. written: unchanged. apart: moved to a message before the calls.
    # text: the calls and their results become text, too.
    beside_calls: Literal["written", "apart", "text"] = "written"
    no_results: bool = False  # tool results are unsupported: a result becomes a user turn
    no_stray_results: bool = False  # the same, for a result without a call
    no_user_behind_results: bool = False  # calls with results become text if a user turn follows them


def plainest(form: MessageForm) -> MessageForm:
    """Return a form that reduces a conversation to alternating texts of the user and the model."""
    return MessageForm(
        parts=form.parts,
        no_empty=True,
        no_system=True,
        joined=frozenset({"user", "assistant"}),
        user_first=True,
        user_last=form.user_last,
        needs_user=True,
        needs_turn=True,
        empty_tools=form.empty_tools,
        no_tools=True,
        calls=None,
        no_results=True,
    )


def formed(
    messages: Sequence[Message], tools: Tools, form: MessageForm, calls: CallFormat
) -> tuple[list[Message], Tools | None]:
    """Return a conversation in a form, and the tools that the template must write.

    calls: format of calls that become text.
    """
    messages = _with_names(messages)
    if form.no_empty:
        messages = [message for message in messages if not _is_empty(message)]
    if tools and form.no_tools:
        messages, tools = introduced(messages, tools, calls), ()
    messages = _with_late_systems(messages, form)
    messages = _exchanges(_joined(messages, form.joined), form, calls)
    needs_turn = form.needs_turn or (bool(tools) and form.tools_need_turn)
    messages = _with_user(messages, form, needs_turn)
    messages = _joined(messages, form.joined)
    if form.calls is not None and any(message.get("tool_calls") for message in messages):
        messages = in_form(messages, form.calls)
    return list(messages), tools if tools or form.empty_tools else None


def with_parts(messages: Sequence[Message], form: MessageForm) -> list[dict[str, Any]]:
    """Return messages with text content as a list of parts, for the roles that need it."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if message["role"] in form.parts and isinstance(message.get("content"), str)
        else dict(message)
        for message in messages
    ]


def text_of(message: Message) -> str:
    """Return the text of a message whose content is a text or a list of parts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(str(part.get("text") or "") for part in content)


def _is_empty(message: Message) -> bool:
    return message["role"] == "assistant" and not message.get("tool_calls") and not text_of(message)


def _with_names(messages: Sequence[Message]) -> list[Message]:
    """Return messages with function names in tool results and with developer messages as system messages.

    Identifiers of calls may be reused, so each result gets the name of the latest call before it.
    """
    names: dict[Any, str] = {}
    named: list[Message] = []
    for message in messages:
        if message["role"] == "developer":
            message = {**message, "role": "system"}
        names |= {call.get("id"): call["function"]["name"] for call in message.get("tool_calls") or ()}
        is_known = message["role"] == "tool" and message.get("tool_call_id") in names
        named.append({"name": names[message["tool_call_id"]], **message} if is_known else message)
    return named


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _before(text: str, message: Message) -> Message:
    """Return a message with a text prepended to its own."""
    return {**message, "content": "\n\n".join(filter(None, (text, text_of(message))))}


def _n_leading_systems(messages: Sequence[Message]) -> int:
    return next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))


def _with_late_systems(messages: list[Message], form: MessageForm) -> list[Message]:
    """Return messages with later system messages moved to where the template accepts them."""
    n_leading = _n_leading_systems(messages)
    if n_leading > 1 and form.one_system:
        texts = [text for message in messages[:n_leading] if (text := text_of(message))]
        messages = [{**messages[0], "content": "\n\n".join(texts)}, *messages[n_leading:]]
        n_leading = 1
    n_systems = sum(message["role"] == "system" for message in messages)
    moves = form.no_second_system if n_systems > 1 else form.no_late_system
    n_last = _n_leading_systems(messages[::-1])
    if not moves or n_systems == n_leading or (n_systems == n_leading + n_last and not form.no_last_system):
        return messages
    return [*messages[:n_leading], *_systems_as_users(messages[n_leading:])]


def _systems_as_users(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the text of system messages moved into the next user turn, or into a new one."""
    moved: list[Message] = []
    texts: list[str] = []
    for message in (*messages, None):
        if message is not None and message["role"] == "system":
            texts += filter(None, (text_of(message),))
            continue
        if texts and message is not None and message["role"] == "user":
            message = _before("\n\n".join(texts), message)
        elif texts:
            moved.append(_user("\n\n".join(texts)))
        texts = []
        if message is not None:
            moved.append(message)
    return moved


def _exchanges(messages: Sequence[Message], form: MessageForm, calls: CallFormat) -> list[Message]:
    """Return messages with calls and results changed to what the template accepts."""
    changed: list[Message] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        if not message.get("tool_calls"):
            is_stray = message["role"] == "tool" and (form.no_results or form.no_stray_results)
            changed.append(_result_as_user(message) if is_stray else message)
            continue
        n_results = next((n for n, result in enumerate(rest) if result["role"] != "tool"), len(rest))
        results, rest = rest[:n_results], rest[n_results:]
        has_text = bool(text_of(message))
        is_answered_by_user = bool(rest) and rest[0]["role"] == "user"
        becomes_text = (has_text and form.beside_calls == "text") or (
            is_answered_by_user and form.no_user_behind_results
        )
        if form.calls is None or becomes_text:
            changed.append(with_calls_as_text(message, calls))
        elif has_text and form.beside_calls == "apart":
            changed += [{"role": message["role"], "content": text_of(message)}, {**message, "content": ""}]
        else:
            changed.append(message)
        changed += map(_result_as_user, results) if form.no_results or becomes_text else results
    return changed


def _result_as_user(message: Message) -> Message:
    return _user(f"<tool_response>\n{text_of(message)}\n</tool_response>")


def _with_user(messages: list[Message], form: MessageForm, needs_turn: bool) -> list[Message]:
    """Return messages with the user turns that the template needs, and with system text moved into them."""
    users = [place for place, message in enumerate(messages) if message["role"] == "user"]
    is_bare = needs_turn and _n_leading_systems(messages) == len(messages)
    if form.no_system or is_bare or (form.needs_user and not users):
        messages = _systems_as_users(messages)
    n_leading = _n_leading_systems(messages)
    leading, behind = messages[:n_leading], messages[n_leading:]
    has_user = any(message["role"] == "user" for message in behind)
    first = behind[0] if behind else {"role": ""}
    user_first = form.user_first or (form.user_before_calls and "tool_calls" in first)
    if (form.needs_user and not has_user) or (user_first and first["role"] == "assistant"):
        behind = [_user(_BEGIN), *behind]
    if form.user_last and behind and behind[-1]["role"] == "assistant":
        behind = [*behind, _user(_CONTINUE)]
    last = next((n for n in reversed(range(len(behind))) if behind[n]["role"] == "user"), None)
    if form.system_by_last_user and leading and last is not None and last < len(behind) - 1:
        text = "\n\n".join(map(text_of, leading))
        leading, behind = [], [*behind[:last], _before(text, behind[last]), *behind[last + 1 :]]
    return [*leading, *behind]


def _joined(messages: Sequence[Message], roles: frozenset[str]) -> list[Message]:
    """Return messages with consecutive turns of the same role joined, for these roles."""
    joined: list[Message] = []
    for message in messages:
        before = joined[-1] if joined else {"role": ""}
        is_text = not before.get("tool_calls") and not message.get("tool_calls")
        if message["role"] in roles and before["role"] == message["role"] and is_text:
            thoughts = [own for turn in (before, message) if (own := turn.get("reasoning_content"))]
            thought = {"reasoning_content": "\n\n".join(thoughts)} if thoughts else {}
            joined[-1] = {**before, **_before(text_of(before), message), **thought}
        else:
            joined.append(message)
    return joined
