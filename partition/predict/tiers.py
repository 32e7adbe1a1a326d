"""Share of a stage that is in a device's GPU memory, by the rule of the loader.

A device whose GPU does not hold its whole stage computes some layers there and the others on the processor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partition.predict.residency import MOST_SUMS, LayerBytes
from partition.predict.speeds import Curve, DeviceSpeed

Numbers = Any  # a float or an array of floats
Ints = NDArray[np.int64]
_CELLS = 500_000  # sums in memory at a time


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


def bytes_before(layers: Sequence[LayerBytes], weights: float, kv: float) -> Ints:
    """Return the bytes of dense weights, experts and KV cache on a rank before each layer: [3, layers + 1].

    weights, kv: shares of the rank.
    """
    whole = np.array([(0, 0, 0), *((layer.dense, layer.experts, layer.kv) for layer in layers)], float).T
    result: Ints = np.rint(whole * [[weights], [weights], [kv]]).astype(np.int64).cumsum(axis=1)
    return result


def on_gpu(
    before: Ints,
    expert_share: float,
    room: int,
    head_bytes: int,
    starts: Numbers,
    stops: Numbers,
    fixed_layers: int | None = None,
) -> OnGpu:
    """Return the part of each stage [start, stop) that a GPU holds, placed as by `place_on_gpu`.

    before: result of `bytes_before` for all layers of the model.
    expert_share: share of a layer's experts that a token uses.
    room: bytes of GPU memory for layers and head.
    head_bytes: bytes of the head, which belongs to the last layer's stage.
    starts, stops: numbers, or arrays of one shape.
    fixed_layers: number of layers on the GPU, counted from the head, instead of as many as fit.
    """
    dense, experts, kv = before
    starts, stops = np.asarray(starts), np.asarray(stops)

    def token_bytes(firsts: Ints, expert_bytes: Ints) -> Any:
        return dense[stops] - dense[firsts] + expert_share * expert_bytes

    if fixed_layers is None:
        ends = np.unique(stops)
        rooms = np.maximum(0, room - head_bytes * (ends == before.shape[1] - 1))
        table, expert_table = _placed(before, expert_share, rooms, ends)
        at = np.searchsorted(ends, stops)
        firsts = table[starts, at]
        expert_bytes, head = expert_table[firsts, at], firsts < stops
    else:
        firsts = np.clip(stops + 1 - fixed_layers, starts, stops)
        expert_bytes, head = experts[stops] - experts[firsts], np.full(stops.shape, fixed_layers > 0)
    every = np.maximum(token_bytes(starts, experts[stops] - experts[starts]), 1)
    return OnGpu(
        layers=token_bytes(firsts, expert_bytes) / every,
        attention=token_bytes(firsts, experts[stops] - experts[firsts]) / every,
        weights=dense[stops] - dense[firsts] + expert_bytes,
        kv=kv[stops] - kv[firsts],
        head=head.astype(float),
    )


def _placed(before: Ints, expert_share: float, rooms: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Return, for each start and each of the ends, the first layer on the GPU, and the bytes of experts there if this
    layer is the start: [layers + 1, ends]. The first layer is the end if nothing fits.

    before: result of `bytes_before`.
    rooms: bytes of GPU memory for each end.
    """
    dense, experts, kv = before
    firsts = np.arange(len(dense))[:, None]
    dense_bytes, every_expert = (sums[ends] - sums[:, None] for sums in (dense + kv, experts))
    left = rooms - dense_bytes
    fits = (firsts < ends) & (left >= 0)
    expert_bytes = np.where(fits, every_expert, 0)
    short = fits & (every_expert > left)
    if short.any():
        layers = np.diff(experts, prepend=0)
        sizes = np.unique(layers[layers > 0])
        counts = np.cumsum(layers == sizes[:, None], axis=1)  # before each layer
        first, end = np.nonzero(short)
        numbers = fullest_counts(sizes.tolist(), counts[:, ends[end]] - counts[:, first], left[short])
        expert_bytes[short] = sizes @ numbers
    read = np.where(fits, dense_bytes + expert_share * expert_bytes, 0.0)
    most = np.maximum.accumulate(read[::-1])[::-1]  # over this and later first layers
    chosen = np.where((read == most) & (read > 0), firsts, ends)
    return np.minimum.accumulate(chosen[::-1])[::-1], expert_bytes


def fullest_counts(sizes: Sequence[int], counts: Ints, rooms: Ints) -> Ints:
    """Return the number of each size with which the sum is the largest within each room: [sizes, rooms].

    The search is that of `partition.predict.residency.fullest`. If it takes more than `MOST_SUMS` sums, several sizes
    are filled with as many as fit, the largest one first.

    sizes: different sizes above 0.
    counts: largest number of each size, [sizes, rooms].
    rooms: at least 0.
    """
    most = counts.max(axis=1, initial=0).tolist()
    rarest = sorted(range(len(sizes)), key=lambda k: (most[k], sizes[k]))
    n_tried = sum(n <= MOST_SUMS for n in accumulate((most[k] + 1 for k in rarest[:-1]), lambda a, b: a * b))
    tried, filled = rarest[:n_tried], sorted(rarest[n_tried:], key=lambda k: -sizes[k])
    dims = [most[k] + 1 for k in tried]
    choices = np.indices(dims).reshape(n_tried, math.prod(dims), 1)
    chosen = np.zeros_like(counts)
    step = max(1, _CELLS // math.prod(dims))
    for at in range(0, len(rooms), step):
        part = slice(at, at + step)
        left = np.broadcast_to(rooms[part], (math.prod(dims), len(rooms[part])))
        numbers = {k: np.minimum(choice, counts[k, part]) for k, choice in zip(tried, choices, strict=True)}
        for k in [*tried, *filled]:
            numbers.setdefault(k, np.clip(left // sizes[k], 0, counts[k, part]))
            left = left - numbers[k] * sizes[k]
        best = np.where(left < 0, np.iinfo(np.int64).max, left).argmin(axis=0)
        for k, own in numbers.items():
            chosen[k, part] = own[best, np.arange(len(best))]
    return chosen
