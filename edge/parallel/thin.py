"""Thin owner: rank 0 without layers. It has the tokens, the token table and the sampler, and others compute.

Its engine has no keys and values. It knows which positions the other ranks hold, so that it can say, as rank 0 must,
what can be read, kept or forgotten.
"""

from __future__ import annotations

import os
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
from partition.model.metadata import Metadata
from partition.plan.plan import Range
from partition.slices.rules import has_windows
from partition.state.sequence import KVBlock
from quant.gguf.file import GgufFile
from quant.types import CacheType


class PositionsContext(Context):
    """A context that knows which positions it holds, without keys and values."""

    def __init__(self, model: Model, n_ctx: int, *, can_shift: bool = True) -> None:
        self.model, self.n_ctx, self.can_shift, self.shift_pending = model, n_ctx, can_shift, False
        self.rollback, self.blank_snapshot = 0, None
        self._ends: dict[int, tuple[int, int]] = {}  # of each sequence: the first and the last position held
        self._stopped = False

    def decode(self, batch: Batch, n: int) -> None:
        """Hold the positions of the first `n` rows."""
        self.check_stopped()
        self.hold(batch.sequences[:n], batch.positions[:n])
        self.shift_pending = False

    def hold(self, sequences: NDArray[np.int32], positions: NDArray[np.int32]) -> tuple[int, int]:
        """Hold the rows' positions. Return how many earlier ones the rows attend to together: those that are the only
        one of their sequence, and those that share one."""
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
        """Make decodes fail, from their next wait on."""
        self._stopped = True

    def resume(self) -> None:
        """Allow decoding again."""
        self._stopped = False

    def use_threads(self, threads: int) -> None:
        """None computes."""

    def use_adapters(self, scales: Sequence[float]) -> None:
        """None computes."""

    def wait(self) -> None:
        """Nothing is computed behind."""

    def close(self) -> None:
        """There is nothing to free."""

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
    """An engine without layers, over the header of the model's own file. `decode_rows` notes positions."""

    def __init__(self, path: str | os.PathLike[str], options: EngineOptions, vocabulary: Model) -> None:
        """vocabulary: of the file; it stays the caller's. The errors of ModelRunner; NotEnoughMemory where the process
        alone is larger than the options allow."""
        self._vocabulary = vocabulary
        super().__init__(path, replace(options, prefixes=None, lora=()), embeddings=True)
        self.states = PositionStates(self.file, self._context, self.states.kv)

    def _load(
        self, request: LoadRequest, options: EngineOptions, accounted: Accounted | None, *, embeddings: bool
    ) -> ModelInMemory:
        """Load nothing: what is in memory is the process, and the hidden states of a batch."""
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
                f"this device holds no layer, and needs {need.total / MIB:,.0f} MiB for its process and for what"
                f" crosses; {(options.memory or need.available) / MIB:,.0f} MiB are there: give it a larger --memory"
            )
        context = PositionsContext(self._vocabulary, sizes.context, can_shift=self._others_shift())
        return ModelInMemory(self._vocabulary, context, sizes, None, need, ExitStack(), None)

    def _others_shift(self) -> bool:
        """Return whether the caches of slices can shift positions, as far as the header says."""
        has_sections = Metadata(self.file).key("rope.dimension_sections") in self.file.metadata
        model, rules = self._vocabulary, RULES[self.file.architecture]
        return model.rotates and not (model.is_recurrent or has_sections or rules.no_states)

    @property
    def knows_removals(self) -> bool:
        """True if all caches can forget any positions, so that no rank need be asked: those without attention windows
        and recurrent layers."""
        return not (self._vocabulary.is_recurrent or has_windows(self.file))


class PositionSnapshots(Snapshots):
    """Snapshots that are of other ranks: which of them were made."""

    def __init__(self, context: Context) -> None:
        self._context, self._hashes = context, set[bytes]()

    def make(self, sequence: int, block_hash: bytes) -> None:
        """Note that the others make one."""
        self._hashes.add(block_hash)

    def has(self, block_hash: bytes) -> bool:
        """Return whether they made one."""
        return block_hash in self._hashes

    def set_back(self, sequence: int, length: int, block_hash: bytes) -> bool:
        """Hold the first positions alone."""
        return self._context.kv_remove(sequence, length, -1)

    def drop(self, sequence: int, start: int) -> None:
        """Hold the positions before `start` alone."""
        self._context.kv_remove(sequence, start, -1)

    def keep(self, hashes: Sequence[bytes]) -> None:
        """Keep nothing: there is nothing here."""


class PositionStates(States):
    """States of a rank without layers: blocks are of other ranks, and only their names are made here."""

    def __init__(self, file: GgufFile, context: Context, kv: CacheType) -> None:
        super().__init__(file, context, kv)
        if context.model.is_recurrent:
            self.snapshots = PositionSnapshots(context)
        rules = RULES[file.architecture]
        if self._window == sys.maxsize and rules.window is not None and rules.window.size:
            self._window = rules.window.size

    def read(self, sequence: int, positions: Range) -> KVBlock:
        """A block without layers. StateError where another rank may lack positions: an attention window may have
        dropped them. CannotSlice as `shape`, EngineError as `Context.read_state`."""
        self.shape  # noqa: B018  # the whole model's: CannotSlice where other ranks could not read theirs
        if self._context.shift_pending:
            raise EngineError("positions were shifted and their keys were not; decode a token before they are read")
        first, last = self._context.kv_ends(sequence)
        start = max(first, last + 1 - self._window)
        if not 0 <= start <= positions.start < positions.stop <= last + 1:
            raise StateError(f"positions {positions} of a sequence whose ranks hold {start} to {last}")
        return KVBlock(positions, ())

    def write(self, sequence: int, block: KVBlock) -> None:
        """Note that the other ranks hold these positions. EngineError where their caches have no room."""
        self._hold(sequence, block.positions)

    @property
    def keeps(self) -> bool:
        """True if the other ranks are asked to keep blocks."""
        return self.history_key != self._process_key and self._known

    def describe(self) -> str:
        return "on the disks of the other devices" if self.keeps else super().describe()

    def keep(self, sequence: int, start: int, hashes: Sequence[bytes]) -> None:
        """Keep nothing: there is nothing here."""

    def n_cached(self, hashes: Sequence[bytes], part: Part = Part.WHOLE) -> int:
        """All of them: nothing is lacking here."""
        return len(hashes) if self.keeps else 0

    def restore(self, sequence: int, start: int, hashes: Sequence[bytes], part: Part = Part.WHOLE) -> int:
        """Note that the other ranks hold the blocks' positions."""
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
