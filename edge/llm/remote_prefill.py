"""Prompts of requests that another placement of the model computes: their keys and values are received here."""

from __future__ import annotations

from edge.errors import Interrupted
from edge.llm.interface import TextEngine
from edge.llm.queues import Queues
from edge.llm.requests import RequestState
from edge.llm.slots import Slots

LOOK_S = 0.05  # longest wait for keys and values, after which a step checks whether the engine was stopped


class RemotePrompts:
    """Receives keys and values for the slots of the requests in `Queues.remote`."""

    def __init__(self, engine: TextEngine, slots: Slots, queues: Queues) -> None:
        self._engine, self._slots, self._queues = engine, slots, queues

    def begin(self, state: RequestState) -> bool:
        """Let the other placement compute the prompt of an admitted request. Return False if it does not."""
        prefiller = self._engine.states.prefiller
        if prefiller is None or state.slot is None or state.request.media:
            return False
        state.remote = prefiller.begin(
            state.tokens, len(state.slot.tokens), state.namespace, state.adapters, keep=self._slots.keeps
        )
        if state.remote is not None:
            self._queues.remote.append(state)
        return state.remote is not None

    def receive(self, *, steps_in_flight: bool) -> bool:
        """Write the keys and values that have arrived. Requests whose transfer is complete become ready, and the engine
        here computes the rest of their prompts.

        Return False if keys and values have arrived while steps are in flight: they can be written only between steps.
        """
        remote = self._queues.remote
        if steps_in_flight:
            return not any(state.remote and state.remote.wait(0) for state in remote)
        for state in [*remote]:
            assert state.remote is not None
            assert state.slot is not None
            blocks, is_over = state.remote.take()
            if blocks and not self._slots.write(state.slot, state.tokens, blocks):
                state.release_remote()
                is_over = True
            if blocks:
                state.tell_prefill()
            if is_over:
                remote.remove(state)
                self._queues.ready.append(state)
        return True

    def wait(self) -> None:
        """Wait up to `LOOK_S` for keys and values if another placement computes a prompt. Raise Interrupted if the
        engine was stopped."""
        if not self._queues.remote:
            return
        if self._engine.states.use.is_stopped:
            raise Interrupted("stopped on request")
        first = self._queues.remote[0].remote
        if first is not None:
            first.wait(LOOK_S)
