"""Functions for several devices: plan a model on a cluster, and deploy it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from edge.api.onnx import OnnxModel
from edge.arguments import checked, named
from edge.cluster.llm_ranks import Exchange
from edge.deployment.deploy import Resilience
from edge.deployment.deploy import deploy as deploy_plan
from edge.llm.model import Model
from edge.models.paths import PathLike, model_path
from edge.planning.choice import PlanChoice
from edge.planning.choose import arrange, best_choice
from edge.planning.front import Front
from edge.planning.plan_options import DEFAULTS, PlanOptions, engine_options, is_onnx
from edge.planning.spaces import spaces
from edge.planning.type_files import divergence_text
from edge.profiling.cluster import Cluster
from edge.speculate.factory import drafts, model_with, with_draft_and_cache
from edge.tasks import SILENT, Steps
from edge.units import as_bytes, memory_options
from partition.errors import PlanError
from partition.model.file import ModelFile
from partition.plan.onnx_plan import OnnxPlan
from partition.predict.objectives import AXES, AxisName, ObjectiveName, check_objectives, default_axes

if TYPE_CHECKING:
    from edge.onnx.bench import Flow

Parallel = Literal["auto", "tensor", "pipeline"]


@checked
def plan(
    model: PathLike | None,
    cluster: Cluster,
    *,
    objective: ObjectiveName = "latency",
    limits: Mapping[str, float] | None = None,
    types: Sequence[str] = (),
    text: PathLike | None = None,
    parallel: Parallel | None = None,
    shares: Sequence[float] | None = None,
    options: PlanOptions = DEFAULTS,
    steps: Steps = SILENT,
) -> PlanChoice:
    """Return the best plan for a model on a cluster, found by measurement.

    objective: the figure to optimize.
    limits: upper bounds of other objectives, in seconds (throughput: seconds a token or input), bytes or joules;
        with types also "divergence", in nats a token.
    types: types of a language model's weights ("q8_0"), or files of these types, to choose from; the file becomes
        the plan's model.
    text: the text that divergence is measured on; None: the start of a bundled text.

    parallel, shares: for language models, instead of an objective: "tensor" puts every layer on all devices, "pipeline"
    some layers on each. shares are the relative parts, this device first; None: by measurement.

    Raises PlanError, with need and have, if nothing fits, and WorkerError if the cluster is not open.
    """
    cluster.check_open()
    path = model_path(model)
    if is_onnx(path) and (parallel is not None or shares is not None):
        raise PlanError(f"parallel and shares are for language models only, and {path.name} is a network")
    if types and (parallel is not None or shares is not None):
        raise PlanError("types need an objective: leave out parallel and shares")
    if parallel is not None or shares is not None:
        return arrange(ModelFile.open(path), cluster, options, parallel or "auto", shares, steps)
    limits = limits or {}
    check_objectives([objective])
    check_objectives(limits, AXES, " of limits")
    most = limits.get("divergence")
    on = divergence_text(types, default_axes(types), most, None if text is None else Path(text))
    choices = spaces(path, cluster, options, types=types, divergence_on=on, steps=steps)
    return best_choice(choices, options, objective, limits)


@checked
def pareto(
    model: PathLike | None,
    cluster: Cluster,
    *,
    axes: Sequence[AxisName] | None = None,
    measure: int = 0,
    types: Sequence[str] = (),
    max_divergence: float | None = None,
    text: PathLike | None = None,
    options: PlanOptions = DEFAULTS,
    steps: Steps = SILENT,
) -> Front:
    """Return the plans that are worth choosing between. `Front.pick` takes one of them.

    axes: None: latency and throughput, with types also divergence.
    measure: number of the most promising plans to run and measure.
    types: types of the weights, or files of these types, to choose from.
    max_divergence: maximum divergence of a type from the model, in nats a token.
    text: the text that divergence is measured on; None: the start of a bundled text.

    Raises PlanError, with need and have, if nothing fits, and WorkerError if the cluster is not open.
    """
    cluster.check_open()
    path = model_path(model)
    axes = axes or default_axes(types)
    check_objectives(axes, AXES, " of axes")
    if measure < 0:
        raise ValueError(f"measure must be 0 or more, got {measure}")
    on = divergence_text(types, axes, max_divergence, None if text is None else Path(text))
    choices = spaces(path, cluster, options, types=types, divergence_on=on, steps=steps)
    front = Front(choices, axes, options, max_divergence=max_divergence)
    if measure:
        front.measure(measure, cluster.fleet, fresh=options.fresh, steps=steps)
    return front


@checked
def deploy(
    choice: PlanChoice,
    cluster: Cluster,
    *,
    exchange: Exchange | None = None,
    memory: int | str | None = None,
    prefix_cache: int | str = 0,
    draft: PathLike = "off",
    draft_worker: str | None = None,
    reproducible: bool = False,
    steps: Steps = SILENT,
    **options: Any,
) -> Model:
    """Deploy a language model on the devices that its plan names.

    exchange: transport and wire type of tensors; None: those of the plan's options.
    memory: maximum on this device, in bytes or as a text such as "3GiB".
    prefix_cache: as for `load`; each device stores its own part.
    draft, draft_worker: as for `load`.
    reproducible: as for `load`, also after a device is lost.
    options: other fields of EngineOptions. The plan supplies context, sequences, threads, memory and kv_type if they
    are omitted.

    If a device is lost or leaves, another plan on the remaining devices takes over. A plan chosen by `plan` is also
    replaced by a better one if a device becomes slow or comes back. `steps.say` reports each change.

    Raises WorkerError if a device of the plan is not connected, PlanError if the plan is for another model or an ONNX
    network, NotEnoughMemory, and TransportError.
    """
    work = choice.options
    if isinstance(choice.plan, OnnxPlan):
        raise PlanError(f"{choice.model.name} is a network in ONNX: deploy it with deploy_onnx")
    planned = engine_options(replace(work, concurrency=1) if reproducible else work)
    limit = named("memory", memory_options, work.memory if memory is None else memory)
    own = replace(planned, **{**limit, **options})
    disk_bytes = named("prefix_cache", as_bytes, prefix_cache)
    file = choice.open()
    choice = replace(choice, file=file)
    drafting = drafts(draft, file, steps, worker=draft_worker, insecure=cluster.insecure)
    travel = exchange or Exchange(work.transport, wire=work.wire)
    resilience = Resilience(reproducible=reproducible)
    engine = with_draft_and_cache(own, drafting, prefix_cache=disk_bytes, reproducible=reproducible)
    model = deploy_plan(choice, cluster, engine, travel, resilience, steps=steps)
    return model_with(drafting, model.engine, model.close, steps)


@checked
def deploy_onnx(
    choice: PlanChoice, cluster: Cluster, *, exchange: Exchange | None = None, steps: Steps = SILENT
) -> OnnxModel:
    """Load a network in ONNX on the devices of its plan.

    If a device is lost, the network continues by another plan on the workers that answer, and `steps.say` reports it.

    exchange: transport and wire type of the tensors; None: those of the plan's options. Raises WorkerError if a
    device of the plan is not connected, PlanError if the plan is for another model or a language model, and
    TransportError.
    """
    work = choice.options
    if not isinstance(choice.plan, OnnxPlan):
        raise PlanError(f"{choice.model.name} is a language model: deploy it with deploy")
    travel = exchange or Exchange(work.transport, wire=work.wire)
    start = partial(_pipeline, choice, choice.plan, cluster, travel, steps)
    return OnnxModel.over(choice.model, start, dict(work.dims)).open()


def _pipeline(
    choice: PlanChoice, chosen: OnnxPlan, cluster: Cluster, exchange: Exchange, steps: Steps, stack: ExitStack
) -> Flow:
    from edge.deployment.networks import deploy_network
    from edge.onnx.bench import sequential
    from edge.onnx.engine import OnnxEngine
    from edge.onnx.model import load_source

    path, dims = choice.model, dict(choice.options.dims)
    source = load_source(path, dims, choice.options.inputs)
    source.check(chosen)
    if chosen.own is not None and not chosen.remote:
        engine = OnnxEngine(path, chosen.own.threads, chosen.own.provider, dims=dims)
        return sequential(stack.enter_context(engine).run)
    deployed = deploy_network(choice, source, cluster, exchange, steps=steps)
    return partial(stack.enter_context(deployed).pipeline.map, wire=exchange.wire)
