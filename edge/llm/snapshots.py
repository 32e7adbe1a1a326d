"""Snapshots of recurrent layers: which positions get one, how many there are, and how a sequence is set back to one.

A prompt begins like an earlier one up to some position that nobody knows before it comes. Going on from there takes a
snapshot of that position or one before it. So snapshots lie at distances from a prompt's end that double: a prompt
that differs in its last d tokens computes d more at most, and a prompt of n tokens has log2(n / 32) of them.
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
from partition.model.metadata import Metadata
from partition.model.model import ModelShape
from partition.state.recurrent import SnapshotShape
from quant.gguf.file import GgufFile

LAST_TOKENS = 32  # the last snapshot of a prompt is so far from its end
ANSWER_TOKENS = 64  # one snapshot for so many tokens of an answer
MEMORY_PART = 8  # one part in so many of the memory that is free, or of a budget, is for snapshots
ROLLBACK_PART = 16  # likewise, for what is held so that rows can be forgotten
LEAST_ON_DISK = 8  # that must have room there, or none is kept
_OVERHEAD_BYTES = 256  # of each, beside its own


def borders(n_tokens: int, block: int) -> list[int]:
    """The positions, in order, at which a prompt of so many tokens gets snapshots: ends of blocks."""
    distance, from_the_end = LAST_TOKENS, list[int]()
    while (at := (n_tokens - distance) // block * block) > 0:
        from_the_end.append(at)
        distance *= 2
    return from_the_end[::-1]


class SnapshotPlan:
    """The positions at which a sequence gets snapshots: those of its prompt, and some of its answer."""

    def __init__(self, n_tokens: int = 0, block: int = sys.maxsize) -> None:
        """n_tokens: of the prompt. Without it there are none: no position is a multiple of such a block."""
        self.n_tokens, self._block, self._borders = n_tokens, block, borders(n_tokens, block)
        self._next = n_tokens + ANSWER_TOKENS  # the least position behind the prompt
        self.has_new = False  # one was made, and is not on disk yet

    def rows(self, at: int, n_rows: int) -> int:
        """As many of the next rows of a prompt as go up to its next border: a step ends there for a snapshot. at: the
        position of the first."""
        return min([n_rows, *(border - at for border in self._borders if border > at)])

    def wants(self, at: int) -> bool:
        """Return whether a sequence that ends at this position gets a snapshot now."""
        if at in self._borders:
            return True
        if at % self._block or at < self._next:
            return False
        self._next = at + ANSWER_TOKENS
        return True


def snapshot_bytes(budget: int | None) -> int:
    """Bytes that snapshots may take in memory. budget: of memory, for everything; None: there is none."""
    return (budget or available_memory()) // MEMORY_PART


def affordable(rollback: int, file: GgufFile, budget: int | None, layers: int | None = None) -> int:
    """Rows that recurrent layers can be able to forget, at most `rollback`, where what they hold for that of a sequence
    and of the one that states are read by takes no more than a sixteenth of the memory. budget: as of
    `snapshot_bytes`. layers: that a slice has; None: all."""
    meta, layers = Metadata(file), ModelShape.from_gguf(file).n_layers if layers is None else max(1, layers)
    values = meta.count("ssm.state_size", 0) * meta.count("ssm.inner_size", 0)  # Mamba and the delta rule
    values = values or meta.count("kda.head_dim", 0) ** 2 * meta.count("attention.head_count", 0)
    states = (budget or available_memory()) // (ROLLBACK_PART * 2 * 4 * layers * values) if values and rollback else 0
    return max(0, min(rollback, states - 1)) if values else rollback


class SnapshotCache:
    """Snapshots by the hash of the last block before them, at most `max_bytes`: those unused for longest are dropped
    first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.n_bytes = max_bytes, 0
        self._snapshots: OrderedDict[bytes, NDArray[np.uint8]] = OrderedDict()

    def put(self, name: bytes, snapshot: NDArray[np.uint8]) -> None:
        """Hold a snapshot, unless it alone is too large."""
        size = snapshot.nbytes + _OVERHEAD_BYTES
        if name in self._snapshots or size > self.max_bytes:
            return
        self.n_bytes += size
        self._snapshots[name] = snapshot
        while self.n_bytes > self.max_bytes:
            self.n_bytes -= self._snapshots.popitem(last=False)[1].nbytes + _OVERHEAD_BYTES

    def get(self, name: bytes) -> NDArray[np.uint8] | None:
        """Return a snapshot, which counts as used now; None where there is none."""
        if name in self._snapshots:
            self._snapshots.move_to_end(name)
        return self._snapshots.get(name)

    def __contains__(self, name: bytes) -> bool:
        return name in self._snapshots


class Snapshots:
    """Snapshots of sequences on this device, each by the hash of the block that it is behind: in memory, and on disk
    where blocks are kept there."""

    def __init__(self, context: Sequences, max_bytes: int) -> None:
        """max_bytes: in memory."""
        assert context.blank_snapshot is not None
        self._context, self._shape = context, SnapshotShape.from_blank(context.blank_snapshot)
        self._cache = SnapshotCache(max_bytes)
        self.sealed: SealedBlocks | None = None  # where they are kept; None: nowhere

    def make(self, sequence: int, block_hash: bytes) -> None:
        """Make a snapshot of a sequence, which ends with this block now."""
        if block_hash not in self._cache:
            self._cache.put(block_hash, self._context.read_snapshot(sequence))

    def has(self, block_hash: bytes) -> bool:
        """Return whether there is a snapshot behind this block."""
        return block_hash in self._cache or (
            self.sealed is not None and self.sealed.count([_kept_name(block_hash)]) == 1
        )

    def set_back(self, sequence: int, length: int, block_hash: bytes) -> bool:
        """Set a sequence back to its first `length` tokens, of which this is the last block. False where there is no
        snapshot; nothing has changed then."""
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
        """Keep those that there are in memory behind these blocks on disk, where there is room for several."""
        if self.sealed is None or LEAST_ON_DISK * self._shape.n_bytes > self.sealed.store.max_bytes:
            return
        for block_hash in hashes:
            snapshot = self._cache.get(block_hash)
            if snapshot is not None and not self.sealed.count([_kept_name(block_hash)], use=True):
                self.sealed.keep([_kept_name(block_hash)], snapshot.data)

    def up_to_last(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading ones of these blocks there are up to the last with a snapshot."""
        return next((n for n in range(len(hashes), 0, -1) if self.has(hashes[n - 1])), 0)


def _kept_name(block_hash: bytes) -> bytes:
    """The hash under which the snapshot behind a block is kept on disk."""
    return derived(block_hash, b"snapshot")
