"""Simulate a plan that serves many requests. This shows effects of queues, jitter and lost devices, which the cost
model ignores.

Stages and links process one step at a time, with queues between them. Their times come from `partition.simulate.times`.
Requests to a language model go through the stages in groups, as `edge.llm.scheduler` forms them. Inputs of an ONNX
model go one by one, with a limited number in flight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from partition.errors import PlanError
from partition.plan.plan import LOCAL
from partition.predict.prediction import Prediction
from partition.simulate.arrivals import Arrivals, poisson
from partition.simulate.requests import Dispatcher, Inputs, State, Texts
from partition.simulate.result import REQUIRED, Goodput, Simulated, Spread, Targets, Use
from partition.simulate.servers import Clock, Jitter, Server, Slow, TooManyEvents
from partition.simulate.times import StageOrLink, capacity_per_s, parts

# Bounds of the rate search: ratio of the first interval's ends, and relative width of the last interval.
_LEAST_LOAD, _RATE_WITHIN = 200, 0.01
_RATE_REQUESTS = 1000  # maximum requests of each simulation in the rate search


@dataclass(frozen=True)
class Conditions:
    """Deviations from the prediction."""

    jitter: float = 0.0  # coefficient of variation of all stage and link times; their means stay the same
    slow: tuple[Slow, ...] = ()
    leave: tuple[tuple[str, float], ...] = ()  # (device, seconds at which it leaves)

    def check(self, devices: Sequence[str]) -> None:
        """Raise PlanError for a device that the plan does not use."""
        for device in (*(slow.device for slow in self.slow), *(device for device, _ in self.leave)):
            if device not in devices:
                raise PlanError(f"{device[:80]} is not in the plan; in it are {', '.join(devices)}")

    @property
    def end_s(self) -> float:
        """Time at which the first device leaves. The deployment ends then, as the runtime does when a rank is lost."""
        return min((when for _, when in self.leave), default=math.inf)


def simulate(
    predicted: Prediction,
    arrivals: Arrivals,
    conditions: Conditions | None = None,
    *,
    seed: int = 0,
    owner: str = LOCAL,
    targets: Targets | None = None,
) -> Simulated:
    """Simulate requests on a plan. The same seed gives the same result.

    Each request goes to the copy of the model that will finish it soonest. Copies do not slow each other down. When a
    device leaves, all incomplete requests fail, and later requests fail, too.

    predicted: prediction of the plan.
    owner: name of the device that sends requests and receives results.
    targets: latency targets of a language model, for goodput.

    Raises PlanError if a condition names a device outside the plan, or if the plan uses a device twice. Raises
    TooManyEvents after MOST_EVENTS events.
    """
    deviations = conditions or Conditions()
    copies = predicted.copies or (predicted,)
    deviations.check([device for copy in copies for stage in copy.stages for device in stage.devices])
    clock, jitter = Clock(), Jitter(deviations.jitter, seed)
    source, of_text = Dispatcher(clock, arrivals), predicted.ttft_s is not None
    used: list[list[tuple[StageOrLink, Server]]] = []  # stages and links of each copy
    for copy in copies:
        plan_parts = parts(copy, owner)
        servers = [
            Server(clock, jitter, part.seconds, part.latency_s, _slows(part, deviations.slow)) for part in plan_parts
        ]
        used.append(list(zip(plan_parts, servers, strict=True)))
        if of_text:
            Texts(clock, servers, copy, source, seed)
        else:
            Inputs(clock, servers, copy, source)
    source.begin()
    clock.run(deviations.end_s)
    completed = [state for state in source.states if state.done]
    stalled = len(completed) < len(source.states)
    seconds = deviations.end_s if stalled else max(state.last_s for state in completed)
    several = [state for state in completed if state.tokens > 1]
    stages: list[Use] = []
    links: list[Use] = []
    for copy_of_model, servers_of_copy in zip(source.copies, used, strict=True):
        uses = [
            Use(part.devices, part.is_link, server.utilization(seconds), *server.queue.over(seconds))
            for part, server in servers_of_copy
        ]
        if of_text:  # requests of a language model wait at the scheduler
            mean, most = copy_of_model.ready.over(seconds)
            uses[0] = replace(uses[0], queue_mean=mean, queue_max=most)
        stages += [use for use in uses if not use.is_link]
        links += [use for use in uses if use.is_link and use.devices[0] != use.devices[1]]
    waiting_mean, waiting_max = source.waiting.over(seconds)
    generated = sum(state.tokens for state in source.states)
    return Simulated(
        requests=len(source.states),
        completed=len(completed),
        failed=len(source.states) - len(completed),
        failed_in_flight=source.arrived - len(completed),
        stalled_s=deviations.end_s if stalled else None,
        left=min(deviations.leave, key=lambda leave: leave[1])[0] if stalled else None,
        of_text=of_text,
        seconds=seconds,
        ttft_s=Spread.from_values([state.first_s - state.arrived_s for state in completed]) if of_text else None,
        tpot_s=Spread.from_values([(state.last_s - state.first_s) / (state.tokens - 1) for state in several])
        if of_text
        else None,
        latency_s=Spread.from_values([state.last_s - state.arrived_s for state in completed]),
        throughput_per_s=generated / seconds if seconds else 0.0,
        stages=tuple(stages),
        links=tuple(links),
        waiting_mean=waiting_mean,
        waiting_max=waiting_max,
        in_flight=predicted.in_flight,
        in_flight_mean=source.in_flight.over(seconds)[0],
        arrivals_per_s=arrivals.rate_per_s,
        capacity_per_s=capacity_per_s(predicted, *_mean_tokens(arrivals)),
        goodput=None if targets is None else _goodput(completed, len(source.states), seconds, targets),
    )


def most_arrivals_per_s(
    predicted: Prediction,
    arrivals: Arrivals,
    targets: Targets,
    conditions: Conditions | None = None,
    *,
    seed: int = 0,
    owner: str = LOCAL,
) -> float | None:
    """Return the highest Poisson rate at which REQUIRED of the requests meet the targets, within 1 %.

    The search bisects up to twice the plan's capacity by the cost model. Each request has the mean token counts of
    `arrivals`. Return 0 if the targets fail even at 1/100 of the capacity. Return None if the search takes too many
    events, or if devices are slow or leave at given times: such times affect another fraction of requests at each rate.
    """
    if conditions is not None and (conditions.slow or conditions.leave):
        return None
    prompt, tokens = _mean_tokens(arrivals)
    most = 2 * capacity_per_s(predicted, prompt, tokens)

    def is_enough(rate: float) -> bool:
        coming = poisson(rate, min(len(arrivals.requests), _RATE_REQUESTS), prompt, tokens, seed)
        goodput = simulate(predicted, coming, conditions, seed=seed, owner=owner, targets=targets).goodput
        return goodput is not None and goodput.within >= REQUIRED

    low, high = most / _LEAST_LOAD, most
    try:
        if not is_enough(low):
            return 0.0
        if is_enough(high):  # the run is too short for a queue to build up
            return high
        while high > low * (1 + _RATE_WITHIN):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if is_enough(middle) else (low, middle)
    except TooManyEvents:
        return None
    return low


def _goodput(completed: Sequence[State], requests: int, seconds: float, targets: Targets) -> Goodput:
    """Count the requests that met both targets."""
    met = sum(
        state.first_s - state.arrived_s <= targets.ttft_s
        and state.last_s - state.first_s <= targets.itl_s * max(1, state.tokens - 1)
        for state in completed
    )
    return Goodput(targets, met / requests, met / seconds if seconds else 0.0)


def _mean_tokens(arrivals: Arrivals) -> tuple[int, int]:
    """Return the mean prompt tokens and the mean generated tokens, rounded."""
    requests = arrivals.requests
    prompts, answers = sum(request.prompt for request in requests), sum(request.tokens for request in requests)
    return round(prompts / len(requests)), round(answers / len(requests))


def _slows(part: StageOrLink, slow: Sequence[Slow]) -> tuple[Slow, ...]:
    """Return the slow periods of a stage's devices. Links have none."""
    return () if part.is_link else tuple(period for period in slow if period.device in part.devices)
