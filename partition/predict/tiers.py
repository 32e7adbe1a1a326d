"""Share of a stage that is in a device's GPU memory, by the rule of the loader.

A device whose GPU does not hold its whole stage computes some layers there and the others on the processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partition.predict.residency import GpuPlacement, LayerBytes, place_on_gpu
from partition.predict.speeds import Curve, DeviceSpeed

Numbers = Any  # a float or an array of floats


@dataclass(frozen=True, slots=True)
class OnGpu:
    """Part of a stage on the GPU of one rank. Each field is a number, or an array with a value for each stage."""

    layers: Numbers = 0.0  # share of the weights that a token reads
    attention: Numbers = 0.0  # share of the attention
    weights: Numbers = 0  # bytes of weights, with all experts
    kv: Numbers = 0  # bytes of KV cache
    head: Numbers = 0  # 1 if the head is there


class TieredSpeed:
    """Times of a device that computes a stage partly on its GPU. `GroupCost` uses it like a `DeviceSpeed`."""

    def __init__(self, speed: DeviceSpeed, gpu: DeviceSpeed, part: OnGpu) -> None:
        """part: part of the stage on the GPU."""
        self._speed, self._gpu, self._part = speed, gpu, part
        # The parts of one pass run one after another, and the GPU's driver starts them.
        self.step_s = _Both(speed.step_s, gpu.step_s, np.asarray(part.layers) > 0)
        self.layer_s = _Both(speed.layer_s, gpu.layer_s, part.layers)
        self.head_s = _Both(speed.head_s, gpu.head_s, part.head)
        self.sum_s = speed.sum_s

    def row_token_s(self, *, prompt: bool) -> Numbers:
        """Return the mean of `DeviceSpeed.row_token_s` over the layers of the stage."""
        on_processor, on_gpu = (tier.row_token_s(prompt=prompt) for tier in (self._speed, self._gpu))
        return _mixed(on_processor, on_gpu, self._part.attention)

    def part_line_s(self, rows: float) -> tuple[Numbers, Numbers]:
        """Return the mean of `DeviceSpeed.part_line_s` over the layers of the stage."""
        lines = zip(self._speed.part_line_s(rows), self._gpu.part_line_s(rows), strict=True)
        constant, slope = (_mixed(on_processor, on_gpu, self._part.layers) for on_processor, on_gpu in lines)
        return constant, slope


@dataclass(frozen=True, slots=True)
class _Both:
    """Curves of a processor and of a GPU, and the share of the work on the GPU."""

    processor: Curve
    gpu: Curve
    share: Numbers

    def at(self, rows: float) -> Numbers:
        return _mixed(self.processor.at(rows), self.gpu.at(rows), self.share)


def _mixed(on_processor: float, on_gpu: float, share: Numbers) -> Numbers:
    return (1.0 - share) * on_processor + share * on_gpu


def on_gpu(
    layers: Sequence[LayerBytes], expert_share: float, room: int, head_bytes: int, fixed_layers: int | None = None
) -> OnGpu:
    """Return the part of a stage that a GPU holds.

    layers: bytes of each layer of the stage on this rank.
    expert_share: share of a layer's experts that a token uses.
    room: bytes of GPU memory for layers and head.
    head_bytes: bytes of the head; 0 if the stage has none.
    fixed_layers: number of layers on the GPU, counted from the head, instead of as many as fit.
    """
    if fixed_layers is None:
        placement = place_on_gpu(layers, room - head_bytes, expert_share)
    else:
        last = tuple(range(len(layers)))[max(0, len(layers) + 1 - fixed_layers) :] if fixed_layers else ()
        placement = GpuPlacement(last, last)
    if not placement.dense and not fixed_layers:
        return OnGpu()
    read = [layer.dense + expert_share * layer.experts for layer in layers]  # bytes for a token
    dense, experts = (sum(layers[n].dense for n in placement.dense), sum(layers[n].experts for n in placement.experts))
    every = sum(read) or 1.0
    return OnGpu(
        layers=min(1.0, (dense + expert_share * experts) / every),
        attention=sum(read[n] for n in placement.dense) / every,
        weights=dense + experts,
        kv=sum(layers[n].kv for n in placement.dense),
        head=1,
    )


def stacked(parts: Sequence[Sequence[OnGpu]]) -> OnGpu:
    """Return the parts of all stages [i, j) as one part with arrays [n, n]."""
    values = np.array([[(p.layers, p.attention, p.weights, p.kv, p.head) for p in row] for row in parts], float)
    return OnGpu(*np.moveaxis(values, -1, 0))
