"""Rows of a decode in llama.cpp's form. One of the files with ctypes."""

from __future__ import annotations

import ctypes as C
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.llama.library import llama_cpp as L

_SECTIONS = 4  # sections of a position in multimodal models


class Batch:
    """Arrays for up to `capacity` rows of a decode: token or embedding, position, sequence, and whether a row gives
    logits.

    The caller fills the arrays in place: tokens int32 [n] or embeddings float32 [n, n_embd], positions int32 [n],
    sequences int32 [n], outputs int8 [n].
    """

    def __init__(self, capacity: int, n_embd: int = 0, *, as_tokens: bool = False, both: bool = False) -> None:
        """Allocate the arrays and llama.cpp's struct.

        as_tokens: pass tokens to llama.cpp. A caller with embeddings writes them over the result of the token look-up.
        both: pass tokens, and as embeddings the hidden state before each token.
        """
        self.capacity = capacity
        self.tokens = np.zeros(capacity, np.int32)
        self.embeddings = np.zeros((capacity, n_embd), np.float32)
        self.positions = np.zeros(capacity, np.int32)
        self.sequences = np.zeros(capacity, np.int32)
        self.outputs = np.zeros(capacity, np.int8)
        # [3, n] position offsets of an image's rows, relative to its first position
        self.offsets: NDArray[np.int32] | None = None
        self.deep: NDArray[np.float32] | None = None  # [layers, n, n_embd] added to the outputs of the first layers
        self.causal = True  # False: each row attends to all other rows of this decode
        self.has_embeddings = bool(n_embd) and not as_tokens
        self._one_sequence = np.ones(capacity, np.int32)
        self._in_sections = np.zeros(_SECTIONS * capacity if n_embd and not (as_tokens or both) else 0, np.int32)
        self._sequence_pointers = self.sequences.ctypes.data + 4 * np.arange(capacity, dtype=np.uintp)

        def pointer(array: NDArray[Any], kind: Any) -> Any:
            return array.ctypes.data_as(C.POINTER(kind))

        self.native = L.llama_batch(
            n_tokens=0,
            token=pointer(self.tokens, C.c_int32) if as_tokens or both or not n_embd else None,
            embd=pointer(self.embeddings, C.c_float) if n_embd and not as_tokens else None,
            pos=pointer(self.positions, C.c_int32),
            n_seq_id=pointer(self._one_sequence, C.c_int32),
            seq_id=pointer(self._sequence_pointers, C.POINTER(C.c_int32)),
            logits=pointer(self.outputs, C.c_int8),
        )

    def decode(self, handle: Any) -> int:
        """Decode the rows in the llama.cpp context `handle` and return llama.cpp's code."""
        if self.causal:
            return int(L.llama_decode(handle, self.native))
        L.llama_set_causal_attn(handle, False)
        try:
            return int(L.llama_decode(handle, self.native))
        finally:
            L.llama_set_causal_attn(handle, True)

    def set_sections(self, n: int) -> None:
        """Set positions in time, height and width for embeddings.

        Rows of an image have their own positions. Other rows have the position of their token in all three parts.
        """
        if len(self._in_sections):
            sections = self._in_sections[: _SECTIONS * n].reshape(_SECTIONS, n)
            sections[: _SECTIONS - 1] = self.positions[:n] if self.offsets is None else self.sections(n)
            sections[_SECTIONS - 1] = 0
            self.native.pos = self._in_sections.ctypes.data_as(C.POINTER(C.c_int32))

    def native_positions(self, n: int, *, in_sections: bool) -> NDArray[np.int32]:
        """Return the positions of the first `n` rows as llama.cpp reads them: [n], or [4 n] for embeddings of a model
        whose positions have sections."""
        if not (in_sections and len(self._in_sections)):
            return self.positions[:n]
        self.set_sections(n)
        return self._in_sections[: _SECTIONS * n]

    def sections(self, n: int) -> NDArray[np.int32]:
        """Return the position parts [3, n] of an image's rows. `positions` must hold the position at which the image
        begins."""
        assert self.offsets is not None
        return self.positions[:n] + self.offsets
