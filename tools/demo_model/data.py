"""Training rows for the demonstration model: whole dialogues packed side by side, the gaps filled with plain text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tools.demo_model import grammar
from tools.demo_model.tokens import ASSISTANT, BOS, CONTROL, END, render

Ids = NDArray[np.int64]

BLOCK = 4000  # dialogues or statements generated and tokenized at a time
CHOICE = 8  # dialogues to choose from when filling a row
PLAIN_ROWS = 0.18  # the share of rows that are plain text alone; the gaps bring more
STATEMENTS = 0.75  # the share of plain text that is statements; the rest is docstrings


class Rows:
    """An endless supply of batches of `tokens` tokens, in rows of `short` or `long` tokens; the same for a seed."""

    def __init__(
        self, tokenizer: Tokenizer, documents: list[str], seed: int, tokens: int = 4096, short: int = 256,
        long: int = 1024,
    ) -> None:  # fmt: skip
        self._tokenizer, self._rng = tokenizer, random.Random(seed)
        self._tokens, self._short, self._long = tokens, short, long
        self._prose = self._joined([document + END for document in documents])
        self._bos = tokenizer.token_to_id(BOS)
        self._dialogues, self._sentences = self._tokenized(), grammar.statements(self._rng)
        self._statements: Ids = np.zeros(0, np.int64)  # what is left of the last block of sentences
        self._waiting: list[Ids] = []  # fit a short row
        self._waiting_long: list[Ids] = []  # fit a long row only

    def batch(self) -> Ids:
        """The next rows, each one token longer than its inputs: [rows, length + 1].

        The rows are long whenever enough long dialogues wait to fill them.
        """
        long = sum(map(len, self._waiting_long)) > self._tokens
        length = self._long if long else self._short
        return np.stack([self._row(length + 1, long) for _ in range(self._tokens // length)])

    def _row(self, length: int, long: bool) -> Ids:
        """Dialogues as long as they fit, then plain text."""
        parts: list[Ids] = []
        room = length
        if self._rng.random() >= PLAIN_ROWS:
            while (ids := self._fitting(room, long)) is not None:
                parts.append(ids)
                room -= len(ids)
        if room:
            parts += [np.array([self._bos]), self._plain(room - 1)]
        return np.concatenate(parts)

    def _plain(self, length: int) -> Ids:
        """A piece of plain text."""
        if self._rng.random() < STATEMENTS:
            if len(self._statements) < length:
                self._statements = self._joined([" ".join(islice(self._sentences, BLOCK))])
            piece, self._statements = self._statements[:length], self._statements[length:]
            return piece
        start = self._rng.randrange(len(self._prose) - length)
        return self._prose[start : start + length]

    def _fitting(self, room: int, long: bool) -> Ids | None:
        """A waiting dialogue of at most `room` tokens, long ones first where wanted; None when there is none."""
        while len(self._waiting) < CHOICE:
            ids = next(self._dialogues)
            if len(ids) <= self._long:
                (self._waiting if len(ids) <= self._short else self._waiting_long).append(ids)
        for waiting in (self._waiting_long, self._waiting) if long else (self._waiting,):
            for i, ids in enumerate(waiting):
                if len(ids) <= room:
                    return waiting.pop(i)
        return None

    def _joined(self, texts: list[str]) -> Ids:
        """The token ids of the texts, one after the other."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return np.concatenate([np.array(encoding.ids) for encoding in encodings])

    def _tokenized(self) -> Iterator[Ids]:
        """Dialogues as token ids, without end."""
        stream = grammar.dialogues(self._rng)
        while True:
            texts = [render(messages) for messages in islice(stream, BLOCK)]
            for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                yield np.array(encoding.ids)


def weights(ids: Ids, tokenizer: Tokenizer) -> NDArray[np.float32]:
    """Return each token's weight as a target: answers 1, plain text 0.5, what the user says 0.1, a new start 0."""
    control = ids < len(CONTROL)
    opens = control & (ids != tokenizer.token_to_id(END))
    last = np.maximum.accumulate(np.where(opens, np.arange(ids.shape[1]), 0), axis=1)
    speaker = np.take_along_axis(ids, last, axis=1)
    answer, prose = tokenizer.token_to_id(ASSISTANT), tokenizer.token_to_id(BOS)
    value = np.where(speaker == answer, 1.0, np.where(speaker == prose, 0.5, 0.1))
    value = np.where(opens, np.where(ids == prose, 0.0, 0.1), value)
    return value.astype(np.float32)


def separate(ids: Ids, tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """Which positions may look at which: earlier ones of the same document. [rows, 1, length, length]."""
    document = np.cumsum(ids == tokenizer.token_to_id(BOS), axis=1)
    same = document[:, :, None] == document[:, None, :]
    mask: NDArray[np.bool_] = (same & np.tri(ids.shape[1], dtype=bool))[:, None]
    return mask
