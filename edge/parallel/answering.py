"""Requests that a placement of prompts answers beside its prompts, while the one that generates is overloaded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

from edge.errors import EdgeError
from edge.llm.in_flight import InFlight, Rows
from edge.llm.interface import TextEngine
from edge.llm.requests import Event, RemoteAnswer
from edge.llm.slot import Slot
from edge.llm.slots import Slots
from edge.llm.step_budget import StepBudget
from partition.predict.migration import HEADROOM
from partition.state.sequence import KVBlock


class Answering:
    """The requests that are answered, in steps that have all of them. For the thread of their placement."""

    def __init__(self, engine: TextEngine, slots: Slots) -> None:
        self._engine, self._slots = engine, slots
        self.in_flight = InFlight(StepBudget(engine.batch, time.perf_counter), engine, 1)
        self._answers: list[tuple[RemoteAnswer, Slot]] = []

    @property
    def any(self) -> RemoteAnswer | None:
        """A request that is answered; None where there is none."""
        return self._answers[-1][0] if self._answers else None

    def admit(self, answer: RemoteAnswer) -> None:
        """Give a request a slot, which then holds what there is of its history. It is over where there is no room."""
        own = answer.own
        with answer.changed:
            tokens = list(own.tokens)
        self.leave()
        placement = None if answer.is_over else self._slots.place(tokens, HEADROOM, own.namespace)
        if placement is None:
            answer.end()
            return
        own.slot = slot = self._slots.admit(placement, tokens, own.namespace, adapters=own.adapters)
        self._answers.append((answer, slot))
        self.in_flight.pace.clear()
        self._write(answer.blocks, slot, tokens)
        answer.blocks = ()

    def _write(self, blocks: Sequence[KVBlock], slot: Slot, tokens: Sequence[int]) -> None:
        """Continue a slot by keys and values from elsewhere. What cannot be taken is computed by the next steps."""
        try:
            for block in blocks:
                start, stop = block.positions.start, block.positions.stop
                if not start <= len(slot.tokens) < stop or not self._slots.make_room(stop - start):
                    return
                slot.cut(start)
                self._engine.states.write(slot.sequence, block)
                slot.submitted(tokens[start:stop])
        except EdgeError:
            slot.cut(len(slot.tokens))  # raises where this engine has failed

    def leave(self) -> None:
        """Let others have the slots of requests that are over. What they hold stays until it is needed."""
        for answer, slot in [pair for pair in self._answers if pair[0].is_over]:
            self._answers.remove((answer, slot))
            self._slots.leave(slot, keep=False)

    def step(self) -> None:
        """Compute the next token of each request, or a part of what its slot lacks: one step for each set of
        adapters. Where the cache is full the last request ends."""
        self.leave()
        for adapters in {answer.own.adapters: None for answer, _ in self._answers}:
            answers = [answer for answer, _ in self._answers if answer.own.adapters == adapters]
            with ExitStack() as looking:
                for answer in answers:
                    looking.enter_context(answer.changed)
                rows = self._rows([answer for answer in answers if not answer.is_over])
            if rows:
                self._compute(rows)

    def _rows(self, answers: Sequence[RemoteAnswer]) -> list[Rows]:
        """The rows of a step that has these requests."""
        rows: list[Rows] = []
        left = self._engine.batch - len(answers)
        for answer in answers:
            n_rows = min(self._engine.chunk(answer.own.pending), 1 + left)
            own = Rows.pending(answer.own, n_rows)
            left -= len(own.tokens) - 1
            if not self._slots.make_room(sum(len(other.tokens) for other in (*rows, own))):
                answer.end()
                continue
            rows.append(own)
        return rows

    def _compute(self, rows: Sequence[Rows]) -> None:
        by_request = {answer.own: answer for answer, _ in self._answers}
        self.in_flight.submit(self._engine, rows)
        if not any(own.logits for own in rows):
            return
        collected = self.in_flight.collect(self._engine)
        assert collected is not None, "the step gives logits"
        logits, step = collected
        end = 0
        for own in step.rows:
            begin, end = end, end + own.logits
            answer = by_request[own.running]
            with answer.changed:
                if not answer.is_over:
                    events: list[Event] = []
                    self.in_flight.verify(own, logits[begin:end], 0, False, events)
                    answer.add(events)
