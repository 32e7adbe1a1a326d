"""Parse answers with tool calls in pieces, for comparison with expected calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from edge.serve.tools.parser import CallArguments, CallEnd, CallParser, CallStart, Part
from edge.text.templates.formats import CallFormat

Parsed = list[str | dict[str, Any]]
"""Texts; complete calls as `name` and `arguments`, broken ones as `name` and `partial`."""

FUNCTIONS: dict[str, Any] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "save": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "zip": {"anyOf": [{"$ref": "#/$defs/zip"}]},
            "meta": {"type": "object"},
            "tags": {"type": "array"},
            "none": {"type": ["string", "null"]},
        },
        "$defs": {"zip": {"type": "string"}},
    },
    "time": {},
}


def merged(parts: Iterable[Part]) -> Parsed:
    """Return parts with neighbouring texts, and all of a call, as one."""
    parsed: Parsed = []
    for part in parts:
        last = parsed[-1] if parsed else None
        if isinstance(part, CallStart):
            parsed.append({"name": part.name, "partial": ""})
        elif isinstance(part, CallArguments):
            assert isinstance(last, dict)
            last["partial"] += part.text
        elif isinstance(part, CallEnd):
            assert isinstance(last, dict)
            if part.is_complete:
                last["arguments"] = json.loads(last.pop("partial"))
        elif isinstance(last, str):
            parsed[-1] = last + part
        else:
            parsed.append(part)
    return parsed


def parsed(
    form: CallFormat, pieces: Iterable[str], functions: Mapping[str, Any] = FUNCTIONS, *, streams: bool = False
) -> Parsed:
    """Return what a parser makes of an answer that comes in these pieces."""
    parser = CallParser(form, functions, streams=streams)
    return merged([*(part for piece in pieces for part in parser.add(piece)), *parser.end()])


def splits(text: str) -> Iterable[list[str]]:
    """Yield a text as it is, in single characters, and in two pieces in every way."""
    yield [text]
    yield list(text)
    for place in range(1, len(text)):
        yield [text[:place], text[place:]]
