"""Load a slice or a whole model in an engine process, within a memory limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from devices.machine_disk import disk_read_rate
from edge.errors import EdgeError, NotEnoughMemory
from edge.llama import ggml, llama
from edge.llm.engine import Engine, ModelRunner
from edge.llm.generate import GreedyDrafter
from edge.llm.options import EngineOptions
from edge.llm.prefixes import seal
from edge.llm.resolve import context_sizes
from edge.llm.states import held_bytes
from edge.microbenchmark import MOST_S
from edge.parallel.engine_kinds import own_kind
from edge.parallel.follower import follow
from edge.parallel.shard import Shard
from edge.parallel.topology import place
from edge.weights import memory
from edge.weights.adapter_file import AdapterFile
from edge.weights.elastic.share import SHARE
from edge.weights.elastic.weights import ElasticWeights
from edge.weights.memory import MemoryNeed
from edge.worker.draft_queries import follow as follow_drafts
from edge.worker.limits import ResourceLimits
from edge.worker.loaded import LoadedPart, only_other
from edge.worker.messages import options_from
from edge.worker.timing import time_shard
from quant.wire import WIRES
from transport import edge_pb2 as pb
from transport.collective import Group

T = TypeVar("T")

_MOST_TIMED = 16  # maximum number of step sizes in one request


class _LoadedRunner(LoadedPart):
    """Common base of a loaded whole model and a loaded slice."""

    def __init__(self, runner: ModelRunner, need: MemoryNeed) -> None:
        self._runner, self._need = runner, need

    def describe(self) -> pb.Loaded:
        """Return the peak memory in bytes, the number of layers and the context size."""
        shape, follows = self._runner.shape, isinstance(self._runner.paging, ElasticWeights)
        most = self._need.budget if follows else None
        return pb.Loaded(memory_bytes=most or self._need.total, layers=shape.n_layers, context=self._runner.context)

    def finish(self, timeout_s: float) -> None:
        self._runner.states.finish(timeout_s)

    def close(self) -> None:
        self._runner.close()


class WholeModel(_LoadedRunner):
    """Model that runs on this device alone. In a group of two it drafts tokens for rank 0."""

    def __init__(self, engine: Engine, need: MemoryNeed) -> None:
        super().__init__(engine, need)
        self._engine = engine

    def run(self, _: pb.Run, group: Group) -> None:
        """Answer rank 0's draft requests until their end.

        Raises EdgeError in a larger group, and errors of the link and of the engine.
        """
        only_other(group, "a whole model drafts")
        follow_drafts(GreedyDrafter(self._engine), group.links[0])


class SlicePart(_LoadedRunner):
    """Slice of a model, with its place among the ranks."""

    def __init__(self, shard: Shard, need: MemoryNeed) -> None:
        super().__init__(shard.engine, need)
        self._shard = shard

    @property
    def computed_s(self) -> float:
        return self._shard.clock.computed_s

    @property
    def gpu_bytes(self) -> tuple[int, int] | None:
        return ggml.gpu_bytes() if llama.has_gpu() else None

    def run(self, request: pb.Run, group: Group) -> None:
        """Compute the incoming steps until their end. Raises errors of links and of the engine."""
        follow(self._shard, group, request.algorithm, WIRES[request.wire])

    def time(self, request: pb.Time) -> pb.Timed:
        """Return the duration of each step and the disk's read rate. Raises EdgeError if there are too many step
        sizes."""
        if len(request.rows) > _MOST_TIMED:
            raise EdgeError(f"{len(request.rows)} kinds of steps to time; the maximum is {_MOST_TIMED}")
        with own_kind().timing_clock(self._shard.engine) as clock:
            others = 0 if clock else request.other_bytes  # an engine with its own clock uses no caches
            most_s = request.most_s if 0 < request.most_s < MOST_S else MOST_S
            times = time_shard(self._shard, request.rows, request.steps, request.depth, clock, others, most_s)
        step_s, busy = [time.seconds for time in times], [time.busy for time in times]
        return pb.Timed(step_s=step_s, disk_bytes_per_s=self._disk() if request.disk else 0.0, busy=busy)

    def _disk(self) -> float:
        """Return the read rate of the slice's disk in bytes per second, or 0 if it cannot be measured."""
        try:
            return disk_read_rate(self._runner.path.parent)[0]
        except (OSError, ValueError):
            return 0.0


