"""Grammars of answers with tool calls, in llguidance's Lark dialect.

A literal is a separate rule `lit_N: "..."`, and a text up to a mark is `free_N` or `raw_N`. This lets the engine, which
knows the vocabulary, replace marks by control tokens (edge/serve/engine/grammars.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from edge.serve.tools.alternatives import NotHeldError, constants, types
from edge.serve.tools.functions import Function, FunctionUse
from edge.serve.tools.grammar import ANYTHING, JSON_LIKE, NO_VALUE, Grammar, json_schema, normal, root_of
from edge.serve.tools.styles import MAX_HEADER
from edge.text.constraints.schemas import AT, PLACE, place_below
from edge.text.templates.formats import JSON, CallFormat


def constraint(form: CallFormat, use: FunctionUse, text_schema: Mapping[str, Any] | None = None) -> str | None:
    """Return the grammar of an answer, or None if any answer is allowed.

    If a call is required, only calls are allowed. With a schema for text, calls or JSON of the schema are allowed. With
    a strict function, text with calls that follow their schemas is allowed.

    Raises BadRequest for a schema that cannot be enforced.
    """
    functions = use.callable
    strict = any(function.strict for function in functions)
    if not functions or not (use.must_call or text_schema is not None or strict):
        return None
    grammar = Grammar(form.notation)
    either = grammar.rule(" | ".join(_held_call(grammar, form, function) for function in functions))
    several = not use.must_call if use.several is None else use.several
    mark, rest = _calls(grammar, form, either, several=several)
    calls = f"{grammar.literal(mark)} {rest}"
    if use.must_call:
        start = [f"start: {calls}"]
    elif text_schema is not None:
        text = json_schema(normal(text_schema, "response_format", "the schema of the answer"), "response_format")
        start = [f"start: {calls} | text", f"{PLACE}the schema of the answer", f"text: %json {text}"]
    elif form.bare:
        start = [f"start: {calls} | TEXT?", rf"TEXT: /[^\s{{\[]{ANYTHING}/"]
    else:
        # After the mark of a call, the answer must continue as a call.
        times = "*" if several else "?"
        start = [f"start: ({grammar.up_to(mark, 'free')} {rest}){times} TEXT", f"TEXT: /{ANYTHING}/"]
    return "\n".join([*start, *grammar.lines])


def _calls(grammar: Grammar, form: CallFormat, call: str, *, several: bool) -> tuple[str, str]:
    """Return the mark that begins calls, and the rules for the text after it."""

    def more(mark: str, text: str) -> str:
        # This is one literal, because the lexer takes the longest match, so no literal may be a prefix of another.
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


def _held_call(grammar: Grammar, form: CallFormat, function: Function) -> str:
    """Return the rule of a call. Raises BadRequest for parameters that cannot be enforced."""
    schema = grammar.begin(function)
    try:
        rule = grammar.rule(" ".join(_call(grammar, form, function.name, schema)))
        grammar.end()
    except NotHeldError as error:
        raise grammar.error("", f"{error} in the call format of this model") from None
    except RecursionError:
        raise grammar.error("", "the schema is nested too deeply; simplify it") from None
    return rule


def _call(grammar: Grammar, form: CallFormat, name: str, schema: Mapping[str, Any]) -> list[str]:
    """Return the rules of a call, from after its `begins` to after its `ends`."""
    if form.style == "json":
        begin = f'{form.space}{{"{form.name_key}": {json.dumps(name)}, "{form.arguments_key}": '
        return [grammar.literal(begin), grammar.json(schema), grammar.literal("}" + form.space)]
    if form.style == "named":
        before, _, behind = form.header.format(name=name, index="\0").partition("\0")
        index = "/[0-9]{1,4}/" if "{index}" in form.header else ""
        arguments = grammar.json(schema) if form.notation == JSON else grammar.value(schema)
        if not arguments:
            raise grammar.error("", NO_VALUE)
        ends = grammar.literal(form.ends)
        return [grammar.literal(before), index, grammar.literal(behind + form.before), arguments, ends]
    ways = grammar.alternatives(schema)
    if not ways:
        raise grammar.error("", NO_VALUE)
    if form.style == "pythonic":
        bodies = [grammar.members(way, "=", bare=True) for way in ways]
        return [grammar.literal(name + "("), _any_of(bodies), grammar.literal(")")]
    bodies = [" ".join(_parameters(grammar, form, root_of(way))) for way in ways]
    begin = grammar.literal(name + form.name_end + form.space)
    return [begin, _any_of(bodies), grammar.literal(form.ends)]


def _any_of(bodies: Sequence[str]) -> str:
    """Return an expression for any of the bodies, some of which may be empty."""
    said = [body for body in bodies if body]
    if len(bodies) == 1 or not said:
        return "".join(said)
    return f"({' | '.join(said)}){'' if len(said) == len(bodies) else '?'}"


def _parameters(grammar: Grammar, form: CallFormat, root: Mapping[str, Any]) -> list[str]:
    """Return the rules of the parameters, in their order."""
    rules, ends = [], [end for end in (form.key_end, form.other_key_end) if end]
    properties, required = root["properties"], root["required"]
    for key, schema in properties.items():
        is_written = key == key.strip() and 0 < len(key) < MAX_HEADER
        is_written = is_written and not any((key + end).find(end) < len(key) for end in ends)
        at = place_below("", key)
        if is_written and (rule := _parameter(grammar, form, grammar.literal(key), schema, at)):
            rules.append(rule if key in required else f"({rule})?")
        elif key in required:
            raise grammar.error(at, NO_VALUE) if is_written else grammar.unwritable(key)
    more = root["additionalProperties"]
    if more is not False and (rule := _parameter(grammar, form, grammar.other_key(root), more, "")):
        rules.append(f"({rule})*")
    return rules


def _parameter(grammar: Grammar, form: CallFormat, key: str, schema: Any, at: str) -> str:
    """Return the rule of a parameter, or "" if it allows no value."""
    ways = grammar.alternatives(schema, at)
    between = (form.space + form.value if form.value else "") + form.padding
    texts = [way for way in ways if "string" in types(way)]
    others = [{**way, "type": kinds} for way in ways if (kinds := [kind for kind in types(way) if kind != "string"])]
    is_held = any(way.keys() - {"type", AT, "format"} for way in (*texts, *others))
    bodies = []
    if texts:
        begin = grammar.literal(form.key_end + between)
        bodies += [f"{begin} {text}" for text in _texts(grammar, form, texts, at, bool(others), is_held=is_held)]
    if others and (not texts or form.other_key_end or is_held):
        begin = grammar.literal((form.other_key_end or form.key_end) + between)
        values = [grammar.value(way, at) for way in others] if texts else [grammar.value(schema, at)]
        end = grammar.literal(form.padding + form.value_end)
        bodies += [f"{begin} {value} {end}" for value in dict.fromkeys(values) if value]
    if not bodies:
        return ""
    return grammar.rule(f"{grammar.literal(form.key)} {key} ({' | '.join(bodies)}) {grammar.literal(form.space)}")


def _texts(
    grammar: Grammar, form: CallFormat, ways: Sequence[Mapping[str, Any]], at: str, is_mixed: bool, *, is_held: bool
) -> list[str]:
    """Return rules for unquoted texts with the mark after them.

    is_mixed: values of other types are allowed as well. A text that looks like such a value would then be misread,
    unless its key marks it as text.
    """
    no_json, rules = is_mixed and not form.other_key_end, []
    for way in ways:
        try:
            values = constants(way)
        except NotHeldError as error:
            raise grammar.error(at, str(error)) from None
        if values is not None:
            texts = [value for value in values if isinstance(value, str)]
            texts = [text for text in texts if not (no_json and re.fullmatch(JSON_LIKE, text))]
            rules += [grammar.literal(text + form.padding + form.value_end) for text in texts]
        elif way.keys() & {"minLength", "maxLength", "pattern"} or (no_json and is_held):
            end = form.padding + form.value_end
            rules.append(grammar.text_up_to(end, way, at, no_json=no_json and is_held))
        else:
            rules.append(grammar.up_to(form.value_end, "raw"))
    return rules
