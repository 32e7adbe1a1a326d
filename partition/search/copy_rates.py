"""Throughput of one copy of a model on each set of devices: exact for one group, and upper bounds for several stages.

A set of devices is a bit mask of their indices. If device 0, the owner's, is missing, the owner is thin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from partition.plan.plan import LOCAL
from partition.plan.tensor import shards
from partition.predict import cost
from partition.predict.cost import GroupCost
from partition.predict.replicas import join
from partition.search.planner import Planner
from partition.search.stage_group import StageGroup

Array = NDArray[np.float64]


def group_rates(planner: Planner) -> list[Array]:
    """Return the throughput of a copy on each group by its number of requests, [C + 1]; -inf if it is impossible."""
    return [_group_rate(planner, group) for group in planner.groups]


def _group_rate(planner: Planner, group: StageGroup) -> Array:
    work, links = planner.work, planner.links
    rates = np.full(work.concurrency + 1, -np.inf)
    for n in range(1, len(rates)):
        seconds = group.whole_s(n) + sum(cost.answer_s(group.devices, LOCAL, links, n))
        if 0 not in group.members:
            seconds += planner.speeds[0].step_s.at(n) + sum(cost.hop_s(work, (LOCAL,), group.devices, links, n))
        if np.isfinite(seconds):
            rates[n] = n / seconds
    return rates


def most_per_s(planner: Planner) -> float:
    """Return an upper bound on the throughput of all devices together, in any number of copies."""
    requests = range(1, planner.work.concurrency + 1)
    lines = [_lines(planner, n)[1] for n in requests]
    computed = float(np.max([n / layers_s for n, layers_s in zip(requests, lines, strict=True)], axis=0).sum())
    if planner.tensor:
        return computed
    return min(computed, requests[-1] / float(lines[0].min()))  # each request waits for all layers


_BISECTIONS = 20
_TINY, _ENDLESS_S = 1e-9, 1e9


class CopyRates:
    """Rates and bounds for all sets of devices."""

    def __init__(self, planner: Planner, former: CopyRates | None = None) -> None:
        """former: rates of a planner in which the owner's device has more memory. Their bounds are valid here, too."""
        self._planner = planner
        n, most = len(planner.speeds), planner.work.concurrency
        self.whole = (1 << n) - 1
        self._bits = np.array([[mask >> i & 1 for i in range(n)] for mask in range(1 << n)], bool)
        # [masks, C + 1]: best copy on a single group of these devices, and the index of this group.
        self.single = np.full((1 << n, most + 1), -np.inf)
        self.group = np.zeros((1 << n, most + 1), np.int64)
        for index, (group, rates) in enumerate(zip(planner.groups, group_rates(planner), strict=True)):
            mask = sum(1 << i for i in group.members)
            self.single[mask], self.group[mask] = rates, index
        for i in range(n):
            masks = np.flatnonzero(self._bits[:, i])
            better = self.single[masks ^ (1 << i)] > self.single[masks]
            self.single[masks] = np.where(better, self.single[masks ^ (1 << i)], self.single[masks])
            self.group[masks] = np.where(better, self.group[masks ^ (1 << i)], self.group[masks])
        self._possible = (self._bits.sum(axis=1) > 1) & self._has_room()
        # Bounds for several stages, by requests and microbatches.
        self._by_groups: dict[int, dict[int, Array]] = self._bounds_by_groups() if former is None else former._by_groups
        maxima = [np.full(1 << n, -np.inf), *(np.max(list(each.values()), axis=0) for each in self._by_groups.values())]
        several: Array = np.stack(maxima, axis=1) if former is None else former.several
        self.several: Array = np.where(self._possible[:, None], several, -np.inf)  # their maxima, [masks, C + 1]
        self.bound = np.maximum(self.single, self.several)
        # Bounds on the sum of throughputs of any copies on each set, and the sum that single groups reach.
        self.together, self.singles = best_sums(self.bound), best_sums(self.single)

    def of_groups(self) -> CopyRates:
        """Return the rates of copies on single groups only, which are exact."""
        other = copy(self)
        other.several = np.full(self.single.shape, -np.inf)
        other.bound, other.together = self.single, self.singles
        return other

    def latency_s(self) -> Array:
        """Return a lower bound on the latency of a copy on each set, [masks]."""
        _, layers_s, _ = _lines(self._planner, 1)
        alone_s = np.where(self._bits, layers_s, np.inf).min(axis=1, initial=np.inf)
        latency_s: Array = np.minimum(alone_s, self._shared_s(layers_s, 2) + self._sums_s(1))
        return latency_s

    def ttft_s(self) -> Array:
        """Return a lower bound on the time to the first token of a copy on each set, [masks]."""
        prompt = self._planner.work.prompt
        rows = {cost.chunk_rows(prompt, stages) for stages in (1, 2)}
        layers = self._planner.work.before[-1]
        prompts_s = [
            min(float(tier.prompt_s(layers, False, n) - tier.prompt_s(0.0, False, n)) for n in rows for tier in tiers)
            for tiers in _alone(self._planner)
        ]
        return self._least_s(np.array(prompts_s))

    def microbatches(self, mask: int, requests: int) -> list[tuple[float, int]]:
        """Return the numbers of microbatches, each behind its upper bound of copies with several stages, best first."""
        bounds = self._by_groups[requests].items()
        return sorted(((float(values[mask]), groups) for groups, values in bounds), reverse=True)

    def _bounds_by_groups(self) -> dict[int, dict[int, Array]]:
        """Return the upper bounds for several stages, by the numbers of requests and of microbatches."""
        hops_s, by_groups = self._least_hops_s(), {}
        for requests in range(1, self._planner.work.concurrency + 1):
            powers = (1 << i for i in range(requests.bit_length()))
            counts = {cost.groups(requests, groups) for groups in (*powers, requests)}
            by_groups[requests] = {groups: self._bounds(requests, groups, hops_s) for groups in sorted(counts)}
        return by_groups

    def _bounds(self, requests: int, groups: int, hops_s: Array) -> Array:
        """Return upper bounds on the throughput of copies with several stages, [masks].

        hops_s: least latency of all hops of a pass, [masks].

        Device i takes L seconds for all layers, H for the head and s for a step of b rows. If it does the part f of the
        work, it is busy for s + f L (1 + h) or more, and h is the least H / L of the devices. This is at most b / rate,
        and all parts sum to 1. Also rate <= requests / pass, and a pass takes all hops and all layers.
        """
        rows = requests / groups
        step_s, layers_s, head_s = _lines(self._planner, rows)
        order = np.argsort(step_s)
        bits = self._bits[:, order]
        ratio = np.where(self._bits, head_s / layers_s, np.inf).min(axis=1, initial=np.inf)
        ratio = np.where(np.isfinite(ratio), ratio, 0.0)
        work_s = layers_s[order] * (1 + ratio[:, None])
        speed = np.cumsum(bits / work_s, axis=1)
        lost = np.cumsum(bits * step_s[order] / work_s, axis=1)
        most: Array = (rows * speed / (1 + lost)).max(axis=1)
        steps_s = 2 * np.where(self._bits, step_s, np.inf).min(axis=1, initial=np.inf)
        steps_s += np.where(self._bits[:, 0], 0.0, step_s[0])
        fixed_s = hops_s + steps_s + self._least_s(head_s, least_ranks=3)
        # The fastest devices do as much as their busy time permits. All devices together may do the rest.
        order = np.argsort(layers_s)
        bits, own_s = self._bits[:, order], layers_s[order]
        shared_s = self._shared_s(layers_s, 3) + self._sums_s(rows)
        least = np.zeros(len(most))
        for _ in range(_BISECTIONS):
            rate = (least + most) / 2
            room = np.maximum(0.0, bits * (rows / np.maximum(rate, 1e-12)[:, None] - step_s[order]))
            room = np.where(own_s <= shared_s[:, None], room, 0.0)
            before = np.cumsum(room / own_s, axis=1) - room / own_s
            parts = np.clip(1 - before, 0.0, room / own_s)
            rest = np.maximum(0.0, 1 - parts.sum(axis=1))
            pass_s = fixed_s + parts @ own_s + np.where(rest > _TINY, rest, 0.0) * np.minimum(shared_s, _ENDLESS_S)
            can = pass_s <= requests / np.maximum(rate, _TINY)
            least, most = np.where(can, rate, least), np.where(can, most, rate)
        return most

    def _least_s(self, seconds: Array, least_ranks: int = 2) -> Array:
        """Return the least seconds of a pass through work that these devices may share, [masks].

        seconds: time of each device alone.
        least_ranks: fewest devices that share work; 3 if there are several stages, which leave out one of two devices.
        """
        alone = np.where(self._bits, seconds, np.inf).min(axis=1, initial=np.inf)
        least_s: Array = np.minimum(alone, self._shared_s(seconds, least_ranks))
        return least_s

    def _shared_s(self, seconds: Array, least_ranks: int) -> Array:
        """Return the seconds of a pass if all these devices share the work, without sums; inf if they cannot."""
        rates = (self._bits / np.maximum(seconds, 1e-12)).sum(axis=1)
        can = (self._bits.sum(axis=1) >= least_ranks) & self._planner.tensor
        shared_s: Array = np.where(can, 1 / np.maximum(rates, 1e-12), np.inf)
        return shared_s

    def _sums_s(self, rows: float) -> Array:
        """Return the least seconds of all sums over ranks in a pass through all layers, [masks]."""
        work, n = self._planner.work, len(self._planner.speeds)
        fastest = np.full((n, n), np.inf)
        for a, b in permutations(range(n), 2):
            way = self._planner.links.slowest([self._planner.speeds[i].device for i in (a, b)])
            fastest[a, b] = min(work.sum_s(rows, ranks, way.latency_s, way.bytes_per_s) for ranks in range(2, n + 1))
        sums_s = np.zeros(len(self._bits))
        for mask, bits in enumerate(self._bits):
            inside = np.flatnonzero(bits)
            if len(inside) > 1:
                sums_s[mask] = fastest[np.ix_(inside, inside)].min()
        return work.limits.sums_a_layer * work.before[-1] * sums_s

    def _least_hops_s(self) -> Array:
        """Return the least latency of all hops of a pass through two stages, [masks]."""
        devices, links = [speed.device for speed in self._planner.speeds], self._planner.links
        n = len(devices)
        latency_s = np.full((n, n), np.inf)
        for a, b in permutations(range(n), 2):
            latency_s[a, b] = links.get(devices[a], devices[b]).latency_s
        between = latency_s.copy()
        between[:, 0] = np.inf  # the owner is in the first stage
        hops_s = np.zeros(len(self._bits))
        for mask, bits in enumerate(self._bits):
            inside = np.flatnonzero(bits)
            others = inside[inside > 0]
            if len(inside) > 1:
                enter = 0.0 if bits[0] else latency_s[0, others].min()
                hops_s[mask] = enter + between[np.ix_(inside, inside)].min() + latency_s[others, 0].min()
        return hops_s

    def _has_room(self) -> NDArray[np.bool_]:
        """Return which sets have enough memory for the model, or a device that pages, [masks]."""
        enough: NDArray[np.bool_] = np.where(self._bits, rooms(self._planner), 0.0).sum(axis=1) >= need(self._planner)
        return enough


