"""Several requests at once on one engine: each has a sequence of the KV cache, and all stages are kept busy.

Rows of several requests that go through an engine together cost little more than one, so ready requests share a step.
Where an engine has stages they form as many groups (microbatches), so that every stage has one to work on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from edge.errors import ContextFull, EdgeError, EngineError
from edge.llm.continuation import Continuation
from edge.llm.interface import TextEngine
from edge.llm.sampler import SamplingParams
from edge.llm.sequence import USED_MEANWHILE, holds, take


@dataclass(frozen=True)
class Request:
    """A prompt to be continued."""

    prompt: Sequence[int]  # token ids
    max_tokens: int
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0))
    stop: Sequence[str] = ()  # strings that end the answer; the token that completes one is its last
    ends: bool = True  # False: also after a token that ends a text, for measuring


@dataclass(frozen=True)
class Event:
    """What came of one request in one step."""

    request: int  # its number, as `add` gave it
    token_id: int | None  # None where only its end is told
    text: str  # that is certain by now; may be empty while a character or a stop string is incomplete
    finish_reason: str | None  # "stop", "length", "cancelled", or None while it goes on


class _Running:
    """A request with its sequence."""

    def __init__(self, number: int, request: Request, sequence: int, continuation: Continuation) -> None:
        self.number, self.request, self.sequence, self.continuation = number, request, sequence, continuation
        self.prefilled = 0  # tokens of the prompt that were submitted
        self.cancelled = False

    @property
    def generated(self) -> list[int]:
        """The tokens of its answer so far."""
        return self.continuation.tokens

    @property
    def room(self) -> int:
        """Tokens of context it may come to need."""
        return len(self.request.prompt) + self.request.max_tokens


class Scheduler:
    """Runs requests on an engine whose KV cache it has to itself. They may come, and be cancelled, between steps."""

    def __init__(self, engine: TextEngine, microbatches: int | None = None) -> None:
        """microbatches: how many groups requests form; None: one for each stage."""
        self._engine = engine
        self._groups = microbatches or engine.stages
        self._in_flight = self._groups if engine.stages > 1 else 1  # a single stage has one at a time
        self._next = 0  # the number of the next request
        self._waiting: deque[tuple[int, Request]] = deque()
        self._ready: deque[_Running] = deque()  # the next step of these can be submitted
        self._flying: deque[list[_Running]] = deque()  # submitted; in the order their logits come
        self._free = list(range(engine.sequences))
        self._room = engine.context
        self._events: list[Event] = []  # of cancelled requests, to be told by the next step
        engine.kv_clear()
        for sequence in range(engine.sequences):
            take(engine, sequence, self)

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        return bool(self._waiting or self._ready or self._flying or self._events)

    def add(self, request: Request) -> int:
        """Let a request wait for its turn; its number. ContextFull where it alone does not fit."""
        number, need = self._next, len(request.prompt) + request.max_tokens
        if not 0 < need <= self._engine.context or not request.prompt:
            raise ContextFull(
                f"request {number} has {len(request.prompt)} tokens and may get {request.max_tokens}; the context"
                f" holds {self._engine.context}"
            )
        self._next += 1
        self._waiting.append((number, request))
        return number

    def cancel(self, number: int) -> None:
        """End a request; the next steps tell so. Nothing happens where it has ended already."""
        for waiting in self._waiting:
            if waiting[0] == number:
                self._waiting.remove(waiting)
                self._events.append(Event(number, None, "", "cancelled"))
                return
        for running in self._ready:
            if running.number == number:
                self._ready.remove(running)
                self._finish(running)
                self._events.append(Event(number, None, "", "cancelled"))
                return
        for running in (one for group in self._flying for one in group):
            running.cancelled |= running.number == number  # its logits are under way, and are dropped when they come

    def step(self) -> list[Event]:
        """Admit who waits, submit what can be submitted, else collect what comes: what came of it, in order.

        The errors of the engine; SamplingError for a request whose options cannot be used; EngineError where a
        conversation used the engine meanwhile. Then the scheduler is to be closed.
        """
        if not all(holds(self._engine, sequence, self) for sequence in range(self._engine.sequences)):
            raise EngineError(USED_MEANWHILE)
        events, self._events = self._events, []
        self._admit()
        if self._ready and len(self._flying) < self._in_flight:
            self._submit()
        elif self._flying:
            events += self._collect()
        return events

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        """The tokens generated for each request. ContextFull where one of them alone does not fit.

        Each is what `generate` gives for it alone. A token that ends a text is not part of it.
        """
        with self:
            numbers = [self.add(request) for request in requests]
            tokens: dict[int, list[int]] = {number: [] for number in numbers}
            while self.busy:
                for event in self.step():
                    if event.token_id is not None:
                        tokens[event.request].append(event.token_id)
            return list(tokens.values())

    def close(self) -> None:
        """Drop all requests. The engine is left in order, also where it failed."""
        self._waiting.clear()
        for running in (*self._ready, *(one for group in self._flying for one in group)):
            running.continuation.close()
        self._ready.clear()
        self._flying.clear()
        while self._engine.uncollected:  # the next to ask must not get these
            with suppress(EdgeError):  # the engine has failed, and that error is on its way
                self._engine.collect()
        with suppress(EdgeError):
            for sequence in range(self._engine.sequences):
                if holds(self._engine, sequence, self):  # what was dropped must leave no rows behind
                    self._engine.kv_remove(sequence, 0, -1)

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _admit(self) -> None:
        """Give waiting requests a sequence, as far as there are some and the context has room."""
        while self._waiting and self._free:
            number, request = self._waiting[0]
            if len(request.prompt) + request.max_tokens > self._room:
                return
            continuation = Continuation(
                self._engine.model,
                request.prompt,
                request.sampling,
                max_tokens=request.max_tokens,
                stop=request.stop,
                ends=request.ends,
            )
            running = _Running(number, request, self._free[0], continuation)
            self._waiting.popleft()
            self._free.pop(0)
            self._room -= running.room
            self._ready.append(running)

    def _submit(self) -> None:
        """A chunk of one prompt, or the next token of a group of requests."""
        first = self._ready[0]
        if first.prefilled < len(first.request.prompt):
            self._prefill(self._ready.popleft())
            return
        decoding = [one for one in self._ready if one.generated]
        in_all = len(decoding) + sum(len(group) for group in self._flying)
        group = decoding[: max(1, -(-in_all // self._groups))]
        for one in group:
            self._ready.remove(one)
        self._engine.submit(
            [one.generated[-1] for one in group],
            np.array([len(one.request.prompt) + len(one.generated) - 1 for one in group]),
            np.array([one.sequence for one in group]),
            np.ones(len(group), np.int8),
            top=_top(group),
        )
        self._flying.append(group)

    def _prefill(self, one: _Running) -> None:
        prompt = one.request.prompt
        start = one.prefilled
        tokens = prompt[start : start + self._engine.chunk(len(prompt))]
        one.prefilled += len(tokens)
        outputs = np.zeros(len(tokens), np.int8)
        outputs[-1] = one.prefilled == len(prompt)
        positions = np.arange(start, one.prefilled)
        self._engine.submit(tokens, positions, np.full(len(tokens), one.sequence), outputs, top=_top([one]))
        if outputs[-1]:
            self._flying.append([one])
        else:
            self._ready.appendleft(one)

    def _collect(self) -> list[Event]:
        """Choose a token for each request of the oldest group."""
        group, events = self._flying.popleft(), []
        for running, logits in zip(group, self._engine.collect(), strict=True):
            if running.cancelled:
                events.append(Event(running.number, None, "", "cancelled"))
                self._finish(running)
                continue
            text = running.continuation.choose(logits)
            finish_reason = running.continuation.finish_reason
            token = None if text is None else running.generated[-1]
            rest = running.continuation.rest() if finish_reason else ""
            events.append(Event(running.number, token, (text or "") + rest, finish_reason))
            if finish_reason:
                self._finish(running)
            else:
                self._ready.append(running)
        return events

    def _finish(self, running: _Running) -> None:
        running.continuation.close()
        self._engine.kv_remove(running.sequence, 0, -1)
        self._free.append(running.sequence)
        self._room += running.room


def _top(group: Sequence[_Running]) -> int:
    """How many of the largest logits suffice for all of them; 0: all."""
    needs = [one.continuation.needs for one in group]
    return max(needs) if all(needs) else 0
