"""Keys and values of an engine's sequences in blocks of tokens: read, written, kept on disk and found there again."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
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

_HELD_FILES = 4  # at once, within a budget: one waits to be written, two are read, and copies
_LEAST_HELD = 1 << 20  # bytes
FINISH_S = 5.0  # for what is still to be written at the end
BLOCK_TOKENS = 8  # small, so that most of a history is in whole blocks; 70B models have 2.5 MiB in each
READ_TOKENS = 16  # more than a block, as each read of other ranks waits for links


def in_window(file: GgufFile, tokens: int) -> int:
    """So many tokens, but no more than an attention window has, as llama.cpp writes no more."""
    return min(tokens, Metadata(file).count("attention.sliding_window", 0) or tokens)


def position_factors(file: GgufFile, context: int) -> str:
    """Which factors positions are turned by in a context of so many tokens: "short" or "long", as llama.cpp chooses
    where a model has both, else "". Keys that were turned by one are of no use beside those of the other."""
    if "rope_factors_long.weight" not in file.tensors:
        return ""
    meta = Metadata(file)
    original = meta.count("rope.scaling.original_context_length", meta.count("context_length", 0))
    return "long" if context > original else "short"


def held_bytes(shape: ModelShape) -> int:
    """Bytes that keeping blocks takes of a budget of memory, with keys and values of 16 bits."""
    values = sum(shape.n_heads_kv) * (shape.head_k + shape.head_v)
    block_bytes = BLOCK_TOKENS * 2 * values
    return max(_LEAST_HELD, _HELD_FILES * blocks_a_file(block_bytes, sys.maxsize) * block_bytes)


def blocks_of(positions: Range, most: int) -> list[Range]:
    """These positions in blocks of at most so many."""
    return [Range(start, min(start + most, positions.stop)) for start in range(positions.start, positions.stop, most)]


class Part(IntFlag):
    """The part that some blocks are of those that are counted or restored, which have one snapshot at the end."""

    WHOLE = 0
    BEFORE = 1  # others follow
    BEHIND = 2  # others were before these


class CacheOwner(Protocol):
    """Interface of `edge.llm.scheduler.Scheduler`, whose tokens a KV cache holds."""

    engine: Any  # a `TextEngine`, which has a `CacheUse`
    slots: Any  # `edge.llm.slots.Slots`

    def yield_engine(self) -> None: ...
    def follow_engine(self) -> None: ...
    def preempt_all(self) -> None: ...


class CacheUse:
    """Use of an engine's KV cache, by one scheduler at a time. This engine is the only one there is; with
    `edge.parallel.replacements.Replacements` another one may take over between two steps."""

    exact = False  # what is computed again after a loss is computed in the very steps of before
    is_stopped = False  # whoever waits is to give up

    def __init__(self) -> None:
        self.owner: CacheOwner | None = None  # the scheduler whose tokens the cache holds
        self.computed_again = 0  # tokens, where other engines took over

    @property
    def slots(self) -> Sequence[Any]:
        """Slots of the scheduler that has the cache: nothing else knows what it holds."""
        return self.owner.slots.all if self.owner is not None else ()

    def alone(self) -> AbstractContextManager[None]:
        """While no other thread uses the engine."""
        return nullcontext()

    def step(self, owner: CacheOwner, work: Callable[[], T]) -> T:
        """Return the result of a scheduler's step, which takes the cache from the scheduler that used it last. After a
        loss the step is made once more, on another engine."""
        if self.owner is not owner:
            if self.owner is not None:
                self.owner.yield_engine()
            self._clear(owner)
            self.owner = owner
            owner.follow_engine()
        return work()

    def in_use_by(self, owner: CacheOwner) -> Any:
        """The engine, while its cache holds this scheduler's tokens; else None."""
        return owner.engine if self.owner is owner else None

    def between_steps(self, work: Callable[[Any], T], engine: Any) -> T:
        """Return the result of `work` on the engine, while no step is in flight."""
        return work(engine)

    def _clear(self, owner: CacheOwner) -> None:
        owner.engine.kv_clear()


