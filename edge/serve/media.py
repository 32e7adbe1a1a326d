"""Parts of messages: texts, pictures and sounds, as the APIs have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from edge.multimodal.marks import new_mark
from edge.serve.apis.fields import Fields, Kind
from edge.serve.apis.other_fields import Refused

TEXTS = ("text", "input_text", "output_text")
# By type, the field that has a picture or sound.
_MEDIA = {"image_url": "image_url", "input_image": "image_url", "input_audio": "input_audio", "image": "source"}


def _known(kind: str) -> str:
    if kind not in TEXTS and kind not in _MEDIA:
        raise PydanticCustomError(
            "not_taken",
            "a part of the type {kind} is not taken: this server reads text, pictures and sounds, no files; say in"
            " words what is in it",
            {"kind": repr(kind[:80])},
        )
    return kind


PartType = Annotated[str, AfterValidator(_known), Field(json_schema_extra={"enum": [*TEXTS, *_MEDIA]})]


class ImageUrl(Fields):
    url: str = Field(description="data:image/png;base64,...; http(s) where the server allows it")

    ignored = frozenset({"detail"})


class InputAudio(Fields):
    data: str = Field(description="base64 of a WAV, MP3 or FLAC file")

    ignored = frozenset({"format"})


class Source(Fields):
    """A picture in Anthropic's API."""

    type: Literal["base64", "url"]
    data: str = ""
    url: str = ""

    ignored = frozenset({"media_type"})


class Part(Fields):
    """A part of a message."""

    type: PartType
    text: str | None = None
    image_url: str | ImageUrl | None = None
    input_audio: InputAudio | None = None
    source: Source | None = None

    empty_values: ClassVar[Mapping[str, Kind]] = {"text": str}
    refused: ClassVar[Refused] = {"file_id": (), "transformations": ()}
    ignored = frozenset({"annotations", "cache_control", "citations", "detail", "logprobs", "prompt_cache_breakpoint"})

    @model_validator(mode="after")
    def _has_its_field(self) -> Self:
        needed = _MEDIA.get(self.type, "text")
        if getattr(self, needed) is None:
            raise PydanticCustomError(
                "missing", "a part of the type {kind} needs {field}", {"kind": repr(self.type), "field": needed}
            )
        return self

    @cached_property
    def content(self) -> str:
        """Its text, or the mark that stands for it in a text."""
        return self.text or "" if self.type in TEXTS else new_mark()

    @property
    def file(self) -> str | None:
        """Base64 of the file, or a URL; None for a text."""
        if self.type in TEXTS:
            return None
        if self.type == "input_audio" and self.input_audio is not None:
            return self.input_audio.data
        if self.type == "image" and self.source is not None:
            return self.source.url if self.source.type == "url" else self.source.data
        url = self.image_url.url if isinstance(self.image_url, ImageUrl) else self.image_url or ""
        head, comma, data = url.partition(",")
        is_data = comma and head[:5].lower() == "data:" and head[-7:].lower() == ";base64"
        return data if is_data else url


def joined(content: str | Iterable[Part] | None) -> str:
    """Return the text of a message, with marks in place of pictures and sounds."""
    return content if isinstance(content, str) else "".join(part.content for part in content or ())


def media_in(contents: Iterable[Any]) -> dict[str, str]:
    """Return the files of pictures and sounds in the contents of messages, by their marks."""
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, Part)]
    return {part.content: part.file for part in parts if part.file is not None}
