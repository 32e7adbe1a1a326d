"""Prompts of requests that another placement of the model computes: their keys and values are received here."""

from __future__ import annotations

from edge.errors import Interrupted
from edge.llm.interface import TextEngine
from edge.llm.queues import Queues
from edge.llm.requests import Running
from edge.llm.slots import Slots

LOOK_S = 0.05  # longest wait for keys and values, after which a step checks whether the engine was stopped


class RemotePrompts:
    """Receives keys and values for the slots of the requests in `Queues.remote`."""

    def __init__(self, engine: TextEngine, slots: Slots, queues: Queues) -> None:
        self._engine, self._slots, self._queues = engine, slots, queues

    def begin(self, running: Running) -> bool:
        """Let the other placement compute the prompt of an admitted request. Return False if it does not."""
        prefiller = self._engine.states.prefiller
        if prefiller is None or running.slot is None or running.request.media:
            return False
        running.remote = prefiller.begin(
            running.tokens, len(running.slot.tokens), running.namespace, running.adapters, keep=self._slots.keeps
        )
        if running.remote is not None:
            self._queues.remote.append(running)
        return running.remote is not None

    def receive(self, *, steps_in_flight: bool) -> bool:
        """Write the keys and values that have arrived. Requests whose transfer is complete become ready, and the engine
        here computes the rest of their prompts.

        Return False if keys and values have arrived while steps are in flight: they can be written only between steps.
        """
        remote = self._queues.remote
        if steps_in_flight:
            return not any(running.remote and running.remote.wait(0) for running in remote)
        for running in [*remote]:
            assert running.remote is not None
            assert running.slot is not None
            blocks, is_over = running.remote.take()
            if blocks and not self._slots.write(running.slot, running.tokens, blocks):
                running.release_remote()
                is_over = True
            if blocks:
                running.tell_prefill()
            if is_over:
                remote.remove(running)
                self._queues.ready.append(running)
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
