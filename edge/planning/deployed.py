"""A language model on several devices: arranged as a person asks, loaded there, and what there is to say of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from devices.busy import LostTimeMeter
from edge.cluster.deployment import DEFAULT_EXCHANGE, Exchange
from edge.cluster.fleet import Fleet
from edge.cluster.standby import Standby
from edge.errors import EdgeError
from edge.llm.engine import Engine, load
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions, resolve
from edge.parallel.engine import DistributedEngine
from edge.parallel.step_times import Summary
from edge.parallel.surviving import SurvivingEngine
from edge.planning.arrange import Arrangement, arrange, work_of
from edge.planning.reproducible import SameCuts, check_settled, settled
from edge.planning.supervisor import Supervisor
from edge.slices.local import OwnSlices
from edge.survey.joining import FindWorkers
from edge.tasks import SILENT, Steps
from partition.errors import PlanError
from partition.model.check import check_loadable
from partition.model.model import ModelShape
from partition.plan.plan import Plan
from quant.gguf.file import GgufFile

DISTURBED = 0.05  # of the time: threads waited for longer, so other programs had this device's cores


@dataclass(frozen=True)
class Placement:
    """Where a model is to run: as a plan says, or on these workers as is best by measurement."""

    workers: tuple[str, ...] = ()  # addresses, by rank from 1 on
    plan: Plan | None = None
    why: str = "as the plan says"
    parallel: str = "auto"  # tensor, pipeline, or what the planner finds best; like the next of no meaning with a plan
    shares: tuple[float, ...] | None = None  # what part each device does, this one first; None: measured
    exchange: Exchange = DEFAULT_EXCHANGE
    insecure: bool = False  # allow workers that do not encrypt
    own: Mapping[str, Any] = field(default_factory=dict)  # fields of this device's shard that a person has set
    spare: int | str = 0  # losses of devices that are prepared for; "auto": as many as there is room for
    seek: FindWorkers | None = None  # for workers that join while it runs; None: those named are all
    reproducible: bool = False  # the same tokens from run to run, for options that are (`edge.llm.options`)


@dataclass
class Deployed:
    """A model that runs on several devices. Where one is lost, it goes on with the others, and these fields change."""

    engine: TextEngine
    plan: Plan
    why: str  # this plan
    exchange: Exchange
    names: tuple[str, ...]  # of the devices by rank, for people
    standby: Standby | None = None  # what is held for a loss, where that was asked for

    @property
    def _several(self) -> DistributedEngine | None:
        engine = self.engine.current if isinstance(self.engine, SurvivingEngine) else self.engine
        return engine if isinstance(engine, DistributedEngine) else None

    def times(self, *, clear: bool = False) -> list[dict[str, Summary]]:
        """As `DistributedEngine.times`; nothing is known of a plan for this device alone."""

        def times(engine: TextEngine) -> list[dict[str, Summary]]:
            return engine.times(clear=clear) if isinstance(engine, DistributedEngine) else [{}]

        return self.engine.between_steps(times) if isinstance(self.engine, SurvivingEngine) else times(self.engine)

    def link_lines(self) -> list[str]:
        """How this device is linked to the others, how others are where it is unusual, and what was changed."""
        if not self._several:
            return []
        states = [state for state in self._several.link_states if state.ranks[0] == 0 or not state.usual]
        links = [f"ranks {low} and {high}: {state.why}" for state in states for low, high in (state.ranks,)]
        return [*links, *self._several.link_watch.changes]

    def change(self, plan: Plan, why: str, names: tuple[str, ...]) -> None:
        """It runs elsewhere now."""
        self.plan, self.why, self.names = plan, why, names

    def line(self) -> str:
        """The devices, what each holds, and why, in one line."""
        if len(self.names) == 1:
            return self.why
        staged = len(self.plan.stages) > 1
        parts = []
        for rank, name in enumerate(self.names):
            cut = self.plan.slice(rank)
            held = [f"layers {cut.layers}"] if staged else []
            if len(self.plan.group(rank)) > 1:
                held += [f"heads {cut.heads}", f"ff {cut.ff}"]
            parts.append(f"{name} {', '.join(held)}")
        return f"{'; '.join(parts)} ({self.why})"

    def to_json(self, times: Sequence[Mapping[str, Summary]]) -> dict[str, Any]:
        """What a command's --json adds to its own figures. times: what the steps of each rank took."""
        several = self._several
        links = several.links if several else {}
        ranks: list[dict[str, Any]] = []
        for rank, of in enumerate(times):
            kinds = {"decode": of.get("decode"), "prefill": of.get("prefill")}
            figures = {kind: found.to_json() if found else None for kind, found in kinds.items()}
            ranks.append({"rank": rank, "device": self.plan.devices[rank], "link": links.get(rank), **figures})
        return {
            "ranks": ranks,
            "links": [state.to_json() for state in several.link_states] if several else [],
            "link_changes": list(several.link_watch.changes) if several else [],
            "plan": self.plan.to_json(),
            "why": self.why,
            "transport": self.exchange.transport,
            "wire": self.exchange.wire,
            "allreduce": self.exchange.algorithm,
            "standby": self.standby.to_json() if self.standby else None,
        }


