"""Conversations with functions and schemas, in the form that an engine accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge.serve.http.errors import BadRequest
from edge.serve.tools.constraint import constraint
from edge.serve.tools.functions import FunctionUse, Message, json_text
from edge.serve.tools.parser import CallParser
from edge.serve.tools.sizes import JsonSize
from edge.text.templates.formats import CallFormat, format_of
from edge.text.templates.template import CONTINUES


@dataclass(frozen=True)
class Conversation:
    """Messages, constraints of the answer, and the format of its calls.

    When they are rendered, messages and tools are converted to the form of the template.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    sampling: Mapping[str, Any]
    form: CallFormat | None  # None: no calls are possible
    functions: Mapping[str, Any]  # JSON schemas of parameters by function name
    variables: Mapping[str, Any]  # variables of the template
    think: int | None = None  # thinking budget in tokens; None: the server's default
    is_single: bool = False  # an answer has at most one call

    def parser(self, streams: bool = False) -> CallParser | None:
        """Return a parser for one answer, or None without calls.

        streams: calls are passed on while they are generated.
        """
        if self.form is None:
            return None
        is_constrained = "lark" in self.sampling
        return CallParser(
            self.form, self.functions, streams=streams, is_constrained=is_constrained, is_single=self.is_single
        )

    @property
    def marks(self) -> Sequence[str]:
        """Marks of calls, whose control tokens must be returned as text."""
        return self.form.marks if self.form else ()

    @property
    def ends_thought(self) -> Sequence[str]:
        """Marks that also end a thought. With a grammar there are none, because it begins after the thought."""
        return self.form.opens if self.form and self.form.ends_thought and not self.sampling else ()

    @property
    def answer(self) -> str:
        """Text that begins a grammar-constrained call, if a header could begin in the same way; otherwise ""."""
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
    """Return the conversation.

    template: source of the model's template.
    text_schema: JSON schema of an answer without calls.
    think: thinking budget in tokens.
    continues: treat a last message of the assistant as the beginning of the answer. This requires that the message
        has only text, and that the answer has no constraint.

    Raises BadRequest for an invalid request.
    """
    functions = use.functions if use.choice != "none" else ()
    size = JsonSize("tools")
    tools = [function.to_json() for function in functions]
    for function, tool in zip(functions, tools, strict=True):
        size.add(tool, f"the tool {function.name!r}")
    if use.must_call and text_schema is not None:
        raise BadRequest(
            "a tool must be called, and the answer must follow a schema; use only one of the two", "tool_choice"
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
    """Return True if a message only has text of the assistant, so that an answer may continue it."""
    return message["role"] == "assistant" and bool(message["content"]) and message.keys() <= {"role", "content", "name"}
