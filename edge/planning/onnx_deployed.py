"""An ONNX model on several devices: cut as a person asks, loaded there, and what there is to say of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from devices.cluster_file import Cluster
from edge.cluster.fleet import Fleet, device
from edge.onnx.failover import FailoverPipeline
from edge.onnx.model import OnnxSource
from edge.planning.onnx_supervisor import OnnxPlacement, SurvivingDeployment
from edge.quantization.onnx_compare import OutputError
from edge.tasks import SILENT, Steps
from partition.plan.onnx_cuts import choose, cut_at, routes
from partition.plan.onnx_plan import OnnxPlan
from partition.plan.onnx_split import split
from partition.plan.plan import LOCAL
from quant.text import bytes_text, seconds_text


@dataclass(frozen=True)
class Deployed:
    """A model whose stages are on their devices."""

    deployment: SurvivingDeployment
    transport: str
    wire: str

    @property
    def pipeline(self) -> FailoverPipeline:
        """What to talk to."""
        return self.deployment.pipeline

    @property
    def plan(self) -> OnnxPlan:
        """Which stage is where now; another one once a device was lost."""
        return self.deployment.current.plan

    @property
    def why(self) -> str:
        """The reason for this plan."""
        return self.deployment.why

    def stages(self, compute_ms: Sequence[float | None] = ()) -> list[dict[str, Any]]:
        """What each stage holds, sends on and takes. compute_ms: medians, where they were measured."""
        current, plan = self.deployment.current, self.plan
        leaving = routes(self.deployment.model.graph, plan.cuts)[1:]
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
                self.deployment.names,
                current.loaded,
                current.links,
                leaving,
                compute_ms if compute_ms else [None] * len(plan.stages),
                strict=True,
            )
        ]

    def to_json(self, compute_ms: Sequence[float | None], wire_errors: Sequence[OutputError]) -> dict[str, Any]:
        """What a command's --json adds to its own figures. wire_errors: how far outputs are from those with F32 on the
        wire; none where that is the wire's type."""
        return {
            "provider": None,
            "fell_back_from": [],
            "threads": None,
            "stages": self.stages(compute_ms),
            "plan": self.plan.to_json(),
            "why": self.why,
            "transport": self.transport,
            "wire": self.wire,
            "wire_errors": [asdict(error) for error in wire_errors] if wire_errors else None,
        }


@contextmanager
def deployed(model: OnnxSource, placement: OnnxPlacement, *, steps: Steps = SILENT) -> Iterator[Deployed]:
    """The model on its devices until the end of the block, its stages loaded. The errors of Fleet and OnnxDeployment,
    and PlanError for cuts that do not exist."""
    plan, why = _plan(placement, model, steps)
    workers = tuple(one for one in plan.devices if one != LOCAL)
    cluster = Cluster.of_addresses(dict.fromkeys(map(device, workers)))
    with (
        Fleet(workers, insecure=placement.insecure) as fleet,
        closing(SurvivingDeployment(model, placement, plan, why, fleet, cluster, steps=steps)) as deployment,
    ):
        yield Deployed(deployment, placement.transport, placement.wire)


def _plan(placement: OnnxPlacement, model: OnnxSource, steps: Steps) -> tuple[OnnxPlan, str]:
    """The plan, and why it is this one."""
    if placement.plan is not None:
        return placement.plan, placement.why
    model.check_places(len(placement.devices))
    if placement.cuts is not None:
        return model.plan(placement.devices, [cut_at(model.graph, where) for where in placement.cuts]), "as --cut says"
    shares = placement.shares or (1.0,) * len(placement.devices)
    places = choose(model.graph, "auto")
    if len(places) < len(shares):
        places = choose(model.graph, "all")
    with steps.step(f"Timing the nodes of {model.name}"):
        seconds = model.node_seconds(placement.threads)
    work = "estimated work" if seconds is None else "work as this device does it"
    why = f"as --shares says, by {work}" if placement.shares else f"equal parts of the {work}"
    return model.plan(placement.devices, split(model.graph, places, shares, seconds)), why


def stage_rows(
    stages: Sequence[Mapping[str, Any]], deployed: Deployed, wire_errors: Sequence[OutputError]
) -> list[tuple[str, str]]:
    """Rows of (name, value): each stage, the reason for the cuts, and what the wire type does to the outputs."""
    rows = [(f"stage {i}", _stage(stage)) for i, stage in enumerate(stages)]
    rows.append(("cut", deployed.why))
    if deployed.wire != "f32":
        rows.append(("wire", f"{deployed.wire}: {'; '.join(map(_error, wire_errors))}"))
    return rows


def _stage(stage: Mapping[str, Any]) -> str:
    start, stop = stage["nodes"]
    parts = [f"{stop - start} nodes" + (f" up to {stage['until']}" if stage["until"] else "")]
    parts.append(f"{bytes_text(stage['weight_bytes'])} of weights")
    if stage["compute_ms_median"] is not None:
        parts.append(seconds_text(stage["compute_ms_median"] / 1e3))
    many = f" in {len(stage['tensors'])} tensors" if len(stage["tensors"]) > 1 else ""
    parts.append(f"gives {bytes_text(stage['payload_bytes'])}{many}")
    return f"{stage['name']}: {', '.join(parts)}"


def _error(error: OutputError) -> str:
    """How far an output is from what it is with F32 on the wire."""
    if error.max_abs is None or error.relative_l2 is None:
        return f"{error.name} cannot be compared"
    return f"{error.name} differs by {error.max_abs:.3g} at most, {100 * error.relative_l2:.2g} % of its norm"