@contextmanager
def deployed(
    path: Path,
    placement: Placement,
    options: EngineOptions,
    *,
    steps: Steps = SILENT,
    on_plan: Callable[[Plan], None] = lambda plan: None,
) -> Iterator[Deployed]:
    """The model at `path` where it is to run, until the end of the block. on_plan: told the plan before it is brought
    to life.

    PlanError for a plan of another model; the errors of Fleet, arrange and Deployment.
    """
    file = GgufFile.open(path)
    check_loadable(file)
    if placement.reproducible:
        check_settled(placement.plan, placement.parallel, placement.shares)
    with ExitStack() as stack:
        fleet = None
        if placement.workers:
            fleet = stack.enter_context(Fleet(placement.workers, insecure=placement.insecure))
        plan, why, made, digest = _arranged(placement, fleet, file, options, steps)
        plan = settled(plan) if placement.reproducible else plan
        on_plan(plan)
        if fleet is None or (plan.world_size == 1 and placement.seek is None):
            # One request alone has as many threads as others leave free, as without workers.
            options = replace(options, follows_load=options.sequences == 1)
            engine = stack.enter_context(alone(path, options, plan, steps))
            yield Deployed(engine, plan, why, placement.exchange, ("this device",))
            return
        survivors = SameCuts if placement.reproducible else Supervisor
        with survivors(
            file,
            digest,
            options,
            placement.exchange,
            steps,
            placement.insecure,
            arranged=made,
            spare=placement.spare,
            seek=placement.seek,
        ) as survivor:
            names = tuple(fleet.workers[d].label if d in fleet.workers else d for d in plan.devices)
            survives = survivor.start(fleet, plan)
            others, began = LostTimeMeter(), time.monotonic()
            model = Deployed(survives, plan, why, placement.exchange, names, survivor.standby)
            survivor.changed = model.change
            yield model
            survivor.stay()
            if made is not None and options.sequences == 1 and not survives.recoveries + survives.moves:
                _learn(made, model, steps, disturbed=others.lost_s() > DISTURBED * (time.monotonic() - began))


def alone(path: Path, options: EngineOptions, plan: Plan, steps: Steps = SILENT) -> Engine:
    """The whole model on this device, as its plan says where `options` do not. The errors of Engine."""
    shard = plan.shard(0)
    options = replace(
        options,
        memory=options.memory or shard.memory,
        threads=options.threads or shard.threads,
        gpu_layers=shard.gpu_layers if options.gpu_layers is None else options.gpu_layers,
    )
    return load(path, options, steps)


def _arranged(
    placement: Placement, fleet: Fleet | None, file: GgufFile, options: EngineOptions, steps: Steps
) -> tuple[Plan, str, Arrangement | None, str]:
    """The plan, why it is this one, what it was made from, and the digest of the model."""
    with steps.step(f"Reading {file.path.name}") as show:
        digest = OwnSlices().model_digest(file.path, show)
    if placement.plan is not None or fleet is None:
        assert placement.plan is not None, "without a plan there are workers"
        if fleet is None and placement.plan.model_digest not in ("", digest):
            raise PlanError(f"the plan is for another model than {file.path.name}, or it has changed; plan again")
        return _with_own(placement.plan, placement.own), placement.why, None, digest
    context, _, kv = resolve(options, ModelShape.from_gguf(file))
    wire, transport = placement.exchange.wire, placement.exchange.transport
    work = work_of(file, context=context, concurrency=options.sequences, kv_type=kv.name, wire=wire)
    with steps.step("Measuring devices", unit="steps") as show:
        made = arrange(
            fleet,
            placement.workers,
            file,
            digest,
            parallel=placement.parallel,
            shares=placement.shares,
            work=work,
            threads=options.threads,
            memory=options.memory,
            transport=transport,
            on_step=show,
        )
    return _with_own(made.plan, placement.own), made.why, made, digest


def _with_own(plan: Plan, own: Mapping[str, Any]) -> Plan:
    """The plan with what a person said of this device, so that a saved one says it, too."""
    first, *others = plan.stages
    shard, *rest = first.shards
    shard = replace(shard, **{name: value for name, value in own.items() if value is not None})
    return replace(plan, stages=(replace(first, shards=(shard, *rest)), *others))


def _learn(made: Arrangement, model: Deployed, steps: Steps, *, disturbed: bool) -> None:
    """Correct what was measured by what steps took, and say so."""
    with suppress(EdgeError):  # a rank has gone: the next session sees to it
        for line in made.learn(model.plan, model.times(), disturbed=disturbed):
            steps.say(line)
