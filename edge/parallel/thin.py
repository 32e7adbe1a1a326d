"""Thin owner: rank 0 without layers. It has the tokens, the token table and the sampler, and other ranks compute.

Its engine has no KV cache. It tracks the positions that the other ranks hold, so that rank 0 can decide which positions
can be read, kept or removed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from devices.probe import available_memory, own_rss
from edge.errors import EngineError, Interrupted, NotEnoughMemory
from edge.llama.llama import Batch, Context, Model
from edge.llm.engine import Accounted, ModelRunner
from edge.llm.options import EngineOptions
from edge.llm.snapshots import Snapshots
from edge.llm.states import Part, States
from edge.weights.mapped import ModelInMemory
from edge.weights.memory import MIB, LoadRequest, MemoryNeed
from partition.architectures.table import RULES
from partition.errors import StateError
from partition.model.file import ModelFile
from partition.model.metadata import Metadata
from partition.plan.plan import Range
from partition.slices.rules import has_windows
from partition.state.sequence import KVBlock
from quant.gguf.file import GgufFile
from quant.types import CacheType


class PositionsContext(Context):
    """A context that tracks positions without a KV cache."""

    def __init__(self, model: Model, n_ctx: int, *, can_shift: bool = True) -> None:
        self.model, self.n_ctx, self.can_shift, self.shift_pending = model, n_ctx, can_shift, False
        self.rollback, self.blank_snapshot = 0, None
        self._ends: dict[int, tuple[int, int]] = {}  # first and last position of each sequence
        self._stopped = False

    def decode(self, batch: Batch, n: int) -> None:
        """Record the positions of the first `n` rows."""
        self.check_stopped()
        self.hold(batch.sequences[:n], batch.positions[:n])
        self.shift_pending = False

    def hold(self, sequences: NDArray[np.int32], positions: NDArray[np.int32]) -> tuple[int, int]:
        """Record the positions of rows. Return two totals of earlier tokens that the rows attend to.

        The first total is for rows that are alone in their sequence, the second for rows that share a sequence.
        """
        behind, behind_shared = 0, 0
        for sequence in np.unique(sequences).tolist():
            own = positions[sequences == sequence]
            first, last = self._ends.get(sequence, (int(own.min()), -1))
            if len(own) == 1:
                behind += int(own.min())
            else:
                behind_shared += len(own) * int(own.min())
            self._ends[sequence] = first, max(last, int(own.max()))
        n_cells = sum(last + 1 - first for first, last in self._ends.values())
        if n_cells > self.n_ctx and len(self._ends) == 1:  # sequences may share positions
            raise EngineError(f"no room in the KV cache of {self.n_ctx} tokens for {n_cells}")
        return behind, behind_shared

    def check_stopped(self) -> None:
        """Raise Interrupted after `stop`."""
        if self._stopped:
            raise Interrupted("stopped on request")

    def stop(self) -> None:
        """Make decodes fail from their next wait on."""
        self._stopped = True

    def resume(self) -> None:
        """Allow decoding again."""
        self._stopped = False

    def use_threads(self, threads: int) -> None:
        """Do nothing, because nothing is computed."""

    def use_adapters(self, scales: Sequence[float]) -> None:
        """Do nothing, because nothing is computed."""

    def wait(self) -> None:
        """Do nothing, because nothing is computed in the background."""

    def close(self) -> None:
        """Do nothing."""

    def kv_remove(self, sequence: int, start: int, end: int) -> bool:
        first, last = self.kv_ends(sequence)
        reaches_end = end < 0 or end > last
        if last < 0 or start > last:
            return True
        if start <= first and reaches_end:
            del self._ends[sequence]
        elif reaches_end:
            self._ends[sequence] = first, start - 1
        elif start <= first:
            self._ends[sequence] = max(first, end), last
        return True

    def kv_copy(self, source: int, target: int, start: int, end: int) -> None:
        first, last = self.kv_ends(source)
        first, last = max(first, start), last if end < 0 else min(last, end - 1)
        if last >= first >= 0:
            before = self._ends.get(target, (first, last))
            self._ends[target] = min(first, before[0]), max(last, before[1])

    def kv_shift(self, sequence: int, start: int, end: int, delta: int) -> None:
        if not self.can_shift:
            raise EngineError("this model's KV cache cannot shift positions")
        if sequence in self._ends:
            ends = [at + delta if at >= start and (end < 0 or at < end) else at for at in self._ends[sequence]]
            self._ends[sequence] = max(0, ends[0]), max(0, ends[1])
        self.shift_pending = True

    def kv_clear(self) -> None:
        self._ends.clear()
        self.shift_pending = False

    def kv_ends(self, sequence: int) -> list[int]:
        return list(self._ends.get(sequence, (-1, -1)))


class ThinEngine(ModelRunner):
    """An engine without layers on the header of the model's own file. `decode_rows` only records positions."""

    def __init__(self, file: ModelFile, options: EngineOptions, vocabulary: Model) -> None:
        """vocabulary: vocabulary of the file; the caller closes it.

        Raises the errors of ModelRunner, and NotEnoughMemory if the process alone exceeds the memory of the options.
        """
        self._vocabulary = vocabulary
        super().__init__(file, replace(options, prefixes=None, lora=()), embeddings=True)
        self.states = PositionStates(self.file, self._context, self.states.kv)

    def _load(
        self, request: LoadRequest, options: EngineOptions, accounted: Accounted | None, *, embeddings: bool
    ) -> ModelInMemory:
        """Load nothing. Memory is needed for the process and for the hidden states of a batch."""
        sizes = request.sizes
        parts = {
            "weights": 0,
            "KV cache": 0,
            "compute buffers": 4 * sizes.batch * self.shape.n_embd,
            "output buffer": 0,
            "runtime": own_rss() + options.reserved,
        }
        need = MemoryNeed(parts, available_memory(), options.memory)
        if not need.fits:
            raise NotEnoughMemory(
                f"this device holds no layer, and needs {need.total / MIB:,.0f} MiB for its process and"
                f" its buffers; {(options.memory or need.available) / MIB:,.0f} MiB are available: give it a larger"
                " --memory"
            )
        context = PositionsContext(self._vocabulary, sizes.context, can_shift=self._others_shift())
        return ModelInMemory(self._vocabulary, context, sizes, None, need, ExitStack(), None)

    def _others_shift(self) -> bool:
        """Return True if the caches of slices can shift positions, according to the header."""
        has_sections = Metadata(self.file).key("rope.dimension_sections") in self.file.metadata
        model, rules = self._vocabulary, RULES[self.file.architecture]
        return model.rotates and not (model.is_recurrent or has_sections or rules.no_states)

    @property
    def knows_removals(self) -> bool:
        """True if all caches can remove arbitrary positions, so that ranks need not report. That requires a model
        without attention windows and recurrent layers.
        """
        return not (self._vocabulary.is_recurrent or has_windows(self.file))


