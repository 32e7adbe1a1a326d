"""Several requests at once on one engine: each has a sequence of the KV cache, and all stages are kept busy.

Rows of several requests that go through an engine together cost little more than one. So a step has the next token of
every answer, and beside them as many tokens of new prompts as leave the answers fluent. Where an engine has stages the
answers form as many groups (microbatches), so that every stage has one to work on.

A step is: admit, submit, collect, choose, tell. What a request does not have in the cache yet are its pending tokens:
all of its prompt at first, one token later.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from edge.constraints.constraint import Mask, never_given_up
from edge.errors import ContextFull, EdgeError, EngineError, SamplingError
from edge.llm.continuation import Continuation
from edge.llm.interface import StepDrafter, TextEngine
from edge.llm.requests import Event, Request, Running, token_logprobs
from edge.llm.sampler import LogitsRequest
from edge.llm.sequence import USED_MEANWHILE, holds, take
from edge.llm.slots import Slots
from edge.llm.step_budget import StepBudget, parts

HEADROOM = 32  # tokens: each answer has room for so many more before another request joins, which else soon waits again


class Scheduler:
    """Runs requests on an engine whose KV cache it has to itself. They may come, and be cancelled, between steps."""

    def __init__(
        self,
        engine: TextEngine,
        microbatches: int | None = None,
        *,
        keep: bool = False,
        drafter: StepDrafter | None = None,
        admitted: Callable[[int], None] = lambda number: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """microbatches: how many groups answers form; None: one for each stage. keep: sequences of complete requests
        stay in the cache while there is room, and on disk where the engine has such a place, for prompts that begin
        like them. drafter: guesses tokens while few requests run, which their steps then check. admitted: told the
        number of a request before anything of it is computed."""
        self._engine, self._drafter, self._admitted = engine, drafter, admitted
        self._groups = microbatches or engine.stages
        self._in_flight = self._groups if engine.stages > 1 else 1  # a single stage has one at a time
        self._numbers = itertools.count()
        self._waiting: deque[Running] = deque()
        self._ready: deque[Running] = deque()  # the next rows of these can be submitted; in order of admission
        self._flying: deque[list[Running]] = deque()  # submitted; in the order their logits come
        self._slots = Slots(engine, keep=keep)
        self._budget = StepBudget(engine.batch, clock)
        self._events: list[Event] = []  # to be told by the next step
        self.passes = self.preemptions = 0
        engine.kv_clear()
        for sequence in range(engine.sequences):
            take(engine, sequence, self)

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        return bool(self._waiting or self._ready or self._flying or self._events)

    @property
    def waiting(self) -> int:
        """Requests that have no sequence yet."""
        return len(self._waiting)

    @property
    def running(self) -> list[Running]:
        """Requests that have a sequence, by its number."""
        having = {*self._ready, *(one for group in self._flying for one in group)}
        return sorted(having, key=lambda one: one.slot.sequence if one.slot else -1)

    def prepare(self, request: Request, given_up: Callable[[], bool] = never_given_up) -> Running:
        """A request that `enqueue` can take: all that can be wrong with it is found here. Any thread may do this.
        given_up: whether nobody waits for it any more.

        ContextFull where it alone does not fit, SamplingError for options that cannot be used.
        """
        number, need = next(self._numbers), len(request.prompt) + request.max_tokens
        if not 0 < need <= self._engine.context or not request.prompt:
            raise ContextFull(
                f"request {number} has {len(request.prompt)} tokens and may get {request.max_tokens}; the context"
                f" holds {self._engine.context}"
            )
        continuation = Continuation(
            self._engine.model,
            request.prompt,
            request.sampling,
            max_tokens=request.max_tokens,
            stop=request.stop,
            ends=request.ends,
            given_up=given_up,
        )
        try:
            continuation.follow(request.generated)
        except SamplingError:
            continuation.close()
            raise
        return Running(number, request, continuation)

    def enqueue(self, running: Running) -> int:
        """Let a prepared request wait for its turn; its number."""
        self._waiting.append(running)
        return running.number

    def add(self, request: Request) -> int:
        """Let a request wait for its turn; its number. The errors of `prepare`."""
        return self.enqueue(self.prepare(request))

    def cancel(self, number: int) -> None:
        """End a request; the next steps tell so. Nothing happens where it has ended already."""
        for queue in (self._waiting, self._ready):
            for running in queue:
                if running.number == number:
                    queue.remove(running)
                    self._events.append(self._ended(running, "cancelled"))
                    return
        for running in (one for group in self._flying for one in group):
            running.cancelled |= running.number == number  # its logits are under way, and are dropped when they come

    def step(self) -> list[Event]:
        """Admit who waits, submit what can be submitted, collect what comes: what came of it, in order.

        The errors of the engine; EngineError where a conversation used the engine meanwhile. Then the scheduler is to
        be closed.
        """
        if not all(holds(self._engine, sequence, self) for sequence in range(self._engine.sequences)):
            raise EngineError(USED_MEANWHILE)
        events, self._events = self._events, []
        self._admit()
        submitted = bool(self._ready) and len(self._flying) < self._in_flight and self._submit()
        if self._flying and (not submitted or self._in_flight == 1):  # stages go on with others meanwhile
            events += self._collect()
        return events

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        """The tokens generated for each request. ContextFull where one of them alone does not fit, SamplingError.

        Each is what `generate` gives for it alone. A token that ends a text is not part of it.
        """
        with self:
            numbers = [self.add(request) for request in requests]
            tokens: dict[int, list[int]] = {number: [] for number in numbers}
            while self.busy:
                for event in self.step():
                    if event.error is not None:
                        raise event.error
                    if event.token_id is not None:
                        tokens[event.request].append(event.token_id)
            return list(tokens.values())

    def close(self) -> None:
        """Drop all requests. The engine is left in order, also where it failed."""
        for running in (*self._waiting, *self._ready, *(one for group in self._flying for one in group)):
            self._close(running)
        self._waiting.clear()
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

    # --- admit ---

    def _admit(self) -> None:
        """Give waiting requests a sequence, in their order, while the context has room for their next tokens."""
        while self._waiting and self._slots.free:
            running, others = self._waiting[0], self.running
            growth = sum(min(one.left, HEADROOM) for one in (running, *others))
            if not self._slots.make_room(running.length + (growth if others else 1)):
                return
            if self._slots.restores and self._flying:
                return  # states are read between steps
            self._waiting.popleft()
            running.slot, held = self._slots.admit(running.history, running.request.namespace)
            if running.cached_tokens is None:
                running.cached_tokens = min(held, len(running.request.prompt))
            self._ready.append(running)
            self._admitted(running.number)

    # --- submit ---

    def _submit(self) -> bool:
        """The next token of a group of answers, and tokens of prompts beside them; False where there is room for none
        before others have ended."""
        chosen = self._chosen()
        while not self._slots.make_room(sum(n_rows for _, n_rows in chosen)):
            self._preempt(chosen)
        if not chosen:
            return False
        self._guess(chosen)
        tokens: list[int] = []
        positions: list[int] = []
        sequences: list[int] = []
        outputs: list[int] = []
        flying: list[Running] = []
        for running, n_rows in chosen:
            assert running.slot is not None
            start = len(running.slot.tokens)
            added = running.part(start, n_rows)
            running.slot.tokens += added
            tokens += added
            outputs += [0] * (n_rows - 1) + [int(not running.pending)]
            if not running.pending:
                self._ready.remove(running)
                flying.append(running)
            guesses = running.guesses or ()
            running.slot.tokens += guesses
            tokens += guesses
            outputs += [1] * len(guesses)
            n_rows += len(guesses)
            positions += range(start, start + n_rows)
            sequences += [running.slot.sequence] * n_rows
        prompts = sum(n_rows for _, n_rows in chosen if n_rows > 1)
        top, masks = self._wanted(flying)
        with self._budget.timed(len(tokens), prompts):
            self._engine.submit(
                tokens, np.array(positions), np.array(sequences), np.array(outputs, np.int8), top=top, masks=masks
            )
        self.passes += 1
        if flying:
            self._flying.append(flying)
        return True

    def _wanted(self, group: Sequence[Running]) -> LogitsRequest:
        """Which logits suffice for all of them. All where they are on this device: masks would be made for nothing."""
        if not self._engine.logits_cross or any(one.request.logprobs is not None for one in group):
            return LogitsRequest()
        each = [one.continuation.wanted(one.guesses or ()) for one in group]
        if not all(wanted.top for wanted in each):
            return LogitsRequest()
        masks: list[Mask | None] = []
        for one, wanted in zip(group, each, strict=True):
            masks += wanted.masks or [None] * (1 + len(one.guesses or ()))
        return LogitsRequest(max((wanted.top for wanted in each), default=1), masks)

    def _chosen(self) -> list[tuple[Running, int]]:
        """Whose rows the next step has, and how many of each."""
        answering = [one for one in self._ready if one.pending == 1]
        prefilling = [one for one in self._ready if one.pending > 1]
        in_all = len(answering) + sum(len(group) for group in self._flying)
        group = answering[: -(-in_all // self._groups)]
        chosen = [(one, 1) for one in group]
        longest = max((one.length for one in prefilling), default=1)
        most = self._budget.beside(len(group), len(prefilling) / in_all) if in_all else self._engine.chunk(longest)
        room = min(self._engine.batch - len(group), most)
        return chosen + parts(prefilling, room)

    def _guess(self, chosen: Sequence[tuple[Running, int]]) -> None:
        """Let answers have guesses behind their tokens, where the step has all of them and nothing else."""
        if self._drafter is None:
            return
        group = [one for one, _ in chosen]
        for one in group:
            one.guesses = None
        if self._flying or len(self._ready) > len(group) or any(one.pending > 1 for one in group):
            self._drafter.disturbed()
            return
        drafted = self._drafter.draft(group, min(self._engine.outputs, self._engine.batch))
        fit = self._slots.make_room(len(group) + sum(map(len, drafted)))  # nobody has to wait for a guess
        for one, guesses in zip(group, drafted, strict=True):
            one.guesses = guesses if fit else ()

    def _preempt(self, chosen: list[tuple[Running, int]]) -> None:
        """Let the request that was admitted last wait again: those before it need its place. It goes on later with the
        same tokens."""
        last = max(self._ready, key=lambda one: one.number)
        self._ready.remove(last)
        chosen[:] = [(one, n_rows) for one, n_rows in chosen if one is not last]
        assert last.slot is not None
        self._slots.leave(last.slot, keep=not self._flying)
        last.slot = None
        self._waiting.appendleft(last)
        self.preemptions += 1

    # --- collect, choose, tell ---

    def _collect(self) -> list[Event]:
        """Choose tokens for each request of the oldest group: one, and others while they are as guessed."""
        group, events, used = self._flying.popleft(), [], []
        rows = [1 + len(running.guesses or ()) for running in group]
        ends = itertools.accumulate(rows)
        logits = self._engine.collect()
        for running, n_rows, end in zip(group, rows, ends, strict=True):
            told = self._answered(running, logits[end - n_rows : end])
            used.append(len(told))
            events += told
        if self._drafter is not None and all(running.guesses is not None for running in group):
            self._drafter.checked(rows, used)
        return events

    def _answered(self, running: Running, rows: NDArray[np.float32]) -> list[Event]:
        """What comes of the rows of one request. The row behind a wrong guess knows nothing of what was chosen."""
        assert running.slot is not None
        held, events = len(running.slot.tokens) - len(rows), list[Event]()
        if running.cancelled:
            return [self._ended(running, "cancelled")]
        try:
            for logits, guess in zip(rows, (*(running.guesses or ()), None), strict=True):
                events.append(self._told(running, logits))
                if events[-1].finish_reason or events[-1].token_id != guess:
                    break
        except SamplingError as error:
            events.append(Event(running.number, None, running.continuation.rest(), "error", error=error))
        if len(events) < len(rows):
            self._slots.cut(running.slot, held + len(events))
        if events[-1].finish_reason is None:
            self._ready.append(running)
        else:
            self._free(running)
        return events

    def _told(self, running: Running, logits: NDArray[np.float32]) -> Event:
        """The next token of a request, or its end; nothing is freed yet."""
        continuation, wanted = running.continuation, running.request.logprobs
        text = continuation.choose(logits)
        token = None if text is None else continuation.tokens[-1]
        logprobs = None if wanted is None or token is None else token_logprobs(logits, token, wanted)
        reason, text = continuation.finish_reason, text or ""
        if reason:
            text += continuation.rest()
        return Event(
            running.number, token, text, reason, logprobs, continuation.stop_string, running.cached_tokens or 0
        )

    def _ended(self, running: Running, finish_reason: str) -> Event:
        """Tell the end of a request that no token brought, and free what it had."""
        self._free(running)
        return Event(running.number, None, "", finish_reason, cached_tokens=running.cached_tokens or 0)

    def _free(self, running: Running) -> None:
        """A request has ended: others may have what it had."""
        self._close(running)
        if running.slot is not None:
            self._slots.leave(running.slot, keep=not self._flying)

    def _close(self, running: Running) -> None:
        running.continuation.close()
        if self._drafter is not None:
            self._drafter.ended(running.number)
