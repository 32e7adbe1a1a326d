"""A plan at work on many requests, by discrete events: what no formula says of queues, of jitter and of lost devices.

Stages and links serve one step at a time, for what `partition.simulate.times` says, and queues are between them. Of a
language model, requests that are ready go through the stages in groups, as `edge.llm.scheduler` forms them; inputs of
an ONNX model go one by one, up to a number in flight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from partition.errors import PlanError
from partition.plan.plan import LOCAL
from partition.predict.prediction import Prediction
from partition.simulate.arrivals import Arrivals
from partition.simulate.requests import Inputs, Texts
from partition.simulate.result import Simulated, Spread, Use
from partition.simulate.servers import Clock, Jitter, Server, Slow
from partition.simulate.times import Part, capacity_per_s, parts


@dataclass(frozen=True)
class Conditions:
    """What is not as predicted."""

    jitter: float = 0.0  # coefficient of variation of every time at a stage or on a link; their means stay
    slow: tuple[Slow, ...] = ()
    leave: tuple[tuple[str, float], ...] = ()  # (device, when)

    def check(self, devices: Sequence[str]) -> None:
        """PlanError for a device that the plan does not use."""
        for device in (*(slow.device for slow in self.slow), *(device for device, _ in self.leave)):
            if device not in devices:
                raise PlanError(f"{device[:80]} is not in the plan; in it are {', '.join(devices)}")

    @property
    def end_s(self) -> float:
        """When the first device leaves. That ends the deployment, as the runtime does when a rank is lost."""
        return min((when for _, when in self.leave), default=math.inf)


def simulate(
    predicted: Prediction,
    arrivals: Arrivals,
    conditions: Conditions | None = None,
    *,
    seed: int = 0,
    owner: str = LOCAL,
) -> Simulated:
    """What becomes of these requests. The same seed gives the same result.

    When a device leaves, all requests that are not completed fail, and those that arrive later. owner: what the device
    is called that sends requests and gets the answers. PlanError for conditions of devices that are not in the plan,
    for a plan that uses a device twice, and for more than MOST_EVENTS events.
    """
    given = conditions or Conditions()
    given.check([device for stage in predicted.stages for device in stage.devices])
    clock, jitter = Clock(), Jitter(given.jitter, seed)
    made = parts(predicted, owner)
    servers = [Server(clock, jitter, part.seconds, part.latency_s, _slows(part, given.slow)) for part in made]
    of_text = predicted.ttft_s is not None
    source: Texts | Inputs = (
        Texts(clock, servers, predicted, arrivals, seed) if of_text else Inputs(clock, servers, predicted, arrivals)
    )
    source.begin()
    clock.run(given.end_s)
    completed = [one for one in source.states if one.done]
    stalled = len(completed) < len(source.states)
    seconds = given.end_s if stalled else max(one.last_s for one in completed)
    several = [one for one in completed if one.tokens > 1]
    uses = [
        Use(part.devices, part.is_link, server.utilization(seconds), *server.queue.over(seconds))
        for part, server in zip(made, servers, strict=True)
    ]
    stages = [use for use in uses if not use.is_link]
    if of_text:  # its queue is with the scheduler
        mean, most = source.ready.over(seconds)
        stages[0] = replace(stages[0], queue_mean=mean, queue_max=most)
    waiting_mean, waiting_max = source.waiting.over(seconds)
    generated = sum(one.tokens for one in source.states)
    usual = [
        round(math.fsum(of) / len(of)) for of in zip(*((r.prompt, r.tokens) for r in arrivals.requests), strict=True)
    ]
    return Simulated(
        requests=len(source.states),
        completed=len(completed),
        failed=len(source.states) - len(completed),
        failed_in_flight=source.arrived - len(completed),
        stalled_s=given.end_s if stalled else None,
        left=min(given.leave, key=lambda one: one[1])[0] if stalled else None,
        of_text=of_text,
        seconds=seconds,
        ttft_s=Spread.of([one.first_s - one.arrived_s for one in completed]) if of_text else None,
        tpot_s=Spread.of([(one.last_s - one.first_s) / (one.tokens - 1) for one in several]) if of_text else None,
        latency_s=Spread.of([one.last_s - one.arrived_s for one in completed]),
        throughput_per_s=generated / seconds if seconds else 0.0,
        stages=tuple(stages),
        links=tuple(use for use in uses if use.is_link and use.devices[0] != use.devices[1]),
        waiting_mean=waiting_mean,
        waiting_max=waiting_max,
        in_flight=predicted.in_flight,
        in_flight_mean=source.flying.over(seconds)[0],
        arrivals_per_s=arrivals.rate_per_s,
        capacity_per_s=capacity_per_s(predicted, *usual),
    )


def _slows(part: Part, slow: Sequence[Slow]) -> tuple[Slow, ...]:
    """Of a stage: when one of its devices is slow. Links are not."""
    return () if part.is_link else tuple(one for one in slow if one.device in part.devices)
