"""Conversations with functions and schemas, in the form of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge.serve.http.errors import BadRequest
from edge.serve.tools.constraint import constraint
from edge.serve.tools.formats import CallFormat, format_of
from edge.serve.tools.functions import FunctionUse, Message, json_text
from edge.serve.tools.parser import CallParser
from edge.serve.tools.sizes import JsonSize
from edge.serve.tools.writing import introduced, plain, with_calls_as_text
from edge.templates.template import CONTINUES


@dataclass(frozen=True)
class Conversation:
    """Messages in the template's form, constraints on the answer, and the format of its calls."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    sampling: Mapping[str, Any]
    form: CallFormat | None  # None: there are no calls
    functions: Mapping[str, Any]  # schemas of parameters, by name
    variables: Mapping[str, Any]  # of the template
    think: int | None = None  # tokens of thoughts; None: the server's default
    template: str = ""  # source of the model's template
    is_single: bool = False  # an answer has one call at most

    def parser(self, streams: bool = False) -> CallParser | None:
        """Return a parser for one answer; None if there are no calls. streams: calls are given as they come."""
        if self.form is None:
            return None
        is_constrained = "lark" in self.sampling
        return CallParser(
            self.form, self.functions, streams=streams, is_constrained=is_constrained, is_single=self.is_single
        )

    def behind(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages that follow in the template's form."""
        return _in_template_form(messages, (), self.form or format_of(self.template), self.template)

    @property
    def marks(self) -> Sequence[str]:
        """Texts of calls, whose control tokens are to have text."""
        return self.form.marks if self.form else ()

    @property
    def ends_thought(self) -> Sequence[str]:
        """Marks that end a thought where they come in one. A grammar begins behind a thought, so none ends it then."""
        return self.form.opens if self.form and self.form.ends_thought and not self.sampling else ()

    @property
    def answer(self) -> str:
        """Beginning of an answer that is a call and follows a grammar, if it is also that of a header; else empty."""
        return self.form.answer if self.form and "lark" in self.sampling else ""


def conversation(
    messages: Sequence[Message],
    use: FunctionUse,
    template: str,
    text_schema: Mapping[str, Any] | None = None,
    variables: Mapping[str, Any] | None = None,
    think: int | None = None,
    *,
    continues: bool = False,
) -> Conversation:
    """Return the conversation. template: source of the model's template. text_schema: JSON schema of an answer that is
    no call. think: tokens of thoughts. continues: where the last message is text of the model alone, and nothing
    constrains the answer, it is the beginning of the answer. BadRequest for a request that cannot be put to a model."""
    functions = use.functions if use.choice != "none" else ()
    size = JsonSize("tools")
    for function in functions:
        size.add(function.to_json(), f"the tool {function.name!r}")
    if use.must_call and text_schema is not None:
        raise BadRequest(
            "a tool must be called, and the answer must follow a schema; ask for one of the two", "tool_choice"
        )
    form = format_of(template)
    sampling: dict[str, Any] = {}
    if (grammar := constraint(form, use, text_schema)) is not None:
        sampling["lark"] = grammar
    elif text_schema is not None:
        sampling["json_schema"] = json_text(text_schema, "response_format")
    knows_tools = "tools" in template
    own = _in_template_form(messages, functions, form, template)
    if continues and not sampling and len(own) > 1 and _is_beginning(messages[-1]):
        own = [*own[:-1], {**own[-1], CONTINUES: True}]
    return Conversation(
        own,
        [function.to_json() for function in functions] if knows_tools else (),
        sampling,
        form if use.callable else None,
        {function.name: function.parameters for function in use.callable},
        variables or {},
        think,
        template,
        use.several is False,
    )


def _is_beginning(message: Message) -> bool:
    """Return whether a message is text of the model alone, which an answer may go on with."""
    return message["role"] == "assistant" and bool(message["content"]) and message.keys() <= {"role", "content", "name"}


def _in_template_form(
    messages: Sequence[Message], functions: Sequence[Any], form: CallFormat, template: str
) -> Sequence[Message]:
    """Return messages with what a template does not write itself, functions, calls or results, as text."""
    messages = _with_names(messages)
    knows_calls = "tool_calls" in template
    if "tools" in template:
        return messages if knows_calls else [with_calls_as_text(message, form) for message in messages]
    return introduced(messages if knows_calls else [plain(message, form) for message in messages], functions, form)


def _with_names(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose results have the name of their function. An identifier may come again."""
    names: dict[Any, str] = {}
    named: list[Message] = []
    for message in messages:
        names |= {call.get("id"): call["function"]["name"] for call in message.get("tool_calls") or ()}
        is_known = message["role"] == "tool" and message.get("tool_call_id") in names
        named.append({"name": names[message["tool_call_id"]], **message} if is_known else message)
    return named
