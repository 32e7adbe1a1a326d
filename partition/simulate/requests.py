"""Requests of a simulation: they arrive, are grouped into steps, and receive tokens."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from partition.predict.prediction import Prediction
from partition.simulate.arrivals import Arrivals, Request
from partition.simulate.servers import Clock, Server, SimulatedStep, Tally
from partition.simulate.times import PROMPT_ROWS, chunk_rows
from partition.simulate.windows import Windows, draw_accepted


class State:
    """A request and its progress."""

    __slots__ = ("arrived_s", "done", "first_s", "last_s", "pending", "request", "tokens")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.arrived_s, self.first_s, self.last_s = 0.0, 0.0, 0.0
        self.pending: float = request.prompt  # tokens not yet submitted: the rest of the prompt, later the last token
        self.tokens = 0  # tokens generated so far; for an ONNX model, 1 once the outputs exist
        self.done = False


class Dispatcher:
    """Lets requests arrive, and sends each request to the copy of the model that will finish it soonest."""

    def __init__(self, clock: Clock, arrivals: Arrivals) -> None:
        self.states = [State(request) for request in arrivals.requests]
        self.waiting, self.in_flight = Tally(clock), Tally(clock)  # numbers of requests over time
        self.copies: list[RequestSource] = []
        self._clock, self._arrivals = clock, arrivals
        self._next = 0  # index of the next request to arrive
        self.arrived = 0

    def begin(self) -> None:
        """Schedule the first arrivals."""
        for _ in range(self._arrivals.clients or 1):
            self._expect()

    def _expect(self) -> None:
        """Schedule the next arrival, if any: at its own time, or now if a client sends it."""
        if self._next < len(self.states):
            of_its_own = self._arrivals.clients is None
            time_s = self.states[self._next].request.arrival_s if of_its_own else self._clock.now
            self._clock.at(time_s, self._arrive, self._next)
            self._next += 1

    def _arrive(self, index: int) -> None:
        self.arrived += 1
        self.states[index].arrived_s = self._clock.now
        if self._arrivals.clients is None:
            self._expect()
        self.waiting.add(1)
        soonest = min(self.copies, key=lambda copy: copy.finishes_s(index)) if len(self.copies) > 1 else self.copies[0]
        soonest.accept(index)

    def completed(self) -> None:
        """Handle a complete request: its client, if there is one, sends the next request."""
        self.in_flight.add(-1)
        if self._arrivals.clients is not None:
            self._expect()


class RequestSource:
    """A copy of the model. It gives each of its requests a place in flight when one is free."""

    def __init__(self, clock: Clock, servers: Sequence[Server], predicted: Prediction, dispatcher: Dispatcher) -> None:
        """servers: stages and links of the plan in order; the last one is the link that returns results."""
        self.states, self.ready = dispatcher.states, Tally(clock)
        self._clock, self._dispatcher, self._first = clock, dispatcher, servers[0]
        self._predicted, self._free = predicted, predicted.in_flight
        self._queue: deque[int] = deque()  # requests that wait for a place in flight
        self._unfinished: set[int] = set()
        dispatcher.copies.append(self)
        for server, following in pairwise(servers):
            server.then = following.take
        servers[-2].then = lambda step: servers[-1].take(step) if step.answers else None
        servers[-1].then = self._answered

    def finishes_s(self, index: int) -> float:
        """Estimate the seconds until this copy completes a request: the tokens of all requests if no place is free, and
        the tokens of this request while the others are in flight.
        """
        predicted, tokens = self._predicted, self.states[index].request.tokens
        per_s = predicted.throughput_per_s or 1 / predicted.latency_s
        at_once = min(len(self._unfinished) + 1, predicted.in_flight)
        own_s = (predicted.ttft_s or 0.0) + tokens * max(predicted.latency_s, at_once / per_s)
        ahead = sum(self.states[other].request.tokens - self.states[other].tokens for other in self._unfinished)
        return own_s if self._free else own_s + ahead / per_s

    def accept(self, index: int) -> None:
        """Take a request."""
        self._unfinished.add(index)
        self._queue.append(index)
        self._admit()

    def _admit(self) -> None:
        while self._queue and self._free:
            self._free -= 1
            self._dispatcher.waiting.add(-1)
            self._dispatcher.in_flight.add(1)
            self._start(self._queue.popleft())

    def _token(self, index: int) -> bool:
        """Count one more token of a request. Return True if the request is complete."""
        state = self.states[index]
        state.tokens += 1
        state.last_s = self._clock.now
        if state.tokens == 1:
            state.first_s = state.last_s
        if state.tokens < state.request.tokens:
            return False
        state.done = True
        self._free += 1
        self._unfinished.remove(index)
        self._dispatcher.completed()
        return True

    def _start(self, index: int) -> None:
        """Handle a request that got its place in flight."""
        raise NotImplementedError

    def _answered(self, step: SimulatedStep) -> None:
        """Handle a step whose result has arrived from the last stage."""
        raise NotImplementedError


class Inputs(RequestSource):
    """Requests to an ONNX model. Inputs enter the pipeline one by one."""

    def _start(self, index: int) -> None:
        self._first.take(SimulatedStep((index,), 1))

    def _answered(self, step: SimulatedStep) -> None:
        self._token(step.requests[0])
        self._admit()


LEAST_ROWS = 32  # rows of a step with several prompts and no decode; as in edge.parallel.steps
_NOTHING = 1e-6  # rows that rounding may leave when a prompt is split evenly
OLDEST_PART = 4  # the oldest prompt gets at least 1/4 of the prefill rows; as in edge.llm.scheduler


class Texts(RequestSource):
    """Requests to a language model. Steps decode a group of requests and prefill chunks of prompts.

    The rules are those of `edge.llm.scheduler`. Of the requests that can decode, ceil((ready + in flight) /
    microbatches) form a group. The step also gets rows of prompts, shortest prompt first, with a reserved part for the
    oldest. The number of groups in flight is the number of microbatches, or 1 for a single stage, and fewer if all
    answers form fewer groups.

    With speculative decoding, a request that is alone has draft tokens in its steps. Each draft token is accepted with
    the assumed probability, up to the first rejected one. If the plan uses several draft windows, the lone request has
    that many in flight. When another request becomes ready, no more windows are submitted. The lone request joins the
    others after its last window is verified.
    """

    def __init__(
        self, clock: Clock, servers: Sequence[Server], predicted: Prediction, dispatcher: Dispatcher, seed: int = 0
    ) -> None:
        super().__init__(clock, servers, predicted, dispatcher)
        self._draft, self._random = predicted.draft, random.Random(f"guesses {seed}")
        self._stages = predicted.n_stages
        self._groups = predicted.microbatches if self._stages > 1 else 1
        self._ready: list[int] = []
        self._groups_flying, self._requests_flying = 0, 0
        self._windows: Windows | None = None  # windows of a lone request; they count as one group
        self._cancelled: set[SimulatedStep] = set()  # steps of cancelled windows, whose results are dropped
        self._first.freed = self._soon

    def _start(self, index: int) -> None:
        self._wait(index)
        self._soon()

    def _answered(self, step: SimulatedStep) -> None:
        if step in self._cancelled:
            self._cancelled.remove(step)
            return
        if self._windows is not None and self._windows.take(step):
            self._soon()
            return
        self._landed(len(step.requests))
        for index in step.requests:
            used = 1 + self._right(step.drafts)
            if not any(self._token(index) for _ in range(used)):
                self._go_on(index)
        self._admit()
        self._soon()

    def _landed(self, requests: int) -> None:
        self._groups_flying -= 1
        self._requests_flying -= requests

    def _go_on(self, index: int) -> None:
        self.states[index].pending = 1
        self._wait(index)

    def _right(self, drafts: int) -> int:
        """Draw the number of accepted draft tokens."""
        return draw_accepted(self._draft.acceptance, drafts, self._random) if self._draft is not None else 0

    def _left(self, index: int) -> int:
        """Return the number of tokens that a request may still get."""
        state = self.states[index]
        return state.request.tokens - state.tokens

    def _is_alone(self, group: Sequence[int], parts: Sequence[tuple[int, float]]) -> bool:
        """Return True if a step would only decode one request, which has its first token, and nothing else is in
        flight.
        """
        return len(group) == 1 and not parts and not self._requests_flying and self.states[group[0]].tokens > 0

    def _drafts(self, group: Sequence[int], parts: Sequence[tuple[int, float]]) -> int:
        """Return the number of draft tokens of a step: 0 unless its request is alone, and at most the tokens that
        are left.
        """
        if self._draft is None or not self._is_alone(group, parts):
            return 0
        return min(self._draft.rows, self._left(group[0])) - 1

    def _has_windows(self, group: Sequence[int], parts: Sequence[tuple[int, float]]) -> bool:
        """Return True if the request of a step gets several draft windows, because no other request is ready."""
        several = self._draft is not None and self._draft.windows > 1
        return several and self._ready == group and self._is_alone(group, parts)

    def _go_on_alone(self) -> None:
        """Submit the next window of the lone request, or verify windows that came back.

        The device does one thing at a time. It verifies when all windows are submitted and its own stage is idle.
        """
        while (windows := self._windows) is not None:
            step = None if self._ready else windows.next(self._left(windows.index))
            if step is not None:
                self._first.take(step)
                return
            used = 0 if windows.is_empty else windows.look()
            if used is None:
                return
            is_complete = any(self._token(windows.index) for _ in range(used))
            if is_complete or (windows.is_empty and self._ready):
                windows.cancel()
                self._windows = None
                self._landed(1)
                if not is_complete:
                    self._go_on(windows.index)
                self._admit()

    def _wait(self, index: int) -> None:
        self._ready.append(index)
        self.ready.add(1)

    def _soon(self) -> None:
        """Submit steps after all other events of this moment."""
        self._clock.behind(self._submit, None)

    def _submit(self, _: None) -> None:
        """Submit the next step, if the first stage is idle and another group may be in flight."""
        if self._first.idle:
            self._go_on_alone()
        if not self._first.idle or not self._ready or self._groups_flying >= self._most_groups():
            return
        group, parts = self._chosen()
        if self._has_windows(group, parts):
            self._begin_alone(group[0])
            return
        prompts = tuple((self.states[index].request.prompt, rows) for index, rows in parts)
        for index, rows in parts:
            self.states[index].pending -= rows
        ended = [index for index, _ in parts if self.states[index].pending < _NOTHING]
        drafts = self._drafts(group, parts)
        step = SimulatedStep((*group, *ended), len(group) + drafts, prompts, drafts)
        self._ready = [index for index in self._ready if index not in step.requests]
        if step.answers:
            self.ready.add(-len(step.requests))
            self._groups_flying += 1
            self._requests_flying += len(step.requests)
        self._first.take(step)

    def _most_groups(self) -> int:
        """Return the number of groups in flight, as `edge.llm.scheduler` does: those of all answers if no prompt is
        ready.
        """
        if any(self.states[index].pending > 1 for index in self._ready):
            return self._groups
        in_all = len(self._ready) + self._requests_flying
        return -(-in_all // -(-in_all // self._groups))

    def _begin_alone(self, index: int) -> None:
        """Start the draft windows of a lone request."""
        assert self._draft is not None
        self._ready.remove(index)
        self.ready.add(-1)
        self._groups_flying += 1
        self._requests_flying += 1
        self._windows = Windows(index, self._draft, self._random, self._cancelled)
        self._go_on_alone()

    def _chosen(self) -> tuple[list[int], list[tuple[int, float]]]:
        """Return the requests that decode in the next step, and the prefill rows that accompany them as (index,
        rows).
        """
        answering = [index for index in self._ready if self.states[index].pending <= 1]
        prompts = [index for index in self._ready if self.states[index].pending > 1]
        in_all = len(answering) + self._requests_flying
        group = answering[: -(-in_all // self._groups)]
        if not prompts:
            return group, []
        alone = max(chunk_rows(self.states[index].request.prompt, self._stages) for index in prompts)
        if len(prompts) > 1:
            alone = max(alone, LEAST_ROWS)
        return group, self._parts(prompts, PROMPT_ROWS if in_all else alone)

    def _parts(self, prompts: Sequence[int], room: float) -> list[tuple[int, float]]:
        """Divide prefill rows among prompts as `edge.llm.scheduler` does. Return (index, rows) pairs."""
        oldest = min(prompts)
        reserved = min(self.states[oldest].pending, -(-room // OLDEST_PART))
        room -= reserved
        parts = []
        for index in sorted(prompts, key=lambda index: (self.states[index].pending, index)):
            kept_back = reserved if index == oldest else 0
            rows = min(self.states[index].pending, room + kept_back)
            if rows:
                parts.append((index, rows))
            room -= max(0, rows - kept_back)
        return parts
