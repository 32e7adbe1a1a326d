"""Marks in texts that stand for pictures and sounds."""

import re
import secrets
from collections.abc import Mapping

_MARK = re.compile(r"<__media_[0-9a-f]{16}__>")


def new_mark() -> str:
    """Return a random mark, which no text contains by accident and no one can predict."""
    return f"<__media_{secrets.token_hex(8)}__>"


def without_marks(text: str, stand_ins: Mapping[str, str]) -> str:
    """Return a text with these marks replaced. stand_ins: replacement by mark"""
    return _MARK.sub(lambda mark: stand_ins.get(mark[0], mark[0]), text) if stand_ins else text
