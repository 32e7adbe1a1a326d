"""Conversion of request parts that templates do not know to prompt text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from edge.serve.media import Content, joined

# The system text of Claude Code begins with an accounting line for the provider, which differs in each request.
_METADATA = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n?")
# Fields without meaning for a model: identifiers, and content that is not readable text.
_NO_TEXT = frozenset(
    "annotations cache_control call_id caller container_id encrypted_content encrypted_index encrypted_stdout id"
    " page_age result signature status tool_use_id type".split()
)
# Types of parts that users write. They must not be dropped, because the message would change its meaning.
KNOWN_PARTS = ("text", "image", "image_url", "input_audio", "document", "file", "input_file", "video", "audio")
MAX_NESTING = 8  # levels of nesting that are converted to text


def system_text(content: Content) -> str:
    """Return the text of a system message without the provider's accounting line."""
    if content is None or isinstance(content, str | Mapping):
        return _METADATA.sub("", joined(content))
    return "".join(_METADATA.sub("", part.content) if part.text else part.content for part in content)


def other_text(part: BaseModel) -> str:
    """Return a line of text for a part that templates do not know, such as a call of a provider's tool."""
    values = part.model_dump(mode="json")
    readable = _readable(values, MAX_NESTING)
    text = readable if isinstance(readable, str) else json.dumps(readable, ensure_ascii=False)
    return f"[{values.get('type')}{'' if readable in ({}, None) else ': '}{'' if readable in ({}, None) else text}]\n"


def _readable(value: Any, depth: int) -> Any:
    """Return the readable part of a value, or None if there is none."""
    if isinstance(value, str):
        return None if value.startswith("data:") else value
    if not isinstance(value, dict | list):
        return value
    if depth == 0:
        return None
    if isinstance(value, list):
        return [readable for item in value if (readable := _readable(item, depth - 1)) not in (None, {})]
    inner = {key: _readable(item, depth - 1) for key, item in value.items() if key not in _NO_TEXT}
    inner = {key: item for key, item in inner.items() if item not in (None, {}, [])}
    return next(iter(inner.values())) if len(inner) == 1 else inner
