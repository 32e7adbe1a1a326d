"""Conversations with functions and schemas, in the form of an engine, and the grammars that their answers follow.

Grammars are in llguidance's form of Lark. A literal is a rule of its own, `lit_N: "..."`, and a text up to a mark is
`free_N` or `raw_N`, so that the engine can put control tokens in place of marks (edge/serve/engine/inputs.py): which
marks are tokens, its vocabulary knows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge.serve.http.errors import BadRequest
from edge.serve.tools.formats import JSON, CallFormat, format_of
from edge.serve.tools.functions import Function, FunctionUse, Message, json_text
from edge.serve.tools.grammar import ANYTHING, Grammar, json_schema, unwritable
from edge.serve.tools.parser import CallParser
from edge.serve.tools.schemas import is_text, types
from edge.serve.tools.styles import MAX_HEADER
from edge.serve.tools.writing import introduced, plain, with_calls_as_text


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

    def parser(self, streams: bool = False) -> CallParser | None:
        """Return a parser for one answer; None if there are no calls. streams: calls are given as they come."""
        if self.form is None:
            return None
        return CallParser(self.form, self.functions, streams=streams, is_constrained="lark" in self.sampling)

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
) -> Conversation:
    """Return the conversation. template: source of the model's template. text_schema: JSON schema of an answer that is
    no call. think: tokens of thoughts. BadRequest for a request that cannot be put to a model."""
    functions = use.functions if use.choice != "none" else ()
    for function in functions:
        json_text(function.to_json(), "tools")
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
    return Conversation(
        _in_template_form(messages, functions, form, template),
        [function.to_json() for function in functions] if knows_tools else (),
        sampling,
        form if use.callable else None,
        {function.name: function.parameters for function in use.callable},
        variables or {},
        think,
        template,
    )


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


def constraint(form: CallFormat, use: FunctionUse, text_schema: Mapping[str, Any] | None = None) -> str | None:
    """Return the grammar of an answer: calls alone if a call must come; with a schema for text, calls or JSON of it;
    with a strict function, text in which calls follow their schemas. None if any answer is allowed. BadRequest for a
    schema that no grammar holds."""
    functions = use.callable
    strict = any(function.strict for function in functions)
    if not functions or not (use.must_call or text_schema is not None or strict):
        return None
    grammar = Grammar(form.notation)
    try:
        either = grammar.rule(" | ".join(_call(grammar, form, function) for function in functions))
    except (TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        raise BadRequest("the parameters of a tool are no JSON schema, or nested too deep", "tools") from None
    mark, rest = _calls(grammar, form, either, several=use.several or not use.must_call)
    calls = f"{grammar.literal(mark)} {rest}"
    if use.must_call:
        start = [f"start: {calls}"]
    elif text_schema is not None:
        start = [f"start: {calls} | text", f"text: %json {json_schema(text_schema, 'response_format')}"]
    elif form.bare:
        start = [f"start: {calls} | TEXT?", rf"TEXT: /[^\s{{\[]{ANYTHING}/"]
    else:
        # A call begins at the mark, and must go on as a call.
        start = [f"start: ({grammar.up_to(mark, 'free')} {rest})* TEXT", f"TEXT: /{ANYTHING}/"]
    return "\n".join([*start, *grammar.lines])


def _calls(grammar: Grammar, form: CallFormat, call: str, *, several: bool) -> tuple[str, str]:
    """Return the mark that begins calls, and what follows it."""

    def more(mark: str, text: str) -> str:
        # One literal: the lexer takes the longest one, so none may begin another.
        return f"({grammar.literal(form.between + mark)} {text})*" if several else ""

    opens = "" if form.bare else next(iter(form.opens), "")
    closes = form.closes if opens else ""
    if form.is_list or form.style == "pythonic":
        return f"{opens}[", f"{call} {more('', call)} {grammar.literal(']' + closes)}"
    if form.is_section:
        begun = grammar.literal(form.space + form.begins)
        return opens, f"{begun} {call} {more(form.begins, call)} {grammar.literal(form.space + closes)}"
    inside = form.space + form.begins if opens and form.begins not in ("", opens) else ""
    closed = f"{call} {grammar.literal((form.space if inside else '') + closes)}"
    mark = opens or form.begins
    return mark, f"{grammar.literal(inside)} {closed} {more(mark + inside, closed)}"


def _call(grammar: Grammar, form: CallFormat, function: Function) -> str:
    """Return the rule of a call, between `begins` and what follows its `ends`."""
    schema, name = {"type": "object", **function.parameters}, function.name
    if form.style == "json":
        begin = f'{form.space}{{"{form.name_key}": {json.dumps(name)}, "{form.arguments_key}": '
        parts = [grammar.literal(begin), grammar.json(schema), grammar.literal("}" + form.space)]
    elif form.style == "named":
        before, _, behind = form.header.format(name=name, index="\0").partition("\0")
        index = "/[0-9]{1,4}/" if "{index}" in form.header else ""
        arguments = grammar.json(schema) if form.notation == JSON else grammar.value(grammar.begin(schema))
        parts = [grammar.literal(before), index, grammar.literal(behind + form.before), arguments]
        parts.append(grammar.literal(form.ends))
    elif form.style == "pythonic":
        arguments = grammar.members(grammar.begin(schema), "=", bare=True)
        parts = [grammar.literal(name + "("), arguments, grammar.literal(")")]
    else:
        parts = [grammar.literal(name + form.name_end + form.space), *_parameters(grammar, form, grammar.begin(schema))]
        parts.append(grammar.literal(form.ends))
    return grammar.rule(" ".join(parts))


def _parameters(grammar: Grammar, form: CallFormat, root: Mapping[str, Any]) -> list[str]:
    """Return the rules of the parameters, in their order."""
    rules, ends = [], [end for end in (form.key_end, form.other_key_end) if end]
    properties, required = root["properties"], root["required"]
    for key, schema in properties.items():
        if key != key.strip() or not 0 < len(key) < MAX_HEADER or any((key + end).find(end) < len(key) for end in ends):
            raise unwritable(key)
        rule = _parameter(grammar, form, grammar.literal(key), schema)
        rules.append(rule if key in required else f"({rule})?")
    if (more := root["additionalProperties"]) is not False:
        rules.append(f"({_parameter(grammar, form, grammar.other_key(root), more)})*")
    return rules


def _parameter(grammar: Grammar, form: CallFormat, key: str, schema: Any) -> str:
    known = grammar.resolved(schema)
    allowed, end = types(known, grammar.document), form.padding + form.value_end
    between = (form.space + form.value if form.value else "") + form.padding
    values = [known["const"]] if "const" in known else known.get("enum")
    ways = []
    if not allowed or "string" in allowed:
        begin = grammar.literal(form.key_end + between)
        if values is None:
            ways.append(f"{begin} {grammar.up_to(form.value_end, 'raw')}")
        else:
            raw = [value for value in values if isinstance(value, str) or not form.other_key_end]
            texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in raw]
            ways.append(f"{begin} ({' | '.join(grammar.literal(text + end) for text in texts)})")
    if not ways or (form.other_key_end and not is_text(allowed)):
        begin = grammar.literal((form.other_key_end or form.key_end) + between)
        ways.append(f"{begin} {grammar.json_part(known)} {grammar.literal(end)}")
    return grammar.rule(f"{grammar.literal(form.key)} {key} ({' | '.join(ways)}) {grammar.literal(form.space)}")
