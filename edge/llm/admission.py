"""Admission of requests to the slots of an engine while its KV cache has room, and preemption when it has none."""

from __future__ import annotations

from collections.abc import Callable

from edge.llm.interface import TextEngine
from edge.llm.queues import Queues
from edge.llm.remote_prefill import RemotePrompts
from edge.llm.requests import Running
from edge.llm.slots import Placement, Slots

HEADROOM = 32  # free tokens per answer that admission requires, so that no answer is preempted soon afterwards


class Admission:
    """Gives slots to waiting requests, and takes them back."""

    def __init__(
        self,
        engine: TextEngine,
        slots: Slots,
        queues: Queues,
        remote: RemotePrompts,
        admitted: Callable[[int], None],
    ) -> None:
        """admitted: called with the number of each request that is admitted."""
        self._engine, self._slots, self._queues, self._remote = engine, slots, queues, remote
        self._admitted = admitted

    def place(self, running: Running) -> Placement | None:
        """Return a slot with room for the next tokens of the request and of all running ones. Return None if there is
        none."""
        others = self._queues.running
        left = self._engine.context - len(running.tokens)
        growth = sum(min(other.left, HEADROOM) for other in (running, *others)) if others else min(1, left)
        return self._slots.place(running.tokens, growth, running.namespace)

    def restores(self, running: Running) -> bool:
        """Return True if admitting a request may restore keys and values, which is possible only between steps."""
        running.former = running.former or self._slots.former(running.tokens, running.namespace)
        return running.former is not None or self._slots.restores

    def admit(self, running: Running, placement: Placement) -> None:
        """Give a waiting request the slot of `placement`, with the cached keys and values of its tokens. Its prompt is
        computed by the other placement if that takes it, and here otherwise."""
        request, is_exact = running.request, self._engine.states.use.exact
        slot = running.slot = self._slots.admit(
            placement,
            adapters=running.adapters,
            in_place=request.in_place,
            former=running.former,
            background=request.background,
        )
        is_first = running.cached_tokens is None
        if is_first or not is_exact:  # the steps of a prompt are chosen by `to_prefill`
            running.to_prefill = len(running.tokens) - len(slot.tokens)
        if is_first:
            running.cached_tokens = min(len(slot.tokens), len(request.prompt))
            running.restored_tokens, running.dropped_tokens = slot.restored, slot.dropped
        self._queues.admit(running)
        if not self._remote.begin(running):
            self._queues.ready.append(running)
        self._admitted(running.number)
        running.tell_prefill()

    def preempt(self, running: Running, *, keep: bool) -> None:
        """Take the slot from a request that waits for no logits. keep: as in `Slots.leave`."""
        running.release_remote()
        assert running.slot is not None
        self._slots.leave(running.slot, keep=keep)
        running.slot = running.former = None
        self._queues.preempt(running)

    def preempt_all(self) -> None:
        """Take the slots from all requests, because another engine takes over with an empty cache."""
        for running in reversed(self._queues.running):
            running.preempt(exact=self._engine.states.use.exact)
        self._slots.replaced()
        self._queues.preempt_all()
