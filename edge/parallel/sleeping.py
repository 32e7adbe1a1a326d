"""Sleeping rank of a lab: an engine that waits for the times of its device's profile and returns zeros.

Everything else of the rank is real: process, links, frames and collectives. Only the header of its slice is read.
`edge.parallel.engine_kinds` opens this engine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from devices.probe import own_rss
from devices.sleeping import run_first
from edge.errors import NotEnoughMemory
from edge.llama.hooks import Hook, NodeValue
from edge.llama.llama import Batch, Context, ContextSizes, Model
from edge.llama.predicting import HiddenRows
from edge.llm.engine import Accounted, ModelRunner
from edge.llm.options import EngineOptions
from edge.parallel.thin import PositionsContext, PositionSnapshots
from edge.weights.mapped import ModelInMemory
from edge.weights.memory import MIB, LoadRequest, MemoryNeed, cache_bytes
from edge.weights.on_gpu import layers_of
from edge.weights.roles import TABLE
from partition.architectures.recurrent import RECURRENT_ARCHITECTURES
from partition.architectures.table import RULES
from partition.model.file import ModelFile
from partition.model.model import ModelShape, block_of
from partition.plan.plan import Range
from partition.predict.cost import WINDOW_LAYERS
from partition.predict.part_times import PartTimes
from partition.predict.residency import GpuPlacement, fixed_bytes, place_on_gpu
from partition.slices.source import Source
from partition.state.sequence import KVBlock, LayerRows, encode
from partition.state.shape import StateShape

Floats = NDArray[np.float32]

# Lateness of a wait that later waits compensate; a longer one is due to other processes and stays visible.
_MOST_LATE_S = 0.01
_LEAST_S = 1e-6  # minimum of a wait on the clock that skips waits, so that the clock always advances
_SLACK_NS = "1000"  # timer slack of this thread in ns; the usual value is 50,000


class Sleeper:
    """Waits one after another. Later waits are shortened by the lateness of earlier ones."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._late_s = self._began_s = 0.0
        self._thread = 0
        self.total_s = 0.0  # total of all waits as requested
        self.skips = False  # True if waits return immediately

    def begin(self) -> None:
        """Begin a step. The lateness of the previous wait is forgotten."""
        self._late_s, self._began_s = 0.0, self._now_s()

    def wait(self, seconds: float, step_s: float = 0.0) -> None:
        """Wait for `seconds`, less the lateness of earlier waits.

        step_s: the wait ends no earlier than this many seconds after the step began.
        """
        now_s = self._now_s()
        until = max(now_s + seconds - self._late_s, self._began_s + step_s)
        self.total_s += max(seconds, until - now_s, _LEAST_S)
        if self.skips:
            return
        self._wake_in_time()
        while (left := until - self._clock()) > 0:
            self._sleep(left)
        self._late_s = min(-left, _MOST_LATE_S)

    def _now_s(self) -> float:
        return self.total_s if self.skips else self._clock()

    def _wake_in_time(self) -> None:
        """Ask the kernel to wake this thread on time. Done once for each thread."""
        thread = threading.get_native_id()
        if thread != self._thread:
            self._thread = thread
            with suppress(OSError):  # without Linux, waits end about 50 us late
                Path(f"/proc/{thread}/timerslack_ns").write_text(_SLACK_NS)
            run_first()


def parts_of(shape: ModelShape, sizes: ContextSizes) -> dict[str, int]:
    """Return the bytes that a slice would need, by part."""
    cache = cache_bytes(shape, sizes.context, sizes.kv)
    return {"weights": shape.weight_bytes, "KV cache": cache, "runtime": own_rss()}


