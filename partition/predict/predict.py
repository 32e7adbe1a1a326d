"""Prediction of a language model's plan by the formulas of `partition.predict.cost`."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from partition.errors import PlanError
from partition.plan.plan import LOCAL, Plan
from partition.predict import cost
from partition.predict.cost import DiskSeconds, GroupCost, Work
from partition.predict.drafts import Draft
from partition.predict.hosts import crowding, used
from partition.predict.prediction import NO_LAYERS, Prediction, StagePrediction
from partition.predict.replicas import distribute, slowdowns
from partition.predict.speeds import Curve, DeviceSpeed, Links, next_to_another, together

_ROWS = (1, 2, 4, 8, 16, 32, 64)  # row counts of decode steps that a simulation may ask for
_MIB = 1 << 20


def predict(
    plan: Plan,
    work: Work,
    speeds: Mapping[str, DeviceSpeed],
    links: Links,
    microbatches: int | None = None,
) -> Prediction:
    """Predict the cost of `plan`.

    speeds: speeds by device.
    microbatches: microbatches in flight; None: as the plan sets, or one for each stage.

    latency is the sum over stages of (seconds + hop) for one row. With drafts it is Draft.token_s with the fastest
    number of windows. The time per token of many requests is cost.per_token_s with C / M rows. ttft is cost.ttft_s. For
    a plan with a prefill placement, ttft is cost.pair_ttft_s, and other figures are those of the decode placement. For
    a plan with replicas, latency and ttft are those of the first copy, and the throughput is that of all copies.

    Raises PlanError if a link is unknown, or if a device has no room for its part and cannot page.
    """
    if plan.replicas:
        return _of_copies(plan, work, speeds, links, microbatches)
    if plan.prefill is not None:
        return _of_pair(plan, work, speeds, links, microbatches)
    if plan.thin_owner and not work.drafts_thin:
        work = replace(work, draft=None)
    n_groups = _n_groups(plan, work.concurrency, microbatches)
    rows = work.concurrency / n_groups
    stages = [_Stage(plan, i, work, speeds, links) for i in range(len(plan.stages))]
    predicted = [
        stage.predicted(rows, times) for stage, times in zip(stages, _crowd(stages, rows, n_groups), strict=True)
    ]
    latency_s, draft = _alone(stages, work)
    token_s = latency_s if work.concurrency == 1 else _token_s(stages, work.concurrency, n_groups)
    joules = sum(stage.joules(rows) + stage.idle_watts * token_s for stage in stages)
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


def _of_pair(
    plan: Plan, work: Work, speeds: Mapping[str, DeviceSpeed], links: Links, microbatches: int | None
) -> Prediction:
    """Predict a plan with a prefill placement. Raises PlanError also if a device has no room for both placements."""
    generates, computes_prompts = plan.placements
    decode = predict(generates, work, speeds, links, microbatches)
    used_bytes = decode.memory_bytes
    left = {
        device: replace(next_to_another(speed, speed.most_bytes - used_bytes[device]), memory_bytes=speed.memory_bytes)
        if speed.gpu is not None and device in used_bytes
        else speed
        for device, speed in speeds.items()
    }
    prefill = predict(computes_prompts, work, left, links, microbatches)
    prompt_s = prefill.ttft_s or 0.0
    to_owner_s = moved_s(computes_prompts, work, speeds, links, to_owner=True)
    from_owner_s = moved_s(generates, work, speeds, links, to_owner=False)
    n_stages = len(computes_prompts.computing)
    both_s = float(cost.pair_ttft_s(prompt_s, to_owner_s, from_owner_s, 0.0, work.prompt, n_stages))
    predicted = replace(
        decode, ttft_s=both_s + decode.plain_s, prefill=prefill, hand_over_s=max(0.0, both_s - prompt_s)
    )
    for device, need in predicted.memory_bytes.items():
        if need > speeds[device].most_bytes:
            raise PlanError(
                f"both placements on {speeds[device].name} need {need / _MIB:,.0f} MiB there, and"
                f" {speeds[device].most_bytes / _MIB:,.0f} are free; leave out prefill, or use another plan for it"
            )
    return predicted


def _of_copies(
    plan: Plan, work: Work, speeds: Mapping[str, DeviceSpeed], links: Links, microbatches: int | None
) -> Prediction:
    """Predict a plan with replicas. The requests are distributed so that the sum of throughputs is largest.

    Copies on the same host, the owner's device and the owner's link slow each other down. The owner's device also has a
    process for each other copy.

    microbatches: microbatches in flight in the first copy.
    """
    copies, own = plan.copies, speeds[LOCAL]
    others = len(copies) - 1
    speeds = {**speeds, LOCAL: replace(own, memory_bytes=max(0, own.memory_bytes - others * own.runtime_bytes))}
    counts = [microbatches, *[None] * others]
    staged = [[_Stage(copy.placements[0], i, work, speeds, links) for i in range(len(copy.stages))] for copy in copies]
    rates = [
        [0.0, *(1 / _token_s(stages, n, _n_groups(copy, n, many)) for n in range(1, work.concurrency + 1))]
        for copy, stages, many in zip(copies, staged, counts, strict=True)
    ]
    requests = distribute(rates, work.concurrency)
    predicted = [
        predict(copy, replace(work, concurrency=max(1, n), draft=work.draft if i == 0 else None), speeds, links, many)
        for i, (copy, n, many) in enumerate(zip(copies, requests, counts, strict=True))
    ]
    alone = [of_copy[n] for of_copy, n in zip(rates, requests, strict=True)]
    uses = [_uses(stages, p.in_flight / p.microbatches) for stages, p in zip(staged, predicted, strict=True)]
    shared = [rate / times for rate, times in zip(alone, slowdowns(alone, uses), strict=True)]
    predicted = [replace(p, throughput_per_s=rate) for p, rate in zip(predicted, shared, strict=True)]
    total = sum(shared)
    watts = [
        None if p.energy_j is None else p.energy_j * rate for p, rate in zip(predicted, shared, strict=True) if rate
    ]
    return replace(
        predicted[0],
        throughput_per_s=total,
        in_flight=work.concurrency,
        energy_j=None if None in watts else sum(w for w in watts if w is not None) / total,
        copies=tuple(predicted),
    )


def _uses(stages: Sequence[_Stage], rows: float) -> dict[Hashable, float]:
    """Return the seconds per token in which a copy uses each host, the owner's device, and each way of the owner's
    link.
    """
    uses: dict[Hashable, float] = {}
    for stage in stages:
        seconds, link_s = stage.seconds(rows) / rows, stage.hop(rows)[1] / rows
        shares: list[tuple[Hashable, float]] = [(("host", id), part * seconds) for id, part in stage.hosts.items()]
        if LOCAL in stage.devices:
            shares += [("owner", seconds), ("from the owner", link_s)]
        elif stage is stages[-1]:
            shares.append(("to the owner", link_s))
        for resource, use_s in shares:
            uses[resource] = uses.get(resource, 0.0) + use_s
    return uses


def _n_groups(plan: Plan, requests: int, microbatches: int | None) -> int:
    """Return the number of groups that the requests form. A single stage computes one step at a time."""
    n_stages = len(plan.computing)
    return cost.groups(requests, (microbatches or plan.microbatches or n_stages) if n_stages > 1 else 1)


def _crowd(stages: Sequence[_Stage], rows: float, n_groups: int) -> list[float]:
    """Return the slowdown factor of each stage while all groups of requests are in flight."""
    return crowding([(stage.hosts, stage.seconds(rows)) for stage in stages]) if n_groups > 1 else [1.0] * len(stages)


def _token_s(stages: Sequence[_Stage], requests: int, n_groups: int) -> float:
    """Return the seconds per token of many requests without drafts."""
    rows, most_rows = requests / n_groups, cost.most_rows(requests, n_groups)
    pass_s = sum(stage.seconds(most_rows) + sum(stage.hop(most_rows)) for stage in stages)
    busy = zip(stages, _crowd(stages, rows, n_groups), strict=True)
    busiest_s = max(max(stage.seconds(rows) * times, stage.hop(rows)[1]) for stage, times in busy)
    return float(cost.per_token_s(pass_s, busiest_s, rows, requests))


def moved_s(placement: Plan, work: Work, speeds: Mapping[str, DeviceSpeed], links: Links, *, to_owner: bool) -> float:
    """Return the seconds to transfer the prompt's KV cache between this placement and the owner."""
    return prompt_and_moved_s(placement, work, speeds, links, to_owner=to_owner)[1]


