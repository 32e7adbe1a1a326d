"""Parsers of values that users write: sizes, numbers in a range, lists.

Parsers raise ValueError with the expected and the actual value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches

from devices.sizes import parse_bytes

MOST_WHOLE = 2**31 - 1
_SPAN_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def as_bytes(size: int | str | None) -> int | None:
    """Return a size in bytes. size: bytes, or a text such as "2GiB"."""
    return parse_bytes(size) if isinstance(size, str) else size


def bytes_up_to(most: int) -> Callable[[str], int]:
    """Return a parser of sizes of at most `most` bytes."""

    def parse(text: str) -> int:
        size = parse_bytes(text)
        if size > most:
            raise ValueError(f"needs a size of at most {most >> 20}MiB, got {text}")
        return size

    return parse


def parse_byte_range(text: str) -> tuple[int, int]:
    """Return (least, most) bytes from "1.2GiB..4GiB"."""
    least, dots, most = text.partition("..")
    if not dots:
        raise ValueError(f"needs two sizes such as 1.2GiB..4GiB, got {text!r}")
    result = parse_bytes(least), parse_bytes(most)
    if result[0] > result[1]:
        raise ValueError(f"needs the smaller size first, got {text!r}")
    return result


def memory_options(memory: int | str | None) -> dict[str, int | None]:
    """Return engine options `memory` and `least_memory` from bytes, or a text such as "3GiB" or "1.2GiB..4GiB"."""
    if isinstance(memory, str) and ".." in memory:
        least, most = parse_byte_range(memory)
        return {"memory": most, "least_memory": least}
    return {"memory": as_bytes(memory), "least_memory": None}


def parse_span(text: str, least_s: int, most_s: int) -> int:
    """Return seconds from "90s", "15m", "1h" or "2d"."""
    match = re.fullmatch(r"([0-9]{1,7})([smhd])", text)
    seconds = int(match[1]) * _SPAN_S[match[2]] if match else 0
    if not least_s <= seconds <= most_s:
        raise ValueError(f"needs a time from {least_s}s to {most_s // 86_400}d, such as 15m or 1h, got {text!r}")
    return seconds


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a parser of integers from `least` to `most` (default: the largest 31-bit integer)."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"needs a whole number, got {text!r}") from None
        if value < least and most is None:
            raise ValueError(f"needs a whole number, {least} or more, got {value}")
        top = MOST_WHOLE if most is None else most
        if not least <= value <= top:
            raise ValueError(f"needs a whole number from {least} to {top}, got {value}")
        return value

    return parse


positive_int, natural = whole(1), whole(0)


def number(text: str) -> float:
    """Return a finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"needs a number, got {text!r}")
    return value


def positive(text: str) -> float:
    """Return a finite number above 0."""
    value = number(text)
    if value <= 0:
        raise ValueError(f"needs a number above 0, got {text!r}")
    return value


def between(least: float, most: float) -> Callable[[str], float]:
    """Return a parser of numbers from `least` to `most`."""

    def parse(text: str) -> float:
        value = number(text)
        if not least <= value <= most:
            raise ValueError(f"needs a number from {least:g} to {most:g}, got {text!r}")
        return value

    return parse


def one_or_two(names: Sequence[str]) -> Callable[[str], str]:
    """Return a parser of NAME or NAME/NAME. Each NAME must be among `names`."""

    def parse(text: str) -> str:
        parts = text.split("/")
        for part in parts if len(parts) < 3 else [text]:
            if part not in names:
                near = get_close_matches(part, names, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ValueError(f"needs one of {', '.join(names)}, or two of them, A/B; got {text!r:.80}{hint}")
        return text

    return parse


def items(text: str) -> list[str]:
    """Return the items of a list separated by commas, spaces or both."""
    parts = text.replace(",", " ").split()
    if not parts or re.search(r"^\s*,|,\s*,|,\s*$", text):
        raise ValueError(f"needs a list such as A,B, got {text[:80]!r}")
    return parts


def dimension(text: str) -> tuple[str, int]:
    """Return the name and size of a dimension from "NAME=N" or "INPUT[AXIS]=N"."""
    name, equals, value = text.rpartition("=")
    if not equals or not name:
        raise ValueError(f"needs NAME=N or INPUT[AXIS]=N, got {text!r}")
    return name, positive_int(value)


def shares(text: str) -> tuple[float, ...]:
    """Return numbers above 0 from a list. The first of several may be 0: that device holds no part of the model."""
    values = tuple(map(number, items(text)))
    if min(values[len(values) > 1 :]) <= 0 or values[0] < 0:
        raise ValueError(f"needs a number above 0 for each device (or 0 for the first), got {text[:80]!r}")
    return values
