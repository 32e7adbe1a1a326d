"""Conversations with functions and schemas, in the form of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge.serve.http.errors import BadRequest
from edge.serve.tools.constraint import constraint
from edge.serve.tools.functions import (
    HERMES,
    CallFormat,
    FunctionUse,
    Message,
    format_of,
    json_text,
    plain_messages,
    renders_tools,
)
from edge.serve.tools.parser import CallParser


@dataclass(frozen=True)
class Conversation:
    """Messages in the template's form, constraints on the answer, and the format of its calls."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    sampling: Mapping[str, Any]
    form: CallFormat | None  # None: there are no calls
    names: frozenset[str]
    variables: Mapping[str, Any]  # of the template
    think: int | None = None  # tokens of thoughts; None: the server's default

    def parser(self) -> CallParser | None:
        """Return a parser for one answer; None if there are no calls."""
        return None if self.form is None else CallParser(self.form, self.names)


def conversation(
    messages: Sequence[Message],
    use: FunctionUse,
    template: str,
    text_schema: Mapping[str, Any] | None = None,
    variables: Mapping[str, Any] | None = None,
    think: int | None = None,
) -> Conversation:
    """Return the conversation. template: source of the model's template. text_schema: JSON schema of an answer that is
    no call. think: tokens of thoughts. BadRequest for a request that cannot be put to a model."""
    functions = use.functions if use.choice != "none" else ()
    for function in functions:
        json_text(function.to_json(), "tools")
    known = renders_tools(template)
    if use.must_call and text_schema is not None:
        raise BadRequest(
            "a tool must be called, and the answer must follow a schema; ask for one of the two", "tool_choice"
        )
    form = (format_of(template) if known else HERMES) if use.callable else None
    sampling: dict[str, Any] = {}
    if form is not None and (grammar := constraint(form, use, text_schema)) is not None:
        sampling["lark"] = grammar
    elif text_schema is not None:
        sampling["json_schema"] = json_text(text_schema, "response_format")
    return Conversation(
        messages if known else plain_messages(messages, functions),
        [function.to_json() for function in functions] if known else (),
        sampling,
        form,
        frozenset(function.name for function in use.callable),
        variables or {},
        think,
    )
