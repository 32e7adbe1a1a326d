"""Every cut in two: what each stage takes alone, what the cut should give by that, and what it gives on two devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from edge.cluster.onnx_deployment import OnnxDeployment
from edge.onnx.bench import Speed, measure
from edge.onnx.engine import OnnxEngine
from edge.onnx.model import OnnxSource
from edge.onnx.stage import LoadedStage
from edge.onnx.wire import Array, Item, Op
from partition.model.onnx_shapes import Value
from partition.plan.onnx_cuts import Cut, routes
from partition.plan.plan import LOCAL
from quant.wire import WIRES


@dataclass(frozen=True)
class CutSpeed:
    """One cut, measured."""

    cut: Cut
    stage_s: tuple[float, ...]  # one run of each stage alone on its device, means
    transfer_s: tuple[float, ...]  # how long one input keeps each link busy: to the first stage, on, and back here
    delay_s: float  # of these links together
    speed: Speed | None = None  # of the pipeline, where it ran as one

    @property
    def expected_latency_s(self) -> float:
        """The sum of what the stages and the links take."""
        return sum(self.stage_s) + sum(self.transfer_s) + self.delay_s

    @property
    def expected_throughput_per_s(self) -> float:
        """One over the slowest of the stages and the links."""
        return 1 / max(*self.stage_s, *self.transfer_s)


def stages_here(model: OnnxSource, cuts: Sequence[Cut], repeats: int, threads: int | None) -> Iterator[CutSpeed]:
    """Each cut in turn, on this device: what both stages take, one after the other."""
    for cut in cuts:
        stage_s = []
        item, tensors = Item(Op.RUN), model.noise()
        for part in model.parts(model.plan((LOCAL, "other"), [cut])):
            with OnnxEngine(part.content, threads) as engine:
                stage = LoadedStage(engine, part.takes, part.gives)
                item, tensors = stage.compute(item, tensors)
                stage_s.append(stage.time(repeats).seconds)
        yield CutSpeed(cut, tuple(stage_s), (), 0.0)


def sweep(
    deployment: OnnxDeployment,
    model: OnnxSource,
    cuts: Sequence[Cut],
    feeds: Mapping[str, Array],
    *,
    repeats: int,
    window: int | None = None,
    wire: str = "f32",
) -> Iterator[CutSpeed]:
    """Each cut in turn, on the two devices of a deployment. Errors as of `OnnxDeployment.load` and of pipelines."""
    hops = deployment.hops()
    own = deployment.plan.own is not None
    for cut in cuts:
        deployment.load(model.plan(deployment.plan.devices, [cut]))
        deployment.start().run(feeds)  # what each stage is timed with
        stage_s = deployment.times(repeats)
        speed = measure(partial(deployment.start().map, wire=wire), feeds, repeats, window)
        before, between, after = routes(model.graph, [cut.position])
        moved = [_bytes(before, "f32"), _bytes(between, wire), _bytes(after, "f32")][own:]
        transfer_s = tuple(hop.seconds(n_bytes) for hop, n_bytes in zip(hops, moved, strict=True))
        yield CutSpeed(cut, stage_s, transfer_s, sum(hop.latency_s for hop in hops), speed)


def _bytes(values: Sequence[Value], wire: str) -> int:
    """What tensors take on the wire."""
    codec = WIRES[wire]
    return sum(
        codec.n_bytes(value.n_bytes // 4) if codec is not None and value.type == "float32" else value.n_bytes
        for value in values
    )
