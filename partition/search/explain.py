"""Which of the plans found to take, and why, in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from partition.errors import PlanError
from partition.plan.plan import Plan
from partition.predict.onnx_predict import OnnxDevice
from partition.predict.speeds import DeviceSpeed
from partition.search.planner import Placed, Planner
from quant.text import number_text

WORTH = 1.05  # what more devices must be better by than this one alone: predictions are off by some
WORTH_BUSY = 1.2  # where one of them was measured while busy
_MIB = 1 << 20
_UNITS = {  # of an objective as a person reads it
    "latency": (1e3, "ms a token"),
    "ttft": (1.0, "s to the first token"),
    "memory": (1 / _MIB, "MiB on the fullest device"),
    "energy": (1.0, "J a token"),
}

_TIMES = ("latency", "throughput", "ttft")  # objectives that more devices have to be WORTH it for


def best_of(planner: Planner) -> tuple[Plan, str]:
    """The plan to take for the least latency, and why, in one line. PlanError, with need and have, where nothing
    fits."""
    placed = best(planner, "latency")
    return placed.plan, reason(planner, placed, "latency")


def best(planner: Planner, objective: str, caps: Mapping[str, float] | None = None) -> Placed:
    """The best plan by one objective; this device alone, where others bring less than WORTH.

    caps: what other objectives, or this one, may be at most. PlanError, with need and have, where nothing fits.
    """
    others = [name for name in caps or {} if name != objective]
    objectives = (objective, *others)
    most = [(caps or {}).get(name, math.inf) for name in objectives]
    found, _ = planner.front(objectives, caps=most)
    if not found:
        if caps and (anything := planner.front((objective,))[0]):
            raise PlanError(_out_of_reach(caps, objective, anything[0]))
        raise PlanError(infeasible(planner))
    own = alone(planner, objective, caps)
    if own is not None and objective in _TIMES and own.objectives[0] <= worth(planner.speeds) * found[0].objectives[0]:
        return own
    return found[0]


def worth(speeds: Iterable[DeviceSpeed | OnnxDevice]) -> float:
    """What more devices must be better by: more, where what they do was measured while they were busy."""
    return WORTH_BUSY if any(speed.busy for speed in speeds) else WORTH


def alone(planner: Planner, objective: str, caps: Mapping[str, float] | None = None) -> Placed | None:
    """The whole model on the owner's device; None where it has no room for it, not even by paging, or is above caps."""
    others = [name for name in caps or {} if name != objective]
    most = [(caps or {}).get(name, math.inf) for name in (objective, *others)]
    found, _ = planner.only_own().front((objective, *others), caps=most)
    return found[0] if found else None


def _out_of_reach(caps: Mapping[str, float], objective: str, nearest: Placed) -> str:
    told = ", ".join(
        f"{name} of at {'least' if name == 'throughput' else 'most'} {_told(name, cap)}" for name, cap in caps.items()
    )
    return f"no plan has {told}; the best {objective} there is is {_told(objective, nearest.objectives[0])}"


def _told(objective: str, value: float) -> str:
    """An objective as a person reads it; throughput, which is planned in seconds a token, as what was asked for."""
    if objective == "throughput":
        return f"{number_text(1 / value)} tokens/s"
    factor, unit = _UNITS[objective]
    return f"{number_text(value * factor)} {unit}"


def reason(planner: Planner, placed: Placed, objective: str, caps: Mapping[str, float] | None = None) -> str:
    """Why this plan, in one line. caps: what objectives were to be at most."""
    own = alone(planner, objective, caps)
    told = _told(objective, placed.objectives[0])
    if placed.plan.world_size == 1:
        gain = f"less than {100 * (worth(planner.speeds) - 1):.0f} %" if objective in _TIMES else "no"
        others = "" if len(planner.speeds) == 1 else f"; with the others it is predicted to be {gain} better"
        return f"use one device: {told} on this device alone{others}"
    if own is not None:
        beside = f"{_told(objective, own.objectives[0])} on this device alone"
    else:
        beside = (
            "this device alone cannot do it within what was asked" if caps else "this device alone has no room for it"
        )
    return f"{kind_of(placed.plan)} on {len(set(placed.plan.devices))} devices: {told}, {beside}"


def kind_of(plan: Plan) -> str:
    """single, tensor, pipeline or hybrid."""
    widths = [len(stage.shards) for stage in plan.stages]
    if len(widths) == 1:
        return "tensor" if widths[0] > 1 else "single"
    return "pipeline" if max(widths) == 1 else "hybrid"


def infeasible(planner: Planner) -> str:
    """Need and have: of the whole model, and of each device."""
    work = planner.work
    parts = {"weights": work.weights_before[-1], "KV cache": work.kv_before[-1], "head": work.shape.head_bytes}
    told = ", ".join(f"{name} {n / _MIB:,.0f}" for name, n in parts.items())
    have = "; ".join(
        f"{speed.name} has {max(0, speed.memory_bytes - speed.runtime_bytes) / _MIB:,.0f}" for speed in planner.speeds
    )
    return (
        f"no plan fits: the model needs {sum(parts.values()) / _MIB:,.0f} MiB ({told}), and beside its own process"
        f" {have}; use a smaller type or a smaller --context, or add a device"
    )
