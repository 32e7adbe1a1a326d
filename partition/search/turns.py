"""Two groups of requests by turns: ranks that share every layer compute one while sums of the other travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from partition.architectures.recurrent import RECURRENT_ARCHITECTURES
from partition.errors import PlanError
from partition.plan.plan import MOST_TURNS, Plan
from partition.predict.cost import groups
from partition.predict.hysteresis import TURNS, clearly_faster, plan_threshold
from partition.predict.objectives import OBJECTIVES, limited_by
from partition.predict.prediction import Prediction
from partition.search.explain import is_busy
from partition.search.planner import Placed, Planner


def as_run(plan: Plan, microbatches: int, concurrency: int) -> Plan:
    """Return the plan with its groups of requests; without, where a scheduler makes the same anyway."""
    several = len(plan.computing) > 1 or plan.turns > 1
    as_usual = groups(concurrency, len(plan.computing))
    return replace(plan, microbatches=microbatches if several and microbatches != as_usual else None)


def by_turns(planner: Planner, plan: Plan) -> tuple[Plan, Prediction] | None:
    """Return a plan whose ranks share every layer with two groups of requests by turns, predicted. None for other
    plans, with drafts, for recurrent layers, whose states two groups do not keep, and where the second context has no
    room."""
    work, two = planner.work, replace(plan, microbatches=MOST_TURNS)
    if work.concurrency < MOST_TURNS or two.turns == 1 or plan.prefill is not None or work.draft is not None:
        return None
    if work.shape.architecture in RECURRENT_ARCHITECTURES:
        return None
    speeds = planner.by_device
    try:
        predicted = planner.predict(two)
    except PlanError:
        return None
    if any(stage.paged_bytes for stage in predicted.stages):
        return None
    # The second context has buffers of its own, of at most what was measured beside weights.
    needs = predicted.memory_bytes.items()
    fits = all(need + speeds[device].runtime_bytes <= speeds[device].memory_bytes for device, need in needs)
    return (two, predicted) if fits else None


def better_by_turns(
    planner: Planner, placed: Placed, objective: str, caps: Mapping[str, float]
) -> tuple[Placed, str] | None:
    """Return a plan with two groups by turns that is no worse by the objective, within the same caps, and has clearly
    more throughput: of the same placement, and by throughput of any in which all layers are shared; and the reason, as
    a clause. None: there is none."""
    plans = [placed.plan]
    if objective == "throughput":
        names, most = limited_by(objective, caps)
        sharing_all = planner.like(planner.speeds, planner.links, pipeline=False)
        plans += [shared.plan for shared in sharing_all.front(names, caps=most)[0]]
    best = max(
        (two for plan in plans if (two := by_turns(planner, plan)) is not None),
        key=lambda two: two[1].throughput_per_s,
        default=None,
    )
    if best is None:
        return None
    plan, new = best
    old = planner.predict(placed.plan, placed.microbatches)
    by = max(TURNS, plan_threshold(is_busy(planner.speeds, plan.devices)))
    cost, throughput = OBJECTIVES[objective].cost_of, OBJECTIVES["throughput"]
    if cost(new) > cost(old) or not clearly_faster(new.throughput_per_s, old.throughput_per_s, by=by):
        return None
    if any(OBJECTIVES[name].cost_of(new) > most for name, most in caps.items()):
        return None
    rates = [throughput.describe(throughput.cost_of(predicted)) for predicted in (new, old)]
    why = f"two groups of requests by turns: {rates[0]}, {rates[1]} without"
    return Placed(plan, MOST_TURNS, (cost(new),)), why
