"""Scheduler: continuous batching of requests on one engine, whose KV cache it owns. A chat has a scheduler of one slot.

Rows of several requests in one step cost little more than one row. So a step contains the next token of each running
request. It also contains as many prompt tokens of waiting requests as keep inter-token latency low (chunked prefill).
If an engine has stages, requests form as many groups (microbatches), so that each stage has work. A lone request gets
draft tokens instead, in as many windows as pay off (`in_flight.py`).

Each step does: receive, admit, submit, collect, choose. The pending tokens of a request are those that the cache lacks.
At first they are its whole prompt, later one token. If a prefill placement computes long prompts, their KV cache
arrives block by block, and the engine computes the rest of the prompt.

If the cache is full, the scheduler preempts the last request, which waits again and continues later from the same
tokens. If the engine is lost, the scheduler preempts all requests, and they continue on another engine. Background
requests run only without other requests, which preempt them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from edge.closing import Closing
from edge.errors import EdgeError, EngineError, MediaError
from edge.llm.admission import Admission
from edge.llm.continuation import Request
from edge.llm.drafts import Drafts
from edge.llm.in_flight import InFlight, Rows, StepInFlight, end_event, in_one_graph, of_one_set
from edge.llm.interface import Drafter, TextEngine
from edge.llm.queues import Queues
from edge.llm.remote_prefill import RemotePrompts
from edge.llm.requests import Event, RequestState, check_media, check_window, prepare
from edge.llm.slot import full_length
from edge.llm.slots import Slots
from edge.llm.step_budget import Came, LatencyTargets, StepBudget
from edge.text.constraints.constraint import never_given_up

Floats = NDArray[np.float32]

USED_MEANWHILE = (
    "something else used this model before the answer was complete; take one answer to its end before the next is"
    " asked for, or answer several at once with Model.stream"
)


class Scheduler(Closing):
    """Runs requests on an engine. Requests may be added and cancelled between steps.

    Several schedulers may use one engine alternately: each takes the whole KV cache from the scheduler before it.
    """

    def __init__(
        self,
        engine: TextEngine,
        microbatches: int | None = None,
        *,
        slots: int | None = None,
        keep: bool = False,
        drafter: Drafter | None = None,
        admitted: Callable[[int], None] = lambda number: None,
        targets: LatencyTargets | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """microbatches: number of groups that answers form; None: from the engine's plan.
        slots: number of concurrent requests; None: the engine's sequences.
        keep: True if later prompts with the same beginning may use the keys and values of complete requests, from
            the cache and from disk.
        drafter: drafts tokens while few requests run.
        admitted: called with the number of each request before its first step.
        targets: latencies that size the steps with prompts.
        """
        check_window(engine)
        self.engine = engine
        self._use = engine.states.use
        self.queues = Queues()
        self._budget = StepBudget(engine.batch, clock, targets)
        self._in_flight = InFlight(self._budget, engine, microbatches)
        self.slots = Slots(engine, slots, keep=keep)
        self._remote = RemotePrompts(engine, self.slots, self.queues)
        self._admission = Admission(engine, self.slots, self.queues, self._remote, admitted)
        self.drafts = Drafts(drafter, engine, self._in_flight)
        self._events: list[Event] = []  # returned by the next `step`

    @property
    def passes(self) -> int:
        """Number of steps that were submitted so far."""
        return self._in_flight.submitted

    @property
    def busy(self) -> bool:
        """True if a step would do something."""
        return bool(self.queues.all or self._in_flight.steps or self._events)

    def prepare(
        self, request: Request, given_up: Callable[[], bool] = never_given_up, number: int | None = None
    ) -> RequestState:
        """Check a request and return it for `enqueue`. Any thread may call this.

        given_up: returns True once the client has disconnected.
        number: unique among all requests; None: the next one.
        Raises ContextFull if the request does not fit alone, and SamplingError for options that cannot be used.
        """
        return prepare(next(self.queues.numbers) if number is None else number, request, self.engine, given_up)

    def enqueue(self, state: RequestState) -> int:
        """Add a prepared request to the waiting ones. Return its number."""
        state.added_at = self._budget.clock()
        self.queues.waiting.append(state)
        return state.number

    def add(self, request: Request) -> int:
        """Prepare and enqueue a request. Return its number. Raises the errors of `prepare`."""
        return self.enqueue(self.prepare(request))

    def cancel(self, number: int) -> None:
        """End a request; the next step returns the event. A request that has ended already is ignored."""
        with self._use.alone():
            for state in self.queues.all:
                if state.number == number:
                    self._end(state, "cancelled")
                    return

    def step(self) -> list[Event]:
        """Run one step, and return its events in order.

        Raises the engine's errors, and EngineError if another scheduler used the engine meanwhile. Close the scheduler
        then.
        """
        with self._use.alone():
            if self.queues.running and self._use.owner is not self:
                raise EngineError(USED_MEANWHILE)
            self._use.step(self, self._go_on)
            events, self._events = self._events, []  # including tokens that were chosen before an engine was lost
        return events

    def _go_on(self) -> None:
        """Run one step: receive, admit, submit, collect, choose."""
        is_free = self._receive()
        is_free = is_free and self._admit()
        submitted = is_free and self._submit()
        collected = self._collect(submitted=submitted)
        self._choose(collected)

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        """Return the generated tokens of each request, without a token that ends the text. They are the tokens that
        `generate` gives for the request alone. Raises ContextFull if a request does not fit alone, and SamplingError.
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

    def drop_requests(self) -> None:
        """Drop all requests. Their keys and values stay in the cache, like the keys and values of complete requests."""
        with self._use.alone():
            for state in self.queues.all:
                self._end(state, "cancelled")
            self._events.clear()

    def close(self) -> None:
        """Drop all requests, and their keys and values. The engine can be used afterwards, unless it has failed."""
        with self._use.alone():
            self.drop_requests()
            self._in_flight.drop(self._use.in_use_by(self))
            if self._use.in_use_by(self) is not None:
                with suppress(EdgeError):
                    for slot in self.slots.all:  # dropped steps must leave no rows behind
                        slot.cut(0)
                self.slots.lost()

    # --- replacement of the engine ---

    def follow_engine(self) -> None:
        """Form steps for another engine from now on."""
        self._in_flight.follow(self.engine)

    def yield_engine(self) -> None:
        """Drop all steps in flight, because another scheduler is about to use the engine."""
        self._in_flight.drop(self._use.in_use_by(self))
        self.slots.lost()
        self.queues.remote.clear()
        self._use.owner = None

    def preempt_all(self) -> None:
        """Let all requests wait again, because another engine takes over with an empty cache. They continue from the
        tokens that were chosen; the steps in flight are computed again."""
        self._in_flight.drop(None)
        self._admission.preempt_all()

    # --- receive ---

    def _receive(self) -> bool:
        """Receive keys and values from the placement for prompts, and preempt background requests if others have come.
        Return False if no request can be admitted until the steps in flight are collected."""
        queues, steps_in_flight = self.queues, bool(self._in_flight.steps)
        if not steps_in_flight:  # no token waits for writes to the disk now
            self.slots.keep_snapshots()
            if queues.is_background:
                self.slots.keep_groups()
        is_free = self._remote.receive(steps_in_flight=steps_in_flight)
        if not queues.is_background:
            for state in queues.without_logits:
                if state.request.background:
                    self._admission.preempt(state, keep=not steps_in_flight)
        return is_free

    # --- admit ---

    def _admit(self) -> bool:
        """Give waiting requests a slot, in the order of `Queues.next_waiting`, while the context has room for their
        next tokens. Return False if the next request must wait for the steps in flight, because its KV cache can be
        restored only between steps.
        """
        queues = self.queues
        while queues.waiting:
            state = queues.next_waiting
            if state.request.background and not queues.is_background:
                return True
            if queues.is_reserved(state, len(self.slots.all), self._budget.clock()):
                return True
            if len(state.tokens) > self.engine.context:  # its next token had no room when the engine was lost
                if not state.shift():
                    self._end(state, "length")
                continue
            while (placement := self._admission.place(state)) is None:
                if (displaced := queues.displaced_by(state)) is None:
                    return True
                self._admission.preempt(displaced, keep=not self._in_flight.steps)
            if self._admission.restores(state) and self._in_flight.steps:
                return False
            self._admission.admit(state, placement)
        return True

    # --- submit ---

    def _submit(self) -> bool:
        """Submit the next tokens of answers, with tokens of prompts or with drafts. Return False if the next rows can
        be submitted only after logits have come."""
        self._end_unfit()
        if self._submit_drafts():
            return False
        self.drafts.disturbed()
        if not self.queues.ready or len(self._in_flight.awaited) >= self._in_flight.most_with(self.queues.ready):
            return False
        if not (rows := self._next_rows()):
            return False
        began = self._budget.clock()
        for step in in_one_graph(rows, self.engine):
            while self.engine.stages == 1 and self._in_flight.steps:  # the part before this one
                self._choose(self._in_flight.collect(self.engine))
            for state in self._in_flight.submit(self.engine, step):
                self.queues.ready.remove(state)
        self._in_flight.took(rows, began)
        for own in rows:
            own.state.tell_prefill()
        return True

    def _end_unfit(self) -> None:
        """End the requests that have no room for another token, or media that the engine cannot take."""
        most = full_length(self.engine)
        for state in [candidate for candidate in self.queues.ready if candidate.fills(most)]:
            if not state.shift():
                self._end(state, "length")
        for state in [candidate for candidate in self.queues.ready if candidate.has_pending_media]:
            try:
                check_media(state.request.media, self.engine)  # another engine may have taken over since `prepare`
            except MediaError as error:
                self._end(state, "error", error)

    def _next_rows(self) -> list[Rows]:
        """Return the rows of the next step, after preempting the last requests until the cache has room for them."""
        same, others = of_one_set(self.queues.ready) if self.engine.adapters else (self.queues.ready, [])
        n_requests, chunk = self._in_flight.n_requests, self.engine.chunk
        if not n_requests and (first := self.queues.newcomers(self._budget.rows_apart)):
            same, others = first, [state for state in self.queues.ready if state not in first]
        chosen = self._budget.choose(same, n_requests, chunk, others, is_short=self.queues.is_background)
        rows = [Rows.pending(state, n_rows) for state, n_rows in chosen]
        while not self.slots.make_room(sum([len(own.tokens) for own in rows])):
            last = max(self.queues.without_logits, key=lambda state: state.number)
            self._admission.preempt(last, keep=not self._in_flight.steps)  # earlier requests need its place
            rows = [own for own in rows if own.state is not last]
        return rows

    def _submit_drafts(self) -> bool:
        """Submit windows of drafts, if all running requests may have them now. Return False if an ordinary step is to
        be submitted, because drafts have no room or requests have other tokens to compute."""
        shape = self.drafts.shape(self.queues.running, len(self.queues.ready))
        if shape is None:
            return False
        n_rows, windows = shape
        while len(self._in_flight.awaited) < windows and (rows := self.drafts.windows(self.queues.running, n_rows)):
            if not self.slots.make_room(sum(len(own.tokens) for own in rows)):
                return False
            for state in self._in_flight.submit(self.engine, rows, windows):
                self.queues.ready.remove(state)
        return True

    # --- collect ---

    def _collect(self, *, submitted: bool) -> tuple[Floats, StepInFlight] | None:
        """Wait for the logits of the oldest step, unless other stages can compute meanwhile. If no step is in flight,
        and none was submitted, wait for the placement for prompts."""
        if not self._in_flight.steps:
            if not submitted:
                self._remote.wait()
            return None
        if submitted and self._in_flight.most > 1:
            return None
        return self._in_flight.collect(self.engine)

    # --- choose ---

    def _choose(self, collected: tuple[Floats, StepInFlight] | None) -> None:
        """Choose the next tokens of each request of a step by its logits."""
        if collected is None:
            return
        logits, step = collected
        is_alone = not step.follows_cancelled and not self._in_flight.awaited
        events, came = list[Event](), list[Came]()
        results, end = [], 0
        try:
            for rows in step.rows:
                begin, end = end, end + rows.logits
                if not rows.cancelled:
                    result = self._in_flight.verify(rows, logits[begin:end], step.windows, is_alone, events)
                    if not rows.state.request.background:  # latency targets are for the others
                        n_tokens = result.used - (events[-1].token_id is None)
                        came.append(Came(rows.state, n_tokens, len(rows.tokens) == 1 and not step.windows))
                    results.append(result)
                    rows.state.release_remote()  # all keys and values of the prompt have arrived before these logits
                    if result.right < result.used and events[-1].finish_reason is None:
                        self.queues.ready.append(rows.state)
            if step.windows:
                self.drafts.verified(results)
            self._budget.chosen(came, self._in_flight.prompt_rows)
        finally:
            self._events += events
            for event in events:
                if event.finish_reason is not None:
                    self._free(next(state for state in self.queues.running if state.number == event.request))

    def _end(self, state: RequestState, finish_reason: str, error: MediaError | None = None) -> None:
        """End a request without a token, and free its slot."""
        self._events.append(end_event(state, finish_reason, error))
        self._in_flight.cancel(state)
        self._free(state)

    def _free(self, state: RequestState) -> None:
        """Free the slot of a request that has ended."""
        state.ended = True
        state.release_remote()
        if not self._in_flight.awaited:
            self._in_flight.drop(self._use.in_use_by(self))
        state.continuation.close()
        self.drafts.ended(state)
        self.queues.ended(state, self._budget.clock())
        if (slot := state.slot) is not None:
            with suppress(EdgeError):  # the next step reports an engine that has failed
                if state.pending < 0 and self._use.in_use_by(self) is not None:  # drafts were in flight
                    slot.cut(len(state.tokens))
                if self._use.in_use_by(self) is not None:
                    self.slots.leave(slot, keep=not self._in_flight.steps)
            slot.busy = False
