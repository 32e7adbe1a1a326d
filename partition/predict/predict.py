"""A plan of a language model, predicted by the formulas of `partition.predict.cost`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from partition.errors import PlanError
from partition.plan.plan import LOCAL, Plan
from partition.predict import cost
from partition.predict.cost import GroupCost, Work
from partition.predict.drafts import Draft
from partition.predict.hosts import crowding, used
from partition.predict.prediction import Prediction, StagePrediction
from partition.predict.speeds import Curve, DeviceSpeed, Links, together

_MIB = 1 << 20


def predict(
    plan: Plan,
    work: Work,
    speeds: Mapping[str, DeviceSpeed],
    links: Links,
    microbatches: int | None = None,
    groups: int = 1,
) -> Prediction:
    """Predict the cost of `plan` on devices of these speeds, by device. microbatches: None is one for each stage.
    groups: of requests, that ranks compute by turns while sums travel; counts where all of them share every layer.

    latency = sum over stages of (seconds + hop), of one row; with drafts Draft.token_s of the rows of a pass, with the
    fastest number of windows. The time per token of many requests = cost.per_token_s of the same with C / M rows; ttft
    = cost.ttft_s. PlanError if a link is unknown, or a device has no room for its part and cannot page.
    """
    by_turns = groups > 1 and len(plan.stages) == 1 and plan.world_size > 1
    n_groups = cost.groups(work.concurrency, groups if by_turns else microbatches or len(plan.stages))
    rows = work.concurrency / n_groups
    stages = [_Stage(plan, i, work, speeds, links) for i in range(len(plan.stages))]
    crowd = crowding([(stage.hosts, stage.seconds(rows)) for stage in stages]) if n_groups > 1 else [1.0] * len(stages)
    predicted = [stage.predicted(rows, times) for stage, times in zip(stages, crowd, strict=True)]
    pass_s = sum(stage.seconds(rows) + sum(stage.hop(rows)) for stage in stages)
    busiest_s = max(
        max(prediction.busy_s * prediction.crowding, prediction.transfer_busy_s) for prediction in predicted
    )
    if by_turns:
        busiest_s = max(stages[0].turn_s(rows))
    joules = sum(stage.joules(rows) for stage in stages)
    latency_s, draft = _alone(stages, work)
    token_s = latency_s if work.concurrency == 1 else float(cost.per_token_s(pass_s, busiest_s, rows, work.concurrency))
    return Prediction(
        latency_s=latency_s,
        throughput_per_s=1 / token_s,
        ttft_s=_ttft_s(stages, work.prompt),
        prompt=work.prompt,
        energy_j=None if math.isnan(joules) else joules,
        enter_s=0.0,
        stages=tuple(predicted),
        in_flight=work.concurrency,
        microbatches=n_groups,
        draft=draft,
    )


def compute_s(
    plan: Plan, work: Work, speeds: Mapping[str, DeviceSpeed], links: Links, rows: int = 1
) -> list[float | None]:
    """Return the seconds that each rank computes in a step of `rows`, by rank, as `GroupCost.own_s`; None for a rank
    that pages."""
    stages = [_Stage(plan, i, work, speeds, links) for i in range(len(plan.stages))]
    return [own for stage in stages for own in stage.own_s(rows)]


def _alone(stages: list[_Stage], work: Work) -> tuple[float, Draft | None]:
    """Return (seconds of a token of a request alone, the draft used: None if it is one row at a time)."""
    rows = work.alone_rows
    seconds = [stage.seconds(rows) for stage in stages]
    hops = [stage.hop(rows) for stage in stages]
    computes = [stage_s + work.drafting_s(stage.devices, LOCAL) for stage, stage_s in zip(stages, seconds, strict=True)]
    crowd = crowding([(stage.hosts, busy_s) for stage, busy_s in zip(stages, computes, strict=True)])
    busy_s = max(*(stage_s * times for stage_s, times in zip(computes, crowd, strict=True)), *(hop[1] for hop in hops))
    token_s, windows = work.alone_s(sum(seconds) + sum(map(sum, hops)), busy_s, len(stages))
    draft = None if work.draft is None or rows * windows == 1 else replace(work.draft, windows=int(windows))
    return float(token_s), draft


class _Stage:
    """Predicted stage of a plan."""

    def __init__(self, plan: Plan, i: int, work: Work, speeds: Mapping[str, DeviceSpeed], links: Links) -> None:
        stage = plan.stages[i]
        self._work, self._links, self._stage = work, links, stage
        self.devices = [shard.device for shard in stage.shards]
        self._after = [shard.device for shard in plan.stages[i + 1].shards] if i + 1 < len(plan.stages) else []
        group = [speeds[device] for device in self.devices]
        self.hosts = used(speed.host for speed in group)
        self._group = GroupCost(work, together(group), stage.shards, links)
        lo, hi = stage.layers.start, stage.layers.stop
        self._k = work.before[hi] - work.before[lo]
        weights, kv = work.weights_before[hi] - work.weights_before[lo], work.kv_before[hi] - work.kv_before[lo]
        last = not self._after
        self._paged = [float(n) for n in self._group.paged(self._k, weights, kv, last)]
        self._held = [round(float(n)) for n in self._group.bytes_held(weights, kv, last)]
        for speed, paged, need in zip(
            self._group.speeds, self._paged, self._group.bytes_needed(weights, kv, last), strict=True
        ):
            if math.isinf(paged):
                raise PlanError(
                    f"layers {stage.layers} on {speed.name} need {float(need) / _MIB:,.0f} MiB there, and"
                    f" {speed.memory_bytes / _MIB:,.0f} are free; use a smaller type or a smaller --context, or a plan"
                    " that gives it less"
                )

    def seconds(self, rows: float, outputs: float | None = None) -> float:
        """Return seconds of one step."""
        return max(
            float(self._group.seconds(self._k, rows, not self._after, outputs)), float(self._group.disk_s(self._paged))
        )

    def turn_s(self, rows: float) -> tuple[float, float]:
        """(seconds that one step computes, seconds that its sums keep a link busy): while sums of one group of requests
        travel the ranks compute another, and a link carries sums of both."""
        n_sums = self._k * self._work.limits.sums_a_layer
        return self.seconds(rows) - n_sums * self._group.sum_s(rows), n_sums * self._group.sum_busy_s(rows)

    def own_s(self, rows: float) -> list[float | None]:
        """Return the seconds that each rank computes in one step; None for a rank that pages."""
        return [
            None if paged else self._group.own_s(rank, self._k, not self._after, rows)
            for rank, paged in enumerate(self._paged)
        ]

    def hop(self, rows: float) -> tuple[float, float]:
        """(latency, busy) of the way to the next stage, or to the owner."""
        if self._after:
            return cost.hop_s(self._work, self.devices, self._after, self._links, rows)
        return cost.answer_s(self.devices, LOCAL, self._links, rows)

    def joules(self, rows: float) -> float:
        """A token."""
        return float(self._group.joules(self.seconds(rows))) / rows

    def _curve(self) -> Curve:
        """Seconds by rows: those that were measured, and the prompt."""
        most = self._work.prompt
        rows = {1, most, *(n for n, _ in self._group.speeds[0].layer_s.points if n < most)}
        return Curve(tuple((n, self.seconds(n, outputs=n if n < most else 1)) for n in sorted(rows)))

    def predicted(self, rows: float, crowding: float) -> StagePrediction:
        several = len(self.devices) > 1
        return StagePrediction(
            devices=tuple(self.devices),
            what=f"layers {self._stage.layers}",
            compute_s=self.seconds(1),
            busy_s=self.seconds(rows),
            transfer_s=sum(self.hop(1)),
            transfer_busy_s=self.hop(rows)[1],
            memory_bytes=dict(zip(self.devices, self._held, strict=True)),
            rows_s=self._curve(),
            sums_s=self._k * self._group.work.limits.sums_a_layer * self._group.sum_s(1) if several else 0.0,
            paged_bytes=round(max(n if math.isfinite(n) else 0.0 for n in self._paged)),
            crowding=crowding,
        )


def _ttft_s(stages: list[_Stage], prompt: int) -> float:
    """A prompt of one request through all stages."""
    n = cost.chunks(prompt)
    whole = [stage.seconds(prompt, outputs=1) for stage in stages]
    hops = sum(stage.hop(prompt / n)[0] + n * stage.hop(prompt / n)[1] for stage in stages[:-1])
    crowd = crowding([(stage.hosts, seconds) for stage, seconds in zip(stages, whole, strict=True)])
    busiest = max(seconds * times for seconds, times in zip(whole, crowd, strict=True))
    return cost.ttft_s(sum(whole), busiest, prompt) + hops + sum(stages[-1].hop(1))
