"""Which rank gets what: as the person says, and for the rest what the planner finds best by measurement."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from edge.cluster.fleet import Fleet, device
from edge.parallel.step_times import Summary
from edge.survey.corrections import correct
from edge.survey.in_use import UsedPlans, token_s
from edge.survey.llm_survey import llm_survey
from edge.survey.survey import Survey
from partition.errors import CannotSlice, PlanError
from partition.model.model import ModelShape
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan
from partition.predict.cost import Work
from partition.predict.hysteresis import clearly_better, plan_threshold
from partition.predict.predict import predict
from partition.predict.speeds import DeviceSpeed
from partition.search.explain import alone, best, busy_words, is_busy, kind_of, outdoes, reason
from partition.search.planner import Placed, Planner
from partition.slices.gguf_slice import check_tensor, limits
from quant.gguf.file import GgufFile
from quant.text import number_text
from quant.types import type_by_name
from transport.choice import choose

PARALLEL = ("auto", "tensor", "pipeline")
CONTEXT = 4096  # tokens, where none is said
PROMPT, DEPTH = 128, 64  # tokens of a prompt, and behind a row that decodes, where none are said


@dataclass(frozen=True)
class Arrangement:
    """A plan and the reason for it, in one line."""

    plan: Plan
    why: str
    survey: Survey[DeviceSpeed] | None  # None where nothing had to be measured
    work: Work | None = None  # that it was predicted for

    def learn(self, plan: Plan, times: Sequence[Mapping[str, Summary]], *, disturbed: bool = False) -> list[str]:
        """Correct what was measured by what steps of this plan took, for the next one: a sentence for each device that
        was clearly off, and one where the plan was. times: of each rank, with steps of one row. disturbed: whether
        other programs had this device's cores meanwhile."""
        if self.survey is None or self.work is None:
            return []
        off = self.far_off(plan, times)
        lines = correct(plan, self.work, self.survey.speeds, self.survey.links, times, disturbed=disturbed)
        return [*lines, *(f"{clause}; the next plan goes by that" for clause in off)]

    def far_off(self, plan: Plan, times: Sequence[Mapping[str, Summary]]) -> list[str]:
        """A clause, where a token of a plan over several devices took far longer than predicted, which is then
        remembered; else nothing. times: as for `learn`."""
        took_s, predicted_s = token_s(times), self._predicted_s(plan)
        if took_s is None or plan.world_size == 1 or not UsedPlans().learn(plan, predicted_s, took_s):
            return []
        return [f"a token took {number_text(1e3 * took_s)} ms, where {number_text(1e3 * predicted_s)} were predicted"]

    def left_here(self, plan: Plan) -> int | None:
        """Bytes of this device's memory that a plan leaves, by prediction; None where nothing was measured. plan: with
        addresses as `device` writes them."""
        if self.survey is None or self.work is None:
            return None
        of = {device(speed.device): speed for speed in self.survey.speeds}
        return of[LOCAL].memory_bytes - predict(plan, self.work, of, self.survey.links).memory_bytes.get(LOCAL, 0)

    def pays(self, plan: Plan, current: Plan, by: float) -> bool:
        """Whether a plan is clearly better than the one that runs, `by` so many times at least, by what was measured
        and by what tokens took in use. plans: with addresses as `device` writes them."""
        if self.survey is None:
            return False
        at_best = replace(
            self, survey=replace(self.survey, speeds=(self.survey.speeds[0].at_best, *self.survey.speeds[1:]))
        )
        new, old = (max(at_best._predicted_s(one), UsedPlans().took_s(one) or 0.0) for one in (plan, current))
        busy = plan.world_size > 1 and is_busy(self.survey.speeds, plan.devices)
        return clearly_better(new, old, by=plan_threshold(busy, by))

    def _predicted_s(self, plan: Plan) -> float:
        """Seconds of a token, by what was measured; infinite where that says that it cannot be, or nothing was."""
        if self.survey is None or self.work is None:
            return math.inf
        try:
            of = {device(speed.device): speed for speed in self.survey.speeds}
            return predict(plan, self.work, of, self.survey.links).latency_s
        except PlanError:
            return math.inf

    def over(self, workers: Collection[str], file: GgufFile, model_digest: str) -> tuple[Plan, str] | None:
        """The best plan of this device and some workers, and why, by what was measured; None where nothing was.

        PlanError where none fits.
        """
        if self.survey is None or self.work is None:
            return None
        there = [speed for speed in self.survey.speeds if device(speed.device) in (LOCAL, *workers)]
        return chosen(Planner(self.work, there, self.survey.links, name_of(file), model_digest, tensor=can_share(file)))


