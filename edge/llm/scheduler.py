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
from dataclasses import dataclass, field, replace

import numpy as np

from edge.errors import ContextFull, EdgeError, EngineError, SamplingError
from edge.llm.continuation import Continuation
from edge.llm.interface import TextEngine
from edge.llm.logprobs import TokenLogprobs, token_logprobs
from edge.llm.sampler import SamplingParams
from edge.llm.sequence import USED_MEANWHILE, holds, take
from edge.llm.slots import Slot, Slots
from edge.llm.step_budget import StepBudget

OLDEST_PART = 4  # of a step's rows for prompts, one in so many is for the oldest
HEADROOM = 32  # tokens: each answer has room for so many more before another request joins, which else soon waits again


@dataclass(frozen=True)
class Request:
    """A prompt to be continued."""

    prompt: Sequence[int]  # token ids
    max_tokens: int
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0))
    stop: Sequence[str] = ()  # strings that end the answer; the token that completes one is its last
    ends: bool = True  # False: also after a token that ends a text, for measuring
    logprobs: int | None = None  # how many alternatives are told with each token; None: no probabilities at all
    generated: Sequence[int] = ()  # the beginning of the answer, where it was told already


@dataclass(frozen=True)
class Event:
    """What came of one request in one step."""

    request: int  # its number, as `add` gave it
    token_id: int | None  # None where only its end is told
    text: str  # that is certain by now; may be empty while a character or a stop string is incomplete
    finish_reason: str | None  # "stop", "length", "cancelled", "error", or None while it goes on
    logprobs: TokenLogprobs | None = None
    stop_string: str | None = None  # that ended it
    cached_tokens: int = 0  # of its prompt: that need not be computed
    error: SamplingError | None = None  # why its constraint cannot be followed any further


class Running:
    """A request that was added, and its answer."""

    def __init__(self, number: int, request: Request, continuation: Continuation) -> None:
        self.number, self.request, self.continuation = number, request, continuation
        self.slot: Slot | None = None  # None while it waits
        self.cached_tokens: int | None = None  # None until it was admitted for the first time
        self.cancelled = False

    @property
    def history(self) -> list[int]:
        """Its prompt, and its answer so far."""
        return [*self.request.prompt, *self.continuation.tokens]

    def part(self, start: int, n_tokens: int) -> list[int]:
        """So many tokens of its history from there on. Steps ask for few of a long one."""
        prompt, end = self.request.prompt, start + n_tokens
        answer = self.continuation.tokens[max(0, start - len(prompt)) : max(0, end - len(prompt))]
        return [*prompt[start:end], *answer]

    @property
    def length(self) -> int:
        """Tokens of its history."""
        return len(self.request.prompt) + len(self.continuation.tokens)

    @property
    def left(self) -> int:
        """Tokens that it may still get."""
        return self.request.max_tokens - len(self.continuation.tokens)

    @property
    def pending(self) -> int:
        """Tokens of its history that were not submitted yet."""
        assert self.slot is not None
        return self.length - len(self.slot.tokens)


