"""The sequences that a context holds: positions forgotten, copied and shifted, and states read and written.

Attention holds keys and values of each position. A recurrent layer holds one state of all of them, which llama.cpp can
bring back only for the last rows of the last decode, where it was told to keep those (`n_rs_seq`), and from a copy of
it: a snapshot (`read_snapshot`).

A layer with an attention window has as many cells as any other, but llama.cpp writes new rows over those that the
window has passed, also where others are free, and a prompt that begins alike could not go on from there. It leaves
cells alone that two sequences share. So where the window slides, and there are 2 to 127 sequences and no recurrent
layers, each sequence has a double, which nobody decodes. A chunked window passes a whole chunk at once: no double could
have its share of the last one in time.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError
from edge.llama.library import llama_cpp as L

Bytes = NDArray[np.uint8]

_PARTIAL = L.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
_HEAD_BYTES = 8  # of a state: its magic number and its sequence


def _closed(context: object) -> Any:
    """Raise EngineError: native code would read memory that was given back."""
    raise EngineError("the engine is closed")


class Sequences:
    """Sequences of a KV cache. `Context` is one."""

    _native, _memory = functools.cached_property(_closed), functools.cached_property(_closed)  # once it is closed

    def __init__(
        self, handle: Any, scratch: int | None, *, is_recurrent: bool, window: int = 0, first_double: int | None = None
    ) -> None:
        """handle: of llama.cpp's context. scratch: a sequence that nobody decodes, by which ranges of positions are
        read and written; None: all layers are recurrent, and there are no such ranges. window: tokens of the model's
        attention window. first_double: the double of sequence 0, which those of the others follow; None: there are
        none."""
        self._native, self._memory, self._scratch = handle, L.llama_get_memory(handle), scratch
        self.shift_pending = False
        self.rollback: int = L.llama_n_rs_seq(handle)  # rows at the end of a decode that recurrent layers can forget
        self._recurrent = is_recurrent
        self._first_rows: dict[int, int] = {}  # of each sequence of the last decode: its first position
        self._broken: set[int] = set()  # sequences of a decode that failed: their recurrent states are of no use
        self._window, self._first_double = window, first_double
        self._doubled: dict[int, int] = {}  # positions of each sequence, from its first on, that its double shares
        # A snapshot of an empty sequence, by which the layout of others is known; None without recurrent layers.
        self.blank_snapshot = self._read(0, _PARTIAL) if is_recurrent else None

    def forget_native(self) -> None:
        """Raise EngineError from now on where llama.cpp would be called: its context is about to be freed."""
        for name in ("_native", "_memory"):
            vars(self).pop(name, None)

    def decoding(self, sequences: NDArray[np.int32]) -> None:
        """Note that rows of these sequences are about to be computed."""
        if self._recurrent:
            self._first_rows.clear()
            self._broken.update(sequences.tolist())

    def decoded(self, sequences: NDArray[np.int32], positions: NDArray[np.int32]) -> None:
        """Note that they were computed."""
        self.shift_pending = False
        if self._first_double is not None:
            for sequence in set(sequences.tolist()):
                self._protect(sequence)
        if self._recurrent:
            self._broken.difference_update(sequences.tolist())
            self._first_rows.update(zip(sequences[::-1].tolist(), positions[::-1].tolist(), strict=True))

    def kv_remove(self, sequence: int, start: int, end: int) -> bool:
        """Forget positions [start, end) of a sequence (-1: to the end). False if this cache can only be cleared, or set
        back to a snapshot; nothing has changed then."""
        if self._recurrent and end < 0 < start:
            if sequence in self._broken:
                return False
            last = self.kv_ends(sequence)[1]
            # llama.cpp would also set states back to rows of an earlier decode, which it does not have any more.
            if start <= last and (start <= self._first_rows.pop(sequence, last) or last + 1 - start > self.rollback):
                return False
        self._broken.discard(sequence)
        if self._first_double is not None and start < self._doubled.get(sequence, 0):
            L.llama_memory_seq_rm(self._memory, self._first_double + sequence, start, end)
            if end < 0:
                self._doubled[sequence] = max(0, start)
        return bool(L.llama_memory_seq_rm(self._memory, sequence, start, end))

    def kv_copy(self, source: int, target: int, start: int, end: int) -> None:
        """Let `target` share positions [start, end) of `source`, and the state of its recurrent layers."""
        if self._first_rows.pop(source, None) is None and self.rollback:
            self._rewrite_state(source)
        self._first_rows.pop(target, None)
        L.llama_memory_seq_cp(self._memory, source, target, start, end)
        self._protect(target)

    def kv_shift(self, sequence: int, start: int, end: int, delta: int) -> None:
        """Add `delta` to positions [start, end) of a sequence. EngineError if this cache cannot."""
        if not L.llama_memory_can_shift(self._memory):
            raise EngineError("this model's KV cache cannot shift positions")
        L.llama_memory_seq_add(self._memory, sequence, start, end, delta)
        self.shift_pending = True

    def kv_clear(self) -> None:
        L.llama_memory_clear(self._memory, True)
        self.shift_pending = False
        self._first_rows.clear()
        self._broken.clear()
        self._doubled.clear()

    def kv_ends(self, sequence: int) -> list[int]:
        """The first position that all layers hold of a sequence, and the last; -1 if none."""
        return [end(self._memory, sequence) for end in (L.llama_memory_seq_pos_min, L.llama_memory_seq_pos_max)]

    def read_state(self, sequence: int, start: int, end: int) -> Bytes:
        """Read the keys and values of positions [start, end) of a sequence; partition/state/sequence.py describes the
        layout. EngineError for a model without attention, and between a shift and the next decode."""
        if self.shift_pending:
            raise EngineError("positions were shifted and their keys were not; decode a token before they are read")
        scratch = self._scratch_sequence()
        L.llama_memory_seq_cp(self._memory, sequence, scratch, start, end)
        try:
            if self.blank_snapshot is not None:
                self._write(scratch, self.blank_snapshot, _PARTIAL)
            data = self._read(scratch)
        finally:
            L.llama_memory_seq_rm(self._memory, scratch, -1, -1)
        return data if self.blank_snapshot is None else data[: len(data) - len(self.blank_snapshot) + _HEAD_BYTES]

    def write_state(self, sequence: int, data: Bytes) -> bool:
        """Add to a sequence what `read_state` gave here or in another context; False if it does not fit this one.
        The data must have been checked before, and its positions must not be held. A recurrent state of the sequence
        is dropped: a snapshot has to follow."""
        scratch = self._scratch_sequence()
        if self.blank_snapshot is not None:
            data = np.concatenate([data, self.blank_snapshot[_HEAD_BYTES:]])
        try:
            if not self._write(scratch, data):
                return False
            L.llama_memory_seq_cp(self._memory, scratch, sequence, -1, -1)
            self._protect(sequence)
        finally:
            L.llama_memory_seq_rm(self._memory, scratch, -1, -1)
        return True

    def read_snapshot(self, sequence: int) -> Bytes:
        """Read the state of a sequence's recurrent layers; partition/state/recurrent.py describes the layout."""
        return self._read(sequence, _PARTIAL)

    def write_snapshot(self, sequence: int, data: Bytes, length: int) -> bool:
        """Set a sequence back to its first `length` positions, by what `read_snapshot` gave of it then; False if it
        does not fit. The data must have been checked before, and attention must hold these positions."""
        self._first_rows.pop(sequence, None)
        self._broken.discard(sequence)
        if not self._write(sequence, data, _PARTIAL):
            return False
        return bool(L.llama_memory_seq_rm(self._memory, sequence, length, -1))

    def drop_recurrent(self, sequence: int, start: int) -> None:
        """Forget keys and values from position `start` on, and all that recurrent layers hold of a sequence: states
        and a snapshot have to follow."""
        self._broken.add(sequence)
        if self._scratch is not None and start and self.blank_snapshot is not None:
            self._write(sequence, self.blank_snapshot, _PARTIAL)
        else:
            start = -1
        L.llama_memory_seq_rm(self._memory, sequence, start, -1)

    def _protect(self, sequence: int) -> None:
        """Let the double of a sequence share what the window will soon have passed. A part of a window at a time: each
        call looks at all cells."""
        if self._first_double is None:
            return
        start, end = self._doubled.get(sequence, 0), self.kv_ends(sequence)[1] + 1 - self._window // 2
        if end - start > self._window // 4:
            L.llama_memory_seq_cp(self._memory, sequence, self._first_double + sequence, start, end)
            self._doubled[sequence] = end

    def _rewrite_state(self, sequence: int) -> None:
        """Put the state of a sequence that was set back by rows to where a copy of the sequence looks for it."""
        self._write(sequence, self._read(sequence, _PARTIAL), _PARTIAL)

    def _read(self, sequence: int, flags: int = 0) -> Bytes:
        data = np.empty(L.llama_state_seq_get_size_ext(self._native, sequence, flags), np.uint8)
        written = L.llama_state_seq_get_data_ext(self._native, _pointer(data), data.size, sequence, flags)
        if written != data.size:
            raise EngineError(
                f"llama.cpp cannot write the state of sequence {sequence}: {written} of {data.size} bytes"
            )
        return data

    def _write(self, sequence: int, data: Bytes, flags: int = 0) -> bool:
        read = L.llama_state_seq_set_data_ext(self._native, _pointer(data), data.size, sequence, flags)
        return bool(read == data.size)

    def _scratch_sequence(self) -> int:
        if self._scratch is None:
            raise EngineError("recurrent layers hold no single positions; compute the history again")
        return self._scratch


def _pointer(data: Bytes) -> Any:
    return data.ctypes.data_as(L.llama_state_seq_get_data_ext.argtypes[1])
