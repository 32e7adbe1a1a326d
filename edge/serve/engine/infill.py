"""Fill-in-the-middle (FIM) prompts: the text around a gap, between the model's FIM tokens.

The layout is that of llama.cpp's server:

    [BOS] [REP] project [SEP] file, text ... [SEP] file  [PRE] prefix [SUF] suffix [MID]

The part before PRE is present if the request has other files. A vocabulary without SEP has a line of text between
files instead. Some models were trained with the suffix first (`spm`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from edge.errors import ContextFull, SamplingError
from edge.llama.llama import Model

MARKS = {"pre": "prefix", "suf": "suffix", "mid": "middle"}  # FIM tokens that a model needs, by llama.cpp's names
_OTHER_MARKS = ("rep", "sep", "pad")
# Default names in llama.cpp's server.
_PROJECT, _FILE = "myproject\n", "filename\n"
_BETWEEN_FILES = "\n\n--- snippet ---\n\n"
_SUFFIX_PART = 4  # if space is short, a quarter of it is for the suffix
# Texts are cut in steps of 1/16 of the space, so that the next request finds the same beginning in the prefix cache.
_STEPS = 16
# Bytes per token that are considered at most; a longer text is cut before tokenization.
_BYTES = 8


class InfillPrompts:
    """Creates prompts for one model. Any thread may use it."""

    def __init__(self, model: Model, name: str, *, spm: bool = False) -> None:
        """name: model name for errors. spm: the model was trained with the order suffix, prefix, middle."""
        self._model, self._name, self._spm = model, name, spm
        self._marks = {mark: model.special_token(f"fim_{mark}") for mark in (*MARKS, *_OTHER_MARKS)}
        self._ids = {token for token in self._marks.values() if token is not None}
        texts = (model.piece(token, special=True).decode(errors="replace").strip() for token in self._ids)
        middles = [f"(?<={re.escape(text[0])})(?={re.escape(text[1:])})" for text in texts if len(text) > 1]
        self._in_a_mark = re.compile("|".join(middles))

    def tokens(self, infill: Mapping[str, Any], room: int) -> list[int]:
        """Return the token ids of a prompt of at most `room` tokens.

        If space is short, the text nearest to the gap is kept: the end of the prefix, the beginning of the suffix, then
        the last files. Raises SamplingError for a model without FIM tokens, and ContextFull if even those do not fit.
        """
        if missing := [word for mark, word in MARKS.items() if self._marks[mark] is None]:
            raise SamplingError(
                f"{self._name} has no token for {' and '.join(missing)}, so it cannot fill gaps; use a model trained"
                " for fill-in-the-middle, whose file has these tokens (tokenizer.ggml.fim_pre_token_id, ...)"
            )
        marks = self._marks
        bos = self._model.added("bos")
        room -= len(bos) + len(MARKS)
        if room < 1:
            raise ContextFull(f"the context leaves {max(room, 0)} tokens around the gap; serve with a larger --context")
        step = max(1, room // _STEPS)
        before = [*self._end(infill["prefix"], room), *self._end(infill["line"], room)]
        after = self._plain(infill["suffix"][: room * _BYTES])
        after = after[: _fitting(len(after), max(room // _SUFFIX_PART, room - len(before)), step)]
        before = _last(before, _fitting(len(before), room - len(after), step))
        files = infill["files"]
        extra = [] if files is None else self._extra(files, room - len(before) - len(after), step)
        parts = [marks["pre"], *before], [marks["suf"], *after]
        first, second = reversed(parts) if self._spm else parts
        return [*bos, *extra, *first, *second, marks["mid"]]  # type: ignore[list-item]

    def _extra(self, files: Sequence[Mapping[str, str]], room: int, step: int) -> list[int]:
        """Return the last files that fit, and the end of the file before them.

        Return [] if even their marks do not fit.
        """
        rep, sep = self._marks["rep"], self._marks["sep"]
        project = [] if rep is None else [rep, *self._plain(_PROJECT)]
        own = [] if sep is None else [sep, *self._plain(_FILE)]
        room -= len(project) + len(own)
        if room < 0:
            return []
        tokens: list[int] = []
        for file in reversed(files):
            head = self._plain(_BETWEEN_FILES) if sep is None else [sep, *self._plain(f"{file['filename']}\n")]
            text = self._end(file["text"], max(room, 1))
            n = _fitting(len(text), room - len(head), step)
            if room < len(head) or (n < 1 and text):
                break
            tokens[:0] = [*head, *_last(text, n)]
            room -= len(head) + n
            if n < len(text):
                break
        return [*project, *tokens, *own]

    def _end(self, text: str | Sequence[int], room: int) -> list[int]:
        """Return the tokens of a text, without most of the beginning that would not fit in `room` tokens."""
        if not isinstance(text, str):
            return list(text)
        most = room * _BYTES
        return self._plain(text[len(text) - _fitting(len(text), most, max(1, most // _STEPS)) :])

    def _plain(self, text: str) -> list[int]:
        """Return the tokens of a text. Names of FIM tokens in the text do not become these tokens."""
        tokens = self._model.tokenize(text, add_special=False, parse_special=False)
        if self._ids.isdisjoint(tokens):
            return tokens
        # A model file may define its FIM tokens as plain words. The text is then tokenized in two parts.
        parts = (
            self._model.tokenize(part, add_special=False, parse_special=False) for part in self._in_a_mark.split(text)
        )
        return [token for part in parts for token in part if token not in self._ids]


def _fitting(n: int, room: int, step: int) -> int:
    """Return the number of n items to keep: all if they fit, otherwise n reduced in whole steps."""
    return n if n <= room else max(0, n - -(-(n - room) // step) * step)


def _last(items: list[int], n: int) -> list[int]:
    return items[len(items) - n :]