def prompt_and_moved_s(
    placement: Plan, work: Work, speeds: Mapping[str, DeviceSpeed], links: Links, *, to_owner: bool
) -> tuple[float, float]:
    """Return (`Prediction.ttft_s`, `moved_s`) of a placement, without predicting the rest."""
    stages = [_Stage(placement, i, work, speeds, links) for i in range(len(placement.stages))]
    return _ttft_s(stages, work.prompt), max(stage.moved_s(to_owner) for stage in stages)


def compute_s(
    plan: Plan, work: Work, speeds: Mapping[str, DeviceSpeed], links: Links, rows: int = 1
) -> list[float | None]:
    """Return the seconds that each rank computes in a step of `rows`, as `GroupCost.own_s`. None for a rank that
    pages or has no layers.
    """
    stages = [_Stage(plan, i, work, speeds, links) for i in range(len(plan.stages))]
    return [own for stage in stages for own in stage.own_s(rows)]


def _alone(stages: list[_Stage], work: Work) -> tuple[float, Draft | None]:
    """Return (seconds per token of a lone request, the draft used; None without drafting)."""
    rows = work.alone_rows
    seconds = [stage.seconds(rows) for stage in stages]
    hops = [stage.hop(rows) for stage in stages]
    computes = [stage_s + work.drafting_s(stage.devices, LOCAL) for stage, stage_s in zip(stages, seconds, strict=True)]
    crowd = crowding([(stage.hosts, busy_s) for stage, busy_s in zip(stages, computes, strict=True)])
    busy_s = max(*(stage_s * times for stage_s, times in zip(computes, crowd, strict=True)), *(hop[1] for hop in hops))
    token_s, windows = work.alone_s(sum(seconds) + sum(map(sum, hops)), busy_s, sum(stage.computes for stage in stages))
    draft = None if work.draft is None or rows * windows == 1 else replace(work.draft, windows=int(windows))
    return float(token_s), draft


