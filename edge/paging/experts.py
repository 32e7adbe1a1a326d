"""Experts in memory: those used last stay, the others come when the router has chosen them, or is expected to.

All experts lie in slots of one piece of memory. A weight with all experts of a layer points to the first slot, and its
product is given numbers of slots in place of numbers of experts. What a layer will choose is predicted before its
attention is computed, where reading ahead pays.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge.llama.address_space import PAGE, AddressSpace
from edge.llama.buffers import Weight
from edge.paging.reader import Job, Reader
from edge.paging.window import Piece
from partition.predict.hysteresis import READ_AHEAD, clearly_better

Expert = tuple[int, int]
"""(layer, number in the layer)."""


class ExpertCounts(NamedTuple):
    """Counts of the router's choices since the experts were made, or between two readings."""

    chosen: int = 0  # experts a layer's rows needed, each once a pass
    hits: int = 0  # of these, in memory when they were chosen
    expected: int = 0  # experts that were expected to be chosen
    right: int = 0  # of these, chosen


class _Bank:
    """One weight with all experts of a layer, and where in a slot its part of an expert lies."""

    def __init__(self, piece: Piece, start: int) -> None:
        self.piece = piece
        self.n_bytes = piece.n_bytes // piece.weight.shape[0]  # of one expert
        # Read in place where every expert is as far into a page in memory as it is in the file.
        self.start = start + (0 if piece.repacked or self.n_bytes % PAGE else piece.offset % PAGE)

    def read(self, number: int, slot: int, arena: AddressSpace) -> Job:
        piece, offset = self.piece, self.piece.offset + number * self.n_bytes
        return Job(piece.weight, piece.file, offset, self.n_bytes, arena, slot + self.start, piece.repacked)


@dataclass(eq=False, slots=True)
class _Cached:
    """An expert that has a slot, and the jobs that bring it there, one for each weight; none when all is there."""

    slot: int
    jobs: list[Job]

    def arrived(self) -> bool:
        if self.jobs and all(job.left == 0 and job.error is None for job in self.jobs):
            self.jobs = []
        return not self.jobs


