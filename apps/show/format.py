"""Numbers as people read them, for commands."""

from quant.text import bytes_text, count_text, counted, ms_text, with_article

__all__ = ["bytes_text", "count_text", "counted", "ms_text", "with_article"]


def age_text(seconds: float) -> str:
    """How long ago something was."""
    for unit, n in (("h", 3600), ("min", 60)):
        if seconds >= n:
            return f"{seconds / n:.0f} {unit} ago"
    return "now" if seconds < 1 else f"{seconds:.0f} s ago"
