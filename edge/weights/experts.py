"""Cache of experts in memory: recently used experts stay, and an expert is read when the router chooses it.

All experts lie in slots of one piece of memory. A weight with all experts of a layer points to the first slot, and its
matrix product gets slot numbers instead of expert numbers.
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
"""(layer, number in the layer)"""


class ExpertCounts(NamedTuple):
    """Counts of the router's choices since the cache was created, or between two readings."""

    chosen: int = 0  # experts that rows of a layer needed, counted once per pass
    hits: int = 0  # chosen experts that were in memory


class _Bank:
    """One weight with all experts of a layer, and the offset of its part within a slot."""

    def __init__(self, piece: Piece, start: int) -> None:
        self.piece = piece
        self.n_bytes = piece.n_bytes // piece.weight.shape[0]  # bytes of one expert
        # An expert is read in place if it has the same offset within a page in memory and in the file.
        self.start = start + (0 if piece.repacked or self.n_bytes % PAGE else piece.offset % PAGE)

    def read(self, number: int, slot: int, arena: AddressSpace) -> Job:
        piece, offset = self.piece, self.piece.offset + number * self.n_bytes
        return Job(piece.weight, piece.file, offset, self.n_bytes, arena, slot + self.start, piece.repacked)


@dataclass(eq=False, slots=True)
class _Cached:
    """Expert with a slot, and its read jobs, one per weight. The jobs are empty when all weights have arrived."""

    slot: int
    jobs: list[Job]

    def arrived(self) -> bool:
        if self.jobs and all(job.left == 0 and job.error is None for job in self.jobs):
            self.jobs = []
        return not self.jobs


class Experts:
    """LRU cache of a model's experts in slots of equal size. A product finds an expert by its slot number."""

    def __init__(self, layers: Mapping[int, Sequence[Piece]], room: int, reader: Reader) -> None:
        """layers: by layer, the weights with experts, in the order of use.
        room: bytes, at least for the experts of a layer that one pass chooses.
        """
        self._slot_bytes = max(map(self.expert_bytes, layers.values()))
        self.n_slots = room // self._slot_bytes
        self._arena = AddressSpace(self.n_slots * self._slot_bytes, huge=True)
        self._banks = {layer: self._place(banks) for layer, banks in layers.items()}
        self._reader = reader
        self._cached: OrderedDict[Expert, _Cached] = OrderedDict()  # least recently used first
        self._free = list(range(self.n_slots))[::-1]
        self._coming: list[_Cached] = []  # last chosen experts that were not in memory
        self._chosen = self._hits = 0

    @staticmethod
    def expert_bytes(pieces: Sequence[Piece]) -> int:
        """Return the bytes that one expert of a layer takes."""
        return sum(_span(piece.weight) for piece in pieces)

    @property
    def counts(self) -> ExpertCounts:
        """Counts of choices since the cache was created."""
        return ExpertCounts(self._chosen, self._hits)

    def choose(self, layer: int, numbers: Collection[int]) -> dict[int, int]:
        """Start to read these experts of a layer, and return the slot of each by number. Call `wait` before using
        them."""
        slots, missing = {}, []
        coming = self._coming = []
        for number in numbers:
            expert = layer, number
            cached = self._cached.get(expert)
            # retry after a temporary read error
            if cached is not None and cached.jobs and any(job.error for job in cached.jobs):
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
            # Read all experts' parts of the weight that is multiplied first, then of the next weight.
            jobs = zip(*(cached.jobs for cached in coming), strict=True)
            self._reader.submit_urgent([job for same_weight in jobs for job in same_weight])
        return slots

    def arrived(self, bank: int) -> bool:
        """Return whether this weight of all chosen experts is in memory. bank: number of the weight."""
        return all(cached.jobs[bank].done for cached in self._coming)

    def wait(self, bank: int) -> None:
        """Wait until this weight of all chosen experts is in memory.

        bank: number of the weight.
        Raises WeightsError.
        """
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
        """Place the weights of a layer one after the other in every slot."""
        placed, start = [], 0
        for piece in pieces:
            bank = _Bank(piece, start)
            piece.weight.spread_matrices(self._slot_bytes, self.n_slots)
            piece.weight.point(self._arena.address + bank.start, piece.repacked)
            placed.append(bank)
            start += _span(piece.weight)
        return placed

    def _make_room(self, missing: Sequence[Expert], keep: Collection[Expert]) -> list[tuple[Expert, _Cached]]:
        """Assign slots to the missing experts, evicting the least recently used ones."""
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
        del self._cached[expert]  # freed only now, because a hanging read may still write there
        self._free.append(cached.slot)


def _span(weight: Weight) -> int:
    """Return the bytes of whole pages that a read of one expert's part may touch at any offset."""
    return (weight.n_bytes // weight.shape[0] // PAGE + 1) * PAGE