class Experts:
    """LRU cache of a model's experts, in slots of one size. A product finds an expert by the number of its slot."""

    def __init__(self, layers: Mapping[int, Sequence[Piece]], room: int, reader: Reader) -> None:
        """layers: the weights with experts of each layer, in the order of use. room: bytes, at least for the experts of
        a layer that one pass chooses, and as many that are expected."""
        self._slot_bytes = max(map(self.expert_bytes, layers.values()))
        self.n_slots = room // self._slot_bytes
        self._arena = AddressSpace(self.n_slots * self._slot_bytes, huge=True)
        self._banks = {layer: self._place(banks) for layer, banks in layers.items()}
        self._reader = reader
        self._cached: OrderedDict[Expert, _Cached] = OrderedDict()  # the one used longest ago first
        self._free = list(range(self.n_slots))[::-1]
        self._expected: dict[int, set[int]] = {}
        self._coming: list[_Cached] = []  # of the experts that were chosen last, those that were not there
        self._chosen = self._hits = self._n_expected = self._right = 0

    @staticmethod
    def expert_bytes(pieces: Sequence[Piece]) -> int:
        """Memory one expert of a layer takes."""
        return sum(_span(piece.weight) for piece in pieces)

    @property
    def counts(self) -> ExpertCounts:
        """Return the counts of choices since the experts were made."""
        return ExpertCounts(self._chosen, self._hits, self._n_expected, self._right)

    def choose(self, layer: int, numbers: Collection[int]) -> dict[int, int]:
        """Begin to bring these experts of a layer into memory, and return the slot of each. `wait` for them."""
        slots, missing = {}, []
        coming = self._coming = []
        for number in numbers:
            expert = layer, number
            cached = self._cached.get(expert)
            if cached is not None and cached.jobs and any(job.error for job in cached.jobs):  # read in a bad moment
                self._drop(expert)
                cached = None
            if cached is None:
                missing.append(expert)
                continue
            self._cached.move_to_end(expert)
            slots[number] = cached.slot
            if not cached.arrived():
                coming.append(cached)
        self._chosen += len(numbers)
        self._hits += len(slots) - len(coming)
        if layer in self._expected:
            expected = self._expected.pop(layer)
            self._n_expected += len(expected)
            self._right += len(expected.intersection(numbers))
        if missing:
            for expert, cached in self._make_room(missing, keep={(layer, number) for number in slots}):
                slots[expert[1]] = cached.slot
                coming.append(cached)
        if coming:
            self._read(coming, urgent=True)
        return slots

    def arrived(self, bank: int) -> bool:
        """Return whether the weights with this number of all chosen experts are in memory."""
        return all(cached.jobs[bank].done for cached in self._coming)

    def wait(self, bank: int) -> None:
        """Wait until the weights with this number of all chosen experts are in memory. WeightsError."""
        for cached in self._coming:
            self._reader.wait(cached.jobs[bank])

    def expect(self, layer: int, numbers: Collection[int]) -> None:
        """Prefetch these experts of a layer, which are likely to be chosen soon."""
        self._expected[layer] = set(numbers)
        expected = [(layer, number) for number in numbers]
        missing = [expert for expert in expected if expert not in self._cached]
        if missing:
            for expert in expected:
                if expert in self._cached:
                    self._cached.move_to_end(expert)
            self._read([cached for _, cached in self._make_room(missing, keep=set(expected))], urgent=False)

    def close(self) -> None:
        """Free all memory."""
        for expert in list(self._cached):
            self._drop(expert)
        for bank in (bank for banks in self._banks.values() for bank in banks):
            bank.piece.weight.join_matrices()
        self._arena.close()

    def _place(self, pieces: Sequence[Piece]) -> list[_Bank]:
        """Let the weights of a layer lie behind each other in every slot."""
        placed, start = [], 0
        for piece in pieces:
            bank = _Bank(piece, start)
            piece.weight.spread_matrices(self._slot_bytes, self.n_slots)
            piece.weight.point(self._arena.address + bank.start, piece.repacked)
            placed.append(bank)
            start += _span(piece.weight)
        return placed

    def _make_room(self, missing: Sequence[Expert], keep: Collection[Expert]) -> list[tuple[Expert, _Cached]]:
        """Give the missing experts slots, in place of the least recently used ones."""
        n = max(0, len(missing) - len(self._free))
        for expert in list(islice((expert for expert in self._cached if expert not in keep), n)):
            self._drop(expert)
        new = []
        for expert in missing:
            slot = self._free.pop()
            jobs = [bank.read(expert[1], slot * self._slot_bytes, self._arena) for bank in self._banks[expert[0]]]
            self._cached[expert] = cached = _Cached(slot, jobs)
            new.append((expert, cached))
        return new

    def _read(self, coming: Sequence[_Cached], *, urgent: bool) -> None:
        """Begin to read experts of a layer: first the weight that is multiplied first, of all of them."""
        self._reader.submit_all([job for jobs in zip(*(c.jobs for c in coming), strict=True) for job in jobs], urgent)

    def _drop(self, expert: Expert) -> None:
        cached = self._cached[expert]
        self._reader.drop(*cached.jobs)
        del self._cached[expert]  # not before: a read that hangs may still write there
        self._free.append(cached.slot)


def _span(weight: Weight) -> int:
    """Bytes of whole pages that a read of one expert's part of a weight may write to, wherever in a page it begins."""
    return (weight.n_bytes // weight.shape[0] // PAGE + 1) * PAGE


MOST_ROWS = 4  # of a batch that a prediction is made for; more rows choose nearly all experts
_RUN, _TRIED, _STAYS = 4, 32, 1024  # passes

Floats = NDArray[np.float32]


class ReadAhead:
    """Chooses by measurement if experts are read ahead: passes alternate both ways, and the faster one stays a while.

    What is read ahead hides behind attention. Predicting costs time, too, and what was expected and is not chosen takes
    the disk's time and the place of another expert.
    """

    def __init__(self) -> None:
        self.on = True
        self._seconds: dict[bool, list[float]] = {True: [], False: []}
        self._left = 0  # passes until both ways are tried again

    def passed(self, seconds: float) -> None:
        """Add the time of a pass of one row, and choose how the next one reads."""
        if self._left:
            self._left -= 1
            return
        self._seconds[self.on].append(seconds)
        n = sum(map(len, self._seconds.values()))
        self.on = n // _RUN % 2 == 0  # in runs, as the first pass of one has what the other way left in memory
        if n == _TRIED:
            with_, without = (statistics.median(self._seconds[on]) for on in (True, False))
            self.on = clearly_better(with_, without, by=READ_AHEAD)
            self._seconds, self._left = {True: [], False: []}, _STAYS


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
