"""The plan that a model gets: the best one by an objective, or as a person says which device does how much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from edge.llm.options import EngineOptions, resolve
from edge.planning.arrange import name_of
from edge.planning.choice import PlanChoice
from edge.planning.describe import beside
from edge.planning.llm_space import LlmSpace
from edge.planning.plan_options import PlanOptions
from edge.planning.space import PlanSpace
from edge.planning.spaces import llm_space
from edge.slices.local import OwnSlices
from edge.survey.cluster import Cluster
from edge.tasks import SILENT, Steps
from partition.errors import CannotSlice, PlanError
from partition.model.check import check_loadable
from partition.model.model import ModelShape
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL
from partition.predict.predict import predict
from partition.search.explain import busy_words
from partition.slices.gguf_slice import check_tensor, limits
from quant.gguf.file import GgufFile
from quant.text import number_text

PARALLEL = ("auto", "tensor", "pipeline")


def best_choice(space: PlanSpace, options: PlanOptions, objective: str, caps: Mapping[str, float]) -> PlanChoice:
    """Return the best plan of a space by an objective. caps: what objectives may be at most. PlanError, with need and
    have, where nothing fits."""
    point, why = space.best(objective, caps)
    planner = space.planner_for(point) if isinstance(space, LlmSpace) else None
    saved = beside(space, point)
    return PlanChoice(space.path, point.plan, why, point.predicted, options, saved, planner, objective, caps)


def work_options(path: Path, options: EngineOptions, transport: str, wire: str) -> PlanOptions:
    """Return the work that a plan is made for where a model is to be loaded with these options."""
    context, _, kv = resolve(options, ModelShape.from_gguf(GgufFile.open(path)))
    return PlanOptions(
        context=context,
        kv_type=kv.name,
        concurrency=options.sequences,
        wire=wire,
        transport=transport,
        threads=options.threads,
        memory=options.memory,
    )


def arrange(
    path: Path,
    cluster: Cluster,
    options: PlanOptions,
    parallel: str = "auto",
    shares: Sequence[float] | None = None,
    steps: Steps = SILENT,
) -> PlanChoice:
    """Choose a plan for a language model on the devices of a cluster that is open.

    parallel: "tensor" and "pipeline" use all devices, in their order; "auto" those that make decoding the fastest, as
    the planner says, which may be this one alone. shares: how much each is to compute, this one first; None: by
    measurement. PlanError for shares or ranks that cannot be, CannotSlice where the model cannot be cut so; else the
    errors of `llm_space`.
    """
    if parallel not in PARALLEL:
        raise PlanError(f"parallel is {parallel[:40]!r}; known are {', '.join(PARALLEL)}")
    file, devices = GgufFile.open(path), [LOCAL, *cluster.addresses]
    check_loadable(file)
    if parallel == "tensor":
        check_tensor(file)
    can, name = limits(file), name_of(file)
    if shares is not None and parallel != "auto":
        with steps.step(f"Reading {path.name}") as show:
            digest = OwnSlices().model_digest(path, show)
        plan = make_plan(can, name, digest, devices, parallel, shares)
        return PlanChoice(path, plan, f"{parallel}, with shares as given", options=options)
    space = llm_space(path, cluster, options, steps)
    if parallel == "auto" and shares is None:
        return best_choice(space, options, "latency", {})
    planner, plans, costs_s, refused = space.planner(), {}, {}, {}
    of = {speed.device: speed for speed in planner.speeds}
    for kind in ("tensor", "pipeline") if parallel == "auto" else (parallel,):
        try:
            if kind == "tensor":
                check_tensor(file)
            rates = planner.shares() if kind == "tensor" else [speed.rate for speed in planner.speeds]
            by_device = dict(zip(of, rates, strict=True))
            parts = shares or [by_device[one] / devices.count(one) for one in devices]
            plans[kind] = make_plan(can, name, space.digest, devices, kind, parts)
            costs_s[kind] = predict(plans[kind], planner.work, of, planner.links).latency_s
        except (CannotSlice, PlanError) as error:
            refused[kind] = error
    if not costs_s:
        raise next(iter(refused.values()))
    kind = min(costs_s, key=lambda kind: costs_s[kind])
    figures = "; ".join(f"{kind} {number_text(seconds * 1e3)} ms" for kind, seconds in costs_s.items())
    by = "by measured speed" if shares is None else "as given"
    why = f"{kind}, shares {by}: a token is predicted to take {figures}{busy_words(planner.speeds)}"
    return PlanChoice(path, plans[kind], why, options=options, planner=planner)
