"""Hidden states behind a model's last layer, of the last tokens of each sequence: what its predictors draft from."""

from __future__ import annotations

from threading import Lock

import numpy as np
from numpy.typing import NDArray

from edge.speculate.speculation import FEW

MOST_TOKENS = 1024  # of a sequence; what lies further back is not seen by a draft
_LEAST_ROOM = 64  # rows

Tokens = NDArray[np.int32]
Floats = NDArray[np.float32]


class _Stretch:
    """Tokens of a sequence at consecutive positions, and the hidden state of each."""

    def __init__(self, n_embd: int) -> None:
        self.first = self.n = 0
        self.tokens = np.empty(_LEAST_ROOM, np.int32)
        self.rows = np.empty((_LEAST_ROOM, n_embd), np.float32)

    def add(self, position: int, tokens: Tokens, rows: Floats, most: int) -> None:
        """Add tokens from a position on, in place of those there and behind. Where there is a gap, or no room for more
        than `most`, those before are left out, half of `most` at a time."""
        keep = position - self.first if self.first <= position <= self.first + self.n else 0
        if keep + len(tokens) > most:
            tokens, rows, position = tokens[-most:], rows[-most:], position + max(0, len(tokens) - most)
            stay = max(0, min(keep, most // 2, most - len(tokens)))
            for array in (self.tokens, self.rows):
                array[:stay] = array[keep - stay : keep].copy()
            keep = stay
        self.first, self.n = position - keep, keep + len(tokens)
        if self.n > len(self.tokens):
            room = max(self.n, 2 * len(self.tokens))
            self.tokens = np.resize(self.tokens, room)
            self.rows = np.concatenate([self.rows, np.empty((room - len(self.rows), self.rows.shape[1]), np.float32)])
        self.tokens[keep : self.n], self.rows[keep : self.n] = tokens, rows


class HiddenStates:
    """The last hidden states of the sequences that were computed last.

    Nothing has to be said of rows that leave the KV cache, are restored or shifted there: tokens are held with the
    states, and states of tokens that a text does not have at their positions are not used.
    """

    def __init__(self, n_embd: int, most: int = MOST_TOKENS) -> None:
        """most: tokens of a sequence."""
        self.n_embd, self._most = n_embd, most
        self._stretches: dict[int, _Stretch] = {}  # by sequence; the one added to last comes last
        self._lock = Lock()  # each group of sequences adds in a thread of its own

    @staticmethod
    def most_bytes(n_embd: int, sequences: int) -> int:
        """Bytes that those of a model with so many sequences take at most."""
        return min(FEW, sequences) * MOST_TOKENS * 4 * (n_embd + 1)

    def add(self, tokens: Tokens, positions: Tokens, sequences: Tokens, rows: Floats) -> None:
        """Keep what a step gave: for each of its rows the token, where it stands and whose it is, all [n], and the
        hidden state [n, n_embd]. A step of many sequences is left out, as none of them has drafts."""
        each = np.unique(sequences).tolist()
        if len(each) > FEW:
            return
        with self._lock:
            for sequence in each:
                own = sequences == sequence
                stretch = self._stretches.pop(sequence, None)
                if stretch is None and len(self._stretches) >= FEW:
                    self._stretches.pop(next(iter(self._stretches)))
                stretch = self._stretches[sequence] = stretch or _Stretch(self.n_embd)
                stretch.add(int(positions[own][0]), tokens[own], rows[own], self._most)

    def behind(self, sequence: int, text: Tokens, start: int) -> tuple[int, Floats]:
        """The hidden states [n, n_embd] of the last tokens of a text but its last one, and the position of the first of
        these. text: tokens of the sequence from position `start` on, the last of which is not computed yet. None of
        them where what was computed is another text."""
        end = start + len(text) - 1
        with self._lock:
            stretch = self._stretches.get(sequence)
            if stretch is None or stretch.first + stretch.n < end or end <= max(start, stretch.first):
                return end, np.empty((0, self.n_embd), np.float32)
            first = max(start, stretch.first)
            of_text = slice(first - stretch.first, end - stretch.first)
            other = np.flatnonzero(stretch.tokens[of_text] != text[first - start : -1])
            first += int(other[-1]) + 1 if len(other) else 0
            return first, stretch.rows[first - stretch.first : end - stretch.first]
