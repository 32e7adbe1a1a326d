"""Values in the notations of calls, converted to JSON while they arrive. The output is always a prefix of JSON."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable

from edge.serve.tools.reader import NoCallError, Reader, Reading
from edge.serve.tools.schemas import admits
from edge.text.templates.formats import JSON, PYTHON, Notation

Give = Callable[[str], None]
"""Receives more JSON text. The reader has then consumed all text that it was made from."""

MAX_DEPTH = 100
MAX_SCALAR = 300  # maximum characters of a number, or of a key without quotes
_SCALAR = re.compile(r"[\w.+-]*")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
# Keys without quotes, by the separator after them.
_KEYS = {"=": re.compile(r"[^\"'(){}\[\],=\n]*"), ":": re.compile(r"[^\"'{}\[\],:<\n]*")}
_ESCAPES = {"\\": "\\", '"': '"', "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_OTHER_ESCAPES = {"json": {"/": "/"}, "python": {"'": "'", "a": "\a", "v": "\v", "0": "\0"}}
_HEX = {"json": {"u": 4}, "python": {"x": 2, "u": 4, "U": 8}}


def json_string(text: str) -> str:
    """Return the inner part of a JSON string. Unpaired surrogates remain escaped."""
    return json.dumps(text, ensure_ascii="\ud800" <= text <= "\udfff")[1:-1]


def value(reader: Reader, notation: Notation, give: Give, depth: int = 0) -> Reading[None]:
    """Read one value. Raises NoCallError if it is invalid."""
    if depth > MAX_DEPTH:
        raise NoCallError("nested too deeply")
    yield from reader.space()
    character = yield from reader.character()
    if character == "{":
        yield from members(reader, notation, give, depth)
        give("}")
    elif character == "[":
        yield from _items(reader, notation, give, depth)
    elif quote := (yield from reader.may_take(*notation.quotes)):
        yield from _string(reader, notation, quote, give)
    else:
        start = reader.at
        word = yield from reader.run(_SCALAR, MAX_SCALAR)
        if reader.is_empty:
            reader.at = start
            raise NoCallError("cut off: more of the value may follow")
        if word in notation.words:
            give(notation.words[word])
        elif _NUMBER.fullmatch(word) and math.isfinite(float(word)):
            give(word)
        else:
            reader.at = start
            raise NoCallError("not a value")


def captured(reader: Reader, notation: Notation) -> Reading[str]:
    """Read one value, and return its JSON."""
    pieces: list[str] = []
    yield from value(reader, notation, pieces.append)
    return "".join(pieces)


def as_json(text: str, allowed: frozenset[str]) -> str:
    """Return the JSON of an unquoted value.

    It is parsed as JSON or Python if the result has an allowed type. Otherwise it is a text.
    """
    for notation in (JSON, PYTHON):
        reader = Reader()
        reader.text, reader.is_final = f"{text.strip()}\n", True
        try:
            next(captured(reader, notation))
        except StopIteration as end:
            if reader.text[reader.at :] == "\n" and admits(allowed, end.value):
                return str(end.value)
        except NoCallError:
            pass
    return f'"{json_string(text)}"'


def members(reader: Reader, notation: Notation, give: Give, depth: int = 0) -> Reading[None]:
    """Read an object. Its closing brace is consumed but not passed to `give`."""
    yield from reader.take("{")
    give("{")
    yield from reader.space()
    is_first = True
    while (yield from another(reader, "}", is_first=is_first)):
        quote = yield from reader.may_take(*notation.quotes)
        if not quote and not notation.bare_keys:
            raise NoCallError("expected a key")
        if not is_first:
            give(", ")
        if quote:
            give('"')
            yield from _inside(reader, notation, quote, give)
        else:
            key = yield from bare_key(reader, ":")
            give(f'"{json_string(key)}')
        yield from reader.space()
        yield from reader.take(":")
        give('": ')
        yield from value(reader, notation, give, depth + 1)
        yield from reader.space()
        is_first = False


def another(reader: Reader, closes: str, *, is_first: bool) -> Reading[bool]:
    """Read the comma before an item other than the first. Return False at the end of the items."""
    if (yield from reader.may_take(closes)):
        return False
    if not is_first:
        yield from reader.take(",")
        yield from reader.space()
    return True


def bare_key(reader: Reader, separator: str) -> Reading[str]:
    """Read a key without quotes, up to its separator."""
    key = (yield from reader.run(_KEYS[separator], MAX_SCALAR)).strip()
    if not key:
        raise NoCallError("expected a key")
    return key


def is_bare_key(key: str, separator: str) -> bool:
    """Return True if `bare_key` reads this key unchanged."""
    return bool(key == key.strip() and 0 < len(key) < MAX_SCALAR and _KEYS[separator].fullmatch(key))


def _items(reader: Reader, notation: Notation, give: Give, depth: int) -> Reading[None]:
    yield from reader.take("[")
    give("[")
    yield from reader.space()
    is_first = True
    while (yield from another(reader, "]", is_first=is_first)):
        if not is_first:
            give(", ")
        yield from value(reader, notation, give, depth + 1)
        yield from reader.space()
        is_first = False
    give("]")


def _string(reader: Reader, notation: Notation, quote: str, give: Give) -> Reading[None]:
    give('"')
    yield from _inside(reader, notation, quote, give)
    give('"')


def _inside(reader: Reader, notation: Notation, quote: str, give: Give) -> Reading[None]:
    """Read the text of a string, up to and including the closing quote."""
    while not (yield from reader.may_take(quote)):
        start = reader.at
        character = yield from reader.character()
        if not character:
            raise NoCallError("the string is not closed")
        if character == "\\" and notation.escapes:
            text = yield from _escaped(reader, notation.escapes)
        else:
            places = [place for mark in (quote[0], "\\") if (place := reader.text.find(mark, start + 1)) >= 0]
            reader.at = min(places, default=len(reader.text))
            text = reader.text[start : reader.at]
        give(json_string(text))


def _escaped(reader: Reader, rules: str) -> Reading[str]:
    """Read an escape sequence. Return its text, which may be an unpaired surrogate."""
    start = reader.at
    reader.at += 1
    kind = yield from reader.character()
    end = reader.at + 1
    if text := {**_ESCAPES, **_OTHER_ESCAPES[rules]}.get(kind):
        reader.at = end
        return text
    if n_digits := _HEX[rules].get(kind):
        while len(reader.text) < end + n_digits and not reader.is_final:
            yield
        digits = reader.text[end : end + n_digits]
        if re.fullmatch(rf"[0-9a-fA-F]{{{n_digits}}}", digits) and int(digits, 16) <= sys.maxunicode:
            reader.at = end + n_digits
            return chr(int(digits, 16))
    elif rules == "python" and kind:
        reader.at = end
        return "" if kind == "\n" else f"\\{kind}"
    reader.at = start
    raise NoCallError("invalid escape sequence")
