"""Admission of requests to the slots of an engine while its KV cache has room, and preemption when it has none."""

from __future__ import annotations

from collections.abc import Callable

from edge.llm.interface import TextEngine
from edge.llm.queues import Queues
from edge.llm.remote_prefill import RemotePrompts
from edge.llm.requests import RequestState
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

    def place(self, state: RequestState) -> Placement | None:
        """Return a slot with room for the next tokens of the request and of all running ones. Return None if there is
        none."""
        others = self._queues.running
        left = self._engine.context - len(state.tokens)
        growth = sum(min(other.left, HEADROOM) for other in (state, *others)) if others else min(1, left)
        return self._slots.place(state.tokens, growth, state.namespace)

    def restores(self, state: RequestState) -> bool:
        """Return True if admitting a request may restore keys and values, which is possible only between steps."""
        state.former = state.former or self._slots.former(state.tokens, state.namespace)
        return state.former is not None or self._slots.restores

    def admit(self, state: RequestState, placement: Placement) -> None:
        """Give a waiting request the slot of `placement`, with the cached keys and values of its tokens. Its prompt is
        computed by the other placement if that takes it, and here otherwise."""
        request, is_exact = state.request, self._engine.states.use.exact
        slot = state.slot = self._slots.admit(
            placement,
            adapters=state.adapters,
            in_place=request.in_place,
            former=state.former,
            background=request.background,
        )
        is_first = state.cached_tokens is None
        if is_first or not is_exact:  # the steps of a prompt are chosen by `to_prefill`
            state.to_prefill = len(state.tokens) - len(slot.tokens)
        if is_first:
            state.cached_tokens = min(len(slot.tokens), len(request.prompt))
            state.restored_tokens, state.dropped_tokens = slot.restored, slot.dropped
        self._queues.admit(state)
        if not self._remote.begin(state):
            self._queues.ready.append(state)
        self._admitted(state.number)
        state.tell_prefill()

    def preempt(self, state: RequestState, *, keep: bool) -> None:
        """Take the slot from a request that waits for no logits. keep: as in `Slots.leave`."""
        state.release_remote()
        assert state.slot is not None
        self._slots.leave(state.slot, keep=keep)
        state.slot = state.former = None
        self._queues.preempt(state)

    def preempt_all(self) -> None:
        """Take the slots from all requests, because another engine takes over with an empty cache."""
        for state in reversed(self._queues.running):
            state.preempt(exact=self._engine.states.use.exact)
        self._slots.replaced()
        self._queues.preempt_all()
