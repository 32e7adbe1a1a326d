"""Where a network is cut: as a person says, else by the work that this device takes for its nodes."""

from __future__ import annotations

from collections.abc import Sequence

from edge.onnx.model import OnnxSource
from edge.planning.choice import PlanChoice
from edge.tasks import SILENT, Steps
from partition.plan.onnx_cuts import choose, cut_at
from partition.plan.onnx_split import split
from partition.plan.plan import LOCAL


def arrange_network(
    model: OnnxSource,
    devices: Sequence[str],
    *,
    cuts: Sequence[str] | None = None,
    shares: Sequence[float] | None = None,
    threads: int | None = None,
    steps: Steps = SILENT,
) -> PlanChoice:
    """Choose a plan for a network on these devices, in their order.

    cuts: labels or positions; None: by `shares`, what part of the work each device does; None: equal parts. threads: of
    this device. PlanError for cuts that do not exist.
    """
    path = model.file.path
    model.check_places(len(devices))
    if cuts is not None:
        plan = model.plan(devices, [cut_at(model.graph, where) for where in cuts])
        return PlanChoice(path, plan, "as --cut says", is_given=True, keeps_off=LOCAL not in devices)
    parts = tuple(shares or (1.0,) * len(devices))
    places = choose(model.graph, "auto")
    if len(places) < len(parts):
        places = choose(model.graph, "all")
    with steps.step(f"Timing the nodes of {model.name}"):
        seconds = model.node_seconds(threads)
    work = "estimated work" if seconds is None else "work as this device does it"
    why = f"as --shares says, by {work}" if shares else f"equal parts of the {work}"
    plan = model.plan(devices, split(model.graph, places, parts, seconds))
    return PlanChoice(path, plan, why, is_given=shares is not None, keeps_off=LOCAL not in devices)
