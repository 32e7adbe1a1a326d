"""The slots of an engine: which of them a request gets, and what is evicted for it.

Every step looks at all cells that are held, whoever's they are: with TinyLlama's shape 1,024 idle ones make a step of
16 rows 5 % longer. So what is on disk, too, leaves its cells as soon as somebody else computes, but for a background
request: whoever preempts it would wait for the disk.

Cells that slots share are counted for each of them: the cache then has more room than is said, never less.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from edge.errors import EdgeError, Interrupted
from edge.llm.interface import TextEngine
from edge.llm.requests import Running
from edge.llm.slot import Former, Slot, common_prefix
from edge.weights.adapter import Scales
from partition.state.sequence import KVBlock

LOOK_S = 0.05  # how soon who waits for keys and values hears that it is to stop


class Placement(NamedTuple):
    """Place for a request with this history."""

    slot: Slot
    source: Slot | None  # whose cells it shares at first
    evicted: list[Slot]
    history: Sequence[int]
    namespace: str


class Slots:
    """As many slots as the engine has sequences, or fewer."""

    def __init__(self, engine: TextEngine, most: int | None = None, *, keep: bool) -> None:
        """keep: what a request leaves stays for others, until its cells are needed."""
        self._engine, self.keeps = engine, keep
        self.all = [Slot(engine, sequence) for sequence in range(min(engine.sequences, most or engine.sequences))]
        self.remote = RemotePrompts(engine, self)
        self._former: list[Former] = []  # what idle slots held, before another engine took over
        self._times = itertools.count(1)

    @property
    def restores(self) -> bool:
        """True if admitting reads from disk."""
        return self.keeps and self._engine.states.keeps

    @property
    def n_cached(self) -> int:
        """Tokens in all of them."""
        return sum([len(slot.tokens) for slot in self.all])

    def wait(self) -> None:
        """Wait for keys and values from another placement, if a prompt is computed there. Raises Interrupted if the
        engine was stopped."""
        if self.remote.requests:
            if self._engine.states.use.is_stopped:
                raise Interrupted("stopped on request")
            self.remote.wait()

    def make_room(self, n_tokens: int) -> bool:
        """Evict what nobody uses, the longest unused first, until so many more tokens fit; whether they do."""
        while self.n_cached + n_tokens > self._engine.context:
            idle = [slot for slot in self.all if not slot.busy and slot.tokens]
            if not idle:
                return False
            min(idle, key=lambda slot: slot.used).cut(0)
        return True

    def write(self, slot: Slot, tokens: Sequence[int], blocks: Sequence[KVBlock]) -> bool:
        """Continue a slot by keys and values from elsewhere, of these tokens. False where they have no room, or this
        cache cannot take them; what was written before stays. The errors of an engine that has failed."""
        try:
            for block in blocks:
                start, stop = block.positions.start, block.positions.stop
                if start < len(slot.tokens) < stop:
                    slot.cut(start)
                if len(slot.tokens) != start or not self.make_room(stop - start):  # or this cache had to forget more
                    return False
                self._engine.states.write(slot.sequence, block)
                slot.submitted(tokens[start:stop])
        except EdgeError:
            slot.cut(len(slot.tokens))  # raises where the engine has failed
            return False
        return True

    def place(self, history: Sequence[int], growth: int, namespace: str = "") -> Placement | None:
        """Return the place for a request with this history, which will get `growth` more tokens: a slot that holds most
        of its beginning already. Return None if it has to wait for other requests. Nothing is changed."""
        idle = [slot for slot in self.all if not slot.busy]
        if not idle:
            return None
        own = {other: other.tokens if self.keeps and other.namespace == namespace else [] for other in self.all}
        shared = {other: common_prefix(tokens, history[:-1]) for other, tokens in own.items()}
        slot, source = min(idle, key=lambda slot: (bool(slot.tokens), slot.used)), None
        if self.keeps:
            like = max(self.all, key=lambda other: (shared[other], other in idle, -other.used))
            if like in idle and (2 * shared[like] >= len(like.tokens) or slot.tokens):
                slot = like  # most of it is of use, or something must go anyway
            elif shared[like] and like.exact is None:
                source = like
        need = len(history) + growth
        evicted = self._evicted(need, slot, source)
        if evicted is None and source in idle:
            slot, source = source, None
            evicted = self._evicted(need, slot, source)
        return None if evicted is None else Placement(slot, source, evicted, history, namespace)

    def _evicted(self, need: int, slot: Slot, source: Slot | None) -> list[Slot] | None:
        """Which slots to evict, the longest unused first, so that one can hold so many tokens; None: too few can be."""
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
        """Let a request have a slot, which then holds what there is of its history: from before, from another slot or
        from disk. adapters: scales that it is computed with, which the namespace tells apart. in_place: as in
        `Slot.begin`, where no other slot could share its cells. former: what an engine before this one held of it.
        background: as of Request."""
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
        for other in self.all:  # no step is under way: what nobody uses goes to the disk
            if not other.busy:
                other.keep()
                if not background and other.is_kept:
                    other.cut(0)
        return slot

    def leave(self, slot: Slot, *, keep: bool) -> None:
        """The request is complete, or waits again. keep: what it computed may be put on disk now."""
        slot.busy, slot.used = False, next(self._times)
        if not self.keeps:
            slot.cut(0)
        elif keep:
            slot.keep()

    def keep_snapshots(self) -> None:
        """Put what requests computed up to a new snapshot on disk, now that no step is under way: where an engine is
        lost, another one goes on from there. No token waits for it: not the first of an answer, and where the disk is
        behind, it is left for a later time."""
        for slot in self.all if self.keeps else ():
            is_due = slot.busy and slot.plan.has_new and len(slot.tokens) >= slot.plan.n_tokens
            if is_due and not self._engine.states.is_writing:
                slot.keep()

    def keep_groups(self) -> None:
        """Put what is computed on disk as it grows, now that nobody waits: whoever comes waits for less of it then."""
        states = self._engine.states
        for slot in self.all if self.keeps and states.snapshots is None and not states.is_writing else ():
            if slot.busy and slot.has_new_group:
                slot.keep()

    def _hold_again(self, slot: Slot, history: Sequence[int], former: Former) -> None:
        """Count the tokens of a history that the engine before this one held, and that are computed again. They are
        computed with the prompt, or here in the steps of before if the model is to compute the same bits."""
        use, end = self._engine.states.use, common_prefix(former.tokens, history)
        if end == len(history):  # its last token has to be computed for its logits, in the rows of before
            end = former.steps[-1] if use.exact and end == len(former.tokens) else end - 1
        if end <= len(slot.tokens):
            return
        use.computed_again += max(0, end - len(slot.tokens))
        if use.exact:
            slot.compute_again(former, end)

    def former(self, history: Sequence[int], namespace: str) -> Former | None:
        """Return the state that an idle slot had on the engine before, where a history begins like it. Each is returned
        once."""
        own = [former for former in self._former if former.namespace == namespace]
        like = max(own, key=lambda slot: common_prefix(slot.tokens, history), default=None)
        if like is None or like.tokens[:1] != history[:1]:
            return None
        self._former.remove(like)
        return like

    def lost(self) -> None:
        """Note that somebody else has the cache now."""
        self._former.clear()
        self.remote.requests.clear()
        for slot in self.all:
            slot.lost()

    def replaced(self) -> None:
        """Note that another engine has taken over. What idle slots held is computed again once a prompt begins like
        it."""
        former = [slot.former() for slot in self.all if slot.tokens and not slot.busy]
        former += self._former[: len(self.all)]
        self.lost()
        self._former = former
        for slot in self.all:
            slot.busy = False


class RemotePrompts:
    """Requests whose prompts another placement computes: their slots receive keys and values from there."""

    def __init__(self, engine: TextEngine, slots: Slots) -> None:
        self._engine, self._slots = engine, slots
        self.requests: list[Running] = []

    def begin(self, running: Running) -> bool:
        """Have the prompt of a request that was admitted computed elsewhere; whether it is."""
        prefiller = self._engine.states.prefiller
        if prefiller is None or running.slot is None:
            return False
        running.remote = prefiller.begin(
            running.tokens, len(running.slot.tokens), running.namespace, running.adapters, keep=self._slots.keeps
        )
        if running.remote is not None:
            self.requests.append(running)
        return running.remote is not None

    def receive(self, *, steps_in_flight: bool) -> list[Running] | None:
        """Give slots the keys and values that came, and return the requests of which no more come: the rest of their
        prompts is computed here. None where some came and steps are in flight, because states are written between
        steps."""
        if steps_in_flight:
            return None if any(running.remote and running.remote.wait(0) for running in self.requests) else []
        ready: list[Running] = []
        for running in [*self.requests]:
            assert running.remote is not None
            assert running.slot is not None
            blocks, is_over = running.remote.take()
            if blocks and not self._slots.write(running.slot, running.tokens, blocks):
                running.release_remote()
                is_over = True
            if blocks:
                running.tell_prefill()
            if is_over:
                self.requests.remove(running)
                ready.append(running)
        return ready

    def wait(self) -> None:
        """Wait for keys and values, for `LOOK_S` at most."""
        if self.requests[0].remote is not None:
            self.requests[0].remote.wait(LOOK_S)
