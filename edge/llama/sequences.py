"""Sequences of a context: remove, copy and shift positions, and read and write states.

Attention layers hold keys and values of each position. A recurrent layer holds one state for all positions. llama.cpp
can roll that state back only by the last rows of the last decode, if `n_rs_seq` reserves them. Otherwise the state must
come from a snapshot (`read_snapshot`).

A layer with a sliding attention window has as many cells as any other layer. llama.cpp still overwrites cells that have
left the window, even if other cells are free. A later prompt with the same prefix could then not reuse them. llama.cpp
does not overwrite cells that two sequences share. So each sequence gets a double that is never decoded, if the window
slides, the number of sequences is 2 to 127, and no layer is recurrent. A chunked window leaves a whole chunk at the
same time, so a double could not get its share of the last chunk in time.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edge.errors import EngineError
from edge.llama.library import llama_cpp as L

Bytes = NDArray[np.uint8]

_PARTIAL = L.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
_HEAD_BYTES = 8  # head of a state: magic number and sequence


def _closed(context: object) -> Any:
    """Raise EngineError: native code would read freed memory."""
    raise EngineError("the engine is closed")


class SequenceCalls(Protocol):
    """llama.cpp's calls on the sequences of a context, in this process or in another one."""

    @property
    def rollback(self) -> int:
        """Rows at the end of a decode that recurrent layers can forget."""
        ...

    @property
    def can_shift(self) -> bool: ...

    def remove(self, sequence: int, start: int, end: int) -> bool: ...
    def copy(self, source: int, target: int, start: int, end: int) -> None: ...
    def add(self, sequence: int, start: int, end: int, delta: int) -> None: ...
    def clear(self) -> None: ...
    def ends(self, sequence: int) -> list[int]: ...

    def read(self, sequence: int, flags: int) -> Bytes:
        """Return the state of a sequence. Raises EngineError if llama.cpp fails."""
        ...

    def write(self, sequence: int, data: Bytes, flags: int) -> bool:
        """Write the state of a sequence. Return False if it does not fit this context."""
        ...


class NativeCalls:
    """Calls on a context of this process."""

    def __init__(self, handle: Any) -> None:
        """handle: handle of the llama.cpp context."""
        self._handle, self._memory = handle, L.llama_get_memory(handle)
        self.rollback = int(L.llama_n_rs_seq(handle))

    @property
    def can_shift(self) -> bool:
        return bool(L.llama_memory_can_shift(self._memory))

    def remove(self, sequence: int, start: int, end: int) -> bool:
        return bool(L.llama_memory_seq_rm(self._memory, sequence, start, end))

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        L.llama_memory_seq_cp(self._memory, source, target, start, end)

    def add(self, sequence: int, start: int, end: int, delta: int) -> None:
        L.llama_memory_seq_add(self._memory, sequence, start, end, delta)

    def clear(self) -> None:
        L.llama_memory_clear(self._memory, True)

    def ends(self, sequence: int) -> list[int]:
        return [end(self._memory, sequence) for end in (L.llama_memory_seq_pos_min, L.llama_memory_seq_pos_max)]

    def read(self, sequence: int, flags: int) -> Bytes:
        data = np.empty(L.llama_state_seq_get_size_ext(self._handle, sequence, flags), np.uint8)
        written = L.llama_state_seq_get_data_ext(self._handle, _pointer(data), data.size, sequence, flags)
        if written != data.size:
            raise EngineError(
                f"llama.cpp cannot write the state of sequence {sequence}: {written} of {data.size} bytes"
            )
        return data

    def write(self, sequence: int, data: Bytes, flags: int) -> bool:
        read = L.llama_state_seq_set_data_ext(self._handle, _pointer(data), data.size, sequence, flags)
        return bool(read == data.size)


