"""Texts for calibration and evaluation."""

from __future__ import annotations

import os
from pathlib import Path

from edge.errors import TextError

BUNDLED = Path(__file__).with_name("calibration.txt")
"""Prose, dialogue, code, lists and other languages, 34 kB. This suffices to compare models of similar quality."""

MAX_BYTES = 64 << 20  # 15 million tokens or more


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text in a file. Raises TextError if it cannot be read, is too large, or is not UTF-8."""
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # a zero byte in the path raises ValueError
        raise TextError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(raw) > MAX_BYTES:
        raise TextError(f"{path}: at most {MAX_BYTES >> 20} MiB of text are used, this is more; use a part of it")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TextError(f"{path}: not UTF-8, byte {error.start} is {raw[error.start]:#04x}; convert it") from error
