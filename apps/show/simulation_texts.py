"""Parsers of a simulation's arrivals and disturbances. ValueError says what is needed and what was there."""

from __future__ import annotations

import math
import re
from typing import Any

from edge.units import number, positive_int

MOST_RATE = 1e6
MOST_FACTOR = 1e4
_SLOW = re.compile(r"(.+):([0-9.]+)@([0-9.]+)(?:-([0-9.]+))?")
_LEAVE = re.compile(r"(.+)@([0-9.]+)")


def arrivals(text: str) -> tuple[str, Any]:
    """Return ("poisson", rate a second), ("closed", clients) or ("trace", file) from "poisson:0.5", "closed:4" or
    "trace:F"."""
    kind, colon, value = text.partition(":")
    if kind == "trace" and value:
        return kind, value
    if kind == "closed" and colon:
        return kind, positive_int(value)
    if kind == "poisson" and colon:
        rate = number(value)
        if 1e-9 <= rate <= MOST_RATE:
            return kind, rate
        raise ValueError(f"needs a rate above 0, at most {MOST_RATE:g} a second, got {value[:40]}")
    raise ValueError(f"needs poisson:RATE, closed:N or trace:FILE, got {text[:80]!r}")


def percent(text: str) -> float:
    """Return a share from per cent."""
    value = number(text)
    if not 0 <= value <= 1000:
        raise ValueError(f"needs per cent, 0 to 1000, got {text[:40]}")
    return value / 100


def slow(text: str) -> tuple[str, float, float, float]:
    """Return (device, factor, from second, to second) from "DEVICE:FACTOR@T" or "DEVICE:FACTOR@T-T2"."""
    match = _SLOW.fullmatch(text)
    if not match:
        raise ValueError(f"needs DEVICE:FACTOR@T or DEVICE:FACTOR@T-T2, got {text[:80]!r}")
    factor, start = number(match[2]), number(match[3])
    stop = number(match[4]) if match[4] else math.inf
    if not 0 < factor <= MOST_FACTOR or stop <= start:
        raise ValueError(f"needs a factor above 0, at most {MOST_FACTOR:g}, and a T2 after T, got {text[:80]!r}")
    return match[1], factor, start, stop


def leave(text: str) -> tuple[str, float]:
    """Return (device, second) from "DEVICE@T"."""
    match = _LEAVE.fullmatch(text)
    if not match:
        raise ValueError(f"needs DEVICE@T, got {text[:80]!r}")
    return match[1], number(match[2])