class Sequences:
    """Sequences of a KV cache. `Context` is a subclass."""

    _calls: SequenceCalls = functools.cached_property(_closed)  # type: ignore[assignment]  # after `forget_native`

    def __init__(
        self,
        calls: SequenceCalls,
        scratch: int | None,
        *,
        is_recurrent: bool,
        window: int = 0,
        first_double: int | None = None,
    ) -> None:
        """Set up the sequences of a context.

        scratch: a sequence that is never decoded, for reading and writing ranges of positions. None: all layers are
            recurrent, so there are no such ranges.
        window: size of the model's attention window in tokens.
        first_double: double of sequence 0; the doubles of the other sequences follow. None: no doubles.
        """
        self._calls, self._scratch = calls, scratch
        self.shift_pending = False
        self.rollback = calls.rollback
        self._recurrent = is_recurrent
        self._first_rows: dict[int, int] = {}  # by sequence: its first position in the last decode
        self._broken: set[int] = set()  # sequences of a failed decode: their recurrent states are invalid
        self._window, self._first_double = window, first_double
        self._doubled: dict[int, int] = {}  # by sequence: number of leading positions that its double shares
        # Snapshot of an empty sequence, which shows the layout of other snapshots. None without recurrent layers.
        self.blank_snapshot = self._read(0, _PARTIAL) if is_recurrent else None

    def forget_native(self) -> None:
        """Make later calls raise EngineError, because the llama.cpp context is about to be freed."""
        vars(self).pop("_calls", None)

    def decoding(self, sequences: NDArray[np.int32]) -> None:
        """Record that rows of these sequences are about to be computed."""
        if self._recurrent:
            self._first_rows.clear()
            self._broken.update(sequences.tolist())

    def decoded(self, sequences: NDArray[np.int32], positions: NDArray[np.int32]) -> None:
        """Record that the rows of these sequences were computed."""
        self.shift_pending = False
        if self._first_double is not None:
            for sequence in set(sequences.tolist()):
                self._protect(sequence)
        if self._recurrent:
            self._broken.difference_update(sequences.tolist())
            self._first_rows.update(zip(sequences[::-1].tolist(), positions[::-1].tolist(), strict=True))

    def kv_remove(self, sequence: int, start: int, end: int) -> bool:
        """Remove positions [start, end) of a sequence (-1: to the end).

        Return False, with nothing changed, if this cache can only be cleared or restored from a snapshot.
        """
        if self._recurrent and end < 0 < start:
            if sequence in self._broken:
                return False
            last = self.kv_ends(sequence)[1]
            # llama.cpp would also roll back to rows of an earlier decode, whose states no longer exist.
            if start <= last and (start <= self._first_rows.pop(sequence, last) or last + 1 - start > self.rollback):
                return False
        self._broken.discard(sequence)
        if self._first_double is not None and start < self._doubled.get(sequence, 0):
            self._calls.remove(self._first_double + sequence, start, end)
            if end < 0:
                self._doubled[sequence] = max(0, start)
        return self._calls.remove(sequence, start, end)

    def kv_copy(self, source: int, target: int, start: int, end: int) -> None:
        """Share positions [start, end) of `source` with `target`, including the state of recurrent layers."""
        if self._first_rows.pop(source, None) is None and self.rollback:
            self._rewrite_state(source)
        self._first_rows.pop(target, None)
        self._calls.copy(source, target, start, end)
        self._protect(target)

    def kv_shift(self, sequence: int, start: int, end: int, delta: int) -> None:
        """Add `delta` to positions [start, end) of a sequence. Raises EngineError if this cache cannot shift."""
        if not self._calls.can_shift:
            raise EngineError("this model's KV cache cannot shift positions")
        self._calls.add(sequence, start, end, delta)
        self.shift_pending = True

    def kv_clear(self) -> None:
        self._calls.clear()
        self.shift_pending = False
        self._first_rows.clear()
        self._broken.clear()
        self._doubled.clear()

    def kv_ends(self, sequence: int) -> list[int]:
        """Return the first position of a sequence that all layers hold, and the last one; -1 if none."""
        return self._calls.ends(sequence)

    def read_state(self, sequence: int, start: int, end: int) -> Bytes:
        """Return the keys and values of positions [start, end) of a sequence. See partition/state/sequence.py for the
        layout.

        Raises EngineError for a model without attention, and between a shift and the next decode.
        """
        if self.shift_pending:
            raise EngineError("positions were shifted and their keys were not; decode a token before they are read")
        scratch = self._scratch_sequence()
        self._calls.copy(sequence, scratch, start, end)
        try:
            if self.blank_snapshot is not None:
                self._write(scratch, self.blank_snapshot, _PARTIAL)
            data = self._read(scratch)
        finally:
            self._calls.remove(scratch, -1, -1)
        return data if self.blank_snapshot is None else data[: len(data) - len(self.blank_snapshot) + _HEAD_BYTES]

    def write_state(self, sequence: int, data: Bytes) -> bool:
        """Add keys and values from `read_state` to a sequence. Return False if they do not fit this context.

        The data must have been checked before, and the sequence must not hold these positions. A recurrent state of the
        sequence is dropped, so a snapshot must be written next.
        """
        scratch = self._scratch_sequence()
        if self.blank_snapshot is not None:
            data = np.concatenate([data, self.blank_snapshot[_HEAD_BYTES:]])
        try:
            if not self._write(scratch, data):
                return False
            self._calls.copy(scratch, sequence, -1, -1)
            self._protect(sequence)
        finally:
            self._calls.remove(scratch, -1, -1)
        return True

    def read_snapshot(self, sequence: int) -> Bytes:
        """Return the state of a sequence's recurrent layers. See partition/state/recurrent.py for the layout."""
        return self._read(sequence, _PARTIAL)

    def write_snapshot(self, sequence: int, data: Bytes, length: int) -> bool:
        """Restore a sequence to its first `length` positions from a snapshot of that length. Return False if it does
        not fit.

        The data must have been checked before, and attention layers must hold these positions.
        """
        self._first_rows.pop(sequence, None)
        self._broken.discard(sequence)
        if not self._write(sequence, data, _PARTIAL):
            return False
        return self._calls.remove(sequence, length, -1)

    def drop_recurrent(self, sequence: int, start: int) -> None:
        """Remove keys and values from position `start` on, and the whole recurrent state of a sequence.

        States and a snapshot must be written next.
        """
        self._broken.add(sequence)
        if self._scratch is not None and start and self.blank_snapshot is not None:
            self._write(sequence, self.blank_snapshot, _PARTIAL)
        else:
            start = -1
        self._calls.remove(sequence, start, -1)

    def _protect(self, sequence: int) -> None:
        """Share positions that will soon leave the window with the sequence's double. Called for a quarter of a
        window at a time, because each call scans all cells."""
        if self._first_double is None:
            return
        start, end = self._doubled.get(sequence, 0), self.kv_ends(sequence)[1] + 1 - self._window // 2
        if end - start > self._window // 4:
            self._calls.copy(sequence, self._first_double + sequence, start, end)
            self._doubled[sequence] = end

    def _rewrite_state(self, sequence: int) -> None:
        """Rewrite the rolled back state of a sequence, so that copies of the sequence find it."""
        self._write(sequence, self._read(sequence, _PARTIAL), _PARTIAL)

    def _read(self, sequence: int, flags: int = 0) -> Bytes:
        return self._calls.read(sequence, flags)

    def _write(self, sequence: int, data: Bytes, flags: int = 0) -> bool:
        return self._calls.write(sequence, data, flags)

    def _scratch_sequence(self) -> int:
        if self._scratch is None:
            raise EngineError("recurrent layers do not store single positions; compute the history again")
        return self._scratch


def _pointer(data: Bytes) -> Any:
    return data.ctypes.data_as(L.llama_state_seq_get_data_ext.argtypes[1])
