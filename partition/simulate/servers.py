"""Components of a simulation: a clock with events, and servers that process one step after another."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from partition.errors import PlanError

_BEHIND = 1 << 60  # sequence number that puts an event after all others of the same time
MOST_EVENTS = 5_000_000  # limit for one simulation; this many events take about half a minute
_Then = Callable[["SimulatedStep"], None]


@dataclass(frozen=True, slots=True)
class Slow:
    """A period in which a device is slower: steps that begin in it take `factor` times as long."""

    device: str
    factor: float
    start_s: float
    stop_s: float = math.inf


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedStep:
    """One step through the stages: tokens of some requests and chunks of prompts, or one input."""

    requests: tuple[int, ...]  # indices of the requests that get a token from this step
    decodes: int  # decode rows, or inputs
    prompts: tuple[tuple[int, float], ...] = ()  # (tokens of the whole prompt, rows of it in this step)
    drafts: int = 0  # rows among `decodes` that verify draft tokens of the only request
    follows: bool = False  # True for a draft window after another one; its first row is also a draft

    @property
    def rows(self) -> int:
        """Total rows. Links carry this many."""
        return self.decodes + sum(round(rows) for _, rows in self.prompts)

    @property
    def answers(self) -> bool:
        """True if the step returns a result."""
        return bool(self.requests)


class TooManyEvents(PlanError):
    """Raised if a simulation would take more than MOST_EVENTS."""


class Clock:
    """Clock of a simulation, with its future events."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._n = 0

    def at(self, time_s: float, then: Callable[[Any], None], argument: Any) -> None:
        """Call then(argument) at `time_s`. Events of the same time run in the order of these calls."""
        self._n += 1
        heapq.heappush(self._events, (time_s, self._n, then, argument))

    def behind(self, then: Callable[[Any], None], argument: Any) -> None:
        """Call then(argument) after all other events of the current time."""
        self._n += 1
        heapq.heappush(self._events, (self.now, _BEHIND + self._n, then, argument))

    def run(self, until_s: float) -> None:
        """Run all events before `until_s`. Raises TooManyEvents after MOST_EVENTS events."""
        done, events = 0, self._events
        while events and events[0][0] < until_s:
            self.now, _, then, argument = heapq.heappop(events)
            then(argument)
            done += 1
            if done > MOST_EVENTS:
                raise TooManyEvents(
                    f"the simulation reached {self.now:.4g} s after {MOST_EVENTS:,} events, which is its limit;"
                    " use fewer requests, or fewer tokens of each"
                )


class Tally:
    """Mean and maximum of a queue's length over time. Entries that leave in the same moment do not count."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since, self._area, self._length, self._most = 0.0, 0.0, 0, 0

    def add(self, n: int) -> None:
        """Change the length by n."""
        self._pass(self._clock.now)
        self._length += n

    def over(self, seconds: float) -> tuple[float, int]:
        """Return (mean, maximum) from the start of the simulation to `seconds`, which is now or later."""
        self._pass(seconds)
        mean = self._area / seconds if seconds else 0.0
        return min(mean, self._most), self._most  # the sum has rounding errors

    def _pass(self, now: float) -> None:
        if now > self._since:
            self._area += self._length * (now - self._since)
            self._most = max(self._most, self._length)
            self._since = now


class Jitter:
    """Random factors with mean 1 and a given coefficient of variation cv.

    They are lognormal: exp(N(-s^2 / 2, s)) with s^2 = ln(1 + cv^2).
    """

    def __init__(self, variation: float, seed: int) -> None:
        self._sigma = math.sqrt(math.log1p(variation * variation))
        self._random = random.Random(f"jitter {seed}")

    def __call__(self) -> float:
        return self._random.lognormvariate(-self._sigma * self._sigma / 2, self._sigma) if self._sigma else 1.0


class Server:
    """A stage or link. It processes one step at a time, in order of arrival; other steps wait.

    A link is free again when the bytes are sent. The bytes arrive after its latency, in the order of sending.
    """

    def __init__(
        self,
        clock: Clock,
        jitter: Jitter,
        seconds: Callable[[SimulatedStep], float],
        latency_s: float = 0.0,
        slow: Sequence[Slow] = (),
    ) -> None:
        """seconds: returns how long a step occupies the server.
        latency_s: further time until the result arrives.
        slow: periods in which the server is slower.
        """
        self._clock, self._jitter, self._seconds, self._latency_s, self._slow = clock, jitter, seconds, latency_s, slow
        self._steps: deque[SimulatedStep] = deque()
        self._factor = 1.0
        self._busy_s, self._until, self._arrived = 0.0, 0.0, 0.0
        self.idle = True
        self.queue = Tally(clock)  # requests in the waiting steps
        self.then: _Then = lambda step: None  # called with a finished step
        self.freed: Callable[[], None] = lambda: None  # called when the server becomes idle

    def take(self, step: SimulatedStep) -> None:
        """Process a step, after all steps that wait already."""
        if self.idle:
            self._begin(step)
            return
        self._steps.append(step)
        self.queue.add(len(step.requests))

    def utilization(self, seconds: float) -> float:
        """Return the fraction of `seconds`, from the start until now, in which the server was busy."""
        served = self._busy_s - max(0.0, self._until - seconds)
        return min(1.0, served / seconds) if seconds else 0.0

    def _begin(self, step: SimulatedStep) -> None:
        now = self._clock.now
        self.idle = False
        self._factor = self._jitter()
        for slow in self._slow:
            if slow.start_s <= now < slow.stop_s:
                self._factor *= slow.factor
        seconds = self._seconds(step) * self._factor
        self._busy_s += seconds
        self._until = now + seconds
        self._clock.at(self._until, self._end, step)

    def _end(self, step: SimulatedStep) -> None:
        now = self._clock.now
        self.idle = True
        self._arrived = max(self._arrived, now + self._latency_s * self._factor)
        if self._arrived > now:
            self._clock.at(self._arrived, self.then, step)
        else:
            self.then(step)
        if self._steps:
            following = self._steps.popleft()
            self.queue.add(-len(following.requests))
            self._begin(following)
        else:
            self.freed()
