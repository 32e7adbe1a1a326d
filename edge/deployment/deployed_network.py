"""A deployed ONNX network: the location of its stages, their resources, and descriptions for people and for JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from edge.cluster.llm_ranks import Exchange
from edge.cluster.onnx_ranks import Loaded, OnnxRanks
from edge.cluster.preflight import check_memory
from edge.deployment.deployed import Deployed
from edge.deployment.kinds import RunningPlan
from edge.models.local_slices import OwnSlices
from edge.onnx.bench import sequential
from edge.onnx.engine import OnnxEngine
from edge.onnx.failover import FailoverPipeline, Runner
from edge.onnx.model import OnnxSource
from edge.onnx.pipeline import Result
from edge.onnx.samples import Array
from edge.quantization.onnx_compare import OutputError
from partition.errors import PlanError
from partition.plan.onnx_cuts import routes
from partition.plan.onnx_plan import OnnxPlan
from partition.plan.plan import LOCAL
from quant.text import bytes_text, seconds_text


class OneDevice:
    """A whole network on this device, with the interface of a deployment."""

    links = (None,)  # the only stage is in this process and has no link

    def __init__(self, model: OnnxSource, plan: OnnxPlan, threads: int | None, provider: str | None) -> None:
        """Load the network.

        threads, provider: defaults if the plan sets none.

        Raises NotEnoughMemory, PlanError if the file has changed since it was read, and the errors of OnnxEngine.
        """
        own, n = plan.stages[0], len(model.graph.nodes)
        weight_bytes = model.graph.stage_weight_bytes(0, n)
        need = weight_bytes + model.graph.activation_bytes(0, n)
        check_memory(None, [(LOCAL, {"the whole model": need})], "free memory there, or add a device")
        if OwnSlices().model_digest(model.file.path) != model.digest:
            raise PlanError(f"{model.name} has changed since it was loaded; start again")
        engine = self._engine = OnnxEngine(model.file.path, own.threads or threads, own.provider or provider)
        self.loaded = (Loaded(LOCAL, weight_bytes, 0, engine.provider, engine.fell_back_from, engine.threads),)
        self.stop, self.resume, self.close = engine.stop, engine.resume, engine.close

    def map(self, feeds: Iterable[Mapping[str, Array]], window: int, wire: str = "f32") -> Iterator[Result]:
        """Yield the result of each input, in order. Raises the errors of `OnnxEngine.run`."""
        return sequential(self._engine.run)(feeds, window)


class DeployedNetwork(Deployed[OnnxPlan, Runner]):
    """A network whose stages run on devices. Its `pipeline` computes."""

    def __init__(
        self,
        model: OnnxSource,
        pipeline: FailoverPipeline,
        running: RunningPlan[OnnxPlan, Runner],
        exchange: Exchange,
        close: Callable[[], None],
    ) -> None:
        super().__init__(running, exchange, close)
        self._model, self.pipeline, self.wire = model, pipeline, exchange.wire

    def close(self) -> None:
        self.pipeline.stop()
        super().close()

    @property
    def current(self) -> OnnxRanks | OneDevice:
        """The stages that are loaded now."""
        loaded = self.running.ranks or self.running.engine
        assert isinstance(loaded, OnnxRanks | OneDevice)
        return loaded

    def stages(self, compute_ms: Sequence[float | None] = ()) -> list[dict[str, Any]]:
        """Return a description of each stage: its nodes, resources and payload.

        compute_ms: median time of each stage, if measured.
        """
        return stages_json(self._model, self.plan, self.names, self.current, compute_ms)

    def to_json(self, compute_ms: Sequence[float | None], wire_errors: Sequence[OutputError]) -> dict[str, Any]:
        """Return values for a command's JSON output.

        compute_ms: median time of each stage, if measured.
        wire_errors: differences from outputs with F32 on the wire; empty if the wire type is F32.
        """
        return {
            "provider": None,
            "fell_back_from": [],
            "threads": None,
            "stages": self.stages(compute_ms),
            "plan": self.plan.to_json(),
            "why": self.why,
            "transport": self.exchange.transport,
            "wire": self.wire,
            "wire_errors": [asdict(error) for error in wire_errors] if wire_errors else None,
        }


def stages_json(
    model: OnnxSource,
    plan: OnnxPlan,
    names: Sequence[str],
    current: OnnxRanks | OneDevice,
    compute_ms: Sequence[float | None] = (),
) -> list[dict[str, Any]]:
    """Return a description of each stage of a plan: its nodes, resources and payload.

    names: device names, for people.
    current: the loaded stages.
    compute_ms: median time of each stage, if measured.
    """
    return [
        {
            "device": stage.device,
            "name": name,
            "nodes": [stage.nodes.start, stage.nodes.stop],
            "until": stage.until or None,
            "weight_bytes": loaded.weight_bytes,
            "memory_bytes": loaded.memory_bytes or None,
            "provider": loaded.provider,
            "fell_back_from": list(loaded.fell_back_from),
            "threads": loaded.threads,
            "link": link,
            "payload_bytes": sum(value.n_bytes for value in tensors),
            "tensors": [value.name for value in tensors],
            "compute_ms_median": ms,
        }
        for stage, name, loaded, link, tensors, ms in zip(
            plan.stages,
            names,
            current.loaded,
            current.links,
            routes(model.graph, plan.cuts)[1:],
            compute_ms if compute_ms else [None] * len(plan.stages),
            strict=True,
        )
    ]


def stage_rows(
    stages: Sequence[Mapping[str, Any]],
    why: str,
    wire: str,
    wire_errors: Sequence[OutputError],
    names: tuple[str, str] = ("stage", "cut"),
) -> list[tuple[str, str]]:
    """Return rows of (name, value): each stage, the reason for the cuts, and the effect of the wire type on outputs.

    names: names of a stage and of the reason.
    """
    rows = [(f"{names[0]} {i}", _stage(stage)) for i, stage in enumerate(stages)]
    rows.append((names[1], why))
    if wire != "f32":
        rows.append(("wire", f"{wire}: {'; '.join(map(_error, wire_errors))}"))
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
    """Describe the difference of an output from the one with F32 on the wire."""
    if error.max_abs is None or error.relative_l2 is None:
        return f"{error.name} cannot be compared"
    return f"{error.name} differs by {error.max_abs:.3g} at most, {100 * error.relative_l2:.2g} % of its norm"