def load(request: pb.Load, rank: int, limits: ResourceLimits, progress: Callable[[float], None]) -> LoadedPart:
    """Load a slice or a model.

    limits: resources that the model may use.
    Raises the errors of Engine, and NotEnoughMemory if the model needs more than the limit.
    """
    options = limit_options(options_from(request.options), limits)
    options = replace(options, lora=tuple(request.adapter_paths))
    stages = tuple(request.stages)
    here = place(rank, stages) if stages else None
    if here is not None and not here.last:
        options = replace(options, outputs=options.rows)  # every row is sent to the next stage
    kind = own_kind()
    file = kind.slice_file(Path(request.path))
    shape = file.shape
    adapters = [AdapterFile(Path(path), file) for path in options.lora]
    sizes = context_sizes(options, shape, adapters, options.rollback)
    limit = request.memory_limit_bytes
    uses_gpu = llama.has_gpu() and 0 not in (options.gpu_layers, options.most_gpu_layers)
    # With `gpu_memory` alone, the other layers stream through the GPU, which needs all weights in memory.
    if limit and (not uses_gpu or options.gpu_memory is None):
        budget = min(limit, options.memory or limit)
        follows = (SHARE.is_divided or limits.gives_back) and kind.follows_memory and not uses_gpu
        options = replace(options, memory=budget, least_memory=max(1, budget - limits.gives_back) if follows else None)
    if request.prefix_key:
        options = replace(options, reserved=options.reserved + held_bytes(shape))
    need = None
    if options.least_memory is None:  # otherwise the engine requests its memory once it knows its sizes
        if options.memory is None:
            if not kind.sleeps:  # a sleeping engine checks the memory of its profile
                need = memory.need(file.path, sizes)
                _check_limit(need, limit)
                SHARE.request(need.total, need.total)
        elif SHARE.is_divided:  # memory for all resident weights, plus a margin
            parts = kind.parts_within(file, sizes, options.memory)
            whole = min(options.memory, (sum(parts.values()) + options.reserved) * 17 // 16)
            least = whole * 15 // 16 if kind.sleeps else whole  # a sleeping engine pages the rest
            options = replace(options, memory=SHARE.request(least, whole))
    if here is None:
        engine = _with_least(lambda own: kind.open_whole(file, own, progress), options)
        return WholeModel(engine, need or engine.memory)
    shard = _with_least(lambda own: Shard(file, own, here, progress), options)
    if request.prefix_key and request.prefix_bytes:
        state_bytes = held_bytes(shape) if options.memory else None
        seal(shard.engine.states, Path(request.prefix_folder), request.prefix_bytes, request.prefix_key, state_bytes)
    return SlicePart(shard, need or shard.engine.memory)


def _with_least(load: Callable[[EngineOptions], T], options: EngineOptions) -> T:
    """Load with these options. If this fails because other sessions use much memory, retry with the least that the
    model needs. Raises the errors of `load`."""
    try:
        return load(options)
    except NotEnoughMemory as error:
        if options.least_memory is None or options.memory is None or options.least_memory >= options.memory:
            raise
        least = (error.least or options.memory) * 17 // 16  # this process now takes more than before the first try
        return load(replace(options, least_memory=min(least, options.memory)))


def _check_limit(need: MemoryNeed, limit: int) -> None:
    """Raise NotEnoughMemory if the need exceeds the limit in bytes. 0: no limit."""
    if limit and need.total > limit:
        parts = ", ".join(f"{name} {n / memory.MIB:,.0f}" for name, n in need.parts.items())
        raise NotEnoughMemory(
            f"the slice needs {need.total / memory.MIB:,.0f} MiB ({parts}), this worker has"
            f" {limit / memory.MIB:,.0f} MiB left of its limit; use a smaller context, or a smaller share"
        )


def limit_options(options: EngineOptions, limits: ResourceLimits) -> EngineOptions:
    """Return the options with threads, GPU layers and GPU memory reduced to the limits."""
    requested, most = options.gpu_layers, limits.gpu_layers
    threads = min(options.threads or limits.threads, limits.threads)
    if limits.gpu_memory is not None and 0 not in (requested, most):
        return replace(options, threads=threads, gpu_layers=None, gpu_memory=limits.gpu_memory)
    return replace(
        options,
        threads=threads,
        gpu_layers=requested if requested is None or most is None else min(requested, most),
        most_gpu_layers=most,
    )
