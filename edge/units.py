"""Sizes as people write them."""

from __future__ import annotations

import re

MOST_BYTES = 2**60


def parse_bytes(text: str) -> int:
    """Bytes, from "2GiB", "900MiB", "1.5GB" or "943718400B". ValueError for anything else, and beyond 1024PiB."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([KMGT]?)(i?)B", text.strip(), re.IGNORECASE)
    if not match:
        raise ValueError(f"needs a size such as 2GiB, 900MiB or 943718400B, got {text!r}")
    base = 1024 if match[3] else 1000
    size = int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
    if not 0 < size < MOST_BYTES:
        raise ValueError(f"needs a size from 1B to 1024PiB, got {text!r}")
    return size


def as_bytes(size: int | str | None) -> int | None:
    """A size given as bytes or as text."""
    return parse_bytes(size) if isinstance(size, str) else size
