"""Conversations with functions and schemas, as an engine takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge.serve.http.errors import BadRequest
from edge.serve.tools.constraint import constraint
from edge.serve.tools.functions import FunctionUse, Message, json_text
from edge.serve.tools.parser import CallParser
from edge.serve.tools.sizes import JsonSize
from edge.templates.formats import CallFormat, format_of
from edge.templates.template import CONTINUES


@dataclass(frozen=True)
class Conversation:
    """Messages, constraints on the answer, and the format of its calls. Messages and tools get the form that the
    template takes when they are rendered."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    sampling: Mapping[str, Any]
    form: CallFormat | None  # None: there are no calls
    functions: Mapping[str, Any]  # schemas of parameters, by name
    variables: Mapping[str, Any]  # of the template
    think: int | None = None  # tokens of thoughts; None: the server's default
    is_single: bool = False  # an answer has one call at most

    def parser(self, streams: bool = False) -> CallParser | None:
        """Return a parser for one answer; None if there are no calls. streams: calls are given as they come."""
        if self.form is None:
            return None
        is_constrained = "lark" in self.sampling
        return CallParser(
            self.form, self.functions, streams=streams, is_constrained=is_constrained, is_single=self.is_single
        )

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
    tools = [function.to_json() for function in functions]
    for function, tool in zip(functions, tools, strict=True):
        size.add(tool, f"the tool {function.name!r}")
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
    own = list(messages)
    if continues and not sampling and len(own) > 1 and _is_beginning(own[-1]):
        own[-1] = {**own[-1], CONTINUES: True}
    return Conversation(
        own,
        tools,
        sampling,
        form if use.callable else None,
        {function.name: function.parameters for function in use.callable},
        variables or {},
        think,
        use.several is False,
    )


def _is_beginning(message: Message) -> bool:
    """Return whether a message is text of the model alone, which an answer may go on with."""
    return message["role"] == "assistant" and bool(message["content"]) and message.keys() <= {"role", "content", "name"}
