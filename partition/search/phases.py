"""Phases: a placement that computes prompts beside the one that generates. The best pairs, exactly.

Keys and values go from the placement P of a prompt to the owner, and from there to the placement D that generates:

    ttft(P, D) = cost.pair_ttft_s(prompt on P, way of P to the owner, way of the owner to D, a row on D)

Neither knows of the other but for the memory it leaves. So the best P beside a given D is on the front of (prompt, way)
on the memory that D leaves; and the D of a best pair is on the front of its own objectives, a row, and its way, or,
where memory keeps the best P from it, on that front with its bytes on each device that has no room for two whole
models. This second search looks only for what no pair of the first outdoes, were all memory there for prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partition.plan.plan import LOCAL, Plan
from partition.predict import cost
from partition.predict.hysteresis import PREFILL, clearly_better, plan_threshold
from partition.predict.predict import first_token_s, moved_s, predict
from partition.predict.prediction import Prediction
from partition.search.explain import is_busy
from partition.search.planner import Placed, Planner, non_dominated
from partition.search.problem import Array
from partition.search.stage_group import StageGroup
from partition.search.tables import rounded
from quant.text import number_text


@dataclass(frozen=True)
class _Prefill:
    """A placement for prompts."""

    plan: Plan
    prompt_s: float
    to_owner_s: float  # of the prompt's keys and values

    def ttft_s(self, from_owner_s: Any, pass_s: Any, prompt: int) -> Any:
        """Return the time to the first token beside a placement that generates, as `cost.pair_ttft_s`."""
        stages = len(self.plan.computing)
        return cost.pair_ttft_s(self.prompt_s, self.to_owner_s, from_owner_s, pass_s, prompt, stages)


@dataclass(frozen=True)
class _Decode:
    """A placement that generates."""

    placed: Placed
    pass_s: float  # of one row
    from_owner_s: float  # of the prompt's keys and values
    ttft_s: float  # with one placement
    free: Mapping[str, float]  # bytes that it leaves on each device


class Phases:
    """Pairs of placements for the work of a planner."""

    def __init__(self, planner: Planner, most_bytes: float = math.inf) -> None:
        """most_bytes: that a pair may hold on any device."""
        self._planner = planner
        self._by_device = {speed.device: speed for speed in planner.speeds}
        self._rooms = {speed.device: min(speed.memory_bytes, most_bytes) for speed in planner.speeds}
        self._for_prompts = planner.for_prompts()
        self._whole = [max(both) for both in zip(planner.whole_bytes(), self._for_prompts.whole_bytes(), strict=True)]
        self._by_room: dict[tuple[int, ...], list[_Prefill]] = {}
        self.exact = True

    def with_prefill(self, placed: Placed) -> Placed | None:
        """Return a placement with the best one for prompts beside it; None where there is no room for one, or none is
        clearly better than `placed` itself."""
        decode = self._decode(placed)
        best = self._best(decode.from_owner_s, decode.free)
        if best is None or not _outdoes(self._planner, best[1].plan, best[0] + decode.pass_s, decode.ttft_s):
            return None
        return self._pair(placed, best[1])

    def pairs(self, objectives: Sequence[str], caps: Mapping[str, float] = MappingProxyType({})) -> list[Placed]:
        """Return the non-dominated pairs by these objectives, ttft among them, within caps on objectives.

        The planner is one without drafts. Each placement that generates has the one for prompts with the soonest first
        token, also where memory is an objective."""
        names = [name for name in dict.fromkeys(("latency", *objectives, *caps)) if name not in ("ttft", "memory")]
        prefills = self._prefills(self._rooms)  # as if the other placement held nothing
        if not prefills:
            return []
        short = [i for i, speed in enumerate(self._planner.speeds) if self._rooms[speed.device] < 2 * self._whole[i]]
        prompt, most_s, pairs = self._planner.work.prompt, caps.get("ttft", math.inf), list[Placed]()

        def least_s(from_owner_s: Array, pass_s: Array) -> Array:
            """Return the least time to the first token beside such placements, were all memory for prompts."""
            return rounded(np.minimum.reduce([prefill.ttft_s(from_owner_s, pass_s, prompt) for prefill in prefills]))

        def outdone(values: Array) -> NDArray[np.bool_]:
            """Return which placements cannot lead to a new pair, by (names, way of the prompt's keys and values)."""
            ttft_s = least_s(values[len(names)], values[0])
            lower = dict(zip(names, values, strict=False)) | {"ttft": ttft_s, "memory": np.zeros_like(ttft_s)}
            least = np.array([lower[name] for name in objectives])
            known = [np.array(pair.objectives)[:, None] for pair in pairs]
            out: NDArray[np.bool_] = ttft_s > most_s
            for pair in known:
                out |= (least >= pair).all(axis=0)
            return out

        def search(devices: Sequence[int]) -> bool:
            """Add pairs whose placement that generates is on the front with its bytes on these devices; return whether
            memory kept the best one for prompts from any."""
            lacking = False
            placed, exact = self._planner.front(
                names,
                caps=[caps.get(name, math.inf) for name in names],
                further=lambda group: [group.moved_s(LOCAL, to_owner=False), *map(group.bytes_of, devices)],
                outdone=outdone,
            )
            self.exact &= exact
            bounds = [
                least_s(*np.array([candidate.objectives[len(names)], candidate.objectives[0]])) for candidate in placed
            ]
            for bound, candidate in sorted(zip(bounds, placed, strict=True), key=lambda pair: float(pair[0])):
                if outdone(np.array(candidate.objectives)[:, None])[0]:
                    continue
                decode = self._decode(candidate)
                best = self._best(decode.from_owner_s, decode.free) if min(decode.free.values()) >= 0 else None
                ttft_s = math.inf if best is None else float(rounded(np.array(best[0] + decode.pass_s)))
                lacking = lacking or bool(ttft_s > bound)
                if best is None or ttft_s > most_s:
                    continue
                pair = self._pair(candidate, best[1])
                values = dict(zip(names, candidate.objectives, strict=False)) | {"ttft": ttft_s}
                values["memory"] = max(self._predicted(pair).memory_bytes.values())
                pairs.append(replace(pair, objectives=tuple(values[name] for name in objectives)))
            return lacking

        if (search(()) or "memory" in objectives) and short:
            search(short)
        return non_dominated(pairs)

    def _decode(self, placed: Placed) -> _Decode:
        """Return what a pair has to know of its placement that generates."""
        predicted = self._predicted(placed)
        planner, memory = self._planner, predicted.memory_bytes
        from_owner_s = moved_s(placed.plan, planner.work, self._by_device, planner.links, to_owner=False)
        free = {device: room - memory.get(device, 0) for device, room in self._rooms.items()}
        return _Decode(placed, predicted.plain_s, from_owner_s, predicted.ttft_s or 0.0, free)

    def _best(self, from_owner_s: float, free: Mapping[str, float]) -> tuple[float, _Prefill] | None:
        """Return the least time until the keys and values of the prompt are where `from_owner_s` is the way to, and the
        placement for prompts that has it; None without any. free: bytes of each device."""
        prompt = self._planner.work.prompt
        pairs = [(float(prefill.ttft_s(from_owner_s, 0.0, prompt)), prefill) for prefill in self._prefills(free)]
        return min(pairs, key=lambda pair: pair[0], default=None)

    def _pair(self, placed: Placed, prefill: _Prefill) -> Placed:
        """Return a pair, with the number of new prompt tokens from which its placement for prompts is used: the fewest
        for which the first token is sooner than with one placement."""
        plan, planner = replace(placed.plan, prefill=prefill.plan), self._planner

        devices, links, row_s = self._by_device, planner.links, self._predicted(placed).plain_s

        def pays(tokens: int) -> bool:
            work = replace(planner.work, prompt=tokens)
            there_s = moved_s(prefill.plan, work, devices, links, to_owner=True)
            back_s = moved_s(placed.plan, work, devices, links, to_owner=False)
            prompt_s = first_token_s(prefill.plan, work, devices, links)
            both_s = float(_Prefill(prefill.plan, prompt_s, there_s).ttft_s(back_s, row_s, tokens))
            return both_s < first_token_s(placed.plan, work, devices, links)

        low, high = 0, planner.work.prompt  # where it does not pay and where it does, if it does anywhere
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if pays(middle) else (middle, high)
        return replace(placed, plan=replace(plan, prefill_from=high))

    def _prefills(self, free: Mapping[str, float]) -> list[_Prefill]:
        """Return the placements for prompts on so much memory of each device that none other is better than in the
        prompt, the way to the owner and the chunks, of which one stage alone has fewer."""
        planner = self._planner
        # What is more than enough makes no difference.
        rooms = tuple(max(0, int(min(free[speed.device], self._whole[i]))) for i, speed in enumerate(planner.speeds))
        if rooms not in self._by_room:
            short = {i: room for i, room in enumerate(rooms) if room < self._whole[i]}
            placed, exact = self._for_prompts.with_memory(short).front(("ttft",), [1], further=_way_and_chunks)
            self.exact &= exact
            self._by_room[rooms] = [_Prefill(candidate.plan, *candidate.objectives[:2]) for candidate in placed]
        return self._by_room[rooms]

    def _predicted(self, placed: Placed) -> Prediction:
        planner = self._planner
        return predict(placed.plan, planner.work, self._by_device, planner.links, placed.microbatches)


def _way_and_chunks(group: StageGroup) -> list[Array]:
    """Return what counts of a placement for prompts beside its ttft, for each stage: the way of keys and values to the
    owner, and 1 for a stage that computes alone, which has fewer chunks than several."""
    moved_s = group.moved_s(LOCAL, to_owner=True)
    alone = np.zeros_like(moved_s)
    alone[0, -1] = 1.0
    return [moved_s, alone]


def paired(planner: Planner, plain: Placed | None, objective: str, caps: Mapping[str, float]) -> Placed | None:
    """Return the pair to take instead of the best plan with one placement, `plain`; None where none is clearly better.

    Where the time to the first token is neither objective nor limited, the placement of `plain` generates; where it is,
    the planner has to be without drafts. plain: None where there is none within the caps.
    """
    if objective == "memory" or len(planner.speeds) == 1:
        return None
    if "ttft" not in (objective, *caps):
        return None if plain is None else Phases(planner, caps.get("memory", math.inf)).with_prefill(plain)
    if planner.work.draft is not None:  # whose row on the placement that generates is not that of a pair's first token
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
    """Return whether a pair with this placement for prompts is clearly better than one placement."""
    return clearly_better(new, old, by=plan_threshold(is_busy(planner.speeds, prefill.devices), PREFILL))


def prefill_reason(planner: Planner, pair: Placed) -> str:
    """Explain the placement for prompts of a pair, as a clause."""
    speeds = {speed.device: speed for speed in planner.speeds}
    both, alone = (
        predict(plan, planner.work, speeds, planner.links, pair.microbatches)
        for plan in (pair.plan, pair.plan.placements[0])
    )
    assert pair.plan.prefill is not None
    devices = dict.fromkeys(shard.device for stage in pair.plan.prefill.computing for shard in stage.shards)
    where = " and ".join(speeds[device].name for device in devices)
    sooner = f"{number_text(both.ttft_s or 0.0)} s to the first token instead of {number_text(alone.ttft_s or 0.0)} s"
    return f"prompts of {pair.plan.prefill_from} tokens or more on {where}: {sooner}"