class SleepingEngine(ModelRunner):
    """An engine on the header of a slice. Steps take the times of `times` and yield zeros.

    Weights that do not fit are paged: a step takes no less than reading them from the profile's disk.
    """

    def __init__(
        self,
        file: ModelFile,
        options: EngineOptions,
        hooks: Sequence[Hook],
        times: PartTimes,
        sleeper: Sleeper | None = None,
    ) -> None:
        """Raises the errors of ModelRunner, and NotEnoughMemory if weights and KV cache exceed the memory of the
        options and cannot be paged.
        """
        self._times, self.sleeper, self._most_bytes = times, sleeper or Sleeper(), options.memory
        super().__init__(file, replace(options, memory=None, prefixes=None, lora=()), hooks, embeddings=True)
        self.hidden = _NoHidden(self._context, self.shape.n_embd)

    @contextmanager
    def timing_clock(self) -> Iterator[Callable[[], float] | None]:
        """Yield a clock that advances by the time of each wait. Meanwhile waits return immediately."""
        self.sleeper.skips = True
        try:
            yield lambda: self.sleeper.total_s
        finally:
            self.sleeper.skips = False

    def follow_snapshots(self) -> None:
        """Record the snapshots of recurrent layers that a thin owner requests, although there is no state."""
        if self.file.architecture in RECURRENT_ARCHITECTURES:
            self.states.snapshots = PositionSnapshots(self._context)

    def _load(
        self, request: LoadRequest, options: EngineOptions, accounted: Accounted | None, *, embeddings: bool
    ) -> ModelInMemory:
        """Load nothing. The context calls the hooks."""
        sizes = request.sizes
        parts = parts_of(self.shape, sizes)
        places = _Places(self.file, sizes, self._times, options)
        parts = {name: n - places.on_gpu.get(name, 0) for name, n in parts.items()}
        most = self._most_bytes or self._times.memory_bytes
        paged_bytes = max(0, sum(parts.values()) - most)
        disk_s = self._paged_s(parts, most) if paged_bytes else 0.0
        parts["weights"] -= paged_bytes
        need = MemoryNeed(parts, self._times.memory_bytes)
        model = _NoWeights(self.file)
        context = SleepingContext(model, self.file, sizes, request.hooks, places, self.sleeper, disk_s)
        return ModelInMemory(model, context, sizes, None, need, ExitStack(), None)

    def _paged_s(self, parts: Mapping[str, int], most: int) -> float:
        """Return the seconds in which the disk reads the weights that do not fit.

        parts: bytes that the slice needs, by part.
        most: bytes that the device may use.

        Raises NotEnoughMemory if the device has no disk, or too little memory for the layers that are read ahead.
        """
        needed, disk = sum(parts.values()), self._times.disk_bytes_per_s
        layers = self.shape.layer_bytes
        window = needed - parts["weights"] + WINDOW_LAYERS * sum(layers) // len(layers)
        if disk is None:
            lack = f"the slice needs {needed / MIB:,.0f} MiB"
            remedy = "and has no disk rate to page at; give it a smaller share"
        elif window > most:
            lack = f"the slice needs {window / MIB:,.0f} MiB even if its weights are paged"
            remedy = "which is too little; give it a smaller share"
        else:
            return (needed - most) / disk
        raise NotEnoughMemory(f"{lack}, the profile of this sleeping device allows {most / MIB:,.0f}, {remedy}")


class _Places:
    """Places of a slice's layers, on the processor or on the GPU of the profile, and their times."""

    def __init__(self, file: ModelFile, sizes: ContextSizes, times: PartTimes, options: EngineOptions) -> None:
        shape, self._processor, self._gpu = file.shape, times, times.gpu or times
        share = shape.n_experts_used / shape.n_experts if shape.n_experts else 1.0
        layers = layers_of(file, sizes, cache_bytes(shape, sizes.context, sizes.kv))
        head = sum(t.n_bytes for t in file.tensors.values() if block_of(t.name) is None and t.name != TABLE)
        self._placement = GpuPlacement((), ())
        if times.gpu is not None and 0 not in (options.gpu_layers, options.most_gpu_layers):
            room = times.gpu.memory_bytes - fixed_bytes(sizes.batch, max(shape.n_embd, *shape.n_ff)) - head
            self._placement = place_on_gpu(layers, room, share)
        read = [(share * layer.experts, layer.dense + share * layer.experts) for layer in layers]
        self._expert_parts = [experts / every if every else 0.0 for experts, every in read]
        on_gpu = self._placement.n_bytes(layers)
        kv = sum(layers[n].kv for n in self._placement.dense)
        self.on_gpu = {"weights": on_gpu - kv + head, "KV cache": kv} if self._placement.dense else {}

    @property
    def first(self) -> PartTimes:
        """Times of the place of the last layers and the head."""
        return self._gpu if self._placement.dense else self._processor

    def layer_s(self, layer: int, rows: int, behind: tuple[int, int]) -> tuple[float, float]:
        """Return the seconds of a layer up to its first all-reduce, and of the rest."""
        dense = self._gpu if layer in self._placement.dense else self._processor
        is_near = layer in self._placement.experts or not self._expert_parts[layer]
        experts = dense if is_near else self._processor
        attention_s, ff_s = dense.attention_s(rows, *behind), dense.ff_s(rows)
        if experts is not dense:
            whole_s = [times.attention_s(rows, 0) + times.ff_s(rows) for times in (experts, dense)]
            later_s = self._expert_parts[layer] * (whole_s[0] - whole_s[1])
            attention_s, ff_s = (attention_s, ff_s + later_s) if ff_s else (attention_s + later_s, 0.0)
        return attention_s, ff_s


