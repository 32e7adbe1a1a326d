"""Numbers as people read them, for commands."""

from quant.text import bytes_text, count_text, counted, ms_text

__all__ = ["bytes_text", "count_text", "counted", "ms_text"]