class PositionSnapshots(Snapshots):
    """Record of snapshots that other ranks hold."""

    def __init__(self, context: Context) -> None:
        self._context, self._hashes = context, set[bytes]()

    def make(self, sequence: int, block_hash: bytes) -> None:
        """Record that the other ranks make a snapshot."""
        self._hashes.add(block_hash)

    def has(self, block_hash: bytes) -> bool:
        """Return True if the other ranks made this snapshot."""
        return block_hash in self._hashes

    def set_back(self, sequence: int, length: int, block_hash: bytes) -> bool:
        """Keep only the first `length` positions."""
        return self._context.kv_remove(sequence, length, -1)

    def drop(self, sequence: int, start: int) -> None:
        """Keep only the positions before `start`."""
        self._context.kv_remove(sequence, start, -1)

    def keep(self, hashes: Sequence[bytes]) -> None:
        """Do nothing, because this rank has no snapshots."""


class PositionStates(States):
    """States of a rank without layers. Other ranks hold the blocks; this rank only computes their hashes."""

    def __init__(self, file: GgufFile, context: Context, kv: CacheType) -> None:
        super().__init__(file, context, kv)
        if context.model.is_recurrent:
            self.snapshots = PositionSnapshots(context)
        rules = RULES[file.architecture]
        if self._window == sys.maxsize and rules.window is not None and rules.window.size:
            self._window = rules.window.size

    def read(self, sequence: int, positions: Range) -> KVBlock:
        """Return a block without layers.

        Raises StateError if another rank may lack positions that an attention window dropped. Raises CannotSlice as
        `shape`, and EngineError as `Context.read_state`.
        """
        self.shape  # noqa: B018  # shape of the whole model: raises CannotSlice if other ranks could not read theirs
        if self._context.shift_pending:
            raise EngineError("positions were shifted and their keys were not; decode a token before they are read")
        first, last = self._context.kv_ends(sequence)
        start = max(first, last + 1 - self._window)
        if not 0 <= start <= positions.start < positions.stop <= last + 1:
            raise StateError(f"positions {positions} were requested, but the ranks hold {start} to {last}")
        return KVBlock(positions, ())

    def write(self, sequence: int, block: KVBlock) -> None:
        """Record that the other ranks hold these positions. Raises EngineError if their caches have no room."""
        self._hold(sequence, block.positions)

    @property
    def keeps(self) -> bool:
        """True if the other ranks are asked to keep blocks."""
        return self.history_key != self._process_key and self._known

    def describe(self) -> str:
        return "on the disks of the other devices" if self.keeps else super().describe()

    def keep(self, sequence: int, start: int, hashes: Sequence[bytes]) -> None:
        """Do nothing, because this rank has no blocks."""

    def n_cached(self, hashes: Sequence[bytes], part: Part = Part.WHOLE) -> int:
        """Return the number of all blocks, because this rank lacks none."""
        return len(hashes) if self.keeps else 0

    def restore(self, sequence: int, start: int, hashes: Sequence[bytes], part: Part = Part.WHOLE) -> int:
        """Record that the other ranks hold the positions of the blocks."""
        if not self.keeps:
            return 0
        self._context.kv_remove(sequence, start, -1)
        self._hold(sequence, Range(start, start + len(hashes) * self.block))
        return len(hashes)

    def _hold(self, sequence: int, positions: Range) -> None:
        if positions.stop > self._context.n_ctx:
            raise EngineError(f"no room in the KV cache of {self._context.n_ctx} tokens for positions {positions}")
        assert isinstance(self._context, PositionsContext)
        at = np.arange(positions.start, positions.stop, dtype=np.int32)
        self._context.hold(np.full(len(at), sequence, np.int32), at)
