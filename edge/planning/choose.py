"""Choose the plan of a model: the best one by an objective, or one with the user's shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from edge.llm.options import EngineOptions
from edge.llm.resolve import resolve
from edge.models.local_slices import OwnSlices
from edge.planning.arrange import name_of, of_kind
from edge.planning.choice import PlanChoice
from edge.planning.describe import saved_figures
from edge.planning.llm_space import LlmSpace
from edge.planning.plan_options import PlanOptions, plan_options
from edge.planning.space import PlanSpace, within_divergence
from edge.planning.spaces import llm_space
from edge.profiling.cluster import Cluster
from edge.tasks import SILENT, Steps
from partition.errors import CannotSlice, PlanError
from partition.model.file import ModelFile
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL
from partition.predict.objectives import OBJECTIVES, check_objectives, searched
from partition.predict.pareto import Point
from partition.search.explain import busy_words
from partition.slices.gguf_slice import check_tensor, limits
from quant.text import number_text

SLOWER = 1.1  # latency of a plan with the most throughput, relative to the plan with the best latency
PARALLEL = ("auto", "tensor", "pipeline")


def best_of(spaces: Sequence[PlanSpace], objective: str, caps: Mapping[str, float]) -> tuple[PlanSpace, Point, str]:
    """Return the space with the best plan by an objective, the plan, and the reason in one line.

    spaces: plans of one model, or of each of its types.
    caps: limits of objectives.
    Raises PlanError with needed and available resources if nothing fits. If only the divergence limit prevents a plan,
    the error names the lowest possible divergence.
    """
    check_objectives([objective])
    row, most = OBJECTIVES[objective], caps.get("divergence")
    others = {name: caps[name] for name in searched(caps)}

    def best(space: PlanSpace) -> tuple[PlanSpace, Point, str] | PlanError:
        try:
            return (space, *space.best(objective, others))
        except PlanError as error:
            return error

    def rank(choice: tuple[PlanSpace, Point, str]) -> tuple[float, float]:
        space, point, _ = choice
        return row.cost_of(point.predicted), OBJECTIVES["divergence"].figure(space.divergence)

    within = within_divergence(spaces, most)
    tried = {space: best(space) for space in within}
    choices = [choice for choice in tried.values() if not isinstance(choice, PlanError)]
    if choices:
        space, point, why = min(choices, key=rank)
        return space, point, why if space.type is None else f"{space.type}: {why}"
    errors = [error for error in tried.values() if isinstance(error, PlanError)]
    if len(spaces) == 1:
        raise errors[0]
    reasons = "; ".join(f"{space.type}: {error}" for space, error in zip(within, errors, strict=True))
    beyond = [space for space in spaces if space not in within and not isinstance(best(space), PlanError)]
    if not beyond:
        raise PlanError(reasons)
    divergence = OBJECTIVES["divergence"]
    least = min(beyond, key=lambda space: divergence.figure(space.divergence))
    raise PlanError(
        f"{reasons}; the lowest divergence within the other limits is"
        f" {divergence.describe(divergence.figure(least.divergence))}, of {least.type}"
    )


def best_choice(
    spaces: Sequence[PlanSpace], options: PlanOptions, objective: str, caps: Mapping[str, float]
) -> PlanChoice:
    """Return the best plan by an objective. caps: limits of objectives. Raises the errors of `best_of`."""
    space, point, why = best_of(spaces, objective, caps)
    planner = space.planner_for(point) if isinstance(space, LlmSpace) else None
    encoder = space.encoder if isinstance(space, LlmSpace) else None
    saved = saved_figures(space, point)
    limits = {name: caps[name] for name in searched(caps)}
    return PlanChoice(
        space.path, point.plan, why, point.predicted, options, saved, planner, objective, limits, encoder, space.file
    )


def work_options(file: ModelFile, options: EngineOptions, transport: str, wire: str) -> PlanOptions:
    """Return the workload for planning a model that will be loaded with these options."""
    context, _ = resolve(options, file.shape)
    return plan_options(replace(options, context=context), transport=transport, wire=wire)


def arrange(
    file: ModelFile,
    cluster: Cluster,
    options: PlanOptions,
    parallel: str = "auto",
    shares: Sequence[float] | None = None,
    steps: Steps = SILENT,
    objective: str = "latency",
) -> PlanChoice:
    """Choose a plan for a language model on the devices of an open cluster.

    parallel: "tensor" and "pipeline" use all devices in their order. "auto" uses the devices that
        decode fastest, which may be this device alone.
    shares: relative work of each device, this device first; None: from measurements.
    objective: "latency", or "throughput" of all requests with a latency at most SLOWER times the best; for "auto".

    Raises PlanError for invalid shares or ranks, CannotSlice if the model cannot be cut this way, and the errors of
    `llm_space`.
    """
    if parallel not in PARALLEL:
        raise PlanError(f"parallel is {parallel[:40]!r}; choose one of {', '.join(PARALLEL)}")
    if cluster.fleet is None:  # this device has nothing to share
        parallel, shares = "auto", None
    path, devices = file.path, [LOCAL, *cluster.addresses]
    if parallel == "tensor":
        check_tensor(file)
    can, name = limits(file), name_of(file)
    if shares is not None and parallel != "auto":
        with steps.step(f"Reading {path.name}") as show:
            digest = OwnSlices().model_digest(path, show)
        plan = make_plan(can, name, digest, devices, parallel, shares)
        return PlanChoice(path, plan, f"{parallel}, with shares as given", options=options, file=file)
    space = llm_space(file, cluster, options, steps, phases=False)
    if parallel == "auto" and shares is None:
        fastest = best_choice([space], options, "latency", {})
        if objective == "latency" or (options.concurrency or 1) < 2 or fastest.predicted is None:
            return fastest
        most_s = OBJECTIVES["latency"].cost_of(fastest.predicted) * SLOWER
        return best_choice([space], options, objective, {"latency": most_s})
    planner, plans, costs_s, refused = space.planner(), {}, {}, {}
    for kind in ("tensor", "pipeline") if parallel == "auto" else (parallel,):
        try:
            plans[kind] = of_kind(planner, file, space.digest, kind, devices, shares)
            costs_s[kind] = planner.predict(plans[kind]).latency_s
        except (CannotSlice, PlanError) as error:
            refused[kind] = error
    if not costs_s:
        raise next(iter(refused.values()))
    kind = min(costs_s, key=lambda kind: costs_s[kind])
    figures = ", ".join(f"{number_text(seconds * 1e3)} ms by {kind}" for kind, seconds in costs_s.items())
    is_estimated = any(speed.estimate for speed in planner.speeds)
    by = "as given" if shares is not None else f"by {'estimated' if is_estimated else 'measured'} speed"
    why = f"{kind}, shares {by}: a token is predicted to take {figures}{busy_words(planner.speeds)}"
    return PlanChoice(
        path, plans[kind], why, options=options, planner=planner, encoder=space.encoder, file=file, is_given=True,
        parallel=parallel,
    )  # fmt: skip
