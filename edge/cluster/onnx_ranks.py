"""Ranks of an ONNX network: send the stages, start and link the engine processes, and run a pipeline.

Sessions and links are made once, for the devices of the first plan. `load` puts other plans for the same devices on
them. A sweep over cuts therefore repeats only `load`, `times` and `start`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass, replace
from itertools import pairwise

from edge.cluster.fleet import Fleet
from edge.cluster.preflight import LEAST_PROCESS_BYTES, check_memory
from edge.cluster.rank_group import DEADLINES, RankGroup
from edge.cluster.session import EngineSession, measured
from edge.net.rendezvous import TRANSPORTS
from edge.onnx.engine import OnnxEngine
from edge.onnx.model import CutStage, OnnxSource
from edge.onnx.pipeline import Pipeline, PipelineEnds
from edge.onnx.stage import LoadedStage
from edge.tasks import AggregateProgress, ShowStep, results, unseen, unwaited_pool
from edge.worker.messages import stage_message
from partition.errors import PlanError
from partition.plan.onnx_plan import OnnxPlan, OnnxStage
from partition.plan.plan import LOCAL
from partition.predict.speeds import LinkSpeed
from quant.wire import WIRES
from transport import edge_pb2 as pb
from transport.link import Deadlines
from transport.measure import measure


@dataclass(frozen=True)
class Loaded:
    """Resources of one loaded stage."""

    device: str
    weight_bytes: int
    memory_bytes: int  # memory of the stage's process after a run; 0 for a stage in this process
    provider: str  # ONNX Runtime execution provider that runs the stage
    fell_back_from: tuple[str, ...]  # faster providers of the device that refused the stage, each with the reason
    threads: int


class OnnxRanks(RankGroup):
    """An ONNX network that runs on several devices. `close()` ends it on all of them."""

    def __init__(
        self,
        fleet: Fleet,
        model: OnnxSource,
        plan: OnnxPlan,
        *,
        transport: str = "auto",
        deadlines: Deadlines = DEADLINES,
        threads: int | None = None,
        provider: str | None = None,
        progress: ShowStep = unseen,
        say: Callable[[str], None] = lambda words: None,
        gives_up: bool = False,
    ) -> None:
        """Connect the devices of `plan` and load its stages. Call `start` to run them.

        threads, provider: defaults for a stage in this process if the plan sets none.
        say: called in a separate thread with a message about a device that stands still.
        gives_up: treat such a device as lost while the pipeline waits for it.

        If this fails, everything is unloaded again and the first error is raised: PlanError (the plan is for another
        model), CannotSlice, NotEnoughMemory, NoRoom, WorkerError, EngineError, or a TransportError. The fleet stays
        open.
        """
        if transport not in TRANSPORTS:
            raise ValueError(f"transport is {transport!r:.80}; known are {', '.join(TRANSPORTS)}")
        super().__init__(
            fleet,
            len(plan.remote) + 1,
            say,
            transport=transport,
            deadlines=deadlines,
            streams=True,
            gives_up=gives_up,
        )
        self._model, self._threads, self._provider = model, threads, provider
        self._pipeline: Pipeline | None = None
        self._own: LoadedStage | None = None
        self._parts: list[CutStage] = []
        self._dirty = False  # True if workers may have stages loaded
        self.plan = plan
        self.loaded: tuple[Loaded, ...] = ()
        try:
            model.check(plan)
            if not plan.remote:
                raise PlanError("the plan is for this device alone; it needs no workers")
            self._connect()
            self.load(plan, progress)
        except BaseException:
            self.close()
            raise

    @property
    def links(self) -> tuple[str | None, ...]:
        """Kind of this process's link to the device of each stage, "tcp" or "grpc". None for its own stage."""
        assert self._group is not None
        kinds = [link.kind for _, link in sorted(self._group.links.items())]
        return (None, *kinds) if self.plan.own is not None else tuple(kinds)

    def close(self) -> None:
        if self._pipeline is not None:
            self._pipeline.stop()
        if self._own is not None:
            self._own.close()
        super().close()

    def load(self, plan: OnnxPlan, progress: ShowStep = unseen) -> None:
        """Replace the loaded plan by another plan for the same devices. Nothing runs until `start`.

        Raises the errors of the constructor, and PlanError if the devices differ.
        """
        self._model.check(plan)
        if plan.devices != self.plan.devices:
            raise PlanError(f"the plan is for {', '.join(plan.devices)}; connected are {', '.join(self.plan.devices)}")
        if [stage.affinity for stage in plan.remote] != [stage.affinity for stage in self.plan.remote]:
            raise PlanError("the plan's affinities differ from those of the open sessions")
        parts = self._model.parts(plan)
        needs = [(stage.device, self._least(stage, part)) for stage, part in zip(plan.stages, parts, strict=True)]
        check_memory(self._fleet, needs, "cut the model so that it holds fewer nodes, or use more devices")
        again = self._dirty
        self._unload()
        self._dirty = True
        remote = parts[len(parts) - len(plan.remote) :]
        total = AggregateProgress(progress, sum(len(part.content) for part in remote), self._closing.check)
        with unwaited_pool(len(remote), "deploy") as pool:
            loading = [
                pool.submit(self._load, session, stage, part, total)
                for session, stage, part in zip(self._sessions, plan.remote, remote, strict=True)
            ]
            try:
                there = results(loading)
            except Exception:
                if again:
                    wait(loading)  # another plan may follow, and a session answers one command at a time
                raise
        if plan.own is not None:
            own, provider = plan.own, plan.own.provider or self._provider
            engine = OnnxEngine(parts[0].content, own.threads or self._threads, provider, buffers=1)
            self._own = LoadedStage(engine, parts[0].takes, parts[0].gives)
            summary = (engine.provider, engine.fell_back_from, engine.threads)
            there.insert(0, Loaded(LOCAL, parts[0].weight_bytes, 0, *summary))
        self.plan, self.loaded = plan, tuple(there)
        self._parts = [replace(part, content=b"") for part in parts]  # each stage's engine has its own copy

    def times(self, repeats: int) -> tuple[float, ...]:
        """Return the seconds of each stage, measured alone, one after the other; the best of `repeats`. Ends a running
        pipeline.
        """
        self._end()
        command = pb.Command(time=pb.Time(steps=repeats))
        remote = tuple(float(session.ask(command).timed.run_s) for session in self._sessions)
        return (self._own.time(repeats).seconds, *remote) if self._own is not None else remote

    def hops(self, seconds: float = 0.2) -> tuple[LinkSpeed, ...]:
        """Measure each link that items take, one after the other: to the first worker, between the workers, and back
        here.

        seconds: approximate time for each link.

        Ends a running pipeline. Raises PlanError if a worker returns impossible figures.
        """
        assert self._group is not None
        self._end()
        figures = [measured(a, b, seconds) for a, b in pairwise(self._sessions)]
        ends = []
        for session in (self._sessions[0], self._sessions[-1]):
            session.tell(pb.Command(answer=pb.Answer(rank=0)))
            ends.append(measure(self._group.links[session.rank], seconds))
            session.answer()
        there, back = ends
        return (
            LinkSpeed(there.latency_s, there.send_bytes_per_s),
            *(LinkSpeed(hop.round_trip_median_s / 2, hop.send_bytes_per_s) for hop in figures),
            LinkSpeed(back.latency_s, back.receive_bytes_per_s),
        )

    def start(self) -> Pipeline:
        """Start the pipeline over the loaded stages and return it. Ends a running pipeline."""
        assert self._group is not None
        self._end()
        if not self.loaded:
            raise PlanError("nothing is loaded, because the last plan failed to load; load a plan")
        for session in self._sessions:
            session.tell(pb.Command(run=pb.Run(wire=next(iter(WIRES)), algorithm="auto")))
        links, last = self._group.links, max(self._group.links)
        first = self._parts[0 if self._own is None else 1]
        ends = PipelineEnds(self._model.inputs, first.takes, links[1], self._parts[-1].gives, links[last], self._own)
        self._pipeline = Pipeline(ends, self._explained)
        return self._pipeline

    def _stood_still(self, session: EngineSession) -> None:
        if self._pipeline is not None and self._pipeline.is_busy:  # loading may take long and hold the interpreter lock
            super()._stood_still(session)

    # --- bringing it up ---

    def _least(self, stage: OnnxStage, part: CutStage) -> dict[str, int]:
        """Return the least bytes of a stage, by purpose. A worker with a memory limit pages weights that exceed it."""
        pages = stage.device != LOCAL and self._fleet.profiles[stage.device].memory_limit_bytes is not None
        weights = min(part.weight_bytes, LEAST_PROCESS_BYTES) if pages else part.weight_bytes
        return {"stages": weights + part.activation_bytes}

    def _connect(self) -> None:
        """Open sessions on the workers, and link all ranks."""
        with unwaited_pool(len(self.plan.remote), "open") as pool:
            ranked = enumerate(self.plan.remote, 1)
            results([pool.submit(self._open_session, rank, stage.device, stage.affinity) for rank, stage in ranked])
        self._join(threads=1)

    def _load(self, session: EngineSession, stage: OnnxStage, part: CutStage, total: AggregateProgress) -> Loaded:
        n_bytes = len(part.content)
        label = self._fleet.workers[stage.device].label
        with total.part(n_bytes, f"sending to {label}") as sent, self._model.recipe(part) as (recipe, path):
            self._fleet.workers[stage.device].send_slice(recipe, path, part.digest, sent)
        described = stage_message(stage, part.takes, part.gives)
        command = pb.Load(slice=part.digest, stages=[1] * (len(self._sessions) + 1), stage=described)
        with total.part(0, f"loading on {label}"):
            loaded = session.ask(pb.Command(load=command)).loaded
        summary = (loaded.provider, tuple(loaded.fell_back_from), int(loaded.threads))
        return Loaded(stage.device, part.weight_bytes, int(loaded.memory_bytes), *summary)

    def _end(self) -> None:
        """End the running pipeline. The stages stay loaded."""
        if self._pipeline is not None:
            pipeline, self._pipeline = self._pipeline, None
            pipeline.end()
            for session in self._sessions:
                session.answer()  # receive the final event of `run`

    def _unload(self) -> None:
        """End the running pipeline and free the stages."""
        self._end()
        if self._dirty:  # also if only some of the stages were loaded
            for session in self._sessions:
                session.unload()
            self._dirty = False
        if self._own is not None:
            self._own.close()
            self._own = None
        self.loaded = ()
