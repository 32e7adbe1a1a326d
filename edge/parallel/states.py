"""KV cache of a model spread over ranks. Each rank has its part; rank 0 joins and splits the parts."""

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
    """Same as `edge.llm.states.States`, for blocks of the whole model. Each rank keeps its part on its own disk."""

    def __init__(self, leader: Leader, plan: Plan) -> None:
        self.use = CacheUse()
        self.prefiller: Any = None  # same as in `States`
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
        # Rank 0 first: the other ranks hold the same positions.
        own, shapes = self._own.read(sequence, positions), self._shapes

        def parts() -> list[tuple[KVBlock, StateShape]]:
            return [(own, shapes[0]), *self._receive(sorted(self._leader.group.links.items()), positions)]

        return join(self._leader.ordered(Read(sequence, positions.start, positions.stop), parts), self._whole)

    def begin_read(self, sequence: int, positions: Range) -> Callable[[], list[KVBlock]]:
        """Request the KV cache of positions in blocks of `most_read`, after the submitted steps. Return a function that
        receives them.

        Later stages send their blocks while further steps without logits are submitted, so the returned function may
        run in another thread. Ranks of the first stage also send partial sums of later steps, so their blocks are
        received here.

        Raises the errors of `read`.
        """
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
        """Receive the parts of a block that these ranks send."""
        shapes = self._shapes
        return [(steps.receive_block(link, shapes[rank], positions), shapes[rank]) for rank, link in links]

    def write(self, sequence: int, block: KVBlock) -> None:
        check(block, self._whole)
        # Rank 0 first: what fails here fails on every rank.
        self._own.write(sequence, cut(block, self._whole, self._shapes[0]))

        def send() -> None:
            for rank, link in sorted(self._leader.group.links.items()):
                steps.send_block(link, cut(block, self._whole, self._shapes[rank]), self._shapes[rank])

        self._leader.ordered(Write(sequence, block.positions.start, block.positions.stop), send)

    @property
    def keeps(self) -> bool:
        """True if blocks are kept on this device. Other devices that keep none report 0."""
        return self._own.keeps

    @property
    def problem(self) -> str | None:
        """Same as `States.problem`, for this device."""
        return self._own.problem

    @property
    def is_writing(self) -> bool:
        """Same as `States.is_writing`, for this device."""
        return self._own.is_writing

    def keep(self, sequence: int, start: int, hashes: Sequence[bytes]) -> None:
        """Same as `States.keep`, on all ranks. All ranks have read their blocks when this returns."""

        def keep(step: Keep) -> int:
            self._own.keep(sequence, step.start, step.hashes)
            return len(step.hashes)

        chunks = self._chunks(start, hashes)
        self._least((Keep(sequence, chunk_start, some) for chunk_start, some, _ in chunks), keep)

    def n_cached(self, hashes: Sequence[bytes]) -> int:
        """Return the number of leading blocks that all ranks keep. With recurrent layers, the last of them has a
        snapshot on every rank.
        """
        n_blocks = self._least_cached(hashes)
        while self.snapshots is not None and n_blocks and (fewer := self._least_cached(hashes[:n_blocks])) < n_blocks:
            n_blocks = fewer
        return n_blocks

    def _least_cached(self, hashes: Sequence[bytes]) -> int:
        counts = (Count(part, some) for _, some, part in self._chunks(0, hashes))
        return self._least(counts, lambda step: self._own.n_cached(step.hashes, step.part))

    def restore(self, sequence: int, start: int, hashes: Sequence[bytes]) -> int:
        """Same as `States.restore`, on all ranks. Some ranks may add more blocks than others; the caller removes
        the excess.
        """

        def restore(step: Restore) -> int:
            return self._own.restore(sequence, step.start, step.hashes, step.part)

        chunks = self._chunks(start, hashes)
        return self._least((Restore(sequence, chunk_start, part, some) for chunk_start, some, part in chunks), restore)

    def _chunks(self, start: int, hashes: Sequence[bytes]) -> Iterator[tuple[int, tuple[bytes, ...], Part]]:
        """Yield (start position, hashes, part) for each step. The snapshot of all blocks is after the last one."""
        for lo in range(0, len(hashes), MOST_HASHES):
            some = tuple(hashes[lo : lo + MOST_HASHES])
            part = (Part.BEHIND if lo else Part.WHOLE) | (Part.BEFORE if lo + len(some) < len(hashes) else Part.WHOLE)
            yield start + lo * self.block, some, part

    def _least(self, queries: Iterable[B], own: Callable[[B], int]) -> int:
        """Return the smallest number of leading blocks that any rank reports for these steps.

        own: returns the number of rank 0.
        """
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
        raise ValueError(f"{said!r:.80} is not a number of blocks")
    return said


class SpreadSnapshots:
    """Same as `edge.llm.snapshots.Snapshots`, on all ranks, after the submitted steps."""

    def __init__(self, own: Snapshots, on_cache: Callable[[CacheStep], bool]) -> None:
        """own: snapshots of rank 0.
        on_cache: same as `Leader.on_cache`.
        """
        self._own, self._on_cache = own, on_cache

    def make(self, sequence: int, block_hash: bytes) -> None:
        self._on_cache(Snapshot(sequence, block_hash))

    def has(self, block_hash: bytes) -> bool:
        """Same as `Snapshots.has`, for this device. Other devices may have dropped their snapshot."""
        return self._own.has(block_hash)

    def set_back(self, sequence: int, length: int, block_hash: bytes) -> bool:
        """Same as `Snapshots.set_back`. After False, some ranks may have been set back."""
        return self._on_cache(SetBack(sequence, length, block_hash))
