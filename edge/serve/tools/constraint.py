"""Grammars of answers with function calls, in llguidance's form of Lark.

A literal is a rule of its own, `lit_N: "..."`, and a text up to a mark is `free_N` or `raw_N`, so that the engine can
put control tokens in place of marks (edge/serve/engine/grammars.py): which marks are tokens, its vocabulary knows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from edge.serve.http.errors import BadRequest
from edge.serve.tools.formats import JSON, CallFormat
from edge.serve.tools.functions import Function, FunctionUse
from edge.serve.tools.grammar import ANYTHING, Grammar, json_schema, unwritable
from edge.serve.tools.schemas import is_text, types
from edge.serve.tools.styles import MAX_HEADER


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
    several = not use.must_call if use.several is None else use.several
    mark, rest = _calls(grammar, form, either, several=several)
    calls = f"{grammar.literal(mark)} {rest}"
    if use.must_call:
        start = [f"start: {calls}"]
    elif text_schema is not None:
        start = [f"start: {calls} | text", f"text: %json {json_schema(text_schema, 'response_format')}"]
    elif form.bare:
        start = [f"start: {calls} | TEXT?", rf"TEXT: /[^\s{{\[]{ANYTHING}/"]
    else:
        # A call begins at the mark, and must go on as a call.
        times = "*" if several else "?"
        start = [f"start: ({grammar.up_to(mark, 'free')} {rest}){times} TEXT", f"TEXT: /{ANYTHING}/"]
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
