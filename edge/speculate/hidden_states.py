"""Hidden states after a model's last layer for recent tokens of each sequence, as input of its predictors."""

from __future__ import annotations

from threading import Lock

import numpy as np
from numpy.typing import NDArray

from edge.speculate.speculation import FEW

MOST_TOKENS = 1024  # maximum tokens per sequence; drafts do not use earlier ones
_LEAST_ROOM = 64  # rows

Tokens = NDArray[np.int32]
Floats = NDArray[np.float32]


class _Stretch:
    """Tokens of a sequence at consecutive positions, with their hidden states."""

    def __init__(self, n_embd: int) -> None:
        self.first = self.n = 0
        self.tokens = np.empty(_LEAST_ROOM, np.int32)
        self.rows = np.empty((_LEAST_ROOM, n_embd), np.float32)

    def add(self, position: int, tokens: Tokens, rows: Floats, most: int) -> None:
        """Add tokens from `position` on, replacing tokens at and after that position.

        Earlier tokens are dropped after a gap, and half of `most` at a time if there are more than `most` tokens.
        """
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
    """Recent hidden states of the sequences that were computed last.

    Rows that the KV cache drops, restores or shifts need no notification. Tokens are stored with the states, and a
    state is used only if the text has its token at its position.
    """

    def __init__(self, n_embd: int, most: int = MOST_TOKENS) -> None:
        """most: maximum tokens per sequence."""
        self.n_embd, self._most = n_embd, most
        self._stretches: dict[int, _Stretch] = {}  # by sequence, in the order of the last addition
        self._lock = Lock()  # each group of sequences adds in its own thread

    @staticmethod
    def most_bytes(n_embd: int, sequences: int) -> int:
        """Return the maximum bytes of hidden states for a model with this number of sequences."""
        return min(FEW, sequences) * MOST_TOKENS * 4 * (n_embd + 1)

    def add(self, tokens: Tokens, positions: Tokens, sequences: Tokens, rows: Floats) -> None:
        """Add the rows of a step: tokens, positions and sequences, all [n], and hidden states [n, n_embd].

        A step with many sequences is ignored, because such sequences get no drafts.
        """
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
        """Return the position of the first known hidden state, and the states [n, n_embd] up to the text's second last
        token.

        text: tokens of the sequence from position `start` on. The last one is not computed yet.
        The result has no states if the computed tokens belong to another text.
        """
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
