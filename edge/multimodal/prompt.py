"""Prompts with pictures and sounds: a mark in the text stands for each, and makes way for its rows."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence

from edge.errors import MediaError
from edge.multimodal.encoder import Media, MediaEncoder
from edge.multimodal.media import EmbeddingRows


def new_mark() -> str:
    """Return a mark that no text has by accident, and nobody can guess."""
    return f"<__media_{secrets.token_hex(8)}__>"


def encoded(encoder: MediaEncoder | None, files: Mapping[str, bytes]) -> dict[str, Media]:
    """Encode files, by their marks. MediaError, with the number of the one at fault."""
    if files and encoder is None:
        raise MediaError("this model takes no pictures and sounds here: load it with its projector (--mmproj FILE)")
    media: dict[str, Media] = {}
    for number, (mark, data) in enumerate(files.items(), 1):
        assert encoder is not None
        try:
            media[mark] = encoder.encode(data)
        except MediaError as error:
            raise MediaError(f"picture or sound {number}: {error}" if len(files) > 1 else str(error)) from None
    return media


def tokens_with(
    text: str, media: Mapping[str, Media], tokenize: Callable[[str, bool], Sequence[int]]
) -> tuple[list[int], tuple[EmbeddingRows, ...]]:
    """Return the token ids of a text with marks, and the rows among them. tokenize: makes tokens of a part; the second
    argument says that it is the first. MediaError where the template has left a picture out."""
    if lost := [mark for mark in media if mark not in text]:
        raise MediaError(f"the model's chat template leaves out {len(lost)} of {len(media)} pictures or sounds")
    tokens: list[int] = []
    rows: list[EmbeddingRows] = []
    for number, (part, own) in enumerate(_parts(text, media)):
        if part or not number:
            tokens += tokenize(part, not number)
        if own is not None:
            tokens += own.tokens
            rows += own.rows
    return tokens, tuple(rows)


def _parts(text: str, media: Mapping[str, Media]) -> Iterator[tuple[str, Media | None]]:
    """Yield the texts in front of each picture with it, and the rest of the text."""
    start = 0
    for match in re.finditer("|".join(map(re.escape, media)), text) if media else ():
        yield text[start : match.start()], media[match.group()]
        start = match.end()
    yield text[start:], None
