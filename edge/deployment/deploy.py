"""Deploy a language model: turn a plan, a cluster and options into a model that survives the loss of devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from devices.probe import available_memory
from edge.cluster.failures import is_loss, loss_reason
from edge.cluster.fleet import Fleet, by_device, device
from edge.cluster.llm_ranks import DEFAULT_EXCHANGE, Exchange, LlmRanks
from edge.cluster.model_slices import ModelSlices, send_ahead
from edge.cluster.preflight import check_room, held_here
from edge.cluster.rank_group import RankGroup
from edge.deployment.deployed import DeployedModel
from edge.deployment.kinds import Building, OtherCopies, RunningPlan
from edge.deployment.replanning import Replanner
from edge.deployment.reproducible import SameCuts, reproducible_plan
from edge.deployment.supervisor import Supervisor
from edge.deployment.watch import MembershipWatch
from edge.errors import ReplicaLost
from edge.llama import llama
from edge.llm.engine import Engine, load
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.models.local_slices import OwnSlices
from edge.parallel.moving import check_movable
from edge.parallel.prefiller import PrefillPlacement
from edge.parallel.replaceable import ReplaceableEngine
from edge.parallel.replacements import Replacements
from edge.planning.choice import PlanChoice
from edge.planning.encoder_place import EncoderPlace
from edge.profiling.cluster import Cluster
from edge.profiling.joining import EstimatedDevices, FindWorkers, JoiningDevices, has_estimates
from edge.tasks import SILENT, Progress, Steps
from edge.weights.adapter_file import CheckedAdapter
from partition.errors import CannotSlice, PlanError
from partition.model.file import ModelFile
from partition.plan.plan import LOCAL, Plan
from quant.text import listed

# Share of the free memory for a model that is larger than this memory and runs on this device alone.
PAGED_SHARE = 0.8


@dataclass(frozen=True)
class Resilience:
    """Policy for devices that are lost, or join, while a model runs."""

    seek: FindWorkers | None = None  # finds devices that join; None: only devices of the plan take part
    reproducible: bool = False  # the same tokens in every run, if the engine options allow it (`edge.llm.options`)
    resumes: bool = False  # devices of the plan that cannot be reached at the start count as lost
    # Raise ReplicaLost after a loss, because this device has a part in another replica and cannot take over.
    is_replica: bool = False
    left_out: frozenset[str] = frozenset()  # addresses of workers that a person leaves out, in the form of `device`
    other_copies: OtherCopies[Plan] | None = None  # runs the replicas of plans; None: plans have one copy


DEFAULT_RESILIENCE = Resilience()


def deploy(
    choice: PlanChoice,
    cluster: Cluster,
    options: EngineOptions,
    exchange: Exchange = DEFAULT_EXCHANGE,
    resilience: Resilience = DEFAULT_RESILIENCE,
    *,
    steps: Steps = SILENT,
) -> DeployedModel:
    """Deploy a language model on the devices that its plan names, and return it.

    A process runs one copy of the model. If the plan has replicas, only its first copy is deployed.

    If a device is lost, leaves, becomes slow, comes back or joins, another plan takes over as `resilience` allows, and
    `steps` shows a line.

    Raises WorkerError if a device of the plan is not connected, unless the model resumes. Raises PlanError if the plan
    is for another model or an ONNX network. Also raises the errors of `LlmRanks` and `Engine`.
    """
    if not isinstance(choice.plan, Plan):
        raise PlanError(f"{choice.model.name} is a network in ONNX: deploy it with deploy_onnx")
    first, *replicas = choice.plan.copies
    if replicas:
        steps.say(f"the plan has {1 + len(replicas)} copies of the model; this process runs the first copy")
    if replicas and resilience.other_copies is None:
        choice = replace(choice, planner=None)  # other plans would use the devices of the replicas
    plan = by_device(reproducible_plan(first) if resilience.reproducible else first)
    file = choice.open()
    fleet = cluster.fleet if resilience.resumes else cluster.connected(plan)
    away = set(map(device, plan.all_devices)) - {LOCAL, *(fleet.workers if fleet else ())}
    with steps.step(f"Reading {file.path.name}") as show:
        digest = OwnSlices().model_digest(file.path, show)
    improves = choice.planner is not None and not choice.is_given and not resilience.reproducible
    stays = choice.planner is None or not improves or not has_estimates(choice.planner.speeds)
    if not away and (fleet is None or (len(plan.all_devices) == 1 and resilience.seek is None and stays)):
        if plan.model_digest not in ("", digest):
            raise PlanError(f"the plan is for another model than {file.path.name}, or it has changed; plan again")
        single = alone(file, options, plan, steps)
        running = RunningPlan[Plan, TextEngine](single, plan, choice.why, ("this device",))
        return DeployedModel(single, running, exchange, single.close, replicas=tuple(replicas))
    # Each rank changes the size of its weights independently, so prefixes on disk would mix several sizes.
    if options.least_memory is not None:
        options = replace(options, prefixes=None)
    with ExitStack() as stack:
        building = LlmBuilding(file, digest, options, exchange, steps.say, choice.encoder)
        stack.callback(building.close)
        plan = building.with_phases(plan, reproducible=resilience.reproducible)
        choice = replace(choice, plan=plan)
        replanner = Replanner(choice, file, digest)
        if resilience.reproducible:
            replanner = SameCuts(choice, file, digest, exchange.wire)
        replanner.left_out = resilience.left_out
        replanner.replicates = resilience.other_copies is not None
        supervisor = Supervisor(
            replanner, building, steps, insecure=cluster.insecure, other_copies=resilience.other_copies
        )
        stack.callback(supervisor.close)
        why = choice.why
        state = "left out by a person" if away <= resilience.left_out else "cannot be reached"
        if away and resilience.is_replica:
            raise ReplicaLost(f"{listed(sorted(away))} {state}")
        if away:
            steps.say(f"{listed(sorted(away))} {state}: going on without")
            plan, why = replanner.over(fleet, cluster.notes, steps)
        engine = building.kept_running(supervisor, fleet, plan, why, replicas, resilience, exact=replanner.exact)
        joining = None
        if (seek := resilience.seek) is not None:

            def find() -> list[str]:
                return [address for address in seek() if device(address) not in replanner.left_out]

            joining = JoiningDevices(find, file, digest, exchange.transport, insecure=cluster.insecure)
        estimated = None
        if improves:
            estimated = EstimatedDevices(
                file, digest, exchange.transport, insecure=cluster.insecure, memory=choice.options.memory
            )
        watch = None
        if not resilience.is_replica or replanner.replicates:
            watch = MembershipWatch(supervisor, replanner, engine.replacements, joining, estimated, steps)
            stack.callback(watch.close)
        close = stack.pop_all().close
        model = DeployedModel(engine, supervisor.running, exchange, close, watch, tuple(replicas))
        supervisor.on_change.append(model.change)
        if (other_copies := resilience.other_copies) is not None:
            supervisor.on_change.append(lambda running: other_copies.run(running.plan, running.others))
        return model


def alone(
    file: ModelFile,
    options: EngineOptions,
    plan: Plan,
    steps: Steps = SILENT,
    *,
    pages: bool = False,
    moved_bytes: int = 0,
) -> Engine:
    """Load the whole model on this device. Values that `options` lacks come from the plan.

    pages: if the model is larger than the free memory, load it with a memory budget so that it pages.
    moved_bytes: bytes of the free memory that will be used for something else.

    Raises the errors of `Engine`.
    """
    shard, free = plan.shard(0), max(0, available_memory() - moved_bytes)
    if options.gpu_memory is not None:
        return load(file, replace(options, threads=options.threads or shard.threads), steps)
    memory = options.memory or shard.memory
    if pages and memory is None and file.path.stat().st_size > free:
        memory = round(PAGED_SHARE * free)
    gpu_layers = shard.gpu_layers if options.gpu_layers is None else options.gpu_layers
    options = replace(options, memory=memory, threads=options.threads or shard.threads, gpu_layers=gpu_layers)
    return load(file, options, steps)


class LlmBuilding(Building[Plan, TextEngine]):
    """Loads plans of a language model, always with the context and batch of the first plan. Close it after all
    engines.
    """

    def __init__(
        self,
        file: ModelFile,
        digest: str,
        options: EngineOptions,
        exchange: Exchange,
        say: Callable[[str], None],
        encoder: EncoderPlace | None = None,
    ) -> None:
        """Prepare to load plans of a model file.

        digest: SHA-256 of the model file.
        say: shows a line while a device is waited for.
        encoder: device that encodes media; if it is lost, this device encodes.
        """
        self._encoder = encoder
        self._file, self._options, self._exchange = file, options, exchange
        # All later plans use the same adapters.
        adapters = CheckedAdapter.all_from(options.lora, file)
        self._slices = ModelSlices(file, digest, adapters, elastic=options.least_memory is not None)
        self._say = say
        self._vocabulary = llama.Model(file.path, vocabulary_only=True)
        self._prefill_lost: Callable[[Plan, str, list[str]], None] = lambda plan, reason, lost: None

    def close(self) -> None:
        """Free the vocabulary."""
        self._vocabulary.close()

    def with_phases(self, plan: Plan, *, reproducible: bool) -> Plan:
        """Return the plan. If the KV cache cannot move between devices, show why and drop the prefill placement."""
        if plan.prefill is None:
            return plan
        why = "steps that are to be the same each time are computed by one placement" if reproducible else ""
        try:
            check_movable(self._file, self._options, self._vocabulary)
        except CannotSlice as error:
            why = str(error)
        if not why:
            return plan
        self._say(f"prompts are computed by the devices that generate: {why}")
        return plan.placements[0]

    def kept_running(
        self,
        supervisor: Supervisor[Plan, TextEngine],
        fleet: Fleet | None,
        plan: Plan,
        why: str,
        others: Sequence[Plan],
        resilience: Resilience,
        *,
        exact: bool,
    ) -> ReplaceableEngine:
        """Start the plan and return an engine that the supervisor can replace.

        others: further copies of the model, which other processes run.
        exact: after a loss, tokens are recomputed in the same steps as before.
        """

        def prefill_lost(plan: Plan, reason: str, lost: list[str]) -> None:
            running = supervisor.running
            if running.plan is not plan:
                return
            self._say(f"{reason}: prompts are computed by {listed(running.names)} from now on")
            there = running.workers - set(lost)  # the watch offers the plan again when the lost devices are back
            supervisor.change(replace(running, plan=plan.placements[0], workers=there))

        first = supervisor.start(fleet, plan, why, others)
        self._prefill_lost = prefill_lost  # set only now, after the first plan has started
        self._options = replace(self._options, context=first.context, batch=first.batch)

        def recovered(error: Exception) -> TextEngine:
            running = supervisor.running
            here = running.others and running.plan.thin_owner if resilience.other_copies else resilience.is_replica
            if here:  # this device computes in another copy, and may lack the memory for this one
                ranks = running.ranks
                raise ReplicaLost(loss_reason(ranks.lost if ranks else [], error)) from error
            return supervisor.replace(error, replacements.losses_in_a_row, lambda: None)

        replacements = Replacements(first, recovered)
        replacements.exact = exact
        return ReplaceableEngine(first, self._vocabulary, replacements)

    def load(
        self, fleet: Fleet | None, plan: Plan, life: ExitStack, steps: Steps
    ) -> tuple[TextEngine, RankGroup | None]:
        own, *others = plan.placements
        if fleet is None or not others:
            return self._load_placement(fleet, own, self._options, life, steps)
        pairs = [(placement, self._slices.of_ranks(placement)) for placement in plan.placements]
        check_room(fleet, pairs, self._file.shape, self._options)
        used = held_here(others[0], self._slices, self._options)
        engine, ranks = self._load_placement(fleet, own, self._options, life, steps, used)
        engine.states.prefiller = self._prefill_placement(fleet, plan, engine, life, steps)
        return engine, ranks

    def _load_placement(
        self,
        fleet: Fleet | None,
        plan: Plan,
        options: EngineOptions,
        life: ExitStack,
        steps: Steps,
        reserved: int = 0,
        *,
        leaves_at_once: bool = False,
    ) -> tuple[TextEngine, LlmRanks | None]:
        """Load one placement, and return its engine.

        reserved: bytes of this device's memory budget that the other placement takes.
        leaves_at_once: as in `LlmRanks`.
        """
        self._slices.check_unchanged()
        if fleet is None or plan.world_size == 1:
            options = replace(options, reserved=options.reserved + reserved)
            encoder, there = self._encoder, {device(address) for address in fleet.workers} if fleet else set()
            moved_bytes = encoder.moved_bytes if encoder is not None and encoder.device not in there else 0
            engine = alone(self._file, options, plan, steps, pages=True, moved_bytes=moved_bytes)
            return life.enter_context(engine), None
        with steps.step(f"Loading {self._file.path.name} on {len(set(plan.devices))} devices") as show:
            ranks = LlmRanks(
                fleet,
                plan,
                self._file,
                options,
                self._exchange,
                show,
                self._say,
                vocabulary=self._vocabulary,
                gives_up=True,
                reserved=reserved,
                leaves_at_once=leaves_at_once,
                adapters=self._slices.adapters,
            )
        return life.enter_context(ranks).engine, ranks

    def _prefill_placement(
        self, fleet: Fleet, plan: Plan, engine: TextEngine, life: ExitStack, steps: Steps
    ) -> PrefillPlacement:
        """Load the prefill placement, with the context of the engine that decodes."""
        assert plan.prefill is not None
        options = replace(
            self._options, context=engine.context, batch=engine.batch, outputs=None, draft_rows=0, prefixes=None
        )
        prefill, ranks = self._load_placement(fleet, plan.prefill, options, life, steps, leaves_at_once=True)

        def lost(error: Exception) -> None:
            reason = loss_reason(ranks.lost if ranks else [], error) if is_loss(error) else str(error)
            gone = ranks.lost_addresses if ranks else []
            # If only links were lost, all devices may be reachable later.
            if not gone and is_loss(error) and plan.prefill is not None:
                gone = [device for device in plan.prefill.devices if device not in plan.devices]
            self._prefill_lost(plan, reason, gone)

        break_off = prefill.stop if ranks is None else ranks.break_off
        return life.enter_context(PrefillPlacement(prefill, plan.prefill_from, lost, break_off))

    def send_ahead(self, fleet: Fleet, plan: Plan, check: Progress) -> None:
        send_ahead(fleet, plan, self._slices, check)
