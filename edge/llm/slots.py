"""Slots of an engine: selection of a slot for a request, and eviction.

Every step scans all used cells of the KV cache. With TinyLlama's shape, 1,024 idle cells make a step of 16 rows 5 %
longer. So when another request is admitted, idle slots that are already on disk are evicted. Background requests do not
evict, because a request that preempts them would wait for the disk.

Cells that slots share are counted for each slot. The cache therefore never has less room than computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from edge.errors import EdgeError
from edge.llm.interface import TextEngine
from edge.llm.slot import Former, Slot, common_prefix
from edge.weights.adapter import Scales
from partition.state.sequence import KVBlock


class Placement(NamedTuple):
    """A slot for a request with a given history."""

    slot: Slot
    source: Slot | None  # slot whose cells it shares at first, or None
    evicted: list[Slot]
    history: Sequence[int]
    namespace: str


class Slots:
    """The slots of an engine, at most one for each of its sequences."""

    def __init__(self, engine: TextEngine, most: int | None = None, *, keep: bool) -> None:
        """keep: keep the contents of completed requests for later ones, until the cells are needed."""
        self._engine, self.keeps = engine, keep
        self.all = [Slot(engine, sequence) for sequence in range(min(engine.sequences, most or engine.sequences))]
        self._former: list[Former] = []  # contents of idle slots before another engine took over
        self._times = itertools.count(1)

    @property
    def restores(self) -> bool:
        """True if admitting a request may read from disk."""
        return self.keeps and self._engine.states.keeps

    @property
    def n_cached(self) -> int:
        """Total number of tokens in all slots."""
        return sum([len(slot.tokens) for slot in self.all])

    def make_room(self, n_tokens: int) -> bool:
        """Evict idle slots, least recently used first, until `n_tokens` more tokens fit. Return True if they do."""
        while self.n_cached + n_tokens > self._engine.context:
            idle = [slot for slot in self.all if not slot.busy and slot.tokens]
            if not idle:
                return False
            min(idle, key=lambda slot: slot.used).cut(0)
        return True

    def write(self, slot: Slot, tokens: Sequence[int], blocks: Sequence[KVBlock]) -> bool:
        """Append received KV blocks of these tokens to a slot.

        Return False if they do not fit, or if the cache cannot take them; earlier blocks stay. Raises the errors of a
        failed engine.
        """
        try:
            for block in blocks:
                start, stop = block.positions.start, block.positions.stop
                if start < len(slot.tokens) < stop:
                    slot.cut(start)
                # A different length means that the cache had to remove more.
                if len(slot.tokens) != start or not self.make_room(stop - start):
                    return False
                self._engine.states.write(slot.sequence, block)
                slot.submitted(tokens[start:stop])
        except EdgeError:
            slot.cut(len(slot.tokens))  # raises the error if the engine has failed
            return False
        return True

    def place(self, history: Sequence[int], growth: int, namespace: str = "") -> Placement | None:
        """Return the slot for a request, preferably one that holds most of its history's beginning. Return None if the
        request has to wait. Nothing is changed.

        history: tokens of the request.
        growth: tokens that the request will get.
        """
        idle = [slot for slot in self.all if not slot.busy]
        if not idle:
            return None
        own = {other: other.tokens if self.keeps and other.namespace == namespace else [] for other in self.all}
        shared = {other: common_prefix(tokens, history[:-1]) for other, tokens in own.items()}
        slot, source = min(idle, key=lambda slot: (bool(slot.tokens), slot.used)), None
        if self.keeps:
            like = max(self.all, key=lambda other: (shared[other], other in idle, -other.used))
            if like in idle and (2 * shared[like] >= len(like.tokens) or slot.tokens):
                slot = like  # most of its contents are useful, or contents have to be evicted anyway
            elif shared[like] and like.exact is None:
                source = like
        need = len(history) + growth
        evicted = self._evicted(need, slot, source)
        if evicted is None and source in idle:
            slot, source = source, None
            evicted = self._evicted(need, slot, source)
        return None if evicted is None else Placement(slot, source, evicted, history, namespace)

    def _evicted(self, need: int, slot: Slot, source: Slot | None) -> list[Slot] | None:
        """Return the slots to evict, least recently used first, so that `slot` can hold `need` tokens. Return None
        if that is not enough.
        """
        room = self._engine.context - sum(len(other.tokens) for other in self.all if other is not slot)
        idle = (other for other in self.all if not other.busy and other.tokens and other not in (slot, source))
        evicted = []
        for other in sorted(idle, key=lambda other: other.used):
            if room >= need:
                break
            evicted.append(other)
            room += len(other.tokens)
        return evicted if room >= need else None

    def admit(
        self,
        placement: Placement,
        *,
        adapters: Scales,
        in_place: bool = False,
        former: Former | None = None,
        background: bool = False,
    ) -> Slot:
        """Give a slot to a request. The slot then holds the available part of its history: from before, from another
        slot, or from disk.

        adapters: adapter scales of the request, which are also part of its namespace.
        in_place: as for `Slot.begin`; used only if no other slot shares cells.
        former: contents on the engine before a replacement.
        background: as in `Request`.
        """
        slot, source, evicted, history, namespace = placement
        for other in evicted:
            other.cut(0)
        if source is not None:
            slot.copy_from(source)
        if not self.keeps or slot.namespace != namespace:
            slot.cut(0)
        slot.namespace, slot.adapters = namespace, adapters
        if self.keeps:
            slot.begin(history, in_place=in_place and len(slot.tokens) == self.n_cached)
        if former is not None:
            self._hold_again(slot, history, former)
        slot.busy = True
        for other in self.all:  # no step is in flight, so idle slots are written to disk
            if not other.busy:
                other.keep()
                if not background and other.is_kept:
                    other.cut(0)
        return slot

    def leave(self, slot: Slot, *, keep: bool) -> None:
        """Release the slot of a request that is complete or preempted.

        keep: its contents may be written to disk now.
        """
        slot.busy, slot.used = False, next(self._times)
        if not self.keeps:
            slot.cut(0)
        elif keep:
            slot.keep()

    def keep_snapshots(self) -> None:
        """Write contents up to new snapshots to disk, while no step is in flight. If the engine is lost, another one
        continues from there.

        No token waits for this: it is not done before the first token of a response, and is postponed while the disk is
        busy.
        """
        for slot in self.all if self.keeps else ():
            is_due = slot.busy and slot.plan.has_new and len(slot.tokens) >= slot.plan.n_tokens
            if is_due and not self._engine.states.is_writing:
                slot.keep()

    def keep_groups(self) -> None:
        """Write growing contents to disk while only background requests run, so that later requests wait less."""
        states = self._engine.states
        for slot in self.all if self.keeps and states.snapshots is None and not states.is_writing else ():
            if slot.busy and slot.has_new_group:
                slot.keep()

    def _hold_again(self, slot: Slot, history: Sequence[int], former: Former) -> None:
        """Count the tokens of a history that the former engine held and that are computed again.

        They are computed with the prompt. If the same bits are needed, they are computed here in the same steps as
        before.
        """
        use, end = self._engine.states.use, common_prefix(former.tokens, history)
        if end == len(history):  # its last token has to be computed for its logits, with the same rows as before
            end = former.steps[-1] if use.exact and end == len(former.tokens) else end - 1
        if end <= len(slot.tokens):
            return
        use.computed_again += max(0, end - len(slot.tokens))
        if use.exact:
            slot.compute_again(former, end)

    def former(self, history: Sequence[int], namespace: str) -> Former | None:
        """Return and remove a former idle slot whose contents begin like the history, or return None."""
        own = [former for former in self._former if former.namespace == namespace]
        like = max(own, key=lambda slot: common_prefix(slot.tokens, history), default=None)
        if like is None or like.tokens[:1] != history[:1]:
            return None
        self._former.remove(like)
        return like

    def lost(self) -> None:
        """Mark all slots as empty, because another user has the cache."""
        self._former.clear()
        for slot in self.all:
            slot.lost()

    def replaced(self) -> None:
        """Mark all slots as empty after a replacement of the engine. Contents of idle slots are recomputed when a
        prompt begins like them.
        """
        former = [slot.former() for slot in self.all if slot.tokens and not slot.busy]
        former += self._former[: len(self.all)]
        self.lost()
        self._former = former
        for slot in self.all:
            slot.busy = False
