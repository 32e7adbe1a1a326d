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

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from edge.closing import Closing
from edge.errors import EdgeError, EngineError, MediaError
from edge.llm.continuation import Request
from edge.llm.in_flight import InFlight, Rows, end_event, in_one_graph, of_one_set, room
from edge.llm.interface import Drafter, TextEngine
from edge.llm.requests import Event, Running, check_media, check_window, only_background, prepare
from edge.llm.slot import full_length
from edge.llm.slots import Slots
from edge.llm.step_budget import Came, LatencyTargets, StepBudget
from edge.text.constraints.constraint import never_given_up
from partition.predict.drafts import most_windows

HEADROOM = 32  # tokens of room for each running request when another one is admitted, so that none is preempted soon
USED_MEANWHILE = (
    "something else used this model before the answer was complete; take one answer to its end before the next is"
    " asked for, or answer several at once with Model.stream"
)


class Scheduler(Closing):
    """Runs requests on an engine. Requests can be added and cancelled between steps.

    Several schedulers may use one engine in turns. Each of them takes the whole KV cache from the one before.
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
        """microbatches: number of decode groups; None: as the engine's plan sets.
        slots: largest number of running requests; None: the engine's number of sequences.
        keep: keep the KV cache of complete requests for later prompts with the same prefix, in memory while there is
            room, and on disk if the engine has a prefix cache.
        drafter: drafts tokens while few requests run; steps verify them.
        admitted: called with the number of a request before it is computed.
        targets: latency targets that determine the size of steps with prompts.
        """
        check_window(engine)
        self.engine, self.drafter, self._admitted = engine, drafter, admitted
        self._use = engine.states.use
        self._numbers = itertools.count()
        self.waiting: deque[Running] = deque()  # requests without a slot
        self.running: list[Running] = []  # requests with a slot, in order of admission
        self._ready: deque[Running] = deque()  # requests whose next rows can be submitted
        self._budget = StepBudget(engine.batch, clock, targets)
        self._in_flight = InFlight(self._budget, engine, microbatches)
        self.slots = Slots(engine, slots, keep=keep)
        self._events: list[Event] = []  # events for the next call of `step`
        self.preemptions = {"foreground": 0, "background": 0}  # number of preempted requests by kind

    @property
    def passes(self) -> int:
        """Number of steps submitted so far."""
        return self._in_flight.submitted

    @property
    def busy(self) -> bool:
        """True if a step would do something."""
        return bool(self.waiting or self.running or self._in_flight.steps or self._events)

    def prepare(
        self, request: Request, given_up: Callable[[], bool] = never_given_up, number: int | None = None
    ) -> Running:
        """Check a request and return it ready for `enqueue`. Any thread may call this.

        given_up: returns True if the client has disconnected.
        number: unique number of the request; None: the next one.

        Raises ContextFull if the request alone does not fit, and SamplingError for invalid options.
        """
        return prepare(next(self._numbers) if number is None else number, request, self.engine, given_up)

    def enqueue(self, running: Running) -> int:
        """Let a prepared request wait for a slot. Return its number."""
        running.added_at = self._budget.clock()
        self.waiting.append(running)
        return running.number

    def add(self, request: Request) -> int:
        """Add a request and return its number. Raises the errors of `prepare`."""
        return self.enqueue(self.prepare(request))

    def cancel(self, number: int) -> None:
        """End a request; the next step reports it. Nothing happens if it has already ended."""
        with self._use.alone():
            for running in (*self.waiting, *self.running):
                if running.number == number:
                    self._end(running, "cancelled")
                    return

    def step(self) -> list[Event]:
        """Run one step: admit waiting requests, submit rows, collect results. Return the events in order.

        Raises the errors of the engine. Raises EngineError if another scheduler used the engine meanwhile; then this
        scheduler must be closed.
        """
        if self.running and self._use.owner is not self:
            raise EngineError(USED_MEANWHILE)
        with self._use.alone():
            self._use.step(self, self._go_on)
        events, self._events = self._events, []  # includes tokens chosen before an engine was lost
        return events

    def _go_on(self) -> None:
        nobody_waits = only_background(self.running, self.waiting)
        if not self._in_flight.steps:  # the tokens of the last step have been sent
            self.slots.keep_snapshots()
            if nobody_waits:
                self.slots.keep_groups()
        ready = self.slots.remote.receive(steps_in_flight=bool(self._in_flight.steps))
        self._ready.extend(ready or ())
        if not nobody_waits:
            for running in [other for other in (*self._ready, *self.slots.remote.requests) if other.request.background]:
                self._preempt(running)
        submitted = ready is not None and self._admit() and self._submit(is_short=nobody_waits)
        # Stages continue with other groups meanwhile.
        if self._in_flight.steps and (not submitted or self._in_flight.most == 1):
            self._collect()
        elif not submitted:
            self.slots.wait()

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        """Return the generated tokens of each request, without end-of-text tokens. They equal those of `generate`.

        Raises ContextFull if one of the requests alone does not fit, and SamplingError.
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
        """Cancel all requests. Their KV cache stays, as after complete requests."""
        with self._use.alone():
            for running in (*self.waiting, *self.running):
                self._end(running, "cancelled")
            self._events.clear()

    def close(self) -> None:
        """Cancel all requests and drop their KV cache. The engine stays usable, unless it has failed."""
        with self._use.alone():
            self.drop_requests()
            self._in_flight.drop(self._use.in_use_by(self))
            if self._use.in_use_by(self) is not None:
                with suppress(EdgeError):
                    for slot in self.slots.all:  # dropped requests must not leave rows in the cache
                        slot.cut(0)
                self.slots.lost()

    # --- owner of the cache ---

    def follow_engine(self) -> None:
        """Use the number of groups and steps in flight of a replaced engine."""
        self._in_flight.follow(self.engine)

    def yield_engine(self) -> None:
        """Drop the steps in flight, because another scheduler is about to use the engine."""
        self._in_flight.drop(self._use.in_use_by(self))
        self.slots.lost()
        self._use.owner = None

    def preempt_all(self) -> None:
        """Preempt all requests, because another engine with an empty cache takes over. They continue after their
        chosen tokens; steps in flight are computed again.
        """
        self._in_flight.drop(None)
        for running in reversed(self.running):
            running.preempt(exact=self._use.exact)
        self.slots.replaced()
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()
        self._ready.clear()

    # --- admit ---

    def _admit(self) -> bool:
        """Give waiting requests a slot in their order, while the context has room. Return False if a request waits
        for the steps in flight, because states are read between steps.
        """
        while self.waiting:
            running = min(self.waiting, key=lambda waiting: waiting.request.background)
            if running.request.background and not only_background(self.running, self.waiting):
                return True
            request, others, left = running.request, self.running, self.engine.context - len(running.tokens)
            if left < 0:  # its next token had no room when the engine was lost
                if not running.shift():
                    self._end(running, "length")
                continue
            growth = sum(min(other.left, HEADROOM) for other in (running, *others)) if others else min(1, left)
            placement = self.slots.place(running.tokens, growth, running.namespace)
            if placement is None:
                return True
            former = running.former = running.former or self.slots.former(running.tokens, running.namespace)
            if (former or self.slots.restores) and self._in_flight.steps:
                return False
            slot = running.slot = self.slots.admit(
                placement,
                adapters=running.adapters,
                in_place=request.in_place,
                former=former,
                background=request.background,
            )
            self.waiting.remove(running)
            if running.cached_tokens is None or not self._use.exact:  # the size of prefill steps depends on this
                running.to_prefill = len(running.tokens) - len(slot.tokens)
            if running.cached_tokens is None:
                running.cached_tokens = min(len(slot.tokens), len(request.prompt))
                running.restored_tokens, running.dropped_tokens = slot.restored, slot.dropped
            self.running.append(running)
            if request.media or not self.slots.remote.begin(running):
                self._ready.append(running)
            self._admitted(running.number)
            running.tell_prefill()
        return True

    # --- submit ---

    def _submit(self, *, is_short: bool) -> bool:
        """Submit decode rows of a group with prompt rows, or windows of drafts. Return False if nothing more can be
        submitted before logits arrive.

        is_short: only background requests run, so steps are short.
        """
        most = full_length(self.engine)
        for running in [candidate for candidate in self._ready if candidate.fills(most)]:
            if not running.shift():
                self._end(running, "length")
        for running in [candidate for candidate in self._ready if candidate.has_pending_media]:
            try:
                check_media(running.request.media, self.engine)  # another engine may have taken over since `prepare`
            except MediaError as error:
                self._end(running, "error", error)
        if self.drafter is not None:
            if self._submit_windows(self.drafter):
                return False
            self.drafter.disturbed()
        if not self._ready or len(self._in_flight.awaited) >= self._in_flight.most:
            return False
        same, others = of_one_set(self._ready) if self.engine.adapters else (self._ready, [])
        chosen = self._budget.choose(same, self._in_flight.n_requests, self.engine.chunk, others, is_short=is_short)
        rows = [Rows.pending(running, n_rows) for running, n_rows in chosen]
        while not self.slots.make_room(sum([len(own.tokens) for own in rows])):
            last = max((*self._ready, *self.slots.remote.requests), key=lambda running: running.number)
            self._preempt(last)  # earlier requests need its place
            rows = [own for own in rows if own.running is not last]
        if not rows:
            return False
        began = self._budget.clock()
        for step in in_one_graph(rows, self.engine):
            while self.engine.stages == 1 and self._in_flight.steps:  # the previous part of this step
                self._collect()
            for running in self._in_flight.submit(self.engine, step):
                self._ready.remove(running)
        self._in_flight.took(rows, began)
        for own in rows:
            own.running.tell_prefill()
        return True

    def _preempt(self, running: Running) -> None:
        """Preempt a request that waits for no logits."""
        for queue in (self._ready, self.slots.remote.requests, self.running):
            if running in queue:
                queue.remove(running)
        running.release_remote()
        assert running.slot is not None
        self.slots.leave(running.slot, keep=not self._in_flight.steps)
        running.slot = running.former = None
        self.waiting.appendleft(running)
        self.preemptions["background" if running.request.background else "foreground"] += 1

    def _submit_windows(self, drafter: Drafter) -> bool:
        """Submit the next tokens of all requests followed by drafts, if they fit into one step. A lone request gets as
        many windows as pay off.

        Return False if plain steps are needed, because other rows are waiting, or because there is no room for drafts.
        """
        group, n = self.running, len(self.running)
        most = self.engine.rollback
        # Recurrent layers may be unable to roll back rejected drafts.
        can_forget = most is None or (n == 1 and most > 0)
        has_media = any(member.request.media for member in group)
        if len({member.adapters for member in group}) != 1 or not can_forget or has_media:
            return False
        if self._in_flight.awaited:
            if n > 1 or not self._in_flight.has_windows:
                return False
        elif n > len(self._ready) or -(-n // self._budget.groups) < n or any(member.pending > 1 for member in group):
            return False
        most_rows, windows = max(1, min(self.engine.outputs, self.engine.batch) // n), 1
        if n == 1:
            most_rows, windows = room(group[0], most_rows), most_windows(self.engine.stages)
            if most is not None:  # recurrent layers can roll back rows of a single step
                most_rows, windows = min(most_rows, 1 + most), 1
        n_rows, windows = drafter.shape(group, most_rows, windows)
        while len(self._in_flight.awaited) < windows:
            rows = [self._in_flight.window(drafter, running, n_rows) for running in group]
            if not rows[0].tokens:
                break
            if not self.slots.make_room(sum(len(member.tokens) for member in rows)):
                return False
            for running in self._in_flight.submit(self.engine, rows, windows):
                self._ready.remove(running)
        return True

    # --- collect, choose, report ---

    def _collect(self) -> None:
        """Choose a token for each request of the oldest step that was not cancelled."""
        if (collected := self._in_flight.collect(self.engine)) is None:
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
                    if not rows.running.request.background:  # clients do not wait for its tokens
                        n_tokens = result.used - (events[-1].token_id is None)
                        came.append(Came(rows.running, n_tokens, len(rows.tokens) == 1 and not step.windows))
                    results.append(result)
                    rows.running.release_remote()  # logits have arrived that are based on its whole KV cache
                    if result.right < result.used and events[-1].finish_reason is None:
                        self._ready.append(rows.running)
            if self.drafter is not None and step.windows:
                self.drafter.verified(results)
            self._budget.chosen(came, self._in_flight.prompt_rows)
        finally:
            self._events += events
            for event in events:
                if event.finish_reason is not None:
                    self._free(next(running for running in self.running if running.number == event.request))

    def _end(self, running: Running, finish_reason: str, error: MediaError | None = None) -> None:
        """End a request without a token, and free its resources."""
        self._events.append(end_event(running, finish_reason, error))
        self._in_flight.cancel(running)
        self._free(running)

    def _free(self, running: Running) -> None:
        """Free the resources of a request that has ended."""
        running.ended = True
        running.release_remote()
        if not self._in_flight.awaited:
            self._in_flight.drop(self._use.in_use_by(self))
        running.continuation.close()
        if self.drafter is not None:
            self.drafter.ended(running)
        for queue in (self.waiting, self._ready, self.slots.remote.requests, self.running):
            if running in queue:
                queue.remove(running)
        if (slot := running.slot) is not None:
            with suppress(EdgeError):  # the next step reports an engine that has failed
                if running.pending < 0 and self._use.in_use_by(self) is not None:  # drafts were in flight
                    slot.cut(len(running.tokens))
                if self._use.in_use_by(self) is not None:
                    self.slots.leave(slot, keep=not self._in_flight.steps)
            slot.busy = False
