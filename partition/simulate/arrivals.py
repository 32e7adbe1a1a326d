"""Request arrivals for a simulation: Poisson, closed-loop, or from a trace file."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from edge.errors import EdgeError
from partition import fields

MOST_REQUESTS = 1_000_000
MOST_TOKENS = 1 << 24
_KEYS = ("arrival_s", "prompt_tokens", "gen_tokens")


class TraceError(EdgeError, ValueError):
    """A trace file that cannot be used. The message names the line."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request. For an ONNX model it is one input, and both token counts are 1."""

    arrival_s: float  # ignored if a fixed number of clients sends the requests
    prompt: int  # prompt tokens
    tokens: int  # tokens to generate


@dataclass(frozen=True)
class Arrivals:
    """Requests in the order of their arrival."""

    requests: tuple[Request, ...]
    description: str  # text for display, for example "2 a second at random"
    rate_per_s: float | None = None  # None: requests arrive as fast as `clients` send them
    clients: int | None = None  # number of clients that each wait for a response before the next request


def poisson(rate_per_s: float, n: int, prompt: int, tokens: int, seed: int) -> Arrivals:
    """Return `n` requests at random times (Poisson arrivals)."""
    dice = random.Random(f"arrivals {seed}")
    times = accumulate(dice.expovariate(rate_per_s) for _ in range(n))
    requests = tuple(Request(time, prompt, tokens) for time in times)
    return Arrivals(requests, f"{rate_per_s:g} a second at random", rate_per_s)


def closed(clients: int, n: int, prompt: int, tokens: int) -> Arrivals:
    """Return `n` requests from clients that each wait for a response before the next request (closed loop)."""
    return Arrivals(
        (Request(0.0, prompt, tokens),) * n, f"{clients} {'client' if clients == 1 else 'clients'}", clients=clients
    )


def trace(lines: Iterable[str], prompt: int, tokens: int, most: int = MOST_REQUESTS) -> Arrivals:
    """Return the first `most` requests of a trace file.

    lines: CSV or JSON lines. CSV: seconds, and optionally prompt and generated tokens; a first line may name the
        columns. JSON: arrival_s, and optionally prompt_tokens and gen_tokens.
    prompt, tokens: defaults for lines without token counts.

    Raises TraceError for an invalid line, or a line with an earlier time than the line before.
    """
    requests: list[Request] = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or (number == 1 and text.replace(" ", "").split(",")[0] == _KEYS[0]):
            continue
        if len(requests) == most:
            break
        where = f"line {number}"
        values = _object(text, where) if text.startswith("{") else _columns(text, where)
        time = _time(values[0], where)
        if requests and time < requests[-1].arrival_s:
            raise TraceError(
                f"{where}: {time:g} s is before {requests[-1].arrival_s:g} s of the line before; sort them"
            )
        requests.append(
            Request(time, _tokens(values[1], prompt, where, _KEYS[1]), _tokens(values[2], tokens, where, _KEYS[2]))
        )
    if not requests:
        raise TraceError("there are no arrivals; expected a line for each, with its seconds")
    span = requests[-1].arrival_s - requests[0].arrival_s
    rate = (len(requests) - 1) / span if span else None
    return Arrivals(tuple(requests), f"{len(requests)} of a trace", rate)


def _columns(text: str, where: str) -> list[Any]:
    """Parse a line of CSV. Empty columns are None."""
    columns = [column.strip() for column in text.split(",")]
    if len(columns) > len(_KEYS):
        raise TraceError(f"{where}: {len(columns)} columns; expected {', '.join(_KEYS)}, or the first of them")
    values: list[Any] = []
    for i, column in enumerate(columns):
        try:
            values.append((float(column) if i == 0 else int(column)) if column else None)
        except ValueError:
            kind = "a number of seconds" if i == 0 else "a whole number"
            raise TraceError(f"{where}: {_KEYS[i]} is {fields.short(column)}; expected {kind}") from None
    return [*values, None, None]


def _object(text: str, where: str) -> list[Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise TraceError(f"{where}: this is not a JSON object") from None
    unknown = next((key for key in values if key not in _KEYS), None)
    if unknown is not None:
        raise TraceError(f"{where}: unknown field {fields.short(unknown)}; known are {', '.join(_KEYS)}")
    return [values.get(key) for key in _KEYS]


def _time(value: Any, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1e9 or math.isnan(value):
        raise TraceError(f"{where}: {_KEYS[0]} is {fields.short(value)}; expected seconds from 0 to 1e9")
    return float(value)


def _tokens(value: Any, usual: int, where: str, key: str) -> int:
    if value is None:
        return usual
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_TOKENS:
        raise TraceError(f"{where}: {key} is {fields.short(value)}; expected a whole number from 1 to {MOST_TOKENS}")
    return value
