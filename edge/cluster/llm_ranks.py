"""Ranks of a language model: send the slices, start and link the engine processes, and load them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from devices.probe import default_threads
from edge.arguments import check_fields
from edge.cluster.fleet import Fleet, device
from edge.cluster.model_slices import FileSlice, ModelSlices
from edge.cluster.preflight import LEAST_PROCESS_BYTES, check_room, shared_rollback
from edge.cluster.rank_group import DEADLINES, RankGroup
from edge.cluster.session import EngineSession
from edge.errors import EdgeError, SliceError
from edge.llama import llama
from edge.llm.options import DEFAULTS, EngineOptions
from edge.llm.prefixes import name_histories, rank_key, seal
from edge.llm.resolve import resolve
from edge.llm.states import held_bytes
from edge.models.local_slices import OwnSlices
from edge.net.rendezvous import TRANSPORTS
from edge.parallel.engine import DistributedEngine
from edge.parallel.engine_kinds import own_kind
from edge.parallel.shard import Shard
from edge.parallel.topology import place
from edge.prefixes.keys import cache_key
from edge.tasks import AggregateProgress, ShowStep, results, unseen, unwaited_pool
from edge.weights.adapter_file import CheckedAdapter
from edge.worker.messages import options_message
from partition.errors import PlanError
from partition.model.file import ModelFile
from partition.plan.plan import Plan
from partition.plan.plan import Shard as PlanShard
from partition.slices.gguf_slice import limits
from partition.slices.recipe import Recipe
from quant.wire import WIRES
from transport import edge_pb2 as pb
from transport.choice import ALGORITHMS
from transport.collective import Group
from transport.link import Deadlines

_AT_ONCE_S = 0.05  # send timeout for the final step; no result depends on it


@dataclass(frozen=True)
class Exchange:
    """Transport and all-reduce settings of the links between ranks. Raises ValueError for unknown values."""

    transport: str = "auto"  # "tcp", "grpc", or "auto": tcp if the peer can be reached by it, else grpc
    algorithm: str = "auto"  # all-reduce algorithm: "star", "mesh", "split", or "auto": the cost model chooses
    wire: str = "f32"  # type of partial sums on the wire: "f32", "f16", "q8"
    deadlines: Deadlines = DEADLINES

    def __post_init__(self) -> None:
        check_fields(self)
        for name, known in (("transport", TRANSPORTS), ("algorithm", ("auto", *ALGORITHMS)), ("wire", tuple(WIRES))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r:.80}; known are {', '.join(known)}")


DEFAULT_EXCHANGE = Exchange()


class LlmRanks(RankGroup):
    """A language model that runs on several devices. `close()` ends it on all of them."""

    engine: DistributedEngine

    def __init__(
        self,
        fleet: Fleet,
        plan: Plan,
        file: ModelFile,
        options: EngineOptions,
        exchange: Exchange = DEFAULT_EXCHANGE,
        progress: ShowStep = unseen,
        say: Callable[[str], None] = lambda words: None,
        *,
        vocabulary: llama.Model | None = None,
        gives_up: bool = False,
        reserved: int = 0,
        leaves_at_once: bool = False,
        adapters: Sequence[CheckedAdapter] | None = None,
    ) -> None:
        """Load and start `plan`.

        options: engine options for all ranks; threads and GPU layers are for this device only.
        say: called in a separate thread with a message about a device that stands still while a request waits.
        vocabulary: the model's vocabulary if it is already loaded.
        gives_up: as in `RankGroup`.
        reserved: bytes of this device's memory budget that another placement takes.
        leaves_at_once: give a device up as soon as it is about to leave, because the other devices can do all of its
            work.
        adapters: LoRA adapters that were checked before; None: check those of the options now.

        If the start fails, everything is unloaded again and the first error is raised: SliceError (the model file has
        changed), PlanError (the plan is for another model), CannotSlice, NotEnoughMemory, NoRoom, WorkerError, or a
        TransportError. The fleet stays open.
        """
        self._leaves_at_once = leaves_at_once
        super().__init__(
            fleet,
            plan.world_size,
            say,
            transport=exchange.transport,
            deadlines=exchange.deadlines,
            streams=False,
            gives_up=gives_up,
        )
        self.plan = plan
        self._file, self._exchange, self._vocabulary = file, exchange, vocabulary
        key = cache_key(options.prefixes.key_folder) if options.prefixes else None
        options = options if key else replace(options, prefixes=None)
        self._prefix_key = key or b""
        self.memory_bytes: dict[str, int] = {}  # granted to the ranks of other devices, by address
        self._own_slices, self._reserved, self._adapters = OwnSlices(), reserved, adapters
        try:
            self._start(options, progress)
        except BaseException:
            self.close()
            raise

    def _is_busy(self) -> bool:
        """Return True while the ranks start or compute a step."""
        engine: DistributedEngine | None = getattr(self, "engine", None)
        return engine is None or bool(engine.busy)

    def _leaves(self, session: EngineSession) -> None:
        """Give the device up now only if `leaves_at_once`. Otherwise the supervisor replaces the plan between two
        steps.
        """
        if self._leaves_at_once:
            super()._leaves(session)

    def break_off(self) -> None:
        """Interrupt a thread that waits or computes here. Call it from another thread; nothing can be computed
        afterwards.
        """
        self.engine.shard.engine.stop()
        for link in self.engine.group.links.values():
            link.close("no longer needed")

    # --- bringing it up ---

    def _start(self, options: EngineOptions, progress: ShowStep) -> None:
        plan, file, exchange = self.plan, self._file, self._exchange
        digest = self._own_slices.model_digest(file.path)
        if plan.model_digest and digest != plan.model_digest:
            raise SliceError(
                f"{file.path.name} has SHA-256 {digest[:12]}..., the plan is for {plan.model_digest[:12]}...: it has"
                " changed, or is another model; make a new plan"
            )
        if plan.sizes != limits(file).sizes:  # the plan would leave out a part of the model
            raise PlanError(
                f"the plan is for {plan.sizes}, and {file.path.name} has {limits(file).sizes}; make a new plan"
            )
        if options.gpu_memory is None:
            options = replace(options, memory=options.memory or plan.shard(0).memory)
        options = replace(options, context=resolve(options, file.shape)[0], batch=options.rows)  # equal for all ranks
        adapters = self._adapters
        if adapters is None:
            adapters = CheckedAdapter.all_from(options.lora, file)
        self._slices = ModelSlices(file, digest, adapters, self._own_slices, elastic=options.least_memory is not None)
        slices = self._slices.of_ranks(plan)
        check_room(self._fleet, [(plan, slices)], file.shape, options)
        # All ranks need the same value, whatever memory each of them has.
        options = replace(options, rollback=shared_rollback(self._fleet, plan, slices, file, options))
        total = AggregateProgress(
            progress, 3 * sum(model.recipe.n_bytes for model, *_ in slices.values()), self._closing.check
        )

        with unwaited_pool(plan.world_size, "deploy") as pool:
            own = pool.submit(self._load_here, slices.get(0, []), options, total)
            ranks = range(1, plan.world_size)
            opening = [pool.submit(self._open, rank, slices[rank], total) for rank in ranks]
            named = results(opening, also_watched=(own,))
            threads = plan.shard(0).threads or options.threads or default_threads()
            with total.part(0, "linking the devices"):
                group, links = self._join(1 if plan.thin_owner else threads)
            loading = [
                pool.submit(self._load, rank, digests, slices[rank][0].recipe, options, total)
                for rank, digests in zip(ranks, named, strict=True)
            ]
            for rank, n_bytes in zip(ranks, results(loading, also_watched=(own,)), strict=True):
                address = plan.shard(rank).device
                self.memory_bytes[address] = self.memory_bytes.get(address, 0) + n_bytes
            model, shard = own.result()
        for session in self._sessions:
            session.tell(pb.Command(run=pb.Run(wire=exchange.wire, algorithm=exchange.algorithm)))
        self.engine = DistributedEngine(
            file, model, plan, shard, group, exchange.algorithm, WIRES[exchange.wire], options.outputs,
            self._explained, links, adapters,
        )  # fmt: skip
        self._closing.then(partial(self._end, group))

    def _load_here(
        self, slices: Sequence[FileSlice], options: EngineOptions, total: AggregateProgress
    ) -> tuple[llama.Model, Shard]:
        """Load the vocabulary and rank 0's slices in this process.

        A thin owner has no slices and holds no layer. The parts load one after the other because llama.cpp reports load
        errors for the process as a whole.
        """
        model = self._vocabulary
        if model is None:
            model = llama.Model(self._file.path, vocabulary_only=True)
            self._closing.then(model.close)
        own = replace(options, reserved=options.reserved + self._reserved, **_own(self.plan.shard(0)))
        here = place(0, self.plan.widths)
        if not here.last:
            own = replace(own, outputs=own.rows)
        own = replace(own, lora=tuple(str(self._slices.use(part, self._closing.enter)) for part in slices[1:]))
        if not slices:
            shard = Shard(self._file, own, here, vocabulary=model)
            self._closing.then(shard.close)
            if options.prefixes is not None:
                name_histories(shard.engine.states, self._prefix_key)
            return model, shard
        recipe, digest = slices[0].recipe, self._digest(slices[0], total)
        with total.part(recipe.n_bytes, "cutting the slice of this device") as cut:
            path = self._closing.enter(self._own_slices.use(recipe, self._file.path, digest, cut))
            part = own_kind().slice_file(path)
        if options.prefixes is not None:
            weights_bytes = held_bytes(part.shape)
            own = replace(own, reserved=own.reserved + weights_bytes)
        with total.part(recipe.n_bytes, "loading on this device") as loaded:
            shard = Shard(part, own, here, lambda fraction: loaded(fraction * recipe.n_bytes, recipe.n_bytes))
            self._closing.then(shard.close)
        if options.prefixes is not None:
            states = shard.engine.states
            name_histories(states, self._prefix_key)
            own_key = rank_key(self._prefix_key, digest)
            prefixes = options.prefixes
            seal(states, prefixes.folder, prefixes.max_bytes, own_key, weights_bytes if own.memory else None)
        return model, shard

    def _digest(self, part: FileSlice, total: AggregateProgress) -> str:
        """Return a slice's digest. It may have to be cut once to compute it."""
        with total.part(part.recipe.n_bytes, f"reading {part.path.name}") as read:
            return self._slices.name(part, read)

    def _open(self, rank: int, slices: Sequence[FileSlice], total: AggregateProgress) -> list[str]:
        """Send a rank's slices to its worker and start its engine process. Return the digests of the slices."""
        part = self.plan.shard(rank)
        worker = self._fleet.workers[part.device]
        recipe, digest = slices[0].recipe, self._digest(slices[0], total)
        with self._named(rank):
            with total.part(recipe.n_bytes, f"sending to {worker.label}") as sent:
                worker.send_slice(recipe, self._file.path, digest, sent)
                adapters = [self._slices.send(part, worker) for part in slices[1:]]
            with total.part(0, f"starting {worker.label}"):
                self._open_session(rank, part.device, part.affinity)
        return [digest, *adapters]

    def _load(
        self, rank: int, digests: Sequence[str], recipe: Recipe, options: EngineOptions, total: AggregateProgress
    ) -> int:
        """Load a rank's slices on its worker. Return the bytes of memory that the worker granted."""
        digest, *adapters = digests
        part = self.plan.shard(rank)
        values: dict[str, Any] = {name: getattr(DEFAULTS, name) for name in _OF_A_DEVICE}
        ranks = [device(other) for other in self.plan.devices].count(device(part.device))
        if ranks > 1:  # oversubscribed threads make llama.cpp's barriers about 100 times slower
            values["threads"] = max(1, self._fleet.profiles[part.device].threads // ranks)
        profile = self._fleet.profiles[part.device]
        limit = profile.memory_limit_bytes
        if ranks > 1 and limit:  # otherwise the first rank to load would take all of the limit
            values["memory"] = max(1, (limit - LEAST_PROCESS_BYTES) // ranks)
        values |= _own(part)
        key = rank_key(self._prefix_key, digest) if self._prefix_key else b""
        message = options_message(replace(options, **values))
        command = pb.Load(slice=digest, options=message, stages=self.plan.widths, prefix_key=key, adapters=adapters)
        label = self._fleet.workers[part.device].label
        with self._named(rank), total.part(recipe.n_bytes, f"loading on {label}") as shown:
            event = self._by_rank[rank].ask(
                pb.Command(load=command),
                lambda event: shown(event.loading.fraction * recipe.n_bytes, recipe.n_bytes),
            )
        return event.loaded.memory_bytes

    # --- the end, and when something fails ---

    @contextmanager
    def _named(self, rank: int) -> Iterator[None]:
        """Attach the device of the rank to errors raised in the block."""
        try:
            yield
        except EdgeError as error:
            error.devices = (device(self.plan.shard(rank).device),)
            raise

    def _end(self, group: Group) -> None:
        """Tell the ranks that no more steps follow. A rank that does not read the message ends with its session."""
        for link in group.links.values():
            link.deadlines = replace(link.deadlines, send_timeout_s=_AT_ONCE_S)
        self.engine.end()


_OF_A_DEVICE = frozenset(
    {"threads", "gpu_layers", "gpu_memory", "memory", "least_memory", "window", "io_threads", "io_chunk", "verify"}
)


def _own(part: PlanShard) -> dict[str, Any]:
    """Return the engine options that a plan sets for one device."""
    limits = {"threads": part.threads, "gpu_layers": part.gpu_layers, "memory": part.memory}
    return {name: value for name, value in limits.items() if value is not None}
