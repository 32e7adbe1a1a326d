"""Measure every cut into two stages: each stage alone, the expected pipeline, and the pipeline on two devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from edge.cluster.fleet import Fleet
from edge.cluster.onnx_ranks import OnnxRanks
from edge.onnx.bench import FlowSpeed, measure, sequential, speed_json
from edge.onnx.engine import OnnxEngine
from edge.onnx.model import OnnxSource
from edge.onnx.samples import Array
from edge.onnx.stage import LoadedStage
from edge.onnx.wire import Item, Op
from partition.plan.onnx_cuts import Cut, routes
from partition.plan.plan import LOCAL
from partition.predict.onnx_predict import wire_bytes


@dataclass(frozen=True)
class CutSpeed:
    """Measurements of one cut."""

    cut: Cut
    stage_s: tuple[float, ...]  # mean seconds of one run of each stage alone on its device
    # One input occupies each link for this many seconds: to the first stage, to the second stage, and back.
    transfer_s: tuple[float, ...]
    delay_s: float  # total latency of these links
    speed: FlowSpeed | None = None  # measured pipeline, if it ran

    @property
    def expected_latency_s(self) -> float:
        """Sum of the times of the stages and links."""
        return sum(self.stage_s) + sum(self.transfer_s) + self.delay_s

    @property
    def expected_throughput_per_s(self) -> float:
        """Inverse of the time of the slowest stage or link."""
        return 1 / max(*self.stage_s, *self.transfer_s)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON values that docs/cli/bench.md describes."""
        return {
            "label": self.cut.label,
            "position": self.cut.position,
            "tensors": [value.name for value in self.cut.tensors],
            "payload_bytes": self.cut.payload_bytes,
            "weight_bytes": list(self.cut.weight_bytes),
            "flops": list(self.cut.flops),
            "stage_ms": [1e3 * seconds for seconds in self.stage_s],
            "transfer_ms": [1e3 * seconds for seconds in self.transfer_s],
            "expected_latency_ms": 1e3 * self.expected_latency_s,
            "expected_throughput_per_s": self.expected_throughput_per_s,
            **speed_json(self.speed),
        }


def sweep_here(
    model: OnnxSource, cuts: Sequence[Cut], repeats: int, threads: int | None
) -> tuple[FlowSpeed, Iterator[CutSpeed]]:
    """Measure the whole model on this device alone. Return its speed and an iterator that measures each cut.

    Raises the errors of OnnxEngine.
    """
    with OnnxEngine(model.file.path, threads) as engine:
        whole = measure(sequential(engine.run), model.sample, repeats, 1)
    return whole, stages_here(model, cuts, repeats, threads)


def sweep_devices(
    devices: Sequence[str],
    model: OnnxSource,
    cuts: Sequence[Cut],
    *,
    repeats: int,
    window: int | None = None,
    wire: str = "f32",
    transport: str = "auto",
    threads: int | None = None,
    insecure: bool = False,
) -> tuple[FlowSpeed, Iterator[CutSpeed]]:
    """Measure the whole model on the last of two devices.

    Return its speed and an iterator that measures each cut as a pipeline of both devices.

    threads: threads of this device, if it is the first of the two.
    Raises the errors of Fleet and of `sweep`.
    """
    last = tuple(devices[-1:])
    with (
        Fleet(last, insecure=insecure) as fleet,
        OnnxRanks(fleet, model, model.plan(last, []), transport=transport) as ranks,
    ):
        whole = measure(ranks.start().map, model.sample, repeats, window)

    def cut_by_cut() -> Iterator[CutSpeed]:
        workers = [device for device in devices if device != LOCAL]
        plan = model.plan(devices, cuts[:1])
        with (
            Fleet(workers, insecure=insecure) as fleet,
            OnnxRanks(fleet, model, plan, transport=transport, threads=threads) as ranks,
        ):
            yield from sweep(ranks, model, cuts, model.sample, repeats=repeats, window=window, wire=wire)

    return whole, cut_by_cut()


def stages_here(model: OnnxSource, cuts: Sequence[Cut], repeats: int, threads: int | None) -> Iterator[CutSpeed]:
    """Measure both stages of each cut on this device, one after the other."""
    for cut in cuts:
        stage_s = []
        item, tensors = Item(Op.RUN), model.sample
        for part in model.parts(model.plan((LOCAL, "other"), [cut])):
            with OnnxEngine(part.content, threads) as engine:
                stage = LoadedStage(engine, part.takes, part.gives)
                item, tensors = stage.compute(item, tensors)
                stage_s.append(stage.time(repeats).seconds)
        yield CutSpeed(cut, tuple(stage_s), (), 0.0)


def sweep(
    ranks: OnnxRanks,
    model: OnnxSource,
    cuts: Sequence[Cut],
    feeds: Mapping[str, Array],
    *,
    repeats: int,
    window: int | None = None,
    wire: str = "f32",
) -> Iterator[CutSpeed]:
    """Measure each cut on the two devices of `ranks`. Raises the errors of `OnnxRanks.load` and of
    pipelines."""
    hops = ranks.hops()
    own = ranks.plan.own is not None
    for cut in cuts:
        ranks.load(model.plan(ranks.plan.devices, [cut]))
        ranks.start().run(feeds)  # provides the input that each stage is timed with
        stage_s = ranks.times(repeats)
        speed = measure(partial(ranks.start().map, wire=wire), feeds, repeats, window)
        before, between, after = routes(model.graph, [cut.position])
        moved = [wire_bytes(before, "f32"), wire_bytes(between, wire), wire_bytes(after, "f32")][own:]
        transfer_s = tuple(n_bytes / hop.bytes_per_s for hop, n_bytes in zip(hops, moved, strict=True))
        yield CutSpeed(cut, stage_s, transfer_s, sum(hop.latency_s for hop in hops), speed)