class Scheduler:
    """Runs requests on an engine whose KV cache it has to itself. They may come, and be cancelled, between steps."""

    def __init__(
        self,
        engine: TextEngine,
        microbatches: int | None = None,
        *,
        keep: bool = False,
        admitted: Callable[[int], None] = lambda number: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """microbatches: how many groups answers form; None: one for each stage. keep: sequences of complete requests
        stay in the cache while there is room, and on disk where the engine has such a place, for prompts that begin
        like them. admitted: told the number of a request before anything of it is computed."""
        self._engine, self._admitted = engine, admitted
        self._groups = microbatches or engine.stages
        self._in_flight = self._groups if engine.stages > 1 else 1  # a single stage has one at a time
        self._numbers = itertools.count()
        self._waiting: deque[Running] = deque()
        self._ready: deque[Running] = deque()  # the next rows of these can be submitted; in order of admission
        self._flying: deque[list[Running]] = deque()  # submitted; in the order their logits come
        self._slots = Slots(engine, keep=keep)
        self._budget = StepBudget(engine.batch, clock)
        self._events: list[Event] = []  # to be told by the next step
        self.preemptions = 0
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

    def prepare(self, request: Request) -> Running:
        """A request that `enqueue` can take: all that can be wrong with it is found here. Any thread may do this.

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
        )
        continuation.follow(request.generated)
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
        """Admit who waits, submit what can be submitted, else collect what comes: what came of it, in order.

        The errors of the engine; EngineError where a conversation used the engine meanwhile. Then the scheduler is to
        be closed.
        """
        if not all(holds(self._engine, sequence, self) for sequence in range(self._engine.sequences)):
            raise EngineError(USED_MEANWHILE)
        events, self._events = self._events, []
        self._admit()
        submitted = bool(self._ready) and len(self._flying) < self._in_flight and self._submit()
        if not submitted and self._flying:
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
            running.continuation.close()
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
            running.slot, held = self._slots.admit(running.history)
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
            positions += range(start, start + n_rows)
            sequences += [running.slot.sequence] * n_rows
            outputs += [0] * (n_rows - 1) + [int(not running.pending)]
            if not running.pending:
                self._ready.remove(running)
                flying.append(running)
        prompts = sum(n_rows for _, n_rows in chosen if n_rows > 1)
        with self._budget.timed(prompts, beside=len(tokens) > prompts):
            self._engine.submit(
                tokens, np.array(positions), np.array(sequences), np.array(outputs, np.int8), top=_top(flying)
            )
        if flying:
            self._flying.append(flying)
        return True

    def _chosen(self) -> list[tuple[Running, int]]:
        """Whose rows the next step has, and how many of each."""
        answering = [one for one in self._ready if one.pending == 1]
        prefilling = [one for one in self._ready if one.pending > 1]
        in_all = len(answering) + sum(len(group) for group in self._flying)
        group = answering[: -(-in_all // self._groups)]
        chosen = [(one, 1) for one in group]
        room = self._engine.batch - len(group)
        room = min(
            room,
            self._budget.rows if in_all else self._engine.chunk(max((one.length for one in prefilling), default=1)),
        )
        return chosen + _parts(prefilling, room)

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
        """Choose a token for each request of the oldest group."""
        group, events = self._flying.popleft(), []
        for running, logits in zip(group, self._engine.collect(), strict=True):
            if running.cancelled:
                events.append(self._ended(running, "cancelled"))
                continue
            try:
                events.append(self._told(running, logits))
            except SamplingError as error:
                events.append(replace(self._ended(running, "error"), error=error))
            if events[-1].finish_reason is None:
                self._ready.append(running)
        return events

    def _told(self, running: Running, logits: np.ndarray[tuple[int], np.dtype[np.float32]]) -> Event:
        continuation, wanted = running.continuation, running.request.logprobs
        text = continuation.choose(logits)
        if text is None:
            return self._ended(running, "stop")
        token = continuation.tokens[-1]
        logprobs = None if wanted is None else token_logprobs(logits, token, wanted)
        if continuation.finish_reason:
            return self._ended(running, continuation.finish_reason, token, text, logprobs)
        return Event(running.number, token, text, None, logprobs, None, running.cached_tokens or 0)

    def _ended(
        self,
        running: Running,
        finish_reason: str,
        token: int | None = None,
        text: str = "",
        logprobs: TokenLogprobs | None = None,
    ) -> Event:
        """Tell the end of a request, and free what it had."""
        rest = "" if finish_reason == "cancelled" else running.continuation.rest()
        stop_string, cached = running.continuation.stop_string, running.cached_tokens or 0
        running.continuation.close()
        if running.slot is not None:
            self._slots.leave(running.slot, keep=not self._flying)
        return Event(running.number, token, text + rest, finish_reason, logprobs, stop_string, cached)


def _parts(prefilling: Sequence[Running], room: int) -> list[tuple[Running, int]]:
    """How many of so many rows each of these prompts gets. Short ones come first, so that most answers begin soon; the
    oldest always has a part, so that it comes to its end."""
    if not prefilling:
        return []
    oldest = min(prefilling, key=lambda one: one.number)
    reserved = min(oldest.pending, -(-room // OLDEST_PART))
    room -= reserved
    parts = []
    for one in sorted(prefilling, key=lambda one: (one.pending, one.number)):
        kept_back = reserved if one is oldest else 0
        n_rows = min(one.pending, room + kept_back)
        if n_rows:
            parts.append((one, n_rows))
        room -= max(0, n_rows - kept_back)
    return parts


def _top(group: Sequence[Running]) -> int:
    """How many of the largest logits suffice for all of them; 0: all."""
    needs = [0 if one.request.logprobs is not None else one.continuation.needs for one in group]
    return max(needs, default=1) if all(needs) else 0