class States:
    """The keys and values of one model, or slice of one, on this device."""

    def __init__(self, file: GgufFile, context: Context, kv: CacheType, snapshot_bytes: int = 0) -> None:
        """snapshot_bytes: of memory that snapshots of recurrent layers may take."""
        self._file, self._context, self.kv = file, context, kv
        self.snapshots = Snapshots(context, snapshot_bytes) if context.blank_snapshot is not None else None
        self.use = CacheUse()
        self.prefiller: Any = None  # the placement that computes prompts, a `PrefillPlacement`; None: this one
        self._transposed = False  # how this context has values; found out by the first block that it refuses
        self.sealed: SealedBlocks | None = None  # where blocks are kept; None: nowhere
        # Makes tokens names of blocks; only rank 0 has the owner's. Without one, snapshots are of this process alone.
        self.history_key = self._process_key = secrets.token_bytes(KEY_BYTES) if context.model.is_recurrent else b""
        self._window = Metadata(file).count("attention.sliding_window", 0) or sys.maxsize
        self.block = in_window(file, BLOCK_TOKENS)
        self.most_read = in_window(file, READ_TOKENS)
        self.factors = position_factors(file, context.n_ctx)

    def seal(self, sealed: SealedBlocks | None) -> None:
        """Keep blocks and snapshots there; None: nowhere."""
        self.sealed = sealed
        if self.snapshots is not None:
            self.snapshots.sealed = sealed

    @cached_property
    def shape(self) -> StateShape:
        """Shape of the keys and values of a token. CannotSlice where that is not known of this architecture."""
        return StateShape.of_model(Source.from_file(self._file), self.kv)

    def read(self, sequence: int, positions: Range) -> KVBlock:
        """Keys and values at these positions. StateError where that is not all of them, CannotSlice as `shape`."""
        shape = self.shape
        return decode(self._context.read_state(sequence, positions.start, positions.stop), shape, positions)

    def begin_read(self, sequence: int, positions: Range) -> Callable[[], list[KVBlock]]:
        """Read any number of positions, in blocks of `most_read`. The errors of `read`."""
        blocks = [self.read(sequence, part) for part in blocks_of(positions, self.most_read)]
        return lambda: blocks

    def write(self, sequence: int, block: KVBlock) -> None:
        """Add a block to a sequence, which must not hold its positions yet. StateError where it is of another shape,
        EngineError where the cache has no room."""
        for transposed in (self._transposed, not self._transposed):
            if transposed and not self.shape.value_size:
                continue  # types in blocks cannot be
            if self._context.write_state(sequence, encode(block, self.shape, transposed=transposed)):
                self._transposed = transposed
                return
        raise EngineError(f"no room in the KV cache for positions {block.positions}, or it is of another kind")

    # --- on disk ---

    @property
    def keeps(self) -> bool:
        """True if blocks of this model are kept."""
        return self.sealed is not None and self._known

    @property
    def problem(self) -> str | None:
        """Why something was not kept, the first time, in one line; None where nothing was amiss."""
        return None if self.sealed is None else self.sealed.store.problem

    @property
    def is_writing(self) -> bool:
        """True while blocks are written to the disk, or wait for it."""
        return self.sealed is not None and self.sealed.is_writing

    def describe(self) -> str:
        """Describe how much is kept where, in a line for people."""
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
        """The names of the whole blocks of a history, each for all tokens up to its end, in a namespace."""
        return block_hashes(self.history_key, tokens, self.block, namespace)

    def keep(self, sequence: int, start: int, hashes: Sequence[bytes]) -> None:
        """Keep the blocks of a sequence from position `start` on, where a group of blocks starts (`group_start`), each
        under its hash. They are written later. Those that are there count as used now."""
        if self.sealed is None or not self.keeps:
            return
        if self.snapshots is not None:
            self.snapshots.keep(hashes)
        if not self.shape.layers:
            return
        store_bytes = self.sealed.store.max_bytes
        a_file = blocks_a_file(encoded_bytes(self.shape, self.block), store_bytes, self._window // self.block)
        first = self.sealed.count(hashes, use=True)
        with suppress(StateError):  # an attention window has dropped some of it
            while first < len(hashes):
                end = min(len(hashes), (first // a_file + 1) * a_file)
                positions = Range(start + first * self.block, start + end * self.block)
                self.sealed.keep(hashes[first:end], encode(self.read(sequence, positions), self.shape).data)
                first = end

    def n_cached(self, hashes: Sequence[bytes], part: Part = Part.WHOLE) -> int:
        """Return how many leading ones of these blocks are kept; with recurrent layers, up to the last with a snapshot,
        unless others follow. The first must start a group."""
        if self.sealed is None or not self.keeps:
            return 0
        n_blocks = self.sealed.count(hashes) if self.shape.layers else len(hashes)
        if self.snapshots is None or Part.BEFORE in part:
            return n_blocks
        return self.snapshots.up_to_last(hashes[:n_blocks])

    def restore(self, sequence: int, start: int, hashes: Sequence[bytes], part: Part = Part.WHOLE) -> int:
        """Add kept blocks to a sequence that ends at position `start`, where a group starts: how many leading ones were
        there. With recurrent layers the last of them must have a snapshot, unless others follow, and whatever is held
        from `start` on is dropped; where not all are there, the sequence is to be cleared."""
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
        """Wait for what is still to be written, for so long at most; nothing is kept from then on."""
        if self.sealed is not None:
            self.sealed.close(timeout_s)

    def _write_encoded(self, sequence: int, data: memoryview, positions: Range, n_blocks: int) -> None:
        """Add the first blocks of what `encode` gave for these positions. All together where that can be, as most of
        what a small state takes llama.cpp is the same for a larger one."""
        check_encoded(data, self.shape, positions)
        n_tokens = n_blocks * self.block
        is_all = n_tokens == len(positions) and not self._transposed
        if is_all and self._context.write_state(sequence, np.frombuffer(data, np.uint8)):
            return
        whole = decode(data, self.shape, positions)
        if not is_all:  # wanted in part, or with values transposed
            with suppress(EngineError):
                self.write(sequence, _part(whole, 0, n_tokens))
                return
        for start in range(0, n_tokens, self.block):  # where cells are free
            self.write(sequence, _part(whole, start, start + self.block))


def _part(block: KVBlock, start: int, stop: int) -> KVBlock:
    """The part of a block that has these of its tokens."""
    layers = tuple(LayerRows(rows.keys[start:stop], rows.values[start:stop]) for rows in block.layers)
    return KVBlock(Range(block.positions.start + start, block.positions.start + stop), layers)
