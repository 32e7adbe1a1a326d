"""Plan the share of each device: by the user's choices, and otherwise by the planner from measurements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from devices.cluster_file import Cluster
from edge.cluster.fleet import Fleet, device
from edge.llm.options import DEFAULT_CONTEXT, DEFAULTS, EngineOptions
from edge.models.local_slices import OwnSlices
from edge.planning.plan_options import PlanOptions
from edge.profiling.llm_survey import llm_speeds
from edge.profiling.profile import ClusterProfile
from edge.tasks import Steps
from partition.errors import CannotSlice, PlanError
from partition.model.file import ModelFile
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan
from partition.predict.cost import Work
from partition.predict.speeds import DeviceSpeed
from partition.search.explain import best, reason
from partition.search.planner import Placed, Planner
from partition.slices.gguf_slice import check_tensor, limits
from quant.gguf.file import GgufFile
from quant.types import cache_type
from transport.choice import choose

PROMPT, DEPTH = 128, 64  # default tokens of a prompt, and default tokens before a decoded row


def chosen(
    planner: Planner, objective: str = "latency", limits: Mapping[str, float] | None = None
) -> tuple[Placed, str]:
    """Return the best plan by an objective, and the reason in one line.

    limits: limits of objectives.

    Raises PlanError with needed and available resources if nothing fits.
    """
    placed = best(planner, objective, limits)
    return placed, reason(planner, placed, objective, limits)


def again(plan: Plan, workers: Sequence[str], file: GgufFile, model_digest: str) -> tuple[Plan, str]:
    """Return a user's plan reduced to this device and the answering workers, with the previous shares, and the reason.

    plan: plan with addresses as `device` writes them.
    Raises PlanError if no plan is possible.
    """
    answering = list(workers)
    for rank in (plan, plan.placements[0]):  # the second one if only the prefill placement lost a device
        if set(rank.all_devices) <= {LOCAL, *answering}:
            return rank, "as the plan says"
    done = (work_shares(plan.prefill) if plan.prefill else {}) | work_shares(plan)
    kind = kind_of(plan)
    shares = {rank: done[rank] for rank in (LOCAL, *answering)}
    while True:
        try:
            fewer = replace(shared(shares, kind, file, model_digest), microbatches=plan.microbatches)
            return fewer, f"{kind}, with shares as before"
        except PlanError:  # too many devices for that kind: with one device per stage, stages may outnumber layers
            if not answering:
                raise
            least = min(answering, key=lambda rank: shares[rank])
            answering.remove(least)
            del shares[least]
            if not answering:  # a thin owner computed nothing before, and now computes everything
                shares = {LOCAL: 1.0}


def shared(shares: Mapping[str, float], kind: str, file: GgufFile, model_digest: str) -> Plan:
    """Return a plan with these shares of the work by device. Raises PlanError if it is not possible."""
    return make_plan(limits(file), name_of(file), model_digest, list(shares), kind, list(shares.values()))


def of_kind(
    planner: Planner,
    file: GgufFile,
    model_digest: str,
    kind: str,
    devices: Sequence[str],
    shares: Sequence[float] | None = None,
) -> Plan:
    """Return a plan of one kind, "tensor" or "pipeline", that uses these devices in their order.

    shares: relative work of each device; None: by the planner's speeds.

    Raises CannotSlice if the model cannot be cut this way, and PlanError if the plan is not possible.
    """
    if kind == "tensor":
        check_tensor(file)
    rates = planner.shares() if kind == "tensor" else [speed.rate for speed in planner.speeds]
    by_device = dict(zip(planner.by_device, rates, strict=True))
    parts = shares or [by_device[device] / devices.count(device) for device in devices]
    return make_plan(limits(file), name_of(file), model_digest, devices, kind, parts)


def kind_of(plan: Plan) -> str:
    """Return "tensor" for a plan with one stage, otherwise "pipeline"."""
    return "tensor" if len(plan.computing) == 1 else "pipeline"


def work_of(
    file: ModelFile,
    engine: EngineOptions = DEFAULTS,
    *,
    prompt: int = PROMPT,
    depth: int = DEPTH,
    wire: str = "f32",
) -> Work:
    """Return the workload of a model for planning. engine: options of the engine, with the concurrent sequences."""
    return Work(
        file.shape, limits(file), engine.context or DEFAULT_CONTEXT, depth, prompt, engine.sequences,
        cache_type(engine.kv_type), allreduce_s, wire,
    )  # fmt: skip


def measured_speeds(
    file: ModelFile,
    cluster: Cluster,
    fleet: Fleet | None,
    notes: Sequence[str],
    options: PlanOptions,
    steps: Steps,
    what: str = "devices",
    transport: str = "auto",
) -> tuple[str, ClusterProfile[DeviceSpeed]]:
    """Return the digest of a file, and the measured or cached times of its parts on the devices.

    what: description of the measured devices.
    Raises the errors of `llm_speeds`.
    """
    with steps.step(f"Reading {file.path.name}") as show:
        digest = OwnSlices().model_digest(file.path, show)
    doing = "Measuring" if options.survey_s else "Estimating"
    with steps.step(f"{doing} {what}", unit="steps") as show:
        return digest, llm_speeds(
            cluster, fleet, notes, file, digest, transport=transport,
            threads=options.threads, memory=options.memory, fresh=options.fresh,
            seconds=options.survey_s, on_step=show,
        )  # fmt: skip


def allreduce_s(n_bytes: int, wire_bytes: int, ranks: int, latency_s: float, bytes_per_s: float) -> float:
    """Return the seconds of one all-reduce by the algorithm that ranks choose (`transport.choice`)."""
    choice = choose(n_bytes, wire_bytes, ranks, latency_s, bytes_per_s)
    return choice.seconds[choice.algorithm]


def can_share(file: GgufFile) -> bool:
    """Return whether the model supports tensor parallelism."""
    try:
        check_tensor(file)
    except CannotSlice:
        return False
    return True


def name_of(file: GgufFile) -> str:
    """Return a model's display name."""
    return str(file.metadata.get("general.name") or file.path.stem)


def work_shares(plan: Plan) -> dict[str, float]:
    """Return each device's fraction of the layers' work, by address as `device` writes it."""
    done: dict[str, float] = defaultdict(float)
    for rank, address in enumerate(plan.devices):
        cut = plan.slice(rank)
        width = len(cut.ff) / plan.sizes.ff if plan.sizes.ff else 1.0
        done[device(address)] += len(cut.layers) / plan.sizes.layers * width
    return dict(done)
