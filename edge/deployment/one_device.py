"""A whole network on this device, which computes one input after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from edge.cluster.onnx_deployment import Loaded
from edge.cluster.preflight import check_memory
from edge.onnx.bench import sequential
from edge.onnx.engine import OnnxEngine
from edge.onnx.model import OnnxSource
from edge.onnx.pipeline import Result
from edge.onnx.samples import Array
from edge.slices.local import OwnSlices
from partition.errors import PlanError
from partition.plan.onnx_plan import OnnxPlan
from partition.plan.plan import LOCAL


class OneDevice:
    """A whole network on this device, with what there is to say of a deployment."""

    links = (None,)  # to the stages

    def __init__(self, model: OnnxSource, plan: OnnxPlan, threads: int | None, provider: str | None) -> None:
        """Load it. NotEnoughMemory, with need and have; PlanError where the file has changed; the errors of OnnxEngine.

        threads, provider: where the plan has none."""
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
        """Yield the results of inputs, in order. The errors of `OnnxEngine.run`."""
        return sequential(self._engine.run)(feeds, window)
