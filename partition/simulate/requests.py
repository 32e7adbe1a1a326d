"""Requests in a simulation: how they arrive, which of them make up a step, and what they have got so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from partition.predict.prediction import Prediction
from partition.simulate.arrivals import Arrivals, Request
from partition.simulate.servers import Clock, Server, Step, Tally
from partition.simulate.times import prompt_steps


class State:
    """A request, and how far it is."""

    __slots__ = ("arrived_s", "chunks", "done", "first_s", "last_s", "request", "tokens")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.arrived_s, self.first_s, self.last_s = 0.0, 0.0, 0.0
        self.chunks: deque[Step] = deque()  # of its prompt, that are still to be computed
        self.tokens = 0  # that it has; of an ONNX model 1, when it has its outputs
        self.done = False


class Source:
    """Lets requests arrive, and gives each a place in flight when there is one."""

    def __init__(self, clock: Clock, servers: Sequence[Server], predicted: Prediction, arrivals: Arrivals) -> None:
        """servers: the parts of the plan in order, the last one the link by which answers come back."""
        self.states = [State(request) for request in arrivals.requests]
        self.waiting, self.flying, self.ready = Tally(clock), Tally(clock), Tally(clock)  # requests
        self._clock, self._arrivals, self._first = clock, arrivals, servers[0]
        self._free = predicted.in_flight
        self._queue: deque[int] = deque()  # those that wait for a place
        self._next = 0  # to arrive
        self.arrived = 0
        for one, following in pairwise(servers):
            one.then = following.take
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
            self.flying.add(1)
            self._start(self._queue.popleft())

    def _token(self, index: int) -> bool:
        """One more for this request; whether it is complete now."""
        state = self.states[index]
        state.tokens += 1
        state.last_s = self._clock.now
        if state.tokens == 1:
            state.first_s = state.last_s
        if state.tokens < state.request.tokens:
            return False
        state.done = True
        self._free += 1
        self.flying.add(-1)
        if self._arrivals.clients is not None:
            self._expect()
        return True

    def _start(self, index: int) -> None:
        """A request has its place."""
        raise NotImplementedError

    def _answered(self, step: Step) -> None:
        """What the last stage made of a step has arrived."""
        raise NotImplementedError


class Inputs(Source):
    """Of an ONNX model: one by one into the pipeline."""

    def _start(self, index: int) -> None:
        self._first.take(Step((index,), 1))

    def _answered(self, step: Step) -> None:
        self._token(step.requests[0])
        self._admit()


class Texts(Source):
    """Of a language model: chunks of prompts, and groups of requests that each get their next token.

    As `edge.llm.scheduler` does it: ready requests wait in one queue. At its head a prompt goes first, all of its
    chunks. Else requests are taken from it for a group, ceil((ready + in flight) / microbatches) of them. As many
    groups as there are microbatches are in flight, and one where there is a single stage.
    """

    def __init__(self, clock: Clock, servers: Sequence[Server], predicted: Prediction, arrivals: Arrivals) -> None:
        super().__init__(clock, servers, predicted, arrivals)
        self._stages = len(predicted.stages)
        self._groups = predicted.microbatches
        self._most = self._groups if self._stages > 1 else 1
        # In the order they became ready, which each has with it.
        self._prompts: deque[tuple[int, int]] = deque()
        self._decoding: deque[tuple[int, int]] = deque()
        self._order = 0
        self._groups_flying, self._requests_flying = 0, 0
        self._first.freed = self._submit

    def _start(self, index: int) -> None:
        state = self.states[index]
        state.chunks.extend(prompt_steps(index, state.request.prompt, self._stages))
        self._wait(index, self._prompts)
        self._submit()

    def _answered(self, step: Step) -> None:
        self._groups_flying -= 1
        self._requests_flying -= len(step.requests)
        for index in step.requests:
            if not self._token(index):
                self._wait(index, self._decoding)
        self._admit()
        self._submit()

    def _wait(self, index: int, where: deque[tuple[int, int]]) -> None:
        self._order += 1
        where.append((self._order, index))
        self.ready.add(1)

    def _submit(self) -> None:
        """The next step, where the first stage has nothing to do and more may be in flight."""
        prompts, decoding = self._prompts, self._decoding
        if not self._first.idle or self._groups_flying >= self._most or not (prompts or decoding):
            return
        if prompts and (not decoding or prompts[0] < decoding[0]):
            step = self.states[prompts[0][1]].chunks.popleft()
            if step.answers:
                prompts.popleft()
        else:
            n = -(-(len(decoding) + self._requests_flying) // self._groups)
            group = tuple(decoding.popleft()[1] for _ in range(min(n, len(decoding))))
            step = Step(group, len(group))
        if step.answers:
            self.ready.add(-len(step.requests))
            self._groups_flying += 1
            self._requests_flying += len(step.requests)
        self._first.take(step)
