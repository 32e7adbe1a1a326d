"""Corrections of measured links by use: where tokens clearly take longer, or less, than a plan's devices compute and
its links were measured to take, the next plan uses corrected links.

    ratio = (what a token took - what its stages computed) / (what it was predicted to take - what they were)

All links that the plan uses get that ratio, because a rank's wait does not tell for which of them it waited. Plans over
other devices add theirs, and the mean of the logarithms counts, as with devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from edge.parallel.step_times import Summary
from edge.survey.corrections import CorrectionFactors, token_s
from partition.plan.plan import LOCAL, Plan
from partition.predict.cost import Work
from partition.predict.hysteresis import PLAN_OFF, clearly_off
from partition.predict.predict import compute_s, predict
from partition.predict.speeds import DeviceSpeed, Links, LinkSpeed
from quant.text import number_text


class LinkCorrections(CorrectionFactors):
    """Correction factors of links by the devices at their ends."""

    name = "link-corrections"

    def applied(self, measured: Links) -> Links:
        """Return the measured links, corrected."""
        return Links({ends: self._applied(ends, link) for ends, link in measured.between.items()})

    def learn(self, ends: tuple[str, str], link: LinkSpeed, ratio: float) -> bool:
        """Remember that messages took `ratio` times as long as `link` says. Return False if that cannot be."""
        return self.put(" ".join(ends), link.times(1 / link.corrected).latency_s, ratio * link.corrected)

    def correct(
        self,
        plan: Plan,
        work: Work,
        speeds: Sequence[DeviceSpeed],
        links: Links,
        times: Sequence[Mapping[str, Summary]],
        *,
        disturbed: bool = False,
    ) -> list[str]:
        """Correct the links that a plan was made from, for the next plan. times: of each rank, its steps of one row.

        Nothing is corrected where the token took what its computing and the links explain, to PLAN_OFF; return a
        sentence where it did not. disturbed: other programs had this device's cores meanwhile, so links are not called
        slower.
        """
        took_s = token_s(times)
        computed_s = [summary.compute_ms.p10 / 1e3 if (summary := rank.get("decode")) else None for rank in times]
        if took_s is None or plan.world_size == 1 or None in computed_s:
            return []
        by_device = {speed.device: speed for speed in speeds}
        plain = replace(work, draft=None, concurrency=1)
        predicted = compute_s(plan, plain, by_device, links)
        if any(seconds is None and plan.slice(rank).layers for rank, seconds in enumerate(predicted)):
            return []  # a rank pages: how long it waits for its disk is not known
        expected_s = predict(plan, plain, by_device, links).latency_s - _in_stages(
            plan, [seconds or 0.0 for seconds in predicted]
        )
        explained_s = _in_stages(plan, [seconds or 0.0 for seconds in computed_s])
        rest_s = took_s - explained_s
        if rest_s <= 0 or expected_s <= 0 or not clearly_off(took_s, explained_s + expected_s, by=PLAN_OFF):
            return []
        ratio = rest_s / expected_s
        if disturbed and ratio > 1:
            return []
        learned = [self.learn(ends, links.get(*ends), ratio) for ends in _used(plan)]
        if not any(learned):
            return []
        return [
            f"communication took {number_text(1e3 * rest_s)} ms of a token, where {number_text(1e3 * expected_s)} were"
            " predicted; the next plan goes by that"
        ]

    def _applied(self, ends: tuple[str, str], measured: LinkSpeed) -> LinkSpeed:
        factor = None if measured.estimate else self.factor(" ".join(ends), measured.latency_s)
        return measured if factor is None else replace(measured.times(factor), corrected=factor)


def _in_stages(plan: Plan, seconds: Sequence[float]) -> float:
    """Return the sum over stages of the slowest rank's seconds."""
    ranks = iter(seconds)
    return sum(max(next(ranks) for _ in stage.shards) for stage in plan.stages)


def _used(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the ways between devices that a token of a plan takes, each once."""
    ways: dict[tuple[str, str], None] = {}
    members = [[shard.device for shard in stage.shards] for stage in plan.stages]
    for i, group in enumerate(members):
        for a, b in combinations(group, 2):
            ways |= {(a, b): None, (b, a): None}
        after = members[i + 1] if i + 1 < len(members) else []
        for t, device in enumerate(after):
            ways[group[t % len(group)], device] = None
    ways |= {(device, LOCAL): None for device in members[-1]}
    return (ends for ends in ways if ends[0] != ends[1])
