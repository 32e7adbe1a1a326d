"""Experts in memory: the hot ones stay, the others come when the router has chosen them, or is expected to.

A weight with all experts of a layer keeps its full range of addresses. Only the experts that are held take memory.

Which experts a layer will choose, predicted before its attention is computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edge.llama.address_space import AddressSpace, pages
from edge.llama.buffers import Weight
from edge.paging.reader import Job, Reader
from edge.paging.window import Source

Expert = tuple[int, int]
"""(layer, number in the layer)."""


@dataclass(frozen=True)
class ExpertCounts:
    """Counts of the router's choices since the experts were made, or between two readings."""

    chosen: int = 0  # experts a layer's rows needed, each once a pass
    hits: int = 0  # of these, in memory when they were chosen
    expected: int = 0  # experts that were expected to be chosen
    right: int = 0  # of these, chosen

    def __add__(self, other: ExpertCounts) -> ExpertCounts:
        return ExpertCounts(
            self.chosen + other.chosen,
            self.hits + other.hits,
            self.expected + other.expected,
            self.right + other.right,
        )

    def __sub__(self, before: ExpertCounts) -> ExpertCounts:
        return ExpertCounts(
            self.chosen - before.chosen,
            self.hits - before.hits,
            self.expected - before.expected,
            self.right - before.right,
        )


class _Bank:
    """One weight with all experts of a layer."""

    def __init__(self, weight: Weight, source: Source, repacked: bool) -> None:
        self.weight, self.source, self.repacked = weight, source, repacked
        self.n_experts, rows, _ = weight.shape
        self.n_bytes = rows * weight.row_bytes  # of one expert
        self.stride = pages(self.n_bytes)  # whole pages, so that one can go without its neighbours
        self.space = AddressSpace(self.stride * self.n_experts)
        weight.spread_matrices(self.stride)
        weight.point(self.space.address, repacked)

    def read(self, number: int) -> Job:
        offset = self.source.offset + number * self.n_bytes
        start = number * self.stride
        return Job(self.weight, self.source.file, offset, self.n_bytes, self.space, start, self.repacked)

    def release(self, number: int) -> None:
        self.space.release(number * self.stride, (number + 1) * self.stride)


class Experts:
    """LRU cache of a model's experts: as many as there is room for are in memory."""

    def __init__(self, layers: Mapping[int, Sequence[tuple[Weight, Source, bool]]], room: int, reader: Reader) -> None:
        """layers: the weights with experts of each layer, each with whether it is repacked. room: bytes, at least for
        the experts of a layer that one pass chooses, and as many that are expected."""
        self._banks = {layer: [_Bank(*entry) for entry in banks] for layer, banks in layers.items()}
        self._reader = reader
        self._room = room
        self._cached: OrderedDict[Expert, list[Job]] = OrderedDict()  # the one used longest ago first
        self.held_bytes = 0  # memory they take
        self._expected: dict[int, set[int]] = {}
        self.counts = ExpertCounts()

    @staticmethod
    def expert_bytes(banks: Sequence[Weight]) -> int:
        """Memory one expert of a layer takes."""
        return sum(pages(weight.n_bytes // weight.shape[0]) for weight in banks)

    def choose(self, layer: int, numbers: Collection[int]) -> None:
        """Bring these experts of a layer into memory, and wait for them. WeightsError if they cannot be read."""
        needed = [(layer, number) for number in sorted(numbers)]
        for expert in needed:
            if any(job.error for job in self._cached.get(expert, ())):  # read ahead in a bad moment
                self._drop(expert)
        missing = [expert for expert in needed if expert not in self._cached]
        expected = self._expected.pop(layer, set())
        self.counts = replace(
            self.counts,
            chosen=self.counts.chosen + len(needed),
            hits=self.counts.hits + sum(expert in self._cached and self._arrived(expert) for expert in needed),
            expected=self.counts.expected + len(expected),
            right=self.counts.right + len(expected & set(numbers)),
        )
        for expert in needed:
            if expert in self._cached:
                self._cached.move_to_end(expert)
                for job in self._cached[expert]:
                    self._reader.prioritize(job)
        for expert in missing:
            self._bring(expert, keep=set(needed), urgent=True)
        for expert in needed:
            try:
                for job in self._cached[expert]:
                    self._reader.wait(job)
            except BaseException:
                for failed in needed:  # who tries again gets another read
                    self._drop(failed)
                raise

    def expect(self, layer: int, numbers: Collection[int], *, read: bool) -> None:
        """Prefetch these experts of a layer, which are likely to be chosen soon. read: begin to read those that are not
        there."""
        self._expected[layer] = set(numbers)
        if not read:
            return
        expected = {(layer, number) for number in numbers}
        for expert in expected:
            if expert in self._cached:
                self._cached.move_to_end(expert)
        for expert in sorted(expected):
            if expert not in self._cached:
                self._bring(expert, keep=expected, urgent=False)

    def close(self) -> None:
        """Free all memory."""
        for expert in list(self._cached):
            self._drop(expert)
        for banks in self._banks.values():
            for bank in banks:
                bank.weight.spread_matrices(bank.n_bytes)  # without gaps again
                bank.space.close()

    def _size(self, layer: int) -> int:
        return sum(bank.stride for bank in self._banks[layer])

    def _arrived(self, expert: Expert) -> bool:
        return all(job.left == 0 for job in self._cached[expert])

    def _bring(self, expert: Expert, keep: Collection[Expert], urgent: bool) -> None:
        """Begin to read an expert in place of the least recently used ones."""
        size = self._size(expert[0])
        for other in list(self._cached):
            if self.held_bytes + size <= self._room:
                break
            if other not in keep:
                self._drop(other)
        self._cached[expert] = jobs = [bank.read(expert[1]) for bank in self._banks[expert[0]]]
        self.held_bytes += size
        for job in jobs:
            self._reader.submit(job, urgent=urgent)

    def _drop(self, expert: Expert) -> None:
        if expert not in self._cached:
            return
        for job in self._cached.pop(expert):
            self._reader.drop(job)
        self.held_bytes -= self._size(expert[0])
        for bank in self._banks[expert[0]]:
            bank.release(expert[1])


MOST_ROWS = 4  # of a batch that a prediction is made for; more rows choose nearly all experts

Floats = NDArray[np.float32]


class Router:
    """The router of one layer, applied to what the layer before has put out.

    Attention adds little to a hidden state, so the router mostly chooses the same before and after it. The norm before
    the router is applied without its division, which changes no order. A router that comes before attention chooses
    just these.
    """

    def __init__(self, weights: Floats, norm: Floats | None, used: int) -> None:
        """weights: [experts, n_embd]; norm: [n_embd]; used: experts a token passes."""
        self._weights = np.ascontiguousarray(weights if norm is None else weights * norm)
        self._used = used

    def expect(self, hidden: Floats) -> set[int]:
        """Numbers of the experts that rows [n, n_embd] are likely to choose."""
        scores = hidden @ self._weights.T
        return set(np.argpartition(scores, -self._used, axis=1)[:, -self._used :].ravel().tolist())
