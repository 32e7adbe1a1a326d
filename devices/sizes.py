"""Sizes in bytes, as users write them."""

from __future__ import annotations

import re

MOST_BYTES = 2**60
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*(?:([KMGT]?)(i?)B|([KMGT])i?)", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Return bytes from "2GiB", "900MiB", "1.5GB" or "943718400B". "2G" is 2GiB, as in Docker and systemd.

    Raises ValueError for other text, and for more than 1024PiB.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"needs a size such as 2GiB, 900MiB or 943718400B, got {text!r}")
    base = 1024 if match[3] or match[4] else 1000
    size = int(float(match[1]) * base ** " KMGT".index((match[2] or match[4] or " ").upper()))
    if not 0 < size < MOST_BYTES:
        raise ValueError(f"needs a size from 1B to 1024PiB, got {text!r}")
    return size