class _Stage:
    """A stage of a plan with its costs."""

    def __init__(self, plan: Plan, i: int, work: Work, speeds: Mapping[str, DeviceSpeed], links: Links) -> None:
        stage = plan.stages[i]
        self._work, self._links, self._stage, self._n_stages = work, links, stage, len(plan.computing)
        self.devices = [shard.device for shard in stage.shards]
        self._after = [shard.device for shard in plan.stages[i + 1].shards] if i + 1 < len(plan.stages) else []
        group = [speeds[device] for device in self.devices]
        self.hosts = used(speed.host for speed in group)
        self._group = GroupCost(work, together(group), stage.shards, links)
        lo, hi = stage.layers.start, stage.layers.stop
        self.computes = bool(stage.layers)  # False for the stage of a thin owner
        self._prompt_kv = work.prompt_kv_before[hi] - work.prompt_kv_before[lo]
        self._k = work.before[hi] - work.before[lo]
        self._weights = weights = work.weights_before[hi] - work.weights_before[lo]
        kv = work.kv_before[hi] - work.kv_before[lo]
        last = not self._after
        self._on_gpu = on_gpu = self._group.on_gpu(lo, hi)
        self._paged = [float(n) for n in self._group.paged(self._k, weights, kv, last, on_gpu)]
        self._bytes_held = [round(float(n)) for n in self._group.bytes_held(weights, kv, last, on_gpu)]
        self._gpu_bytes = [round(float(n)) for n in self._group.bytes_on_gpu(last, on_gpu)]
        for speed, paged, need in zip(
            self._group.speeds, self._paged, self._group.bytes_needed(weights, kv, last), strict=True
        ):
            if math.isinf(paged):
                raise PlanError(
                    f"layers {stage.layers} on {speed.name} need {float(need) / _MIB:,.0f} MiB there, and"
                    f" {speed.most_bytes / _MIB:,.0f} are free; use a smaller type or a smaller --context, or a plan"
                    " that gives it less"
                )

    def seconds(self, rows: float) -> float:
        """Return the seconds of one decode step."""
        seconds = self._group.seconds(self._k, rows, not self._after, self._on_gpu)
        return float(self._disk(rows).added_to(seconds))

    def _disk(self, rows: float) -> DiskSeconds:
        return self._group.disk(self._paged, self._k, self._weights, rows, self._on_gpu)

    def prompt_s(self) -> float:
        """Return the seconds of the whole prompt."""
        rows = cost.chunk_rows(self._work.prompt, self._n_stages)
        return float(self._group.prompt_s(self._k, not self._after, rows, self._disk(rows), self._on_gpu))

    def own_s(self, rows: float) -> list[float | None]:
        """Return the seconds that each rank computes in one step; None for a rank that pages or has no layers."""
        return [
            None
            if paged or not self.computes
            else self._group.own_s(rank, self._k, not self._after, rows, self._on_gpu)
            for rank, paged in enumerate(self._paged)
        ]

    def hop(self, rows: float) -> tuple[float, float]:
        """Return (latency, busy seconds) of the hop to the next stage or to the owner."""
        if self._after:
            return cost.hop_s(self._work, self.devices, self._after, self._links, rows)
        return cost.answer_s(self.devices, LOCAL, self._links, rows)

    def moved_s(self, to_owner: bool) -> float:
        """Return the seconds to transfer the prompt's KV cache of this stage to the owner, or from it."""
        ends = [(device, LOCAL) if to_owner else (LOCAL, device) for device in self.devices]
        return float(self._group.moved_s(self._prompt_kv, [self._links.get(*pair) for pair in ends]))

    def joules(self, rows: float) -> float:
        """Return the joules per token that computing takes, above those of waiting."""
        return self.seconds(rows) * self._group.watts[0] / rows

    @property
    def idle_watts(self) -> float:
        """Power of the stage's devices while they wait."""
        return self._group.watts[1]

    def predicted(self, rows: float, crowding: float) -> StagePrediction:
        several, most = len(self.devices) > 1, self._work.prompt
        by_rows = sorted({*_ROWS, *(n for n, _ in self._group.speeds[0].layer_s.points)})
        return StagePrediction(
            devices=tuple(self.devices),
            what=f"layers {self._stage.layers}" if self.computes else NO_LAYERS,
            compute_s=self.seconds(1),
            busy_s=self.seconds(rows),
            transfer_s=sum(self.hop(1)),
            transfer_busy_s=self.hop(rows)[1],
            memory_bytes=dict(zip(self.devices, self._bytes_held, strict=True)),
            gpu_bytes=dict(zip(self.devices, self._gpu_bytes, strict=True)) if self._on_gpu else None,
            rows_s=Curve((*((n, self.seconds(n)) for n in by_rows if n < most), (most, self.prompt_s()))),
            sums_s=self._k * self._group.work.limits.sums_a_layer * self._group.sum_s(1) if several else 0.0,
            paged_bytes=round(max(n if math.isfinite(n) else 0.0 for n in self._paged)),
            crowding=crowding,
        )


def _ttft_s(stages: list[_Stage], prompt: int) -> float:
    """Return the seconds of a lone request's prompt through all stages.

    A chunk crosses a link while stages compute other chunks. Chunks are longer if a single stage computes, also behind
    a thin owner.
    """
    n_stages = sum(stage.computes for stage in stages)
    n = cost.chunks(prompt, n_stages)
    whole = [stage.prompt_s() for stage in stages]
    hops = [stage.hop(prompt / n) for stage in stages[:-1]]
    ways = [n * busy_s for _, busy_s in hops]
    crowd = crowding([(stage.hosts, seconds) for stage, seconds in zip(stages, whole, strict=True)])
    busiest = max(*(seconds * times for seconds, times in zip(whole, crowd, strict=True)), *ways, 0.0)
    latency_s = sum(latency_s for latency_s, _ in hops)
    return float(cost.ttft_s(sum(whole) + sum(ways), busiest, prompt, n_stages)) + latency_s + sum(stages[-1].hop(1))
