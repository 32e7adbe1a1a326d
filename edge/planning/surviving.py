"""A language model on several devices that goes on when one of them is lost: planned again over those that answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace

from devices.cluster_file import Cluster
from devices.probe import available_memory
from edge.cluster.deployment import Deployment, Exchange
from edge.cluster.fleet import Fleet, device
from edge.cluster.lost import listed, lost_words
from edge.cluster.rank_group import RankGroup
from edge.errors import EdgeError
from edge.llama import llama
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.parallel.surviving import SurvivingEngine
from edge.planning.arrange import Arrangement, can_share, name_of
from edge.survey.profile import reachable
from edge.tasks import Steps
from partition.errors import PlanError
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan
from partition.search.explain import best_of
from partition.search.planner import Planner
from partition.slices.gguf_slice import limits
from quant.gguf.file import GgufFile

PAGED_SHARE = 0.8  # of the memory that is free, for a model that is larger and has no other device left


class Survivor:
    """Brings a model to life, and again elsewhere. `close()` ends it; it is also a context manager."""

    def __init__(
        self,
        file: GgufFile,
        digest: str,
        options: EngineOptions,
        exchange: Exchange,
        steps: Steps,
        insecure: bool,
        *,
        arranged: Arrangement | None = None,
    ) -> None:
        """digest: of the file. arranged: what the first plan was made from; None: it was given."""
        self._file, self._digest, self._options, self._exchange = file, digest, options, exchange
        self._steps, self._insecure, self._arranged = steps, insecure, arranged
        self._stack = ExitStack()  # what lasts
        self._running = ExitStack()  # what another plan replaces
        self.changed: Callable[[Plan, str, tuple[str, ...]], None] = lambda plan, why, names: None

    def start(self, fleet: Fleet, plan: Plan) -> SurvivingEngine:
        """The engine of a plan of several devices, which lives as long as this object. The fleet is the caller's."""
        self._plan = plan
        vocabulary = llama.Model(self._file.path, vocabulary_only=True)
        self._stack.callback(vocabulary.close)
        self._vocabulary = vocabulary
        engine = self._deployed(fleet, plan)
        self._options = replace(self._options, context=engine.context, batch=engine.batch)
        return SurvivingEngine(engine, vocabulary, self._recovered)

    def close(self) -> None:
        """Unload everything."""
        self._running.close()
        self._stack.close()

    def __enter__(self) -> Survivor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _deployed(self, fleet: Fleet, plan: Plan) -> TextEngine:
        with self._steps.step(f"Loading {self._file.path.name} on {len(set(plan.devices))} devices") as show:
            deployment = Deployment(
                fleet,
                plan,
                self._file,
                self._options,
                self._exchange,
                show,
                self._steps.say,
                vocabulary=self._vocabulary,
                gives_up=True,
            )
        self._ranks: RankGroup = self._running.enter_context(deployment)
        return deployment.engine

    def _recovered(self, error: Exception) -> TextEngine:
        """Another engine, in place of the one that failed so. What keeps it from being there is raised, with why."""
        lost = self._ranks.lost
        words = lost_words(lost, error) if lost else str(error)
        with suppress(EdgeError):  # parts of it are gone
            self._running.close()
        self._running = ExitStack()
        try:
            cluster = Cluster.of_addresses(self._addresses())
            fleet, _ = self._running.enter_context(reachable(cluster, insecure=self._insecure))
            plan, why = self._planned(fleet)
            names = tuple("this device" if fleet is None else self._name(fleet, one) for one in plan.devices)
            self._steps.say(f"{words}: going on with {listed(names)}")
            if fleet is None or plan.world_size == 1:
                engine: TextEngine = self._running.enter_context(self._alone(plan))
            else:
                engine = self._deployed(fleet, plan)
        except EdgeError as again:
            raise type(again)(f"{words}, and without it: {again}") from again
        self.changed(plan, why, names)
        return engine

    def _addresses(self) -> list[str]:
        """Of all workers that were measured, or that a given plan names."""
        survey = self._arranged.survey if self._arranged else None
        devices = (speed.device for speed in survey.speeds) if survey else self._plan.devices
        return [address for address in dict.fromkeys(map(device, devices)) if address != LOCAL]

    def _planned(self, fleet: Fleet | None) -> tuple[Plan, str]:
        """What those do that answer, and why. Nothing is measured now, as somebody waits."""
        answering = list(fleet.workers) if fleet is not None else []
        if not answering:
            return self._shared({LOCAL: 1.0}, "pipeline"), "no other device answers"
        made, name = self._arranged, name_of(self._file)
        if made is not None and made.survey is not None and made.work is not None:
            there = [speed for speed in made.survey.speeds if device(speed.device) in (LOCAL, *answering)]
            return best_of(
                Planner(made.work, there, made.survey.links, name, self._digest, tensor=can_share(self._file))
            )
        done = work_shares(self._plan)
        kind = "tensor" if len(self._plan.stages) == 1 else "pipeline"
        shares = {one: done[one] for one in (LOCAL, *answering)}
        while True:
            try:
                return self._shared(shares, kind), f"{kind}, with shares as before"
            except PlanError:  # too many for that kind: a device to each stage may be more than there are layers
                if not answering:
                    raise
                least = min(answering, key=lambda one: shares[one])
                answering.remove(least)
                del shares[least]

    def _shared(self, shares: Mapping[str, float], kind: str) -> Plan:
        can, name = limits(self._file), name_of(self._file)
        return make_plan(can, name, self._digest, list(shares), kind, list(shares.values()))

    def _alone(self, plan: Plan) -> Engine:
        options, path = self._options, self._file.path
        size, free = path.stat().st_size, available_memory()
        if options.memory is None and size > free:
            options = replace(options, memory=round(PAGED_SHARE * free))
        options = replace(options, threads=options.threads or plan.shard(0).threads)
        with self._steps.step(f"Loading {path.name}", size) as show:
            return Engine(path, options, progress=lambda fraction: show(fraction * size))

    def _name(self, fleet: Fleet, address: str) -> str:
        return "this device" if device(address) == LOCAL else fleet.workers[address].label


def work_shares(plan: Plan) -> dict[str, float]:
    """What part of the layers' work each device of a plan does, by its address as `device` writes it; together 1."""
    done: dict[str, float] = defaultdict(float)
    for rank, address in enumerate(plan.devices):
        cut = plan.slice(rank)
        width = len(cut.ff) / plan.sizes.ff if plan.sizes.ff else 1.0
        done[device(address)] += len(cut.layers) / plan.sizes.layers * width
    return dict(done)
