"""Readers of the four styles of calls, for a text that arrives in chunks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

from edge.serve.tools.reader import NoCallError, Reader, Reading
from edge.serve.tools.schemas import is_text, resolved, types
from edge.serve.tools.values import Give, another, as_json, bare_key, captured, json_string, members, value
from edge.text.templates.formats import JSON, CallFormat
from quant.text import overlap

MAX_HEADER = 300  # characters of the text before arguments, and of a key
_NAME = re.compile(r"[\w.-]*", re.ASCII)
_ARGUMENTS = ("arguments", "parameters")  # models confuse these two keys


class CallSink(Protocol):
    """Receives calls while they are read."""

    def begin(self, name: str) -> None:
        """Begin a call of this function. Its arguments follow."""

    def give(self, text: str) -> None:
        """Append JSON text to the arguments."""

    def end_call(self) -> None:
        """End a call with complete arguments. Raises NoCallError for an unknown function."""


def read_call(reader: Reader, form: CallFormat, schemas: Mapping[str, Any], sink: CallSink) -> Reading[None]:
    """Read a call from after its `begins` to its `ends`. For a list, read all of its calls.

    schemas: JSON schemas of parameters, by function name. Raises NoCallError.
    """
    if form.style == "named":
        yield from _named(reader, form, sink)
    elif form.style == "parameters":
        yield from _parameters(reader, form, schemas, sink)
    elif form.style == "pythonic":
        yield from _pythonic(reader, form, sink)
    elif form.is_list:
        yield from _list(reader, form, sink)
    else:
        yield from _object(reader, form, sink)


def _list(reader: Reader, form: CallFormat, sink: CallSink) -> Reading[None]:
    yield from reader.take("[")
    while True:
        yield from reader.space()
        yield from _object(reader, form, sink)
        yield from reader.space()
        if (yield from reader.take(",", "]")) == "]":
            return


def _object(reader: Reader, form: CallFormat, sink: CallSink) -> Reading[None]:
    """Read an object with a name and arguments. The arguments are streamed if the name comes first."""
    yield from reader.take("{")
    name, arguments, has_begun = None, None, False
    while True:
        yield from reader.space()
        key = json.loads((yield from _text(reader)))
        yield from reader.space()
        yield from reader.take(":")
        yield from reader.space()
        if key == form.name_key and not has_begun:
            name = json.loads((yield from _text(reader)))
        elif key in _ARGUMENTS and (yield from reader.begins("{")) and name is not None and not has_begun:
            has_begun = True
            sink.begin(name)
            yield from members(reader, JSON, sink.give)
        else:
            other = yield from captured(reader, JSON)
            if key in _ARGUMENTS:
                if has_begun:
                    raise NoCallError("a call has arguments twice")
                arguments = as_json(json.loads(other), frozenset()) if other.startswith('"') else other
                if not arguments.startswith("{"):
                    raise NoCallError("arguments must be an object")
        yield from reader.space()
        if (yield from reader.take(",", "}")) == "}":
            break
    if not has_begun:
        if name is None or arguments is None:
            raise NoCallError("a call needs a name and arguments")
        sink.begin(name)
        sink.give(arguments.removesuffix("}"))
    sink.give("}")  # not before the call is certain: without this brace, the arguments are not valid JSON
    sink.end_call()


def _text(reader: Reader) -> Reading[str]:
    """Read a JSON string, and return it with its quotes."""
    if not (yield from reader.begins('"')):
        raise NoCallError("expected a string")
    return (yield from captured(reader, JSON))


def _named(reader: Reader, form: CallFormat, sink: CallSink) -> Reading[None]:
    start = reader.at
    header = yield from reader.until((form.before or "{",), MAX_HEADER)
    if (name := form.name_in(header)) is None:
        reader.at = start
        raise NoCallError("no name")
    yield from reader.may_take(form.before)
    yield from reader.space()
    if not (yield from reader.begins("{")):
        raise NoCallError("arguments must be an object")
    sink.begin(name)
    yield from members(reader, form.notation, sink.give)
    sink.give("}")
    sink.end_call()


def _pythonic(reader: Reader, form: CallFormat, sink: CallSink) -> Reading[None]:
    yield from reader.take("[")
    while True:
        yield from reader.space()
        name = yield from reader.run(_NAME, MAX_HEADER)
        yield from reader.take("(")
        sink.begin(name)
        sink.give("{")
        yield from reader.space()
        is_first = True
        while (yield from another(reader, ")", is_first=is_first)):
            key = yield from bare_key(reader, "=")
            yield from reader.take("=")
            sink.give(f'{"" if is_first else ", "}"{json_string(key)}": ')
            yield from value(reader, form.notation, sink.give)
            yield from reader.space()
            is_first = False
        sink.give("}")
        sink.end_call()
        yield from reader.space()
        if (yield from reader.take(",", "]")) == "]":
            return


def _parameters(reader: Reader, form: CallFormat, schemas: Mapping[str, Any], sink: CallSink) -> Reading[None]:
    yield from reader.space()
    name = yield from reader.run(_NAME, MAX_HEADER)
    if form.name_end:
        yield from reader.take(form.name_end)
    yield from reader.space()
    ends = tuple(mark for mark in (form.ends, form.closes) if mark)
    if not name or not (yield from reader.begins(form.key, *ends)):
        raise NoCallError("expected parameters")
    root = schemas.get(name) or {}
    known = resolved(root, root)
    properties = known.get("properties") if isinstance(known, Mapping) else None
    sink.begin(name)
    sink.give("{")
    is_first = True
    while (yield from reader.may_take(form.key)):
        key_ends = tuple(mark for mark in (form.key_end, form.other_key_end) if mark)
        key = yield from reader.until(key_ends, MAX_HEADER)
        key_end = yield from reader.take(*key_ends)
        if form.value:
            yield from reader.space()
            yield from reader.take(form.value)
        sink.give(f'{"" if is_first else ", "}"{json_string(key.strip())}": ')
        allowed = types(properties.get(key.strip()) if isinstance(properties, Mapping) else None, root)
        if key_end == form.other_key_end:
            allowed -= {"string"}
        if is_text(allowed) or (form.other_key_end and key_end == form.key_end):
            sink.give('"')
            yield from _raw(reader, form, ends, lambda text: sink.give(json_string(text)))
            sink.give('"')
        else:
            pieces: list[str] = []
            yield from _raw(reader, form, ends, pieces.append)
            sink.give(as_json("".join(pieces), allowed))
        yield from reader.space()
        is_first = False
    if not (yield from reader.begins(*ends)):
        raise NoCallError("the parameters are not closed")
    yield from reader.may_take(form.ends)
    sink.give("}")
    sink.end_call()


def _raw(reader: Reader, form: CallFormat, ends: tuple[str, ...], give: Give) -> Reading[None]:
    """Read an unquoted value, and the mark after it.

    The mark only ends the value if another parameter or the end of the call follows. Otherwise it belongs to the value.
    """
    end = form.value_end
    if form.padding:
        yield from reader.may_take(form.padding)
    if form.cdata and (yield from reader.may_take("<![CDATA[")):
        end = f"]]>{end}"
    while True:
        place = reader.text.find(end, reader.at)
        if place < 0:
            read = len(reader.text) - max(overlap(reader.text, form.padding + end), overlap(reader.text, end))
            if read > reader.at:
                text, reader.at = reader.text[reader.at : read], read
                give(text)
            if reader.is_final:
                raise NoCallError("a value does not end")
            yield
            continue
        start, reader.at = reader.at, place + len(end)
        yield from reader.space()
        is_end, reader.at = (yield from reader.begins(form.key, *ends)), place + len(end)
        if is_end:
            text = reader.text[start:place]
            if form.padding:
                text = text.removesuffix(form.padding)
            give(text)
            return
        give(reader.text[start : reader.at])
