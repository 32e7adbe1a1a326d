"""Prompts with pictures and sounds: a mark in the text stands for each, and makes way for its rows."""

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
    """Encode files, by their marks, while they have at most so many tokens together and somebody waits.

    files: an error in place of one that cannot be had. n_files: how many there are. namespace: as of
    `MediaEncoder.encode`. spare: marks of files that are left out if they cannot be encoded. MediaError, with the
    number of the one at fault; ContextFull; EngineError once it is given up."""
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


class ChatMedia:
    """Pictures and sounds of a conversation, by the marks in its messages."""

    def __init__(self, encoder: MediaEncoder | None) -> None:
        self._encoder, self._media = encoder, dict[str, Media]()
        self.attached = ""  # marks that the next question begins with

    def attach(self, data: bytes) -> int:
        """Put the bytes of a file in front of the next question: how many tokens it takes. MediaError."""
        mark = new_mark()
        self._media |= encoded(self._encoder, [(mark, data)])
        self.attached += mark
        return len(self._media[mark].tokens)

    def answered(self, question: str) -> None:
        """Note that a question is answered: what it begins with is attached no more."""
        if question.startswith(self.attached):
            self.attached = ""

    def clear(self) -> None:
        self._media.clear()
        self.attached = ""

    def in_messages(self, messages: Iterable[Mapping[str, Any]]) -> dict[str, Media]:
        """Return those that stand in messages."""
        texts = [message["content"] for message in messages] if self._media else []
        return {mark: media for mark, media in self._media.items() if any(mark in text for text in texts)}

    def rows_in(self, messages: Iterable[Mapping[str, Any]]) -> list[EmbeddingRows]:
        """Return the rows of those that stand in messages."""
        return [rows for media in self.in_messages(messages).values() for rows in media.rows]

    def without(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """Return messages with words in place of marks, to be saved: files are not."""
        for mark in self._media:
            messages = [{**own, "content": own["content"].replace(mark, "[picture or sound] ")} for own in messages]
        return messages
