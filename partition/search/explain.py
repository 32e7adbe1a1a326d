"""Choose a plan from the front, and explain the choice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from partition.errors import PlanError
from partition.plan.plan import Plan
from partition.predict.hysteresis import BUSY_PLAN, PLAN, clearly_better, plan_threshold
from partition.predict.objectives import OBJECTIVES
from partition.predict.onnx_predict import OnnxDevice
from partition.predict.predict import predict
from partition.predict.speeds import DeviceSpeed
from partition.search.planner import Placed, Planner

_MIB = 1 << 20


def best(planner: Planner, objective: str, caps: Mapping[str, float] | None = None) -> Placed:
    """Return the best plan by one objective, or this device alone unless other plans are clearly better.

    Measurements of busy devices do not beat this device. Several devices have to be clearly better than this device in
    its quietest moment. First all devices are tried, then only those measured undisturbed.

    caps: largest allowed costs of objectives.

    Raises PlanError with needed and available memory if no plan fits.
    """
    placed = planner.best(objective, caps or {})
    if placed is None:
        if caps and (anything := planner.best(objective, {})):
            raise PlanError(_out_of_reach(caps, objective, anything))
        raise PlanError(infeasible(planner))
    if not OBJECTIVES[objective].time or placed.plan.world_size == 1:
        return placed
    own = alone(planner, objective, caps)
    if own is None:
        return placed
    if outdoes(planner, placed, own, objective):
        return placed
    confirmed = [speed for speed in planner.speeds[1:] if not speed.busy]
    if 0 < len(confirmed) < len(planner.speeds) - 1:
        quiet = planner.like([planner.speeds[0], *confirmed], planner.links)
        placed = quiet.best(objective, caps or {})
        if placed is not None and outdoes(quiet, placed, own, objective):
            return placed
    return own


def outdoes(planner: Planner, several: Placed, own: Placed, objective: str) -> bool:
    """Return True if several devices are clearly better than this device alone in its quietest moment."""
    first, *others = planner.speeds
    by_device = {speed.device: speed for speed in (first.at_best, *others)}
    new, old = (
        OBJECTIVES[objective].cost_of(predict(placed.plan, planner.work, by_device, planner.links, placed.microbatches))
        for placed in (several, own)
    )
    return clearly_better(new, old, by=plan_threshold(is_busy(planner.speeds, several.plan.all_devices)))


def is_busy(speeds: Iterable[DeviceSpeed | OnnxDevice], devices: Sequence[str]) -> bool:
    """Return True if one of these devices was measured while it was busy."""
    return any(speed.busy for speed in speeds if speed.device in devices)


def busy_words(speeds: Iterable[DeviceSpeed | OnnxDevice]) -> str:
    """Return a clause naming the devices that were measured while busy; "" if there are none."""
    busy = [speed.name for speed in speeds if speed.busy]
    return f"; measured while busy: {', '.join(busy)}" if busy else ""


def alone(planner: Planner, objective: str, caps: Mapping[str, float] | None = None) -> Placed | None:
    """Return the plan with the whole model on this device. None if it does not fit, even with paging, or if it
    exceeds caps.
    """
    return planner.only_own().best(objective, caps or {})


def _out_of_reach(caps: Mapping[str, float], objective: str, nearest: Placed) -> str:
    limits = ", ".join(
        f"{name} of at {'least' if OBJECTIVES[name].rate else 'most'} {OBJECTIVES[name].describe(cap)}"
        for name, cap in caps.items()
    )
    nearest_value = OBJECTIVES[objective].describe(nearest.objectives[0])
    return f"no plan has {limits}; the best {objective} there is is {nearest_value}"


def reason(planner: Planner, placed: Placed, objective: str, caps: Mapping[str, float] | None = None) -> str:
    """Return one line with the reason for a plan. caps: largest allowed costs of objectives."""
    value = OBJECTIVES[objective].describe(placed.objectives[0])
    estimates = "; from estimates" if any(speed.estimate and not speed.preset for speed in planner.speeds) else ""
    if placed.plan.world_size == 1 and not placed.plan.replicas:
        return f"use one device: {value} on this device alone{_others(planner, objective)}{estimates}"
    if (own := alone(planner, objective, caps)) is not None:
        alternative = f"{OBJECTIVES[objective].describe(own.objectives[0])} on this device alone"
    else:
        alternative = (
            "this device alone cannot do it within what was asked" if caps else "this device alone has no room for it"
        )
    busy = busy_words(planner.speeds)
    return f"{_where(planner, placed.plan)}: {value}, {alternative}{busy}{estimates}"


def _where(planner: Planner, plan: Plan) -> str:
    """Describe the kind of a plan and the devices of its layers."""
    devices = list(dict.fromkeys(shard.device for stage in plan.computing for shard in stage.shards))
    if plan.replicas:
        return f"{len(plan.copies)} copies on {len(plan.computing_devices)} devices"
    if not plan.thin_owner:
        return f"{kind_of(plan)} on {len(devices)} devices"
    names = {speed.device: speed.name for speed in planner.speeds}
    if len(devices) == 1:
        return f"all layers on {names[devices[0]]}, tokens on this device"
    return f"{kind_of(plan)} on {len(devices)} other devices, tokens on this one"


def _others(planner: Planner, objective: str) -> str:
    """Return a clause with the reason why other devices are not used; "" if there are none."""
    if len(planner.speeds) == 1:
        return ""
    if OBJECTIVES[objective].time and (busy := busy_words(planner.speeds)):
        return f"{busy}, so a plan over several devices must be predicted to be {BUSY_PLAN:g} times as fast"
    gain = f"less than {100 * (PLAN - 1):.0f} %" if OBJECTIVES[objective].time else "no"
    return f"; with the others it is predicted to be {gain} better"


def kind_of(plan: Plan) -> str:
    """Return "single", "tensor", "pipeline" or "hybrid" for the computing stages, or "replicas" for several copies. A
    thin owner with one device is a pipeline.
    """
    if plan.replicas:
        return "replicas"
    widths = [len(stage.shards) for stage in plan.computing]
    if plan.world_size == 1:
        return "single"
    if len(widths) == 1 and widths[0] > 1:
        return "tensor"
    return "pipeline" if max(widths) == 1 else "hybrid"


def infeasible(planner: Planner) -> str:
    """Return a sentence with the memory that the model needs and the memory that each device has."""
    work = planner.work
    parts = {"weights": work.weights_before[-1], "KV cache": work.kv_before[-1], "head": work.shape.head_bytes}
    needs = ", ".join(f"{name} {n / _MIB:,.0f}" for name, n in parts.items())
    have = "; ".join(f"{speed.name} has {speed.room_bytes / _MIB:,.0f}" for speed in planner.speeds)
    return (
        f"no plan fits: the model needs {sum(parts.values()) / _MIB:,.0f} MiB ({needs}), and beside its own process"
        f" {have}; use a smaller type or a smaller --context, or add a device"
    )
