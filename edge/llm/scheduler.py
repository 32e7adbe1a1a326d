"""Several requests at once on one engine: each has a sequence of the KV cache, and all stages are kept busy.

Rows of several requests that go through an engine together cost little more than one, so ready requests share a step.
Where an engine has stages they form as many groups (microbatches), so that every stage has one to work on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from edge.errors import ContextFull, EdgeError
from edge.llm.continuation import Continuation
from edge.llm.interface import TextEngine
from edge.llm.sampler import SamplingParams
from transport.errors import TransportError


@dataclass(frozen=True)
class Request:
    """A prompt to be continued."""

    prompt: Sequence[int]  # token ids
    max_tokens: int
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0))
    stop: Sequence[str] = ()  # strings that end the answer; the token that completes one is its last
    ends: bool = True  # False: also after a token that ends a text, for measuring


class _Running:
    """A request with its sequence."""

    def __init__(self, index: int, request: Request, sequence: int, continuation: Continuation) -> None:
        self.index, self.request, self.sequence, self.continuation = index, request, sequence, continuation
        self.prefilled = 0  # tokens of the prompt that were submitted

    @property
    def generated(self) -> list[int]:
        """The tokens of its answer so far."""
        return self.continuation.tokens

    @property
    def room(self) -> int:
        """Tokens of context it may come to need."""
        return len(self.request.prompt) + self.request.max_tokens


class Scheduler:
    """Runs requests on an engine whose KV cache it has to itself."""

    def __init__(
        self,
        engine: TextEngine,
        on_token: Callable[[int, int], None] = lambda index, token: None,
        microbatches: int | None = None,
    ) -> None:
        """on_token(request's index, token) is called for every token as it is chosen. microbatches: how many groups
        requests form; None: one for each stage."""
        self._engine = engine
        self._groups = microbatches or engine.stages
        self._in_flight = self._groups if engine.stages > 1 else 1  # a single stage has one at a time
        self._on_token = on_token
        self._waiting: deque[tuple[int, Request]] = deque()
        self._ready: deque[_Running] = deque()  # the next step of these can be submitted
        self._flying: deque[list[_Running]] = deque()  # submitted; in the order their logits come
        self._free = list(range(engine.sequences))
        self._room = engine.context
        self._results: dict[int, list[int]] = {}

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        """The tokens generated for each request. ContextFull where one of them alone does not fit.

        Each is what `generate` gives for it alone. A token that ends a text is not part of it.
        """
        for index, request in enumerate(requests):
            if not 0 < len(request.prompt) + request.max_tokens <= self._engine.context or not request.prompt:
                raise ContextFull(
                    f"request {index} has {len(request.prompt)} tokens and may get {request.max_tokens}; the context"
                    f" holds {self._engine.context}"
                )
        self._waiting.extend(enumerate(requests))
        self._engine.kv_clear()
        try:
            while self._waiting or self._ready or self._flying:
                self._admit()
                if self._ready and len(self._flying) < self._in_flight:
                    self._submit()
                else:
                    self._collect()
        finally:
            for one in (*self._ready, *(one for group in self._flying for one in group)):
                one.continuation.close()
            while self._engine.uncollected:  # where it ends by an error: the next to ask must not get these
                with suppress(EdgeError, TransportError):  # the engine has failed, and that error is on its way
                    self._engine.collect()
        return [self._results[index] for index in range(len(requests))]

    def _admit(self) -> None:
        """Give waiting requests a sequence, as far as there are some and the context has room."""
        while self._waiting and self._free:
            index, request = self._waiting[0]
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
            running = _Running(index, request, self._free[0], continuation)
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

    def _collect(self) -> None:
        """Choose a token for each request of the oldest group."""
        group = self._flying.popleft()
        for one, logits in zip(group, self._engine.collect(), strict=True):
            if one.continuation.choose(logits) is not None:
                self._on_token(one.index, one.generated[-1])
            if one.continuation.finish_reason:
                self._finish(one)
            else:
                self._ready.append(one)

    def _finish(self, one: _Running) -> None:
        self._results[one.index] = one.generated
        one.continuation.close()
        self._engine.kv_remove(one.sequence, 0, -1)
        self._free.append(one.sequence)
        self._room += one.room


def _top(group: Sequence[_Running]) -> int:
    """How many of the largest logits suffice for all of them; 0: all."""
    needs = [one.continuation.needs for one in group]
    return max(needs) if all(needs) else 0
