"""Phases: a placement that computes prompts beside the one that generates. The best pairs, exactly.

Keys and values go from the placement P of a prompt to the owner, and from there to the placement D that generates:

    ttft(P, D) = cost.pair_ttft_s(prompt on P, way of P to the owner, way of the owner to D, a row on D)

Neither knows of the other but for the memory it leaves. So the best P beside a given D is found by one search with one
objective, over what memory D leaves and with the way of D as a constant; and the D of a best pair is on the front of
its own objectives, a row, its way, and its bytes on each device that has no room for two whole models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from partition.plan.plan import LOCAL, Plan
from partition.predict import cost
from partition.predict.hysteresis import PREFILL, clearly_better, plan_threshold
from partition.predict.predict import moved_s, predict
from partition.predict.prediction import Prediction
from partition.search.explain import is_busy
from partition.search.planner import BEAM, MOST_EXACT, Placed, Planner, non_dominated
from partition.search.problem import Problem
from partition.search.search import front
from quant.text import number_text

_ROUNDING = 1e-9  # of objectives, and more


@dataclass(frozen=True)
class _Prefill:
    """A placement for prompts."""

    plan: Plan
    prompt_s: float
    to_owner_s: float  # of the prompt's keys and values


@dataclass(frozen=True)
class _Room:
    """A search for placements for prompts on the memory that there is: by the prompt, and by the way to the owner."""

    planner: Planner
    problem: Problem
    prefills: list[_Prefill]


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
        self._by_room: dict[tuple[int, ...], _Room] = {}
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
        short = [i for i, speed in enumerate(self._planner.speeds) if self._rooms[speed.device] < 2 * self._whole(i)]
        placed, exact = self._planner.front(
            names,
            caps=[caps.get(name, math.inf) for name in names],
            further=lambda group: [group.moved_s(LOCAL, to_owner=False), *map(group.bytes_of, short)],
        )
        self.exact &= exact
        least = self._best(0.0, self._rooms)  # as if the other placement held nothing, and nothing had to move there
        if least is None:
            return []
        decodes = [self._decode(candidate) for candidate in placed]
        bounds = [max(least[0], decode.from_owner_s) + decode.pass_s for decode in decodes]
        pairs: list[Placed] = []
        for bound, decode in sorted(zip(bounds, decodes, strict=True), key=lambda pair: pair[0]):
            values = dict(zip(names, decode.placed.objectives, strict=False)) | {"ttft": bound, "memory": 0.0}
            is_out = bound > caps.get("ttft", math.inf) or min(decode.free.values()) < 0
            if is_out or any(_no_worse(pair.objectives, [values[name] for name in objectives]) for pair in pairs):
                continue
            best = self._best(decode.from_owner_s, decode.free)
            if best is None or best[0] + decode.pass_s > caps.get("ttft", math.inf):
                continue
            pair = self._pair(decode.placed, best[1])
            values |= {"ttft": best[0] + decode.pass_s, "memory": max(self._predicted(pair).memory_bytes.values())}
            pairs.append(replace(pair, objectives=tuple(values[name] for name in objectives)))
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
        room, work, links = self._room(free), self._planner.work, self._planner.links

        def seconds(prompt_s: Any, to_owner_s: Any) -> Any:
            return cost.pair_ttft_s(prompt_s, to_owner_s, from_owner_s, 0.0, work.prompt)

        # What was found for other ways bounds the search.
        bound = min(
            (float(seconds(prefill.prompt_s, prefill.to_owner_s)) for prefill in room.prefills), default=math.inf
        )
        problem = replace(
            room.problem,
            objectives=lambda sums, peaks: seconds(*room.problem.objectives(sums, peaks))[None],
            caps=np.array([bound * (1 + _ROUNDING)]),
        )
        result = front(problem, beam=None if len(self._planner.speeds) <= MOST_EXACT else BEAM)
        self.exact &= result.exact
        if not result.solutions:
            return None
        plan = room.planner.plan(result.solutions[0])
        prompt_s = predict(plan, work, self._by_device, links, 1).ttft_s or 0.0
        best = _Prefill(plan, prompt_s, moved_s(plan, work, self._by_device, links, to_owner=True))
        room.prefills.append(best)
        return float(seconds(best.prompt_s, best.to_owner_s)), best

    def _pair(self, placed: Placed, prefill: _Prefill) -> Placed:
        """Return a pair, with the number of new prompt tokens from which its placement for prompts is used: the fewest
        for which the first token is sooner than with one placement."""
        plan, planner = replace(placed.plan, prefill=prefill.plan), self._planner

        def pays(tokens: int) -> bool:
            work = replace(planner.work, prompt=tokens)
            both, alone = (
                predict(either, work, self._by_device, planner.links, placed.microbatches).ttft_s
                for either in (plan, placed.plan)
            )
            return both is not None and alone is not None and both < alone

        low, high = 0, planner.work.prompt  # where it does not pay and where it does, if it does anywhere
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if pays(middle) else (middle, high)
        return replace(placed, plan=replace(plan, prefill_from=high))

    def _room(self, free: Mapping[str, float]) -> _Room:
        """Return the search for placements for prompts on so much memory of each device."""
        planner = self._planner
        # What is more than enough makes no difference.
        rooms = tuple(max(0, int(min(free[speed.device], self._whole(i)))) for i, speed in enumerate(planner.speeds))
        if rooms not in self._by_room:
            speeds = [
                replace(speed, memory_bytes=room, disk_bytes_per_s=None)
                for speed, room in zip(planner.speeds, rooms, strict=True)
            ]
            smaller = planner.like(speeds, planner.links)
            problem = smaller.problem(("ttft",), 1, lambda group: [group.moved_s(LOCAL, to_owner=True)])
            self._by_room[rooms] = _Room(smaller, problem, [])
        return self._by_room[rooms]

    def _whole(self, i: int) -> int:
        """Return the bytes of a process of a device that holds the whole model."""
        work, shape = self._planner.work, self._planner.work.shape
        whole = work.weights_before[-1] + work.kv_before[-1] + shape.head_bytes + shape.embedding_bytes
        return self._planner.speeds[i].runtime_bytes + whole

    def _predicted(self, placed: Placed) -> Prediction:
        planner = self._planner
        return predict(placed.plan, planner.work, self._by_device, planner.links, placed.microbatches)


def paired(planner: Planner, plain: Placed | None, objective: str, caps: Mapping[str, float]) -> Placed | None:
    """Return the pair to take instead of the best plan with one placement, `plain`; None where none is clearly better.

    Where the time to the first token is neither objective nor limited, the placement of `plain` generates. plain: None
    where there is none within the caps.
    """
    if objective == "memory" or len(planner.speeds) == 1:
        return None
    phases = Phases(planner, caps.get("memory", math.inf))
    if plain is not None and objective != "ttft" and "ttft" not in caps:
        return phases.with_prefill(plain)
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


def _no_worse(known: Sequence[float], new: Sequence[float]) -> bool:
    return all(a <= b for a, b in zip(known, new, strict=True))
