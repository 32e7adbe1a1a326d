"""Cache of experts in memory: the most recently used experts stay, and an expert is read when the router chooses it.

All experts lie in slots of one piece of memory. A weight with all experts of a layer points to the first slot, and its
product gets the numbers of slots instead of the numbers of experts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from edge.llama.address_space import PAGE, AddressSpace
from edge.llama.buffers import Weight
from edge.weights.reader import Job, Reader
from edge.weights.window import Piece

Expert = tuple[int, int]
"""(layer, number in the layer)."""


class ExpertCounts(NamedTuple):
    """Counts of the router's choices since the experts were made, or between two readings."""

    chosen: int = 0  # experts a layer's rows needed, each once a pass
    hits: int = 0  # of these, in memory when they were chosen


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
        a layer that one pass chooses."""
        self._slot_bytes = max(map(self.expert_bytes, layers.values()))
        self.n_slots = room // self._slot_bytes
        self._arena = AddressSpace(self.n_slots * self._slot_bytes, huge=True)
        self._banks = {layer: self._place(banks) for layer, banks in layers.items()}
        self._reader = reader
        self._cached: OrderedDict[Expert, _Cached] = OrderedDict()  # the one used longest ago first
        self._free = list(range(self.n_slots))[::-1]
        self._coming: list[_Cached] = []  # of the experts that were chosen last, those that were not there
        self._chosen = self._hits = 0

    @staticmethod
    def expert_bytes(pieces: Sequence[Piece]) -> int:
        """Memory one expert of a layer takes."""
        return sum(_span(piece.weight) for piece in pieces)

    @property
    def counts(self) -> ExpertCounts:
        """Return the counts of choices since the experts were made."""
        return ExpertCounts(self._chosen, self._hits)

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
        if missing:
            for expert, cached in self._make_room(missing, keep={(layer, number) for number in slots}):
                slots[expert[1]] = cached.slot
                coming.append(cached)
        if coming:
            # The weight that is multiplied first comes first, of all experts.
            jobs = zip(*(cached.jobs for cached in coming), strict=True)
            self._reader.submit_urgent([job for same_weight in jobs for job in same_weight])
        return slots

    def arrived(self, bank: int) -> bool:
        """Return whether the weights with this number of all chosen experts are in memory."""
        return all(cached.jobs[bank].done for cached in self._coming)

    def wait(self, bank: int) -> None:
        """Wait until the weights with this number of all chosen experts are in memory. WeightsError."""
        for cached in self._coming:
            self._reader.wait(cached.jobs[bank])

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

    def _drop(self, expert: Expert) -> None:
        cached = self._cached[expert]
        self._reader.drop(*cached.jobs)
        del self._cached[expert]  # not before: a read that hangs may still write there
        self._free.append(cached.slot)


def _span(weight: Weight) -> int:
    """Bytes of whole pages that a read of one expert's part of a weight may write to, wherever in a page it begins."""
    return (weight.n_bytes // weight.shape[0] // PAGE + 1) * PAGE
