"""An ONNX model on several devices: cut as a person asks, loaded there, and what there is to say of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from edge.cluster.fleet import Fleet
from edge.cluster.onnx_deployment import OnnxDeployment
from edge.onnx.model import OnnxSource
from edge.tasks import SILENT, Steps
from partition.plan.onnx_cuts import choose, cut_at, routes
from partition.plan.onnx_plan import OnnxPlan
from partition.plan.onnx_split import split
from partition.plan.plan import LOCAL


@dataclass(frozen=True)
class OnnxPlacement:
    """Where a model's stages are to run: as a plan says, or on these devices, cut as a person says or by work."""

    devices: tuple[str, ...]  # of the stages; LOCAL can be the first
    plan: OnnxPlan | None = None
    why: str = "as the plan says"
    cuts: tuple[str, ...] | None = None  # labels or positions; without them and a plan, by `shares`
    shares: tuple[float, ...] | None = None  # what part of the work each device does; None: equal parts
    transport: str = "auto"
    wire: str = "f32"
    threads: int | None = None  # of a stage in this process, like the next
    provider: str | None = None
    insecure: bool = False  # allow workers that do not encrypt


@dataclass(frozen=True)
class Deployed:
    """A model whose stages are on their devices."""

    deployment: OnnxDeployment
    model: OnnxSource
    why: str  # this plan
    names: tuple[str, ...]  # of the stages' devices, for people
    transport: str
    wire: str

    def stages(self, compute_ms: Sequence[float | None] = ()) -> list[dict[str, Any]]:
        """What each stage holds, sends on and takes. compute_ms: medians, where they were measured."""
        plan = self.deployment.plan
        leaving = routes(self.model.graph, plan.cuts)[1:]
        return [
            {
                "device": stage.device,
                "name": name,
                "nodes": [stage.nodes.start, stage.nodes.stop],
                "until": stage.until or None,
                "weight_bytes": held.weight_bytes,
                "memory_bytes": held.memory_bytes or None,
                "provider": held.provider,
                "fell_back_from": list(held.fell_back_from),
                "threads": held.threads,
                "link": link,
                "payload_bytes": sum(value.n_bytes for value in tensors),
                "tensors": [value.name for value in tensors],
                "compute_ms_median": ms,
            }
            for stage, name, held, link, tensors, ms in zip(
                plan.stages,
                self.names,
                self.deployment.loaded,
                self.deployment.links,
                leaving,
                compute_ms if compute_ms else [None] * len(plan.stages),
                strict=True,
            )
        ]


@contextmanager
def deployed(model: OnnxSource, placement: OnnxPlacement, *, steps: Steps = SILENT) -> Iterator[Deployed]:
    """The model on its devices until the end of the block, its stages loaded. The errors of Fleet and OnnxDeployment,
    and PlanError for cuts that do not exist."""
    plan, why = _plan(placement, model)
    workers = tuple(device for device in plan.devices if device != LOCAL)
    with Fleet(workers, insecure=placement.insecure) as fleet:
        with steps.step(f"Loading {model.name} on {len(set(plan.devices))} devices") as show:
            deployment = OnnxDeployment(
                fleet,
                model,
                plan,
                transport=placement.transport,
                threads=placement.threads,
                provider=placement.provider,
                progress=show,
                say=steps.say,
            )
        with deployment:
            names = tuple("this device" if one == LOCAL else fleet.workers[one].label for one in plan.devices)
            yield Deployed(deployment, model, why, names, placement.transport, placement.wire)


def _plan(placement: OnnxPlacement, model: OnnxSource) -> tuple[OnnxPlan, str]:
    """The plan, and why it is this one."""
    if placement.plan is not None:
        return placement.plan, placement.why
    if placement.cuts is not None:
        return model.plan(placement.devices, [cut_at(model.graph, where) for where in placement.cuts]), "as --cut says"
    shares = placement.shares or (1.0,) * len(placement.devices)
    places = choose(model.graph, "auto")
    if len(places) < len(shares):
        places = choose(model.graph, "all")
    why = "as --shares says, by estimated work" if placement.shares else "equal parts of the estimated work"
    return model.plan(placement.devices, split(model.graph, places, shares)), why
