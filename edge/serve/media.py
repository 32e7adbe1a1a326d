"""Parts of messages in all APIs: texts, pictures, sounds, and other parts, which are converted to text."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import Field, JsonValue, model_validator

from edge.media.marks import new_mark
from edge.serve.apis.fields import Fields
from edge.serve.http.errors import BadRequest

TEXTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")
THOUGHTS = ("thinking", "redacted_thinking", "reasoning")  # thoughts in an earlier answer, which are left out
# Field with the picture or sound, by type.
_MEDIA = {"image_url": "image_url", "input_image": "image_url", "input_audio": "input_audio", "image": "source"}
_STAND_INS = {"input_audio": "[a sound that this model cannot hear]"}
_PICTURE = "[a picture that this model cannot see]"
# Fields of other parts: their text, and titles to put before it.
_BODIES = ("text", "refusal", "tool_name", "query", "input", "content", "output", "stdout", "stderr")
_HEADS = ("title", "name", "source", "url", "context")
_MOST_LEVELS = 6  # levels of nested parts


class ImageUrl(Fields):
    url: str = Field("", description="data:image/png;base64,...; http(s) if the server allows it")

    ignored = frozenset({"detail"})


class InputAudio(Fields):
    data: str = Field("", description="base64 of a WAV, MP3 or FLAC file")

    ignored = frozenset({"format"})


class Part(Fields):
    """A part of a message."""

    type: str = Field(json_schema_extra={"examples": [*TEXTS[:3], *_MEDIA, "refusal", "document", "search_result"]})
    text: str | None = None
    image_url: str | ImageUrl | None = None
    input_audio: InputAudio | None = None
    source: JsonValue = Field(default=None, description="a picture or document in Anthropic's API")
    file_id: JsonValue = Field(default=None, description="not supported, because nothing is stored")
    transformations: JsonValue = Field(default=None, description="not supported")

    ignored = frozenset({"annotations", "cache_control", "citations", "detail", "logprobs", "prompt_cache_breakpoint"})

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, value: Any) -> Any:
        """Accept a text without a type as a part."""
        if isinstance(value, str):
            return {"type": "text", "text": value}
        return {"type": "text", **value} if isinstance(value, dict) and isinstance(value.get("text"), str) else value

    def ignored_names(self) -> Iterator[str]:
        """Yield nothing for parts of other types, because their whole content is in the prompt."""
        yield from super().ignored_names() if self.type in (*TEXTS, *_MEDIA) else ()

    @cached_property
    def content(self) -> str:
        """Text of the part: its text, the mark of a picture or sound, or a line about unreadable content."""
        if self.file is not None:
            return new_mark()
        return self.stand_in if self.problem else self._words

    @cached_property
    def problem(self) -> str | None:
        """Reason why the model cannot process the part, or None for text and for a valid picture or sound."""
        if self.type in (*TEXTS, *THOUGHTS) or self.file is not None:
            return None
        if self.type in _MEDIA:
            field = next((name for name in ("file_id", "transformations") if getattr(self, name)), None)
            if field:
                return f"{field} of a picture is not supported: send the picture as data:image/png;base64,..."
            return f"a part of the type {self.type!r} needs {_MEDIA[self.type]}, with base64 or a URL"
        if self._words:
            return None
        return (
            f"a part of the type {self.type[:80]!r} is not supported: this server reads text, pictures and sounds, no"
            " files; say in words what is in it"
        )

    @property
    def stand_in(self) -> str:
        """Line of text that replaces content that the model cannot process."""
        if self.type in _MEDIA:
            return _STAND_INS.get(self.type, _PICTURE)
        name = (self.model_extra or {}).get("filename") or (self.model_extra or {}).get("title")
        named = f" {name[:200]}" if isinstance(name, str) else ""
        return f"[{self.type[:80]}{named}: this model cannot read it]"

    @cached_property
    def file(self) -> str | None:
        """Base64 or URL of a picture or sound, or None for other parts."""
        if self.type not in _MEDIA or self.transformations:
            return None
        if self.type == "input_audio":
            return (self.input_audio and self.input_audio.data) or None
        if self.type == "image":
            source = self.source if isinstance(self.source, dict) else {}
            own = source.get("url" if source.get("type") == "url" else "data")
            return own if isinstance(own, str) and own else None
        url = self.image_url.url if isinstance(self.image_url, ImageUrl) else self.image_url or ""
        return (_data_of(url) or url) or None

    @cached_property
    def _words(self) -> str:
        if self.type in THOUGHTS:
            return ""
        return (self.text or "") if self.type in TEXTS else "\n".join(_texts(self.model_dump(exclude_none=True)))


def _texts(value: Any, level: int = 0) -> list[str]:
    """Return the texts of a part of another type, such as a document, a search result or a tool reference.

    A part with only a title has no texts.
    """
    if isinstance(value, str):
        return [value] if value else []
    if isinstance(value, list) and level < _MOST_LEVELS:
        return [text for own in value for text in _texts(own, level + 1)]
    if not isinstance(value, dict) or level >= _MOST_LEVELS:
        return []
    kind = value.get("type")
    if level and isinstance(kind, str) and kind in _MEDIA:
        return [_STAND_INS.get(kind, _PICTURE)]
    bodies = [text for name in _BODIES for text in _body(name, value.get(name), level)]
    for file in (value, value.get("source"), value.get("file"), value.get("document")):
        bodies += _texts_of_file(file, level) if isinstance(file, dict) else []
    heads = [text for name in _HEADS if isinstance(text := value.get(name), str) and text]
    return [*heads, *bodies] if bodies or level else []


def _body(name: str, value: Any, level: int) -> list[str]:
    if name == "input" and isinstance(value, dict):  # arguments of a call
        return [json.dumps(value, ensure_ascii=False)]
    return _texts(value, level + 1)


def _texts_of_file(file: Mapping[str, Any], level: int) -> list[str]:
    """Return the texts in the source of a document, or in a text file."""
    kind = str(file.get("media_type") or "")
    data = file.get("file_data") or file.get("data")
    if file.get("type") == "content":
        return _texts(file.get("content"), level + 1)
    if not isinstance(data, str):
        return []
    if file.get("type") == "text":
        return [data]
    if (encoded := _data_of(data)) is not None:
        kind, data = data[5:], encoded
    if not kind.lower().startswith(("text/", "application/json")):
        return []
    try:
        return [base64.b64decode(data).decode()]
    except (binascii.Error, ValueError):
        return []


def _data_of(url: str) -> str | None:
    """Return the base64 in a data URL, or None for another text."""
    head, comma, data = url.partition(",")
    is_data = comma and head[:5].lower() == "data:" and head[-7:].lower() == ";base64"
    return data if is_data else None


Content = str | Sequence[Part] | Mapping[str, Any] | None
"""Content of a message in a request."""


def joined(content: Content) -> str:
    """Return the text of a message with marks for pictures and sounds. An object is written as JSON."""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        return json.dumps(content, ensure_ascii=False)
    texts: list[str] = []
    after_line = False
    for part in content or ():
        is_line = part.type not in (*TEXTS, *THOUGHTS, *_MEDIA)  # parts of other types go on separate lines
        if own := part.content:
            between = "\n" if texts and (is_line or after_line) and not texts[-1].endswith("\n") else ""
            texts.append(f"{between}{own}")
            after_line = is_line
    return "".join(texts)


@dataclass(frozen=True)
class Attached:
    """Pictures and sounds of a conversation."""

    files: Mapping[str, str] = field(default_factory=dict)  # base64 or URL, by mark
    stand_ins: Mapping[str, str] = field(default_factory=dict)  # replacement text for optional files, by mark


NOTHING_ATTACHED = Attached()


def attached(turns: Sequence[tuple[str, str, object]]) -> Attached:
    """Return the pictures and sounds of messages. Those before the last question may be replaced by a line of text.

    turns: place of each message in the request, its role and its content. Raises BadRequest for an unreadable part of
    the last question, because an answer without it would be wrong.
    """
    roles = [role for _, role, _ in turns]
    n_turns = len(turns) - (roles[-1:] == ["assistant"])  # the beginning of an answer at the end does not count
    question = next((n for n in range(n_turns, 0, -1) if roles[n - 1] == "assistant"), 0)
    files: dict[str, str] = {}
    stand_ins: dict[str, str] = {}
    for number, (where, role, content) in enumerate(turns):
        is_asked = role == "user" and number >= question
        for part in content if isinstance(content, list) else ():
            if is_asked and part.problem:
                raise BadRequest(f"{where}: {part.problem}", where)
            if isinstance(part, Part) and part.file is not None:
                files[part.content] = part.file
                if not is_asked:
                    stand_ins[part.content] = part.stand_in
    return Attached(files, stand_ins)
