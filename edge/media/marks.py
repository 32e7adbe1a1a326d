"""Marks in texts that stand for pictures and sounds."""

import re
import secrets
from collections.abc import Mapping

_MARK = re.compile(r"<__media_[0-9a-f]{16}__>")


def new_mark() -> str:
    """Return a mark that no text has by accident, and nobody can guess."""
    return f"<__media_{secrets.token_hex(8)}__>"


def without_marks(text: str, stand_ins: Mapping[str, str]) -> str:
    """Return a text with other texts in place of these marks. stand_ins: by mark."""
    return _MARK.sub(lambda mark: stand_ins.get(mark[0], mark[0]), text) if stand_ins else text
