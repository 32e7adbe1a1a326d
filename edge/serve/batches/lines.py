"""Lines of a batch's input file, and of its output and error files."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from edge.serve.apis.openai_fields import new_id
from edge.serve.http.bodies import to_json

MAX_LINES = 50_000
MAX_ID = 512  # characters of a custom_id
_ORDER_CHARS = 4096  # of a prompt, by which lines are ordered
_PROMPT = ("tools", "instructions", "messages", "prompt", "input")  # in the order of a prompt's text


@dataclass(frozen=True)
class Line:
    """A request of a batch."""

    number: int  # of its line, from 1
    custom_id: str
    model: str | None
    order: str  # lines whose prompts begin alike have texts that do so
    body: bytes  # JSON


def count_lines(content: bytes) -> int:
    """Return the number of lines that are not blank."""
    return sum(1 for _ in _lines(content))


def read_lines(content: bytes, endpoint: str) -> tuple[list[Line], dict[int, str]]:
    """Return the requests of a file, ordered so that those with a common beginning follow each other; and by number the
    lines of the error file for those that are broken."""
    lines: list[Line] = []
    broken: dict[int, str] = {}
    ids: set[str] = set()
    for number, text in _lines(content):
        custom_id = None
        try:
            value = json.loads(text)
            custom_id = _custom_id(value)
            if custom_id in ids:
                raise ValueError(f"its custom_id {custom_id!r:.80} is that of a line before it")
            lines.append(_line(number, custom_id, value, endpoint))
            ids.add(custom_id)
        except (ValueError, RecursionError) as error:
            why = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
            broken[number] = failed_line(custom_id, "invalid_line", f"line {number}: {why}")
    lines.sort(key=lambda line: (line.model or "", line.order))
    return lines, broken


def _lines(content: bytes) -> Iterator[tuple[int, bytes]]:
    return ((number, line) for number, line in enumerate(io.BytesIO(content), 1) if line.strip())


def _custom_id(value: Any) -> str:
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID:
        raise ValueError(f"custom_id needs a text of 1 to {MAX_ID} characters")
    return custom_id


def _line(number: int, custom_id: str, value: dict[str, Any], endpoint: str) -> Line:
    if (value.get("method"), value.get("url")) != ("POST", endpoint):
        raise ValueError(f"method and url need to be POST and {endpoint}, the endpoint of the batch")
    body = value.get("body")
    if not isinstance(body, dict):
        raise ValueError("body needs a JSON object, the request")
    model = body.get("model")
    if not isinstance(model, str | None):
        raise ValueError("body.model needs the name of a model")
    order = json.dumps([body.get(key) for key in _PROMPT])
    return Line(number, custom_id, model, order[:_ORDER_CHARS], json.dumps(body).encode())


def answered_line(custom_id: str, status: int, body: Any) -> str:
    """Return the line of a request that was answered, also with an error."""
    response = {"status_code": status, "request_id": new_id("req_"), "body": body}
    return to_json({"id": new_id("batch_req_"), "custom_id": custom_id, "response": response, "error": None})


def failed_line(custom_id: str | None, code: str, message: str) -> str:
    """Return the line of a request that was not answered."""
    error = {"code": code, "message": message}
    return to_json({"id": new_id("batch_req_"), "custom_id": custom_id, "response": None, "error": error})
