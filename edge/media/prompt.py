"""Prompts with pictures and sounds. A mark in the text stands for each until its rows replace it."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from edge.errors import ContextFull, EngineError, MediaError
from edge.media.encoder import Media, MediaEncoder
from edge.media.marks import new_mark
from edge.media.media import EmbeddingRows
from edge.text.constraints.constraint import never_given_up


def encoded(
    encoder: MediaEncoder | None,
    files: Iterable[tuple[str, bytes | MediaError]],
    n_files: int = 1,
    most_tokens: int | None = None,
    given_up: Callable[[], bool] = never_given_up,
    namespace: str = "",
    spare: Container[str] = (),
) -> dict[str, Media]:
    """Encode files. Return the encoded media by mark.

    files: (mark, content) of each file, or an error if the file could not be read
    n_files: number of files
    most_tokens: limit of their tokens together
    given_up: returns true if the request was cancelled
    namespace: as in `MediaEncoder.encode`
    spare: marks of files that are left out if they cannot be encoded

    Raises MediaError with the number of the bad file, ContextFull above the limit, and EngineError after a
    cancellation.
    """
    media: dict[str, Media] = {}
    if not n_files:
        return media
    if encoder is None:
        raise MediaError("this model takes no pictures and sounds here: load it with its projector (--mmproj FILE)")
    number = 0
    try:
        for mark, data in files:
            number += 1
            if given_up():
                raise EngineError("the request was cancelled before its pictures and sounds were encoded")
            try:
                if isinstance(data, MediaError):
                    raise data
                media[mark] = encoder.encode(data, namespace)
            except MediaError:
                if mark in spare:
                    continue
                raise
            n_tokens = sum(len(own.tokens) for own in media.values())
            if most_tokens is not None and n_tokens >= most_tokens:
                raise ContextFull(
                    f"{len(media)} of {n_files} pictures and sounds have {n_tokens} tokens already, and {most_tokens}"
                    " is all that a prompt and its answer may have; send fewer or smaller ones"
                )
    except MediaError as error:
        raise MediaError(f"picture or sound {number}: {error}" if n_files > 1 else str(error)) from None
    return media


def tokens_with(
    text: str, media: Mapping[str, Media], tokenize: Callable[[str, bool], Sequence[int]]
) -> tuple[list[int], tuple[EmbeddingRows, ...]]:
    """Return the token IDs of a text with marks, and the rows among them.

    tokenize: returns the tokens of a part of the text; its second argument is true for the first part

    Raises MediaError if the template dropped a picture.
    """
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
    """Yield the text before each picture with the picture, then the rest of the text with None."""
    start = 0
    for match in re.finditer("|".join(map(re.escape, media)), text) if media else ():
        yield text[start : match.start()], media[match.group()]
        start = match.end()
    yield text[start:], None


class ChatMedia:
    """Pictures and sounds of a conversation, by the marks in its messages."""

    def __init__(self, encoder: MediaEncoder | None) -> None:
        self._encoder, self._media = encoder, dict[str, Media]()
        self.attached = ""  # marks at the start of the next question

    def attach(self, data: bytes) -> int:
        """Attach a file's content to the next question. Return the number of its tokens. Raises MediaError."""
        mark = new_mark()
        self._media |= encoded(self._encoder, [(mark, data)])
        self.attached += mark
        return len(self._media[mark].tokens)

    def answered(self, question: str) -> None:
        """Record that a question was answered. Its attachments are not repeated."""
        if question.startswith(self.attached):
            self.attached = ""

    def clear(self) -> None:
        self._media.clear()
        self.attached = ""

    def in_messages(self, messages: Iterable[Mapping[str, Any]]) -> dict[str, Media]:
        """Return the media whose marks are in the messages."""
        texts = [message["content"] for message in messages] if self._media else []
        return {mark: media for mark, media in self._media.items() if any(mark in text for text in texts)}

    def rows_in(self, messages: Iterable[Mapping[str, Any]]) -> list[EmbeddingRows]:
        """Return the rows of the media in the messages."""
        return [rows for media in self.in_messages(messages).values() for rows in media.rows]

    def without(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """Return messages for saving, with marks replaced by words, because files are not saved."""
        for mark in self._media:
            messages = [{**own, "content": own["content"].replace(mark, "[picture or sound] ")} for own in messages]
        return messages
