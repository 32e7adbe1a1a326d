"""Sequences of a KV cache: whose they are, what they hold, and what a new prompt can have of them.

Every step looks at all cells that are held, whoever's they are: with TinyLlama's shape 1,024 idle ones make a step of
16 rows 5 % longer. So what is on disk, too, leaves its cells as soon as somebody else computes.

Cells that sequences share are counted for each of them: the cache then has more room than is said, never less.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress

from edge.errors import EdgeError
from edge.llm.interface import TextEngine
from edge.llm.sequence import common_prefix
from edge.prefixes.group import group_start


class Slot:
    """A sequence, and the tokens whose keys and values it holds, or will once what was submitted is computed."""

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.tokens: list[int] = []
        self.namespace = ""  # whose these are: requests of others must not notice that they are there
        self.busy = False
        self.used = 0  # when it was left; the lowest number goes first
        self.kept = 0  # tokens that are on disk


class Slots:
    """All sequences of an engine."""

    def __init__(self, engine: TextEngine, *, keep: bool) -> None:
        """keep: what a request leaves stays for others, until its cells are needed."""
        self._engine, self._keep = engine, keep
        self._slots = [Slot(sequence) for sequence in range(engine.sequences)]
        self._times = itertools.count(1)

    @property
    def free(self) -> bool:
        """Whether a request can be admitted."""
        return not all(slot.busy for slot in self._slots)

    @property
    def restores(self) -> bool:
        """Whether admitting reads from disk."""
        return self._keep and self._engine.states.keeps

    def make_room(self, n_tokens: int) -> bool:
        """Forget what nobody uses, the longest unused first, until so many more tokens fit; whether they do."""
        while sum(len(slot.tokens) for slot in self._slots) + n_tokens > self._engine.context:
            idle = [slot for slot in self._slots if not slot.busy and slot.tokens]
            if not idle:
                return False
            self._clear(min(idle, key=lambda slot: slot.used))
        return True

    def admit(self, history: Sequence[int], namespace: str = "") -> tuple[Slot, int]:
        """A slot for a request, and how many tokens of its history it holds: from another sequence of its namespace, or
        from disk. The last token is always to be computed, for its logits."""
        idle = [slot for slot in self._slots if not slot.busy]
        slot = min(idle, key=lambda slot: (bool(slot.tokens), slot.used))
        if self._keep:
            own = {other: other.tokens if other.namespace == namespace else [] for other in self._slots}
            shared = {other: common_prefix(tokens, history[:-1]) for other, tokens in own.items()}
            like = max(self._slots, key=lambda other: (shared[other], other in idle))
            if like in idle and (2 * shared[like] >= len(like.tokens) or slot.tokens):
                slot = like  # most of it is of use, or something must go anyway
            elif shared[like]:
                self._clear(slot)
                self._engine.kv_copy(like.sequence, slot.sequence, 0, -1)
                slot.tokens = list(like.tokens)
                slot.namespace = namespace
            if slot.namespace != namespace:
                self._clear(slot)
                slot.namespace = namespace
            self.cut(slot, common_prefix(slot.tokens, history[:-1]))
            self._restore(slot, history)
        else:
            self._clear(slot)
        slot.busy = True
        self._clear_kept()
        return slot, len(slot.tokens)

    def leave(self, slot: Slot, *, keep: bool) -> None:
        """The request is complete, or waits again. keep: what it computed may be put on disk now."""
        slot.busy, slot.used = False, next(self._times)
        if not self._keep:
            self._clear(slot)
            return
        if keep:
            self._put_on_disk(slot)

    def _put_on_disk(self, slot: Slot) -> None:
        states = self._engine.states
        whole, kept = len(slot.tokens) // states.block, slot.kept // states.block
        if not states.keeps or whole <= kept:
            return
        first = group_start(kept)
        with suppress(EdgeError):  # the engine's failure is told by the next step, and keeping is no duty
            links = states.links(slot.tokens[: whole * states.block], slot.namespace)
            states.keep(slot.sequence, first * states.block, links[first:])
            slot.kept = whole * states.block

    def _restore(self, slot: Slot, history: Sequence[int]) -> None:
        """Add what is on disk of a history to what a slot holds."""
        states = self._engine.states
        if not states.keeps:
            return
        first, whole = group_start(len(slot.tokens) // states.block), (len(history) - 1) // states.block
        links = states.links(history[: whole * states.block], slot.namespace)[first:]
        links = links[: states.kept(links)]
        start = first * states.block
        if start + len(links) * states.block <= len(slot.tokens):
            return
        self.cut(slot, start)
        if len(slot.tokens) < start:
            return
        blocks = states.restore(slot.sequence, start, links)
        slot.tokens += history[start : start + blocks * states.block]
        self.cut(slot, len(slot.tokens))  # some ranks may have had more than others
        slot.kept = max(slot.kept, len(slot.tokens))

    def _clear_kept(self) -> None:
        """Forget what nobody uses and is on disk, or can be put there now that no step is under way."""
        states = self._engine.states
        for slot in self._slots:
            if slot.busy:
                continue
            self._put_on_disk(slot)
            links = states.links(slot.tokens[: slot.kept], slot.namespace)
            if links and states.kept(links) == len(links):  # it may have had to make room there
                self._clear(slot)

    def cut(self, slot: Slot, length: int) -> None:
        """Hold the first `length` tokens only; none where this cache cannot forget only the others."""
        if not self._engine.kv_remove(slot.sequence, length, -1):
            self._clear(slot)
        del slot.tokens[length:]
        slot.kept = min(slot.kept, len(slot.tokens))

    def _clear(self, slot: Slot) -> None:
        self._engine.kv_remove(slot.sequence, 0, -1)
        slot.tokens, slot.kept = [], 0