class _NoHidden(HiddenRows):
    """Hidden states of an engine that computes nothing: zeros."""

    def __init__(self, context: Context, n_embd: int) -> None:
        super().__init__(context)
        self._n_embd = n_embd

    def give(self, *, only_outputs: bool = False) -> None:
        """Do nothing, because zeros are always available."""

    def rows(self, n: int) -> Floats:
        """Return zeros."""
        return np.zeros((n, self._n_embd), np.float32)


class _NoWeights(Model):
    """The interface of a model for a sleeping engine."""

    def __init__(self, file: ModelFile) -> None:
        self.n_vocab, self.n_bytes, self.architecture = file.shape.n_vocab, file.shape.weight_bytes, file.architecture
        self.has_decoder, self.is_recurrent, self.own_memory = True, False, None
        self.window = 0  # no attention window

    def close(self) -> None:
        """Do nothing."""


class SleepingContext(PositionsContext):
    """A context in which a decode takes the time of its rows, and all logits are zeros."""

    def __init__(
        self,
        model: Model,
        file: ModelFile,
        sizes: ContextSizes,
        hooks: Sequence[Hook],
        places: _Places,
        sleeper: Sleeper,
        disk_s: float,
    ) -> None:
        """disk_s: seconds in which the disk reads the paged weights; each step takes at least as long."""
        super().__init__(model, sizes.context)
        self._file, self._shape, self._kv, self._hooks = file, file.shape, sizes.kv, hooks
        self._places, self._sleeper, self._disk_s = places, sleeper, disk_s
        self._rules = RULES[file.architecture]
        self._n_vocab = file.shape.n_vocab

    def decode(self, batch: Batch, n: int) -> None:
        """Wait for the time of the first `n` rows. The time before a hook's node passes before the hook runs."""
        sequences, positions = batch.sequences[:n], batch.positions[:n]
        behind = self.hold(sequences, positions)
        times, n_layers = self._places.first, self._shape.n_layers
        self._sleeper.begin()
        due_s = times.step_s(n)
        for layer in range(n_layers):
            attention_s, ff_s = self._places.layer_s(layer, n, behind)
            due_s = self._reach(due_s + attention_s, n, weight=f"blk.{layer}.attn_output.weight")
            down = f"blk.{layer}.ffn_down.weight"
            is_dense = down in self._file.tensors
            due_s = self._reach(
                due_s + ff_s, n, weight=down if is_dense else "", name="" if is_dense else self._sum_of(layer)
            )
        self._wait(due_s + times.head_s(int(np.count_nonzero(batch.outputs[:n]))), self._disk_s)
        self._reach(0.0, n, name=self._rules.end_node.format(n_layers - 1))

    def logits(self, row: int, n: int = 1) -> Floats:
        """Return zeros."""
        return np.zeros((n, self._n_vocab), np.float32)

    def _sum_of(self, layer: int) -> str:
        """Return the name of the node that sums a layer's experts."""
        shared = any(name.endswith(".ffn_down_shexp.weight") for name in self._file.tensors)
        return (self._rules.shared_sum if self._rules.shared_sum and shared else self._rules.experts_sum).format(layer)

    def _reach(self, due_s: float, n: int, weight: str = "", name: str = "") -> float:
        """Reach a node after `due_s`. Return the seconds still to wait: 0 if a hook ran, because then the wait is
        over.
        """
        node = NodeValue(np.zeros((n, self._shape.n_embd), np.float32), name, weight)
        for hook in self._hooks:
            if hook.run is not None and hook.wants(node):  # type: ignore[arg-type]  # it looks at names alone
                self._wait(due_s)
                due_s = 0.0
                hook.run(node)  # type: ignore[arg-type]  # and at values
        return due_s

    def _wait(self, seconds: float, step_s: float = 0.0) -> None:
        self.check_stopped()
        self._sleeper.wait(seconds, step_s)

    def read_state(self, sequence: int, start: int, end: int) -> NDArray[np.uint8]:
        """Return a KV block of zeros."""
        shape = StateShape.of_model(Source.from_file(self._file), self._kv)
        n = end - start
        layers = [
            (np.zeros((n, layer.key_bytes), np.uint8), np.zeros((n, layer.value_bytes), np.uint8))
            for layer in shape.layers
        ]
        return encode(KVBlock(Range(start, end), tuple(LayerRows(*rows) for rows in layers)), shape)

    def write_state(self, sequence: int, data: NDArray[np.uint8]) -> bool:
        """Hold the positions of a block."""
        cells = int(data[12:16].view("<u4")[0])
        at = data[16 : 16 + 12 * cells].copy().view("<i4")[::3]
        self.hold(np.full(cells, sequence, np.int32), at)
        return True