def need(planner: Planner) -> float:
    """Return the bytes of a copy on all its devices, without runtimes."""
    work = planner.work
    return work.weights_before[-1] + work.kv_before[-1] + work.shape.head_bytes


def rooms(planner: Planner) -> list[float]:
    """Return the bytes that each device can hold of a model; inf if it pages."""
    return [math.inf if s.disk_bytes_per_s else s.room_bytes for s in planner.speeds]


def best_sums(rates: Array) -> Array:
    """Return the largest sum of throughputs of any copies on each set, [masks, C + 1]. rates: those of one copy."""
    best = np.full(rates.shape, -np.inf)
    best[0, 0] = 0.0
    for mask in range(1, len(best)):
        rest = mask & (mask - 1)
        best[mask] = best[rest]
        for others in subsets(rest):  # devices that are not in the copy of the lowest device
            np.maximum(best[mask], join(best[others], rates[mask ^ others])[0], out=best[mask])
    return best


def subsets(mask: int) -> Iterator[int]:
    """Yield all subsets of a mask, including itself and 0."""
    subset = mask
    while True:
        yield subset
        if not subset:
            return
        subset = (subset - 1) & mask


def _alone(planner: Planner) -> list[list[GroupCost]]:
    """Return the costs of each device alone, with all layers on the processor and with all layers on its GPU."""
    work, links = planner.work, planner.links
    return [
        [GroupCost(work, [tier], shards(work.limits, (tier.device,), (1.0,)), links) for tier in speed.tiers]
        for speed in planner.speeds
    ]


def _lines(planner: Planner, rows: float) -> tuple[Array, Array, Array]:
    """Return the least seconds of a step, of all layers and of the head on each device, for this many rows."""
    layers, parts = planner.work.before[-1], []
    for tiers in _alone(planner):
        lines = []
        for tier in tiers:
            step_s = tier.seconds(0.0, rows, False)
            lines.append((step_s, tier.seconds(layers, rows, False) - step_s, tier.seconds(0.0, rows, True) - step_s))
        parts.append(np.min(lines, axis=0))
    step_s, layers_s, head_s = np.array(parts).T
    return step_s, np.maximum(layers_s, 1e-12), head_s
