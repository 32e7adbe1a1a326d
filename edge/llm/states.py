"""KV cache of an engine's sequences in blocks of tokens: reading, writing, and the prefix cache on disk."""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, suppress
from enum import IntFlag
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np

from edge.errors import EngineError
from edge.llama.llama import Context
from edge.llm.snapshots import Snapshots
from edge.prefixes.group import blocks_a_file
from edge.prefixes.keys import KEY_BYTES, block_hashes
from edge.prefixes.sealed import SealedBlocks
from partition.errors import CannotSlice, StateError
from partition.model.metadata import Metadata
from partition.model.model import ModelShape
from partition.plan.plan import Range
from partition.slices.source import Source
from partition.state.sequence import KVBlock, LayerRows, check_encoded, decode, encode, encoded_bytes
from partition.state.shape import StateShape
from quant.gguf.file import GgufFile
from quant.text import bytes_text
from quant.types import CacheType

T = TypeVar("T")

_HELD_FILES = 4  # files in memory at the same time within a budget: one to be written, two being read, and copies
_LEAST_HELD = 1 << 20  # bytes
FINISH_S = 5.0  # time to finish writing at the end
BLOCK_TOKENS = 8  # small, so that most of a history is in whole blocks; a 70B model has 2.5 MiB in each
READ_TOKENS = 16  # more than a block, because each read from other ranks waits for links


def in_window(file: GgufFile, tokens: int) -> int:
    """Return `tokens`, but at most the attention window, because llama.cpp writes no more."""
    return min(tokens, Metadata(file).count("attention.sliding_window", 0) or tokens)


def position_factors(file: GgufFile, context: int) -> str:
    """Return the kind of RoPE factors for a context of this many tokens, as llama.cpp chooses: "short" or "long"; "" if
    the model has only one kind.

    Keys with one kind of factors cannot be combined with keys of the other kind.
    """
    if "rope_factors_long.weight" not in file.tensors:
        return ""
    meta = Metadata(file)
    original = meta.count("rope.scaling.original_context_length", meta.count("context_length", 0))
    return "long" if context > original else "short"


def held_bytes(shape: ModelShape) -> int:
    """Return the bytes of a memory budget that the prefix cache needs, for a KV cache of 16 bits."""
    values = sum(shape.n_heads_kv) * (shape.head_k + shape.head_v)
    block_bytes = BLOCK_TOKENS * 2 * values
    return max(_LEAST_HELD, _HELD_FILES * blocks_a_file(block_bytes, sys.maxsize) * block_bytes)


def blocks_of(positions: Range, most: int) -> list[Range]:
    """Return the positions split into ranges of at most `most`."""
    return [Range(start, min(start + most, positions.stop)) for start in range(positions.start, positions.stop, most)]


class Part(IntFlag):
    """Position of blocks within a longer list that is counted or restored in several calls. The list has one
    snapshot at its end.
    """

    WHOLE = 0
    BEFORE = 1  # more blocks follow
    BEHIND = 2  # other blocks came before


class CacheOwner(Protocol):
    """Interface of `edge.llm.scheduler.Scheduler`, whose tokens a KV cache holds."""

    engine: Any  # a `TextEngine`, which has a `CacheUse`
    slots: Any  # `edge.llm.slots.Slots`

    def yield_engine(self) -> None: ...
    def follow_engine(self) -> None: ...
    def preempt_all(self) -> None: ...


class CacheUse:
    """Exclusive use of an engine's KV cache by one scheduler at a time.

    Here the engine never changes. With `edge.parallel.replacements.Replacements`, another engine may take over between
    two steps.
    """

    exact = False  # True if recomputation after a loss must use the same steps as before
    is_stopped = False  # True if waiting threads have to give up

    def __init__(self) -> None:
        self.owner: CacheOwner | None = None  # scheduler whose tokens the cache holds
        self.computed_again = 0  # number of tokens recomputed after replacements of the engine
        self._lock = threading.RLock()

    @property
    def slots(self) -> Sequence[Any]:
        """Slots of the scheduler that owns the cache; only they record its contents."""
        return self.owner.slots.all if self.owner is not None else ()

    def alone(self) -> AbstractContextManager[object]:
        """Return a context manager in which no other thread uses the engine."""
        return self._lock

    def step(self, owner: CacheOwner, work: Callable[[], T]) -> T:
        """Return the result of a scheduler's step. The scheduler first takes the cache from its last user. After a
        loss, the step is repeated on another engine.
        """
        if self.owner is not owner:
            if self.owner is not None:
                self.owner.yield_engine()
            self._clear(owner)
            self.owner = owner
            owner.follow_engine()
        return work()

    def in_use_by(self, owner: CacheOwner) -> Any:
        """Return the engine if its cache holds this scheduler's tokens, else None."""
        return owner.engine if self.owner is owner else None

    def between_steps(self, work: Callable[[Any], T], engine: Any) -> T:
        """Return the result of `work` on the engine, while no step is in flight."""
        return work(engine)

    def _clear(self, owner: CacheOwner) -> None:
        owner.engine.kv_clear()


