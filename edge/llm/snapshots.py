"""Snapshots of recurrent layers: their positions and number, and setting a sequence back to one.

A new prompt shares a prefix of unknown length with earlier ones. Reusing it requires a snapshot at or before the end of
this prefix. So the distances of snapshots from a prompt's end double. A prompt that differs in its last d tokens
recomputes at most d more, and a prompt of n tokens has log2(n / 32) snapshots.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from devices.probe import available_memory
from edge.llama.sequences import Sequences
from edge.prefixes.keys import derived
from edge.prefixes.sealed import SealedBlocks
from partition.errors import StateError
from partition.model.file import ModelFile
from partition.model.metadata import Metadata
from partition.state.recurrent import SnapshotShape

LAST_TOKENS = 32  # distance of a prompt's last snapshot from its end
ANSWER_TOKENS = 64  # distance of snapshots in a response
MEMORY_PART = 8  # 1/8 of the free memory or of a budget is for snapshots
ROLLBACK_PART = 16  # 1/16 of the free memory or of a budget is for rolling back rows
LEAST_ON_DISK = 8  # minimum number of snapshots that must fit on disk, or none is kept there
_OVERHEAD_BYTES = 256  # additional bytes of each snapshot


def borders(n_tokens: int, block: int) -> list[int]:
    """Return the ascending positions of snapshots for a prompt of `n_tokens` tokens. They are ends of blocks."""
    distance, from_the_end = LAST_TOKENS, list[int]()
    while (at := (n_tokens - distance) // block * block) > 0:
        from_the_end.append(at)
        distance *= 2
    return from_the_end[::-1]


class SnapshotPlan:
    """Positions at which a sequence gets snapshots, in its prompt and its response."""

    def __init__(self, n_tokens: int = 0, block: int = sys.maxsize) -> None:
        """n_tokens: tokens of the prompt.
        block: tokens per block; with the default there are no snapshots.
        """
        self.n_tokens, self._block, self._borders = n_tokens, block, borders(n_tokens, block)
        self._next = n_tokens + ANSWER_TOKENS  # first possible position after the prompt
        self.has_new = False  # True if a new snapshot is not on disk yet

    def rows(self, at: int, n_rows: int) -> int:
        """Return the number of rows from position `at` up to the next snapshot of the prompt, at most `n_rows`. A
        step must end at a snapshot.
        """
        return min([n_rows, *(border - at for border in self._borders if border > at)])

    def wants(self, at: int) -> bool:
        """Return True if a sequence that ends at this position gets a snapshot now."""
        if at in self._borders:
            return True
        if at % self._block or at < self._next:
            return False
        self._next = at + ANSWER_TOKENS
        return True


def snapshot_bytes(budget: int | None) -> int:
    """Return the bytes that snapshots may use in memory. budget: bytes for the whole process; None: no budget."""
    return (budget or available_memory()) // MEMORY_PART


def affordable(rollback: int, file: ModelFile, budget: int | None, layers: int | None = None) -> int:
    """Return the number of rows that recurrent layers can roll back, at most `rollback`.

    The copies for this, of one sequence and of the one for reading states, may take 1/16 of the memory.

    budget: as for `snapshot_bytes`.
    layers: number of layers of a slice; None: all.
    """
    meta, layers = Metadata(file), file.shape.n_layers if layers is None else max(1, layers)
    values = meta.count("ssm.state_size", 0) * meta.count("ssm.inner_size", 0)  # Mamba and the delta rule
    values = values or meta.count("kda.head_dim", 0) ** 2 * meta.count("attention.head_count", 0)
    states = (budget or available_memory()) // (ROLLBACK_PART * 2 * 4 * layers * values) if values and rollback else 0
    return max(0, min(rollback, states - 1)) if values else rollback


class SnapshotCache:
    """Snapshots by the hash of the block before them, at most `max_bytes`. The least recently used ones are dropped
    first.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.n_bytes = max_bytes, 0
        self._snapshots: OrderedDict[bytes, NDArray[np.uint8]] = OrderedDict()

    def put(self, name: bytes, snapshot: NDArray[np.uint8]) -> None:
        """Add a snapshot, unless it alone is too large."""
        size = snapshot.nbytes + _OVERHEAD_BYTES
        if name in self._snapshots or size > self.max_bytes:
            return
        self.n_bytes += size
        self._snapshots[name] = snapshot
        while self.n_bytes > self.max_bytes:
            self.n_bytes -= self._snapshots.popitem(last=False)[1].nbytes + _OVERHEAD_BYTES

    def get(self, name: bytes) -> NDArray[np.uint8] | None:
        """Return a snapshot and mark it as used, or None if there is none."""
        if name in self._snapshots:
            self._snapshots.move_to_end(name)
        return self._snapshots.get(name)

    def __contains__(self, name: bytes) -> bool:
        return name in self._snapshots


class Snapshots:
    """Snapshots of sequences on this device, by the hash of the block before them. They are in memory, and on disk
    if blocks are kept there.
    """

    def __init__(self, context: Sequences, max_bytes: int) -> None:
        """max_bytes: limit of snapshots in memory."""
        assert context.blank_snapshot is not None
        self._context, self._shape = context, SnapshotShape.from_blank(context.blank_snapshot)
        self._cache = SnapshotCache(max_bytes)
        self.sealed: SealedBlocks | None = None  # store on disk; None: no store

    def make(self, sequence: int, block_hash: bytes) -> None:
        """Make a snapshot of a sequence that currently ends with this block."""
        if block_hash not in self._cache:
            self._cache.put(block_hash, self._context.read_snapshot(sequence))

    def has(self, block_hash: bytes) -> bool:
        """Return True if there is a snapshot after this block."""
        return block_hash in self._cache or (
            self.sealed is not None and self.sealed.count([_kept_name(block_hash)]) == 1
        )

    def set_back(self, sequence: int, length: int, block_hash: bytes) -> bool:
        """Set a sequence back to its first `length` tokens, whose last block has this hash. Return False, without a
        change, if there is no snapshot.
        """
        snapshot = self._cache.get(block_hash)
        if snapshot is None and self.sealed is not None:
            with closing(self.sealed.take([_kept_name(block_hash)])) as runs:
                snapshot = next((np.frombuffer(data, np.uint8).copy() for data, _, _ in runs), None)
        if snapshot is None:
            return False
        try:
            self._shape.check(snapshot, length)
        except StateError:
            return False
        self._cache.put(block_hash, snapshot)
        return self._context.write_snapshot(sequence, snapshot, length)

    def keep(self, hashes: Sequence[bytes]) -> None:
        """Write the snapshots in memory after these blocks to disk, if several fit there."""
        if self.sealed is None or LEAST_ON_DISK * self._shape.n_bytes > self.sealed.store.max_bytes:
            return
        for block_hash in hashes:
            snapshot = self._cache.get(block_hash)
            if snapshot is not None and not self.sealed.count([_kept_name(block_hash)], use=True):
                self.sealed.keep([_kept_name(block_hash)], snapshot.data)

    def up_to_last(self, hashes: Sequence[bytes]) -> int:
        """Return the number of leading blocks up to the last one with a snapshot."""
        return next((n for n in range(len(hashes), 0, -1) if self.has(hashes[n - 1])), 0)


def _kept_name(block_hash: bytes) -> bytes:
    """Return the name under which the snapshot after a block is kept on disk."""
    return derived(block_hash, b"snapshot")