def arrange(
    fleet: Fleet,
    addresses: Sequence[str],
    file: GgufFile,
    model_digest: str,
    *,
    parallel: str = "auto",
    shares: Sequence[float] | None = None,
    work: Work | None = None,
    threads: int | None = None,
    memory: int | None = None,
    transport: str = "auto",
    on_step: Callable[[float, float], None] = lambda done, of: None,
) -> Arrangement:
    """A plan for this device and the workers at `addresses`.

    parallel: "tensor" and "pipeline" use all devices, in this order; "auto" those that make decoding the fastest, as
    the planner says, which may be this one alone. shares: how much each is to compute, this one first; None: by
    measurement. threads, memory (bytes): of this device, at most.

    PlanError for shares or ranks that cannot be, CannotSlice where the model cannot be cut so; else the errors of
    `llm_survey`.
    """
    if parallel not in PARALLEL:
        raise PlanError(f"parallel is {parallel[:40]!r}; known are {', '.join(PARALLEL)}")
    if parallel == "tensor":
        check_tensor(file)
    can, devices, name = limits(file), [LOCAL, *addresses], name_of(file)
    if shares is not None and parallel != "auto":
        plan = make_plan(can, name, model_digest, devices, parallel, shares)
        return Arrangement(plan, f"{parallel}, with shares as given", None)
    own = {LOCAL: threads} if threads else {}
    room = {LOCAL: memory} if memory else {}
    found = llm_survey(
        fleet, addresses, file, model_digest, threads=own, memory=room, transport=transport, on_step=on_step
    )
    work = work or work_of(file)
    planner = Planner(work, found.speeds, found.links, name, model_digest, tensor=can_share(file))
    if parallel == "auto" and shares is None:
        plan, why = chosen(planner)
        return Arrangement(plan, why, found, work)
    kinds = ("tensor", "pipeline") if parallel == "auto" else (parallel,)
    of = {speed.device: speed for speed in found.speeds}
    plans, predicted, refused = {}, {}, {}
    for kind in kinds:
        try:
            if kind == "tensor":
                check_tensor(file)
            given = shares or (planner.shares() if kind == "tensor" else [speed.rate for speed in found.speeds])
            plans[kind] = make_plan(can, name, model_digest, devices, kind, given)
            predicted[kind] = predict(plans[kind], work, of, found.links).latency_s
        except (CannotSlice, PlanError) as error:
            refused[kind] = error
    if not predicted:
        raise next(iter(refused.values()))
    kind = min(predicted, key=lambda kind: predicted[kind])
    told = "; ".join(f"{kind} {number_text(seconds * 1e3)} ms" for kind, seconds in predicted.items())
    by = "by measured speed" if shares is None else "as given"
    why = f"{kind}, shares {by}: a token is predicted to take {told}{busy_words(found.speeds)}"
    return Arrangement(plans[kind], why, found, work)


def chosen(planner: Planner) -> tuple[Plan, str]:
    """The plan to take for the least latency, and why, in one line. PlanError, with need and have, where nothing
    fits."""
    placed, in_use = by_use(planner, best(planner, "latency"))
    return placed.plan, reason(planner, placed, "latency", in_use=in_use)


def by_use(planner: Planner, placed: Placed, used: UsedPlans | None = None) -> tuple[Placed, str]:
    """The plan that is taken for the least latency, and a clause that says why where it is not the one given: this
    device alone, where that one took longer in use."""
    took_s = (used or UsedPlans()).took_s(placed.plan) if placed.plan.world_size > 1 else None
    own = alone(planner, "latency") if took_s is not None else None
    if took_s is None or own is None or outdoes(planner, placed, own, "latency", took_s):
        return placed, ""
    several = f"{kind_of(placed.plan)} on {len(set(placed.plan.devices))} devices"
    predicted = f"{number_text(1e3 * placed.objectives[0])} were predicted"
    return own, f"; in use, {several} took {number_text(1e3 * took_s)} ms a token, where {predicted}"


def again(plan: Plan, workers: Sequence[str], file: GgufFile, model_digest: str) -> tuple[Plan, str]:
    """A plan that a person gave, for this device and some of its workers, with the shares that were, and why it is this
    one. plan: with addresses as `device` writes them. PlanError where none can be."""
    answering = list(workers)
    if set(plan.devices) <= {LOCAL, *answering}:
        return plan, "as the plan says"
    done = work_shares(plan)
    kind = "tensor" if len(plan.stages) == 1 else "pipeline"
    shares = {one: done[one] for one in (LOCAL, *answering)}
    while True:
        try:
            return shared(shares, kind, file, model_digest), f"{kind}, with shares as before"
        except PlanError:  # too many for that kind: a device to each stage may be more than there are layers
            if not answering:
                raise
            least = min(answering, key=lambda one: shares[one])
            answering.remove(least)
            del shares[least]


def shared(shares: Mapping[str, float], kind: str, file: GgufFile, model_digest: str) -> Plan:
    """A plan of these shares of the work, by device. PlanError where it cannot be."""
    return make_plan(limits(file), name_of(file), model_digest, list(shares), kind, list(shares.values()))


def work_of(
    file: GgufFile,
    *,
    context: int = CONTEXT,
    concurrency: int = 1,
    prompt: int = PROMPT,
    depth: int = DEPTH,
    kv_type: str = "f16",
    wire: str = "f32",
) -> Work:
    """What is to be done with a model, for the planner."""
    return Work(
        ModelShape.from_gguf(file), limits(file), context, depth, prompt, concurrency, type_by_name(kv_type),
        allreduce_s, wire,
    )  # fmt: skip


def allreduce_s(n_bytes: int, ranks: int, latency_s: float, bytes_per_s: float) -> float:
    """Seconds of one allreduce by the algorithm that is predicted to be the best, as ranks choose it."""
    return min(choose(n_bytes, n_bytes, ranks, latency_s, bytes_per_s).seconds.values())


def can_share(file: GgufFile) -> bool:
    """Whether several ranks can share a layer of the model."""
    try:
        check_tensor(file)
    except CannotSlice:
        return False
    return True


def name_of(file: GgufFile) -> str:
    """What a model is called, for people."""
    return str(file.metadata.get("general.name") or file.path.stem)


def work_shares(plan: Plan) -> dict[str, float]:
    """What part of the layers' work each device of a plan does, by its address as `device` writes it; together 1."""
    done: dict[str, float] = defaultdict(float)
    for rank, address in enumerate(plan.devices):
        cut = plan.slice(rank)
        width = len(cut.ff) / plan.sizes.ff if plan.sizes.ff else 1.0
        done[device(address)] += len(cut.layers) / plan.sizes.layers * width
    return dict(done)