class States:
    """KV cache of one model, or of a slice, on this device."""

    def __init__(self, file: GgufFile, context: Context, kv: CacheType, snapshot_bytes: int = 0) -> None:
        """snapshot_bytes: memory for snapshots of recurrent layers."""
        self._file, self._context, self.kv = file, context, kv
        self.snapshots = Snapshots(context, snapshot_bytes) if context.blank_snapshot is not None else None
        self.use = CacheUse()
        self.prefiller: Any = None  # the prefill placement, a `PrefillPlacement`; None: this engine prefills
        # True if this context stores values transposed; detected when it refuses the first block.
        self._transposed = False
        self.sealed: SealedBlocks | None = None  # prefix cache on disk; None: no cache
        # Key of block hashes; only rank 0 has the owner's key. With a random key, snapshots belong to this process
        # alone.
        self.history_key = self._process_key = secrets.token_bytes(KEY_BYTES) if context.model.is_recurrent else b""
        self._window = Metadata(file).count("attention.sliding_window", 0) or sys.maxsize
        self.block = in_window(file, BLOCK_TOKENS)
        self.most_read = in_window(file, READ_TOKENS)
        self.factors = position_factors(file, context.n_ctx)

    def seal(self, sealed: SealedBlocks | None) -> None:
        """Use this store for blocks and snapshots; None: no store."""
        self.sealed = sealed
        if self.snapshots is not None:
            self.snapshots.sealed = sealed

    @cached_property
    def shape(self) -> StateShape:
        """Shape of the KV cache of a token. Raises CannotSlice if it is unknown for this architecture."""
        return StateShape.of_model(Source.from_file(self._file), self.kv)

    def read(self, sequence: int, positions: Range) -> KVBlock:
        """Return the KV cache at these positions. Raises StateError if the cache lacks some of them, and
        CannotSlice as `shape`.
        """
        shape = self.shape
        return decode(self._context.read_state(sequence, positions.start, positions.stop), shape, positions)

    def begin_read(self, sequence: int, positions: Range) -> Callable[[], list[KVBlock]]:
        """Return a function that returns the KV cache at these positions, in blocks of `most_read`. Raises the
        errors of `read`.
        """
        blocks = [self.read(sequence, part) for part in blocks_of(positions, self.most_read)]
        return lambda: blocks

    def write(self, sequence: int, block: KVBlock) -> None:
        """Add a block to a sequence, which must not hold its positions yet. Raises StateError for a block of
        another shape, and EngineError if the cache has no room.
        """
        for transposed in (self._transposed, not self._transposed):
            if transposed and not self.shape.value_size:
                continue  # values in quantized blocks cannot be transposed
            if self._context.write_state(sequence, encode(block, self.shape, transposed=transposed)):
                self._transposed = transposed
                return
        raise EngineError(f"no room in the KV cache for positions {block.positions}, or the block has another layout")

    # --- on disk ---

    @property
    def keeps(self) -> bool:
        """True if blocks of this model are kept on disk."""
        return self.sealed is not None and self._known

    @property
    def problem(self) -> str | None:
        """Line about the first error of the prefix cache, or None."""
        return None if self.sealed is None else self.sealed.store.problem

    @property
    def is_writing(self) -> bool:
        """True while blocks are being written, or wait to be written."""
        return self.sealed is not None and self.sealed.is_writing

    def describe(self) -> str:
        """Return a line for people with the size and folder of the prefix cache."""
        if self.sealed is None:
            return "nothing on disk"
        if not self._known:
            return f"nothing on disk: how {self._file.architecture} models hold keys and values is not known"
        store = self.sealed.store
        if store.problem is not None:
            return store.problem
        return f"{bytes_text(store.used_bytes())} of {bytes_text(store.max_bytes)} in {store.folder}"

    @cached_property
    def _known(self) -> bool:
        try:
            return bool(self.shape.layers) or self._context.model.is_recurrent
        except CannotSlice:
            return False

    def block_hashes(self, tokens: Sequence[int], namespace: str = "") -> list[bytes]:
        """Return the hashes of the whole blocks of a history in a namespace. Each hash covers all tokens up to its
        block's end.
        """
        return block_hashes(self.history_key, tokens, self.block, namespace)

    def keep(self, sequence: int, start: int, hashes: Sequence[bytes]) -> None:
        """Keep the blocks of a sequence from position `start` on, each under its hash. They are written later.

        `start` must be the start of a group of blocks (`group_start`). Blocks that are on disk already are marked as
        used.
        """
        if self.sealed is None or not self.keeps:
            return
        if self.snapshots is not None:
            self.snapshots.keep(hashes)
        if not self.shape.layers:
            return
        store_bytes = self.sealed.store.max_bytes
        a_file = blocks_a_file(encoded_bytes(self.shape, self.block), store_bytes, self._window // self.block)
        first = self.sealed.count(hashes, use=True)
        with suppress(StateError):  # an attention window has dropped some positions
            while first < len(hashes):
                end = min(len(hashes), (first // a_file + 1) * a_file)
                positions = Range(start + first * self.block, start + end * self.block)
                self.sealed.keep(hashes[first:end], encode(self.read(sequence, positions), self.shape).data)
                first = end

    def n_cached(self, hashes: Sequence[bytes], part: Part = Part.WHOLE) -> int:
        """Return the number of leading blocks on disk. With recurrent layers, the last of them must have a snapshot,
        unless more blocks follow.

        The first block must start a group.
        """
        if self.sealed is None or not self.keeps:
            return 0
        n_blocks = self.sealed.count(hashes) if self.shape.layers else len(hashes)
        if self.snapshots is None or Part.BEFORE in part:
            return n_blocks
        return self.snapshots.up_to_last(hashes[:n_blocks])

    def restore(self, sequence: int, start: int, hashes: Sequence[bytes], part: Part = Part.WHOLE) -> int:
        """Add blocks from disk to a sequence that ends at position `start`. Return the number of leading blocks found.

        `start` must be the start of a group. With recurrent layers, the last block must have a snapshot, unless more
        blocks follow, and the contents from `start` on are dropped. If blocks are missing, the caller has to clear the
        sequence.
        """
        if self.sealed is None or not self.keeps:
            return 0
        if self.snapshots is not None and Part.BEHIND not in part:
            self._context.drop_recurrent(sequence, start)
        done = self._restore_blocks(sequence, start, hashes) if self.shape.layers else len(hashes)
        if self.snapshots is not None and done == len(hashes) and Part.BEFORE not in part:
            done *= self.snapshots.set_back(sequence, start + done * self.block, hashes[-1])
        return done

    def _restore_blocks(self, sequence: int, start: int, hashes: Sequence[bytes]) -> int:
        assert self.sealed is not None
        done = 0
        with suppress(StateError, EngineError), closing(self.sealed.take(hashes)) as runs:
            for data, n_blocks, n_shared in runs:
                at = start + done * self.block
                self._write_encoded(sequence, data, Range(at, at + n_blocks * self.block), n_shared)
                done += n_shared
        return done

    def finish(self, timeout_s: float = FINISH_S) -> None:
        """Wait until pending blocks are written, at most `timeout_s` seconds. Nothing is kept afterwards."""
        if self.sealed is not None:
            self.sealed.close(timeout_s)

    def _write_encoded(self, sequence: int, data: memoryview, positions: Range, n_blocks: int) -> None:
        """Add the first blocks of encoded data for these positions, in one call if possible. llama.cpp needs nearly
        the same time for a small state as for a large one.
        """
        check_encoded(data, self.shape, positions)
        n_tokens = n_blocks * self.block
        is_all = n_tokens == len(positions) and not self._transposed
        if is_all and self._context.write_state(sequence, np.frombuffer(data, np.uint8)):
            return
        whole = decode(data, self.shape, positions)
        if not is_all:  # partial data, or transposed values
            with suppress(EngineError):
                self.write(sequence, _part(whole, 0, n_tokens))
                return
        for start in range(0, n_tokens, self.block):  # block by block into any free cells
            self.write(sequence, _part(whole, start, start + self.block))


def _part(block: KVBlock, start: int, stop: int) -> KVBlock:
    """Return a part of a block by tokens."""
    layers = tuple(LayerRows(rows.keys[start:stop], rows.values[start:stop]) for rows in block.layers)
    return KVBlock(Range(block.positions.start + start, block.positions.start + stop), layers)
