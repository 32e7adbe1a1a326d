"""Grammars of answers with function calls, in llguidance's form of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from edge.bounds.json_arrays import bounded
from edge.serve.http.errors import BadRequest
from edge.serve.tools.functions import CallFormat, Function, FunctionUse, json_text

# Separators as in templates, so that a small model does not write white space without end.
_STYLE = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
_ANYTHING = r"(.|\n)*"


def constraint(form: CallFormat, use: FunctionUse, text_schema: Mapping[str, Any] | None = None) -> str | None:
    """Return the grammar of an answer: calls alone if a call must come; with a schema for text, calls or JSON of it;
    with a strict function, text in which calls follow their schemas. None if any answer is allowed."""
    functions = use.callable
    strict = any(function.strict for function in functions)
    if not functions or not (use.must_call or text_schema is not None or strict):
        return None
    if use.must_call:
        start = ["start: calls"]
    elif text_schema is not None:
        start = ["start: calls | text", f"text: %json {_json(text_schema, 'response_format')}"]
    elif form.bare:
        start = ["start: calls | TEXT?", rf"TEXT: /[^\s{{\[]{_ANYTHING}/"]
    else:
        # A call begins at the mark, and must go on as a call.
        mark = f"mark[lazy]: /{_ANYTHING}/ {json.dumps(form.opens)}"
        start = ["start: (mark inner)* TEXT", f"TEXT: /{_ANYTHING}/", mark]
    either = " | ".join(f"inner_{number}" for number in range(len(functions)))
    call = f"{json.dumps(form.opens)} inner" if form.opens and not form.is_list else "inner"
    several = use.several or not use.must_call
    calls = f"{call} ({json.dumps(form.between)} {call})*" if several else call
    rules = [f'calls: "[" {calls} "]"' if form.is_list else f"calls: {calls}", f"inner: {either}"]
    return "\n".join([*start, *rules, *(_inner(form, number, function) for number, function in enumerate(functions))])


def _json(schema: Mapping[str, Any], param: str) -> str:
    """Return a schema in its grammar's form. BadRequest as `json_text`."""
    try:
        limited, _ = bounded(schema)
    except RecursionError:
        raise BadRequest("the schema is nested too deep", param) from None
    return json_text({**limited, **_STYLE}, param)


def _inner(form: CallFormat, number: int, function: Function) -> str:
    """Return the rules of a call, without the mark before it. The arguments are a grammar of their own, so that
    references in their schema work."""
    schema = _json({"type": "object", **function.parameters}, "tools")
    space = "\n" if form.closes else ""
    begin = f'{space}{{"name": {json.dumps(function.name)}, "{form.arguments}": '
    arguments = f"arguments_{number}: %json {schema}"
    return (
        f"inner_{number}: {json.dumps(begin)} arguments_{number} {json.dumps('}' + space + form.closes)}\n{arguments}"
    )
