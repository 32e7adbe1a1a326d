"""Keys and values of a model that is spread over ranks: each has its part, rank 0 takes them together and apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

from edge.llm.snapshots import Snapshots
from edge.llm.states import CacheUse, Part, blocks_of
from edge.parallel import steps
from edge.parallel.leader import Leader
from edge.parallel.steps import MOST_HASHES, BlockStep, CacheStep, Count, Keep, Read, Restore, SetBack, Snapshot, Write
from partition.plan.plan import Plan, Range
from partition.slices.source import Source
from partition.state.parts import cut, join
from partition.state.sequence import KVBlock, check
from partition.state.shape import StateShape
from transport.link import Link

B = TypeVar("B", bound=BlockStep)


class SpreadStates:
    """As `edge.llm.states.States`, with blocks of the whole model. What is kept, each rank keeps on its own disk."""

    def __init__(self, leader: Leader, plan: Plan) -> None:
        self.use = CacheUse()
        self.prefiller: Any = None  # as of `States`
        self._leader, self._plan, self._own = leader, plan, leader.shard.engine.states
        own = self._own.snapshots
        self.snapshots = SpreadSnapshots(own, leader.on_cache) if own is not None else None
        self.block, self.most_read, self.factors = self._own.block, self._own.most_read, self._own.factors
        self.describe, self.block_hashes = self._own.describe, self._own.block_hashes

    @cached_property
    def _shapes(self) -> list[StateShape]:
        source, kv = Source.from_file(self._leader.file), self._own.kv
        return [StateShape.of_slice(source, self._plan.slice(rank), kv) for rank in range(self._plan.world_size)]

    @cached_property
    def _whole(self) -> StateShape:
        return StateShape.of_model(Source.from_file(self._leader.file), self._own.kv)

    def read(self, sequence: int, positions: Range) -> KVBlock:
        own, shapes = self._own.read(sequence, positions), self._shapes  # first here: nobody else holds more or fewer

        def parts() -> list[tuple[KVBlock, StateShape]]:
            return [(own, shapes[0]), *self._receive(sorted(self._leader.group.links.items()), positions)]

        return join(self._leader.ordered(Read(sequence, positions.start, positions.stop), parts), self._whole)

    def begin_read(self, sequence: int, positions: Range) -> Callable[[], list[KVBlock]]:
        """Ask all ranks for keys and values in blocks of `most_read`, behind the steps that were submitted. Later
        stages send theirs when they come to it, while further steps without logits are submitted: what it returns
        receives them, in another thread. Ranks of the first stage also send sums of later steps, so that they are
        waited for here. The errors of `read`."""
        leader, shapes = self._leader, self._shapes
        peers = leader.shard.place.peers
        near: list[list[tuple[KVBlock, StateShape]]] = []
        links = sorted(leader.group.links.items())
        first, later = ([pair for pair in links if (pair[0] in peers) == is_peer] for is_peer in (True, False))
        for part in blocks_of(positions, self.most_read):
            own = self._own.read(sequence, part)
            step = Read(sequence, part.start, part.stop)
            near.append([(own, shapes[0]), *leader.ordered(step, partial(self._receive, first, part))])

        def received() -> list[KVBlock]:
            return [join([*parts, *self._receive(later, parts[0][0].positions)], self._whole) for parts in near]

        return lambda: leader.guarded(received)

    def _receive(self, links: Sequence[tuple[int, Link]], positions: Range) -> list[tuple[KVBlock, StateShape]]:
        """The parts of a block that these ranks send."""
        shapes = self._shapes
        return [(steps.receive_block(link, shapes[rank], positions), shapes[rank]) for rank, link in links]

    def write(self, sequence: int, block: KVBlock) -> None:
        check(block, self._whole)
        self._own.write(sequence, cut(block, self._whole, self._shapes[0]))  # first here: what fails, fails everywhere

        def send() -> None:
            for rank, link in sorted(self._leader.group.links.items()):
                steps.send_block(link, cut(block, self._whole, self._shapes[rank]), self._shapes[rank])

        self._leader.ordered(Write(sequence, block.positions.start, block.positions.stop), send)

    @property
    def keeps(self) -> bool:
        """True if blocks are kept on this device; the others answer that they have none where they do not."""
        return self._own.keeps

    @property
    def problem(self) -> str | None:
        """As `States.problem`, of this device."""
        return self._own.problem

    @property
    def is_writing(self) -> bool:
        """As `States.is_writing`, of this device."""
        return self._own.is_writing

    def keep(self, sequence: int, start: int, hashes: Sequence[bytes]) -> None:
        """As `States.keep`, on all ranks. All have read what they keep when this returns."""

        def keep(step: Keep) -> int:
            self._own.keep(sequence, step.start, step.hashes)
            return len(step.hashes)

        chunks = self._chunks(start, hashes)
        self._least((Keep(sequence, chunk_start, some) for chunk_start, some, _ in chunks), keep)

    def n_cached(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading ones of these blocks all ranks keep; with recurrent layers, up to one with a snapshot
        on each."""
        n_blocks = self._least_cached(hashes)
        while self.snapshots is not None and n_blocks and (fewer := self._least_cached(hashes[:n_blocks])) < n_blocks:
            n_blocks = fewer
        return n_blocks

    def _least_cached(self, hashes: Sequence[bytes]) -> int:
        counts = (Count(part, some) for _, some, part in self._chunks(0, hashes))
        return self._least(counts, lambda step: self._own.n_cached(step.hashes, step.part))

    def restore(self, sequence: int, start: int, hashes: Sequence[bytes]) -> int:
        """As `States.restore`, on all ranks. Some ranks may have added more blocks than all have; the caller removes
        those."""

        def restore(step: Restore) -> int:
            return self._own.restore(sequence, step.start, step.hashes, step.part)

        chunks = self._chunks(start, hashes)
        return self._least((Restore(sequence, chunk_start, part, some) for chunk_start, some, part in chunks), restore)

    def _chunks(self, start: int, hashes: Sequence[bytes]) -> Iterator[tuple[int, tuple[bytes, ...], Part]]:
        """Yield the hashes of each step, with the position where its blocks start and the part that they are. The
        snapshot of them all is behind the last."""
        for lo in range(0, len(hashes), MOST_HASHES):
            some = tuple(hashes[lo : lo + MOST_HASHES])
            part = (Part.BEHIND if lo else Part.WHOLE) | (Part.BEFORE if lo + len(some) < len(hashes) else Part.WHOLE)
            yield start + lo * self.block, some, part

    def _least(self, queries: Iterable[B], own: Callable[[B], int]) -> int:
        """Return the least number of leading blocks that any rank reports for these steps. own: reports for rank 0."""
        done = 0
        for step in queries:
            least = self._leader.ordered(step, partial(self._of_all, own, step))
            done += least
            if least < len(step.hashes):
                break
        return done

    def _of_all(self, own: Callable[[B], int], step: B) -> int:
        return min(own(step), *self._leader.reports(_number))


def _number(said: Any) -> int:
    if not isinstance(said, int) or not 0 <= said <= MOST_HASHES:
        raise ValueError(f"{said!r:.80} as a number of blocks")
    return said


class SpreadSnapshots:
    """As `edge.llm.snapshots.Snapshots`, on all ranks, behind the steps that were submitted."""

    def __init__(self, own: Snapshots, on_cache: Callable[[CacheStep], bool]) -> None:
        """own: rank 0's. on_cache: as of `Leader`."""
        self._own, self._on_cache = own, on_cache

    def make(self, sequence: int, block_hash: bytes) -> None:
        self._on_cache(Snapshot(sequence, block_hash))

    def has(self, block_hash: bytes) -> bool:
        """As `Snapshots.has`, of this device: others may have dropped theirs."""
        return self._own.has(block_hash)

    def set_back(self, sequence: int, length: int, block_hash: bytes) -> bool:
        """As `Snapshots.set_back`. Where it is False some ranks may have set theirs back."""
        return self._on_cache(SetBack(sequence, length, block_hash))
