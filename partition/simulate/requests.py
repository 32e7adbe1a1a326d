"""Requests in a simulation: their arrival, their grouping into steps, and their progress."""

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
    """A request, and how far it is."""

    __slots__ = ("arrived_s", "done", "first_s", "last_s", "pending", "request", "tokens")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.arrived_s, self.first_s, self.last_s = 0.0, 0.0, 0.0
        self.pending: float = request.prompt  # tokens of its history that were not submitted: later one at a time
        self.tokens = 0  # tokens so far; 1 for an ONNX model once it has its outputs
        self.done = False


class RequestSource:
    """Lets requests arrive, and gives each request a place in flight when one is free."""

    def __init__(self, clock: Clock, servers: Sequence[Server], predicted: Prediction, arrivals: Arrivals) -> None:
        """servers: the parts of the plan in order, the last one the link by which answers come back."""
        self.states = [State(request) for request in arrivals.requests]
        self.waiting, self.in_flight, self.ready = Tally(clock), Tally(clock), Tally(clock)  # requests
        self._clock, self._arrivals, self._first = clock, arrivals, servers[0]
        self._free = predicted.in_flight
        self._queue: deque[int] = deque()  # those that wait for a place
        self._next = 0  # to arrive
        self.arrived = 0
        for server, following in pairwise(servers):
            server.then = following.take
        servers[-2].then = lambda step: servers[-1].take(step) if step.answers else None
        servers[-1].then = self._answered

    def begin(self) -> None:
        """Let the first ones arrive."""
        for _ in range(self._arrivals.clients or 1):
            self._expect()

    def _expect(self) -> None:
        """Let one more request arrive, if there is one: at its time, or now where a client sends it."""
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
        self._queue.append(index)
        self.waiting.add(1)
        self._admit()

    def _admit(self) -> None:
        while self._queue and self._free:
            self._free -= 1
            self.waiting.add(-1)
            self.in_flight.add(1)
            self._start(self._queue.popleft())

    def _token(self, index: int) -> bool:
        """Count one more token for this request; return whether it is complete now."""
        state = self.states[index]
        state.tokens += 1
        state.last_s = self._clock.now
        if state.tokens == 1:
            state.first_s = state.last_s
        if state.tokens < state.request.tokens:
            return False
        state.done = True
        self._free += 1
        self.in_flight.add(-1)
        if self._arrivals.clients is not None:
            self._expect()
        return True

    def _start(self, index: int) -> None:
        """A request has its place."""
        raise NotImplementedError

    def _answered(self, step: SimulatedStep) -> None:
        """Handle the result of a step that has arrived from the last stage."""
        raise NotImplementedError


class Inputs(RequestSource):
    """Requests to an ONNX model: inputs enter the pipeline one by one."""

    def _start(self, index: int) -> None:
        self._first.take(SimulatedStep((index,), 1))

    def _answered(self, step: SimulatedStep) -> None:
        self._token(step.requests[0])
        self._admit()


LEAST_ROWS = 32  # of a step of several prompts without answers; as in edge.parallel.steps
_NOTHING = 1e-6  # rows: what even chunks leave of a prompt by rounding
OLDEST_PART = 4  # as in edge.llm.scheduler


class Texts(RequestSource):
    """Requests to a language model: groups that each get their next token, with chunks of prompts beside them.

    As in `edge.llm.scheduler`: of those whose next token can be computed, ceil((ready + in flight) / microbatches) make
    a group. With them a step has rows of prompts, the shortest first, and a part for the oldest. As many groups as
    there are microbatches are in flight, and one if there is a single stage.

    If the plan uses speculative decoding, a request that is alone has draft tokens in its steps. Each is accepted with
    the assumed probability, up to the first rejected one. If the plan uses several windows, such a request has them;
    once others are ready it gets no more of them, and joins these when the last window was verified.
    """

    def __init__(
        self, clock: Clock, servers: Sequence[Server], predicted: Prediction, arrivals: Arrivals, seed: int = 0
    ) -> None:
        super().__init__(clock, servers, predicted, arrivals)
        self._draft, self._random = predicted.draft, random.Random(f"guesses {seed}")
        self._stages = predicted.n_stages
        self._groups = predicted.microbatches if self._stages > 1 else 1
        self._ready: list[int] = []
        self._groups_flying, self._requests_flying = 0, 0
        self._windows: Windows | None = None  # windows of a request that is alone; it counts as a group
        self._cancelled: set[SimulatedStep] = set()  # of such requests
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
        """Draw how many draft tokens are accepted."""
        return draw_accepted(self._draft.acceptance, drafts, self._random) if self._draft is not None else 0

    def _left(self, index: int) -> int:
        """Tokens that a request may still get."""
        state = self.states[index]
        return state.request.tokens - state.tokens

    def _is_alone(self, group: Sequence[int], parts: Sequence[tuple[int, float]]) -> bool:
        """Return whether a step would have only the next token of one request, and not its first one, with nothing else
        to compute."""
        return len(group) == 1 and not parts and not self._requests_flying and self.states[group[0]].tokens > 0

    def _drafts(self, group: Sequence[int], parts: Sequence[tuple[int, float]]) -> int:
        """Return the number of draft tokens of a step: some if its one request is alone, never more than it may still
        get."""
        if self._draft is None or not self._is_alone(group, parts):
            return 0
        return min(self._draft.rows, self._left(group[0])) - 1

    def _has_windows(self, group: Sequence[int], parts: Sequence[tuple[int, float]]) -> bool:
        """Return whether the one request of a step gets several windows, as no other is ready."""
        several = self._draft is not None and self._draft.windows > 1
        return several and self._ready == group and self._is_alone(group, parts)

    def _go_on_alone(self) -> None:
        """Submit a window of the request that is alone, or verify those that came back. This device does one thing
        after the other: it verifies when all are submitted and its own stage is idle."""
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
        """Submit, once all that happens now has happened."""
        self._clock.behind(self._submit, None)

    def _submit(self, _: None) -> None:
        """The next step, where the first stage has nothing to do and more may be in flight."""
        if self._first.idle:
            self._go_on_alone()
        if not self._first.idle or self._groups_flying >= self._groups or not self._ready:
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

    def _begin_alone(self, index: int) -> None:
        """A request is to have windows."""
        assert self._draft is not None
        self._ready.remove(index)
        self.ready.add(-1)
        self._groups_flying += 1
        self._requests_flying += 1
        self._windows = Windows(index, self._draft, self._random, self._cancelled)
        self._go_on_alone()

    def _chosen(self) -> tuple[list[int], list[tuple[int, float]]]:
        """Choose the requests that get their next token in the step, and the rows of prompts beside them."""
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
        """Divide rows among prompts as `edge.llm.scheduler` does: (index, rows)."""
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
