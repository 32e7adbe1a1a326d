"""Experts in memory: those used last stay, the others come when the router has chosen them, or is expected to.

All experts lie in slots of one piece of memory. A weight with all experts of a layer points to the first slot, and its
product is given numbers of slots in place of numbers of experts.

Which experts a layer will choose, predicted before its attention is computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from edge.llama.address_space import PAGE, AddressSpace, pages
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
    """One weight with all experts of a layer, and where in a slot its part of an expert lies."""

    def __init__(self, weight: Weight, source: Source, repacked: bool, start: int) -> None:
        self.weight, self.source, self.repacked = weight, source, repacked
        self.n_bytes = weight.n_bytes // weight.shape[0]  # of one expert
        # Read in place where every expert is as far into a page in memory as it is in the file.
        self.start = start + (0 if repacked or self.n_bytes % PAGE else source.offset % PAGE)

    def read(self, number: int, slot: int, arena: AddressSpace) -> Job:
        offset = self.source.offset + number * self.n_bytes
        return Job(self.weight, self.source.file, offset, self.n_bytes, arena, slot + self.start, self.repacked)


class Experts:
    """LRU cache of a model's experts, in slots of one size. A product finds an expert by the number of its slot."""

    def __init__(self, layers: Mapping[int, Sequence[tuple[Weight, Source, bool]]], room: int, reader: Reader) -> None:
        """layers: the weights with experts of each layer, in the order of use, each with whether it is repacked. room:
        bytes, at least for the experts of a layer that one pass chooses, and as many that are expected."""
        self._slot_bytes = max(self.expert_bytes([weight for weight, *_ in banks]) for banks in layers.values())
        self.n_slots = room // self._slot_bytes
        self._arena = AddressSpace(self.n_slots * self._slot_bytes, huge=True)
        self._banks = {layer: self._place(banks) for layer, banks in layers.items()}
        self._reader = reader
        self._cached: OrderedDict[Expert, tuple[int, list[Job]]] = OrderedDict()  # (slot, a job a bank), oldest first
        self._free = list(range(self.n_slots))[::-1]
        self._expected: dict[int, set[int]] = {}
        self._chosen: list[Expert] = []  # of the layer that computes
        self.counts = ExpertCounts()

    @staticmethod
    def expert_bytes(banks: Sequence[Weight]) -> int:
        """Memory one expert of a layer takes."""
        return sum(_span(weight) for weight in banks)

    def choose(self, layer: int, numbers: Collection[int]) -> dict[int, int]:
        """Begin to bring these experts of a layer into memory; return the slot of each. `wait` for them."""
        needed = [(layer, number) for number in sorted(numbers)]
        for expert in needed:
            if any(job.error for job in self._jobs(expert)):  # read ahead in a bad moment
                self._drop(expert)
        missing = [expert for expert in needed if expert not in self._cached]
        expected = self._expected.pop(layer, set())
        self.counts += ExpertCounts(
            chosen=len(needed),
            hits=sum(expert in self._cached and all(job.left == 0 for job in self._jobs(expert)) for expert in needed),
            expected=len(expected),
            right=len(expected & set(numbers)),
        )
        for expert in needed:
            if expert in self._cached:
                self._cached.move_to_end(expert)
        self._make_room(missing, keep=set(needed))
        self._chosen = needed
        # What is multiplied first is read first.
        jobs = [self._jobs(expert)[i] for i in range(len(self._banks[layer])) for expert in needed]
        self._reader.submit_all(jobs, urgent=True)
        return {number: self._cached[layer, number][0] for number in numbers}

    def arrived(self, bank: int) -> bool:
        """Return whether the chosen experts' parts of their layer's weight with this number are in memory."""
        return all(self._cached[expert][1][bank].done for expert in self._chosen)

    def wait(self, bank: int) -> None:
        """Return when they are. WeightsError if they cannot be read."""
        for expert in self._chosen:
            self._reader.wait(self._cached[expert][1][bank])

    def expect(self, layer: int, numbers: Collection[int], *, read: bool) -> None:
        """Prefetch these experts of a layer, which are likely to be chosen soon. read: begin to read those that are not
        there."""
        self._expected[layer] = set(numbers)
        if not read:
            return
        expected = [(layer, number) for number in sorted(numbers)]
        for expert in expected:
            if expert in self._cached:
                self._cached.move_to_end(expert)
        missing = [expert for expert in expected if expert not in self._cached]
        self._make_room(missing, keep=set(expected))
        jobs = [self._jobs(expert)[i] for i in range(len(self._banks[layer])) for expert in missing]
        self._reader.submit_all(jobs, urgent=False)

    def close(self) -> None:
        """Free all memory; the reader must have been closed."""
        self._cached.clear()
        self._arena.close()

    def _place(self, banks: Sequence[tuple[Weight, Source, bool]]) -> list[_Bank]:
        """Let the weights of a layer lie behind each other in every slot."""
        placed, start = [], 0
        for weight, source, repacked in banks:
            bank = _Bank(weight, source, repacked, start)
            weight.point(self._arena.address + bank.start, repacked)
            weight.spread_matrices(self._slot_bytes, self.n_slots)
            placed.append(bank)
            start += _span(weight)
        return placed

    def _jobs(self, expert: Expert) -> Sequence[Job]:
        return self._cached[expert][1] if expert in self._cached else ()

    def _make_room(self, missing: Sequence[Expert], keep: Collection[Expert]) -> None:
        """Give the missing experts slots, in place of the least recently used ones."""
        n = max(0, len(missing) - len(self._free))
        for expert in list(islice((expert for expert in self._cached if expert not in keep), n)):
            self._drop(expert)
        for expert in missing:
            slot = self._free.pop()
            banks = self._banks[expert[0]]
            self._cached[expert] = slot, [bank.read(expert[1], slot * self._slot_bytes, self._arena) for bank in banks]

    def _drop(self, expert: Expert) -> None:
        slot, jobs = self._cached.pop(expert)
        for job in jobs:
            if not job.done or job.error:
                self._reader.drop(job)
        self._free.append(slot)


def _span(weight: Weight) -> int:
    """Whole pages that one expert's part of a weight takes, wherever in a page it begins."""
    n_bytes = weight.n_bytes // weight.shape[0]
    return pages(n_bytes) + (0 if n_bytes % PAGE else PAGE)


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
