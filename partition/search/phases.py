"""Prefill-decode disaggregation: the best pairs of a prefill placement and a decode placement, found exactly.

The KV cache of a prompt goes from the prefill placement P to the owner, and from there to the decode placement D:

    ttft(P, D) = cost.pair_ttft_s(prompt on P, transfer from P to the owner, transfer from the owner to D, a row on D)

The placements depend on each other only through memory. `PairSearch` checks memory on some devices only, so its result
bounds all pairs. At first these are the devices without room for a whole model. If best pairs exceed the memory of
other devices, these are added. With many such devices, some pairs without room are replaced by the best placements that
fit (`gap`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from partition.errors import PlanError
from partition.plan.plan import Plan
from partition.predict import cost
from partition.predict.hysteresis import PREFILL, clearly_better, plan_threshold
from partition.predict.predict import moved_s, prompt_and_moved_s
from partition.predict.prediction import Prediction
from partition.search.explain import is_busy
from partition.search.pair_search import Pair, PairSearch
from partition.search.planner import Placed, Planner
from partition.search.prefills import PrefillSearch, PrefillTable
from quant.front import non_dominated
from quant.text import number_text

MANY_SHORT = 3  # largest number of devices short of memory for an exact search; with more, some pairs are repaired
MOST_REPAIRED = 6  # number of decode placements that get a fitting prefill placement if their pair has no room
_NO_GAP = 1e-9


class Phases:
    """Search for pairs of placements for the work of a planner."""

    def __init__(self, planner: Planner, most_bytes: float = math.inf) -> None:
        """most_bytes: largest memory of a pair on any device."""
        self._planner = planner
        self._by_device = planner.by_device
        self._rooms = [min(speed.most_bytes, most_bytes) for speed in planner.speeds]
        self._for_prompts = planner.for_prompts()
        self._whole = [max(both) for both in zip(planner.whole_bytes(), self._for_prompts.whole_bytes(), strict=True)]
        self._tables: dict[tuple[int, ...], PrefillTable] = {}  # by free memory of the devices
        # (seconds of the prompt, seconds of the transfer) by prefill placement and tokens.
        self._prompts: dict[tuple[Plan, int], tuple[float, float]] = {}
        self.exact = True  # False if some pairs were not searched
        self.gap = 0.0  # bound on the relative excess of the time to first token over the optimum; inf: unknown

    def with_prefill(self, placed: Placed) -> Placed | None:
        """Return a placement with the best prefill placement added. None if none fits, or none is clearly better
        than `placed` alone.
        """
        planner, predicted = self._planner, self._predicted(placed)
        need = predicted.memory_bytes
        free = [room - need.get(device, 0) for device, room in zip(self._by_device, self._rooms, strict=True)]
        from_owner_s = moved_s(placed.plan, planner.work, self._by_device, planner.links, to_owner=False)
        best = self._table(free).best(from_owner_s, np.zeros(0))
        if best is None:
            return None
        prefill = self._for_prompts.plan(best[1])
        if not _outdoes(planner, prefill, best[0] + predicted.plain_s, predicted.ttft_s or 0.0):
            return None
        return self._pair(placed, prefill)

    def pairs(self, objectives: Sequence[str], caps: Mapping[str, float] = MappingProxyType({})) -> list[Placed]:
        """Return the non-dominated pairs within caps. The objectives include ttft. The planner must have no drafts.

        Each decode placement is paired with the prefill placement that gives the earliest first token. If memory is an
        objective, other useful pairs may be missed, and the gap is unknown.
        """
        names = [name for name in dict.fromkeys((*objectives, *caps)) if name not in ("ttft", "memory")]
        names += [*(["memory"] if "memory" in objectives else []), "ttft"]
        most = [math.inf if name == "memory" else caps.get(name, math.inf) for name in names]
        for_prompts = self._on(self._rooms)
        short = {i for i, room in enumerate(self._rooms) if room < self._whole[i]}
        short = short if len(short) <= MANY_SHORT else set()
        while True:
            search = PairSearch(self._planner, for_prompts, self._rooms, sorted(short), names, most)
            pairs = search.run()
            if "memory" not in names:
                pairs = non_dominated(pairs, lambda pair: pair.values)
            lacking = {i for pair in pairs for i in self._lacking(pair)} - short
            if not lacking or len(short | lacking) > MANY_SHORT:
                break
            short |= lacking
        if lacking:
            pairs = self._with_room(pairs, most[-1])
        if not search.exact or ("memory" in objectives and len(self._rooms) > 1):
            self.exact, self.gap = False, math.inf
        placed = []
        for pair in pairs:
            decode = self._planner.plan(pair.decode)
            values = dict(zip(names, pair.values, strict=True))
            placement = self._pair(Placed(decode, pair.microbatches, ()), for_prompts.plan(pair.prefill))
            if "memory" in objectives:
                values["memory"] = max(self._predicted(placement).memory_bytes.values())
            if self._shares_gpu(placement.plan):  # the search gave the whole GPU to both placements
                self.exact, self.gap = False, math.inf
                try:
                    values["ttft"] = self._predicted(placement).ttft_s or 0.0
                except PlanError:
                    continue
            placed.append(replace(placement, objectives=tuple(values[name] for name in objectives)))
        return non_dominated(placed, lambda placed: placed.objectives)

    def _shares_gpu(self, pair: Plan) -> bool:
        """Return True if both placements of a pair use the GPU of a device."""
        decode, prefill = (set(placement.computing_devices) for placement in pair.placements)
        return any(self._by_device[device].gpu is not None for device in decode & prefill)

    def _with_room(self, bounds: Sequence[Pair], most_s: float) -> list[Pair]:
        """Return the pairs that fit into memory, with replacements for some that do not. Set `gap` from the difference
        to the bounds.

        bounds: bounds on all possible pairs: each pair is dominated by, or equal to, one of these.
        most_s: largest allowed time to first token.
        """
        planner, pairs = self._planner, [bound for bound in bounds if not self._lacking(bound)]
        ordered = sorted((bound for bound in bounds if self._lacking(bound)), key=lambda pair: pair.values)
        count = min(MOST_REPAIRED, len(ordered))
        for bound in [ordered[i * (len(ordered) - 1) // max(1, count - 1)] for i in range(count)]:
            needs = planner.bytes_held(bound.decode)
            free = [room - round(need) for room, need in zip(self._rooms, needs, strict=True)]
            decode = planner.plan(bound.decode)
            from_owner_s = moved_s(decode, planner.work, self._by_device, planner.links, to_owner=False)
            best = self._table(free).best(from_owner_s, np.zeros(0)) if min(free) >= 0 else None
            if best is not None:
                ttft_s = best[0] + self._predicted(Placed(decode, bound.microbatches, ())).plain_s
                if ttft_s <= most_s:
                    pairs.append(replace(bound, prefill=best[1], values=(*bound.values[:-1], ttft_s)))
        for bound in bounds:
            as_good = [
                pair.values[-1]
                for pair in pairs
                if all(a <= b for a, b in zip(pair.values[:-1], bound.values[:-1], strict=True))
            ]
            self.gap = max(self.gap, min(as_good, default=math.inf) / bound.values[-1] - 1)
        self.exact &= self.gap < _NO_GAP
        return pairs

    def _lacking(self, pair: Pair) -> list[int]:
        """Return the indices of devices without room for both placements."""
        both = zip(self._planner.bytes_held(pair.decode), self._for_prompts.bytes_held(pair.prefill), strict=True)
        needs = [round(decode) + prefill for decode, prefill in both]
        return [i for i, (need, room) in enumerate(zip(needs, self._rooms, strict=True)) if need > room]

    def _on(self, rooms: Sequence[float]) -> Planner:
        """Return the prefill planner for this much memory on each device, without paging."""
        return self._for_prompts.with_memory(
            {i: max(0, int(room)) for i, room in enumerate(rooms) if room < self._whole[i]}
        )

    def _table(self, free: Sequence[float]) -> PrefillTable:
        """Return the prefill placements for this much free memory on each device."""
        planner = self._planner
        rooms = tuple(max(0, int(min(room, self._whole[i]))) for i, room in enumerate(free))
        if rooms not in self._tables:
            self._tables[rooms] = PrefillSearch(self._on(rooms)).table(planner.beam(of_memory=False))
            self.exact &= self._tables[rooms].exact
        return self._tables[rooms]

    def _pair(self, placed: Placed, prefill: Plan) -> Placed:
        """Return the pair with `prefill_from`, the fewest new prompt tokens that make its first token earlier than
        without it.
        """
        plan, planner, row_s = replace(placed.plan, prefill=prefill), self._planner, self._predicted(placed).plain_s

        def pays(tokens: int) -> bool:
            work = replace(planner.work, prompt=tokens)
            if (prefill, tokens) not in self._prompts:
                self._prompts[prefill, tokens] = prompt_and_moved_s(
                    prefill, work, self._by_device, planner.links, to_owner=True
                )
            prompt_s, there_s = self._prompts[prefill, tokens]
            alone_s, back_s = prompt_and_moved_s(placed.plan, work, self._by_device, planner.links, to_owner=False)
            return float(cost.pair_ttft_s(prompt_s, there_s, back_s, row_s, tokens, len(prefill.computing))) < alone_s

        low, high = 0, planner.work.prompt  # bisect between 0 and the whole prompt
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if pays(middle) else (middle, high)
        return replace(placed, plan=replace(plan, prefill_from=high))

    def _predicted(self, placed: Placed) -> Prediction:
        return self._planner.predict(placed.plan, placed.microbatches)


def paired(planner: Planner, plain: Placed | None, objective: str, caps: Mapping[str, float]) -> Placed | None:
    """Return the pair that is clearly better than `plain`, the best plan with one placement, or None.

    If the time to first token is neither the objective nor limited, the decode placement is that of `plain`. Otherwise
    the planner must have no drafts. plain is None if no plan is within the caps.
    """
    if objective == "memory" or len(planner.speeds) == 1:
        return None
    if "ttft" not in (objective, *caps):
        return None if plain is None else Phases(planner, caps.get("memory", math.inf)).with_prefill(plain)
    # With drafts, the step time of the decode placement is not that of a pair's first token.
    if planner.work.draft is not None:
        return None
    phases = Phases(planner, caps.get("memory", math.inf))
    pairs = phases.pairs(tuple(dict.fromkeys((objective, "ttft"))), caps)
    if not pairs:
        return None
    pair = pairs[0]
    if plain is None or _outdoes(planner, pair.plan.placements[-1], pair.objectives[0], plain.objectives[0]):
        return pair
    return None


def _outdoes(planner: Planner, prefill: Plan, new: float, old: float) -> bool:
    """Return True if a pair with this prefill placement is clearly better than one placement."""
    return clearly_better(new, old, by=plan_threshold(is_busy(planner.speeds, prefill.devices), PREFILL))


def prefill_reason(planner: Planner, pair: Placed) -> str:
    """Return a clause that explains the prefill placement of a pair."""
    both, alone = (planner.predict(plan, pair.microbatches) for plan in (pair.plan, pair.plan.placements[0]))
    assert pair.plan.prefill is not None
    devices = dict.fromkeys(shard.device for stage in pair.plan.prefill.computing for shard in stage.shards)
    where = " and ".join(planner.by_device[device].name for device in devices)
    sooner = f"{number_text(both.ttft_s or 0.0)} s to the first token instead of {number_text(alone.ttft_s or 0.0)} s"
    return f"prompts of {pair.plan.prefill_from} tokens or more on {where}: {sooner}"
