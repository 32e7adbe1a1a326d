"""Marks in texts that stand for pictures and sounds."""

import secrets


def new_mark() -> str:
    """Return a mark that no text has by accident, and nobody can guess."""
    return f"<__media_{secrets.token_hex(8)}__>"
