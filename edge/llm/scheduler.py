"""The scheduler: continuous batching of requests on one engine, whose KV cache it owns. A chat is one with one slot.

Rows of several requests that go through an engine together cost little more than one. So a step has the next token of
every answer, and beside them as many tokens of waiting prompts as leave the answers fluent (chunked prefill). Where an
engine has stages the answers form as many groups (microbatches), so that every stage has one to work on; a request that
is alone has drafts behind its tokens instead, in as many windows as pay (`in_flight.py`).

A step is: receive, admit, submit, collect, choose. The pending tokens of a request are the tokens that the cache lacks:
first its whole prompt, later one token. If another placement computes long prompts, their keys and values are received
block by block, and the engine computes the rest of the prompt. If the cache is full, the scheduler preempts the last
request: it waits again and continues later from the same tokens. If the engine is lost, the scheduler preempts all
requests, and they continue on another engine. Background requests run while there is no other request: the next one
preempts them.
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

HEADROOM = 32  # tokens that each answer has room for when another request is admitted, so that none soon waits again
USED_MEANWHILE = (
    "something else used this model before the answer was complete; take one answer to its end before the next is"
    " asked for, or answer several at once with Model.stream"
)


class Scheduler(Closing):
    """Runs requests on an engine. They may come, and be cancelled, between steps.

    Several schedulers may use one engine in turns: each takes the whole KV cache from the one before.
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
        """microbatches: how many groups answers form; None: as many as the engine's plan says. slots: how many requests
        run at once; None: as many as the engine has sequences. keep: what complete requests computed stays in the cache
        while there is room, and on disk where the engine has such a place, for prompts that begin like them. drafter:
        drafts tokens while few requests run, which their steps then verify. admitted: called with the number of a
        request before anything of it is computed. targets: of latency, which size steps with prompts."""
        check_window(engine)
        self.engine, self.drafter, self._admitted = engine, drafter, admitted
        self._use = engine.states.use
        self._numbers = itertools.count()
        self.waiting: deque[Running] = deque()  # those that have no slot yet
        self.running: list[Running] = []  # in order of admission
        self._ready: deque[Running] = deque()  # those whose next rows can be submitted
        self._budget = StepBudget(engine.batch, clock, targets)
        self._in_flight = InFlight(self._budget, engine, microbatches)
        self.slots = Slots(engine, slots, keep=keep)
        self._events: list[Event] = []  # to be returned by the next step
        self.preemptions = {"foreground": 0, "background": 0}  # of requests that somebody waits for, and of others

    @property
    def passes(self) -> int:
        """Steps that were submitted so far."""
        return self._in_flight.submitted

    @property
    def busy(self) -> bool:
        """True if a step would do something."""
        return bool(self.waiting or self.running or self._in_flight.steps or self._events)

    def prepare(
        self, request: Request, given_up: Callable[[], bool] = never_given_up, number: int | None = None
    ) -> Running:
        """A request that `enqueue` can take: all that can be wrong with it is found here. Any thread may do this.
        given_up: whether nobody waits for it any more. number: unique among all requests; None: the next one.
        ContextFull where it alone does not fit, SamplingError for options that cannot be used."""
        return prepare(next(self._numbers) if number is None else number, request, self.engine, given_up)

    def enqueue(self, running: Running) -> int:
        """Let a prepared request wait for its turn; its number."""
        running.added_at = self._budget.clock()
        self.waiting.append(running)
        return running.number

    def add(self, request: Request) -> int:
        """Let a request wait for its turn; its number. The errors of `prepare`."""
        return self.enqueue(self.prepare(request))

    def cancel(self, number: int) -> None:
        """End a request; the next step tells so. Nothing happens where it has ended already."""
        with self._use.alone():
            for running in (*self.waiting, *self.running):
                if running.number == number:
                    self._end(running, "cancelled")
                    return

    def step(self) -> list[Event]:
        """Admit who waits, submit what can be submitted, collect what comes: what came of it, in order.

        The errors of the engine; EngineError where another scheduler used it meanwhile. Then this one is to be closed.
        """
        if self.running and self._use.owner is not self:
            raise EngineError(USED_MEANWHILE)
        with self._use.alone():
            self._use.step(self, self._go_on)
        events, self._events = self._events, []  # also of what was chosen before an engine was lost
        return events

    def _go_on(self) -> None:
        nobody_waits = only_background(self.running, self.waiting)
        if not self._in_flight.steps:  # the tokens of the last one have left
            self.slots.keep_snapshots()
            if nobody_waits:
                self.slots.keep_groups()
        ready = self.slots.remote.receive(steps_in_flight=bool(self._in_flight.steps))
        self._ready.extend(ready or ())
        if not nobody_waits:
            for running in [other for other in (*self._ready, *self.slots.remote.requests) if other.request.background]:
                self._preempt(running)
        submitted = ready is not None and self._admit() and self._submit(is_short=nobody_waits)
        if self._in_flight.steps and (not submitted or self._in_flight.most == 1):  # stages go on with others meanwhile
            self._collect()
        elif not submitted:
            self.slots.wait()

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

    def drop_requests(self) -> None:
        """Drop all requests. What they computed stays, as after other requests."""
        with self._use.alone():
            for running in (*self.waiting, *self.running):
                self._end(running, "cancelled")
            self._events.clear()

    def close(self) -> None:
        """Drop all requests and all that they computed. The engine is left in order, also where it failed."""
        with self._use.alone():
            self.drop_requests()
            self._in_flight.drop(self._use.in_use_by(self))
            if self._use.in_use_by(self) is not None:
                with suppress(EdgeError):
                    for slot in self.slots.all:  # what was dropped must leave no rows behind
                        slot.cut(0)
                self.slots.lost()

    # --- whose cache it is ---

    def follow_engine(self) -> None:
        """Form steps as another engine takes them, from now on."""
        self._in_flight.follow(self.engine)

    def yield_engine(self) -> None:
        """Drop what is in flight, because another scheduler is about to use the engine."""
        self._in_flight.drop(self._use.in_use_by(self))
        self.slots.lost()
        self._use.owner = None

    def preempt_all(self) -> None:
        """Let all requests wait again, because another engine takes over, and its cache is empty. They go on with the
        tokens that were chosen; what was in flight is computed again."""
        self._in_flight.drop(None)
        for running in reversed(self.running):
            running.preempt(exact=self._use.exact)
        self.slots.replaced()
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()
        self._ready.clear()

    # --- admit ---

    def _admit(self) -> bool:
        """Give waiting requests a slot, in their order, while the context has room for their next tokens. False where
        one waits for the steps in flight, because states are read between steps."""
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
            if running.cached_tokens is None or not self._use.exact:  # by which a prompt's steps are chosen
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
        """Submit the next token of a group of answers, and tokens of prompts beside them; or windows of drafts. False
        where nothing more can be submitted before logits have come. is_short: of the background."""
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
            self._preempt(last)  # those before it need its place
            rows = [own for own in rows if own.running is not last]
        if not rows:
            return False
        began = self._budget.clock()
        for step in in_one_graph(rows, self.engine):
            while self.engine.stages == 1 and self._in_flight.steps:  # the part before this one
                self._collect()
            for running in self._in_flight.submit(self.engine, step):
                self._ready.remove(running)
        self._in_flight.took(rows, began)
        for own in rows:
            own.running.tell_prefill()
        return True

    def _preempt(self, running: Running) -> None:
        """Let a request that waits for no logits wait for a slot again."""
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
        """Submit the next tokens of all requests with drafts behind them, where one step has them all and nothing else;
        of one that is alone, as many windows as pay. False where other steps are to be submitted: there is something
        beside these tokens, or no room for drafts, which nobody has to wait for."""
        group, n = self.running, len(self.running)
        most = self.engine.rollback
        can_forget = most is None or (n == 1 and most > 0)  # a wrong draft, as recurrent layers may not
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
            if most is not None:  # they forget rows of one step alone
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
        """Choose tokens for each request of the oldest step that somebody waits for."""
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
                    if not rows.running.request.background:  # nobody waits for its tokens
                        n_tokens = result.used - (events[-1].token_id is None)
                        came.append(Came(rows.running, n_tokens, len(rows.tokens) == 1 and not step.windows))
                    results.append(result)
                    rows.running.release_remote()  # its logits came behind all of its keys and values
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
        """End a request without a token, and free what it had."""
        self._events.append(end_event(running, finish_reason, error))
        self._in_flight.cancel(running)
        self._free(running)

    def _free(self, running: Running) -> None:
        """A request has ended: others may have what it had."""
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
            with suppress(EdgeError):  # an engine that has failed says so in the next step
                if running.pending < 0 and self._use.in_use_by(self) is not None:  # drafts that were in flight
                    slot.cut(len(running.tokens))
                if self._use.in_use_by(self) is not None:
                    self.slots.leave(slot, keep=not self._in_flight.steps)
            slot.busy = False
