"""Bounds on the performance of a cluster from its devices alone. No plan that uses all of its devices can be better.

In stages of one device each, every device has a layer. A device takes at most as many layers as fit into its memory,
and the fastest devices take the others.

If devices may share layers, one device takes w seconds for a layer, and a group of g devices takes at least c + s/(r1 +
... + rg) + A(g). Here r is a device's rate in layers per second of the shareable part, s is the shareable part of a
layer, c is the time of the part that each device computes, and A is the time of the layer's all-reduces. So each device
has a least time per layer, in the best group around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

from partition.plan.plan import Range
from partition.plan.tensor import attention_bytes
from partition.predict.cost import Work
from partition.predict.speeds import DeviceSpeed, LinkSpeed
from partition.search.clusters import Members

_LEAST_S = 1e-12
_ROUNDED = 1e-9  # layers that rounding may leave


class Bound(NamedTuple):
    """Least seconds of any plan, and the largest capacity."""

    latency_s: float  # per token of a lone request; inf if the model does not fit
    ttft_s: float
    capacity_per_s: float  # requests per second


class ClusterBounds:
    """Bounds for clusters of given kinds of devices. All pairs of devices have the same link, and no device pages."""

    def __init__(self, work: Work, kinds: Sequence[DeviceSpeed], link: LinkSpeed, *, tokens: int, tensor: bool) -> None:
        """kinds: speeds of each kind of device.
        tokens: generated tokens of a request.
        tensor: True if devices may share layers.
        """
        limits = work.limits
        self._work, self._kinds, self._tokens = work, kinds, tokens
        self._layers, self._ranks = work.before[-1], limits.most_ranks if tensor else 1
        self._shared = 1.0
        if limits.shares_heads:
            average = sum(limits.layer_bytes) / len(limits.layer_bytes)
            whole = attention_bytes(limits, Range(0, limits.sizes.heads)) + limits.sizes.ff * limits.ff_bytes
            self._shared = min(1.0, whole / average)
        units = [after - before for before, after in pairwise(work.before)]
        layer_bytes = [after - before for before, after in pairwise(work.weights_before)]
        shared_bytes = self._shared * min(n / unit for n, unit in zip(layer_bytes, units, strict=True))
        self._least_units = min(units)
        self.needed_bytes = self._shared * work.weights_before[-1] + work.kv_before[-1] + work.shape.head_bytes
        self._room = [max(0, kind.memory_bytes - kind.runtime_bytes) for kind in kinds]
        # Layers that fit into memory if they are shared.
        self._most_shared = [room / shared_bytes for room in self._room]
        self._most_alone = [self._most_layers(room) for room in self._room]
        self._whole = [kind.layer_s.at(1) + work.depth * kind.token_s for kind in kinds]
        self._own = [kind.part_s(0.0, 1) for kind in kinds]
        self._rate = [1 / self._slope(kind, 1) for kind in kinds]
        self._prompt_rate = [1 / self._slope(kind, work.prompt) for kind in kinds]
        self._answer_rate = [1 / self._answer_s(kind) for kind in kinds]
        self._hop_s = link.latency_s + work.state_bytes(1) / link.bytes_per_s
        self._back_s = link.latency_s
        self._sums_s = [
            limits.sums_a_layer * work.sum_s(1, n, link.latency_s, link.bytes_per_s) if n > 1 else 0.0
            for n in range(65)
        ]

    def _most_layers(self, room: int) -> float:
        """Return the largest run of layers that fits into `room` bytes."""
        work, most, start = self._work, 0.0, 0
        needs = [weights + kv for weights, kv in zip(work.weights_before, work.kv_before, strict=True)]
        for stop in range(1, len(needs)):
            while needs[stop] - needs[start] > room:
                start += 1
            most = max(most, work.before[stop] - work.before[start])
        return most

    def bound(self, members: Members, *, groups: bool) -> Bound:
        """Return the bound for plans that use all of these devices. groups: True if devices may share layers."""
        latency_s = inf
        if sum(self._room[kind] for kind in members) >= self.needed_bytes:
            latency_s = self._shared_s(members) if groups and self._ranks > 1 else self._stages_s(members)
        layers = self._layers * self._shared
        # All devices compute the prompt at the same time.
        ttft_s = layers / sum(self._prompt_rate[kind] for kind in members)
        in_turn_s = max(_LEAST_S, (self._tokens - 1) * latency_s)
        busy = sum(self._answer_rate[kind] for kind in members) / layers
        return Bound(latency_s, ttft_s, min(busy, self._work.concurrency / in_turn_s))

    def _stages_s(self, members: Members) -> float:
        """Return the least seconds of a token with one device per stage."""
        n = len(members)
        least = sorted((self._whole[kind], self._most_alone[kind] - self._least_units) for kind in members)
        if least and min(most for _, most in least) < -_LEAST_S:
            return inf  # a device has no room for a single layer
        stages_s = self._least_units * sum(layer_s for layer_s, _ in least)
        stages_s += _filled(least, self._layers - n * self._least_units)
        head_s = min(self._kinds[kind].head_s.at(1) for kind in members)
        step_s = sum(self._kinds[kind].step_s.at(1) for kind in members)
        return step_s + stages_s + (n - 1) * self._hop_s + (self._back_s if n > 1 else 0.0) + head_s

    def _shared_s(self, members: Members) -> float:
        """Return the least seconds of a token with any stages: all devices in one group, or several stages."""
        least = sorted((self._layer_s(members, i), self._most_shared[kind]) for i, kind in enumerate(members))
        stages_s = _filled(least, self._layers)
        step_s = min(self._kinds[kind].step_s.at(1) for kind in members)
        if len(members) > 1:
            one_group_s = self._layers * self._group_s(members, len(members), sum(self._rate[i] for i in members))
            stages_s = min(one_group_s, stages_s + self._hop_s + self._back_s + step_s)
        head_s = 1 / sum(1 / max(self._kinds[kind].head_s.at(1), _LEAST_S) for kind in members)
        return step_s + stages_s + head_s

    def _layer_s(self, members: Members, i: int) -> float:
        """Return the least seconds of a layer in which a device takes part."""
        own = self._rate[members[i]]
        others = sorted((self._rate[kind] for j, kind in enumerate(members) if j != i), reverse=True)
        best = self._whole[members[i]]
        for n, rate in enumerate(others, 2):
            own += rate
            best = min(best, self._group_s(members, n, own))
        return best

    def _group_s(self, members: Members, n: int, rate: float) -> float:
        """Return the least seconds of a layer in a group of `n` members. rate: layers per second of the group."""
        if n > self._ranks:
            return inf
        return min(self._own[kind] for kind in members) + self._shared / rate + self._sums_s[n]

    def _answer_s(self, kind: DeviceSpeed) -> float:
        """Return the seconds that a device computes for one layer of a request: its prompt, and each token after the
        first.

        The number of concurrent requests is the one with the least time per token.
        """
        rows = range(1, self._work.concurrency + 1)
        decode_s = min(self._slope(kind, n) / n for n in rows)
        return self._slope(kind, self._work.prompt) + (self._tokens - 1) * decode_s

    def _slope(self, kind: DeviceSpeed, rows: float) -> float:
        """Return the seconds of the shareable part of a layer."""
        return max(_LEAST_S, kind.part_line_s(rows)[1])


def _filled(least: Sequence[tuple[float, float]], layers: float) -> float:
    """Return the seconds of `layers` layers on the fastest devices.

    least: (seconds per layer, most layers), fastest first.
    """
    seconds = 0.0
    for layer_s, most in least:
        n_layers = min(layers, most)
        seconds += n_layers * layer_s
        layers -= n_layers
    return inf if layers > _ROUNDED else seconds
