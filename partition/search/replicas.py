"""Search for plans with replicas: whole copies of the model on disjoint devices.

The throughput of all copies is the sum of theirs, so the best copy on each set of devices, for each number of requests,
decides. Copies on one group of devices are all evaluated. Copies with several stages are searched only if their upper
bound may change the result. Latency and time to first token are those of the first copy, so the other copies count by
throughput only.

A sum of throughputs ignores that copies slow each other down on a shared host, the owner's device and its link. The sum
is therefore an upper bound of the predicted throughput. `Replicas.gap` bounds the resulting error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from partition.plan.plan import Plan
from partition.predict.objectives import OBJECTIVES
from partition.predict.replicas import distribute, join
from partition.search.best import Solution
from partition.search.copy_rates import CopyRates, group_rates, most_per_s, need, rooms, subsets
from partition.search.explain import outdoes
from partition.search.planner import MOST_EXACT, Placed, Planner, with_microbatches
from partition.search.problem import Outdone
from quant.front import non_dominated

Array = NDArray[np.float64]
MOST_SEARCHES = 300  # searches for copies with several stages; more candidates count in the gap
WIDE = 60  # partial sets of copies kept with more than MOST_EXACT devices
_EQUAL = 1 + 1e-9
_LOWER_BOUNDS = ("latency", "ttft")


@dataclass(frozen=True)
class Copies:
    """Copies of a model on disjoint devices."""

    plans: tuple[Plan, ...]
    per_s: float  # sum of the throughputs of the copies, each alone


_NONE = Copies((), 0.0)


class Replicas:
    """Search for plans with replicas."""

    def __init__(self, planner: Planner, searches: int = MOST_SEARCHES) -> None:
        """planner: planner without drafts.
        searches: number of searches for copies with several stages.
        """
        self._planner, self._searches = planner, searches
        self.exact, self.gap = True, 0.0

    def plans(
        self,
        objectives: Sequence[str],
        caps: Mapping[str, float] = MappingProxyType({}),
        others: Sequence[Placed] = (),
    ) -> list[Placed]:
        """Return the non-dominated plans with replicas that no plan of `others` dominates, sorted by the first
        objective.

        caps: largest allowed costs of objectives.
        others: plans without replicas; without caps, their whole front.

        The call sets `gap`: an unknown plan may have this fraction more throughput. It sets `exact` to False if the gap
        is not 0. The search may miss plans that are better in memory or energy.
        """
        planner, self.exact, self.gap = self._planner, True, 0.0
        names = tuple(dict.fromkeys((*objectives, *caps)))
        can = planner.pipeline and planner.thin and len(planner.speeds) > 1 and planner.work.draft is None
        if not can or planner.work.concurrency < 2 or "throughput" not in names:
            return []
        search = _FrontSearch(planner, names, caps, others)
        if len(planner.speeds) > MOST_EXACT:
            search.wide()
        else:
            former: _Copying | None = None
            for most, variant in _by_copies(planner):
                rates = CopyRates(variant, None if former is None else former.rates)
                search.groups(_Copying(variant, rates.of_groups()), most)
                former = _Copying(variant, rates, former)
                search.exactly(former, most, self._searches)
        self.gap = search.gap()
        if {"memory", "energy"} & set(names):
            self.gap = math.inf
        self.exact = self.gap < _EQUAL - 1
        front = [replace(placed, objectives=placed.objectives[: len(objectives)]) for placed in search.placed]
        return non_dominated(front, lambda placed: placed.objectives)


def replicated(planner: Planner, plain: Placed | None, objective: str, caps: Mapping[str, float]) -> Placed | None:
    """Return the best plan with replicas if it is clearly better than `plain`, the best plan without, else None.

    plain: None if no plan without replicas is within the caps.
    """
    plans = Replicas(planner).plans((objective,), caps, () if plain is None else (plain,))
    if plans and (plain is None or outdoes(planner, plans[0], plain, objective)):
        return plans[0]
    return None


def _by_copies(planner: Planner) -> Iterator[tuple[int, Planner]]:
    """Yield (largest number of copies, planner for them). Each other copy has a process on the owner's device, so more
    copies leave less memory there.
    """
    own, room = planner.speeds[0], sum(rooms(planner))
    most = len(planner.speeds) if math.isinf(room) else min(len(planner.speeds), int(room / need(planner)))
    if planner.whole_bytes()[0] + (most - 1) * own.runtime_bytes <= own.memory_bytes:
        yield most, planner
        return
    for copies in range(2, most + 1):
        left = own.memory_bytes - (copies - 1) * own.runtime_bytes
        if left >= own.runtime_bytes:
            yield copies, planner.with_memory({0: left}, pages=True)


class _Copying:
    """Best copies on each set of devices.

    Each method has a floor: it returns None if no result has a larger throughput. Then the floor is a new upper bound.
    """

    def __init__(self, planner: Planner, rates: CopyRates, former: _Copying | None = None) -> None:
        """former: copies with more memory on the owner's device. Those with a thin owner are the same here."""
        self.planner, self.rates, self.searches = planner, rates, 0
        self._best: dict[tuple[int, int], Copies] = {}
        if former is not None:
            self.searches = former.searches
            self._best = {key: copies for key, copies in former._best.items() if not key[0] & 1}
        self._sets: dict[tuple[int, int, int], Copies] = {}
        self._most: dict[tuple[int, int, int], float] = {}  # upper bounds

    def copy(self, mask: int, requests: int, floor: float) -> Copies | None:
        """Return the copy with the largest throughput on some of these devices."""
        rates, key = self.rates, (mask, requests)
        if key not in self._best:
            single = float(rates.single[key])
            if max(single, float(rates.several[key])) <= floor:
                return None
            if rates.several[key] > max(single, floor, 0.0) * _EQUAL:
                most = self._several(mask, requests, max(single, floor, 0.0))
                rates.several[key], rates.bound[key] = most, most
                if key in self._best:
                    return self._best[key]
            if single <= floor or single <= 0:
                return None
            whole = Solution((int(rates.group[key]),), (0, self.planner.work.limits.sizes.layers), (), (), 0)
            self._best[key] = Copies((self.planner.plan(whole),), single)
        return self._best[key] if self._best[key].per_s > floor else None

    def _several(self, mask: int, requests: int, floor: float) -> float:
        """Search for the best copy with several stages, and return the largest throughput."""
        for bound, microbatches in self.rates.microbatches(mask, requests):
            if bound > floor * _EQUAL:
                self.searches += 1
                cap = 1 / floor if floor else math.inf
                plans = self.front(mask, requests, ("throughput",), [cap], [microbatches], single=False)
                if plans and 1 / plans[0].objectives[0] > floor:
                    floor = 1 / plans[0].objectives[0]
                    self._best[mask, requests] = Copies((plans[0].plan,), floor)
        return floor

    def front(
        self,
        mask: int,
        requests: int,
        names: Sequence[str],
        caps: Sequence[float],
        microbatches: Sequence[int] | None = None,
        *,
        outdone: Outdone | None = None,
        single: bool = True,
    ) -> list[Placed]:
        """Return the non-dominated copies on some of these devices, with their microbatches in their plans.

        outdone, single: as in `Planner.front`.
        """
        planner = _restricted(self.planner, mask, requests)
        return [
            replace(placed, plan=with_microbatches(placed.plan, placed.microbatches, requests))
            for placed in planner.front(names, microbatches, caps, outdone=outdone, single=single)[0]
        ]

    def copies(self, mask: int, requests: int, most: int, floor: float) -> Copies | None:
        """Return the copies with the largest sum of throughputs on these devices. most: largest number of copies."""
        if not requests:
            return _NONE if floor < 0 else None
        most = min(most, mask.bit_count())
        if not most:
            return None
        key = mask, requests, most
        if key not in self._sets:
            if self._most.get(key, float(self.rates.together[mask, requests])) <= floor:
                return None
            best = self._copies(mask, requests, most, floor)
            if best is None:
                self._most[key] = floor
                return None
            self._sets[key] = best
        return self._sets[key] if self._sets[key].per_s > floor else None

    def _copies(self, mask: int, requests: int, most: int, floor: float) -> Copies | None:
        best: Copies | None = None
        rates, rest = self.rates, mask & (mask - 1)
        if most >= mask.bit_count():  # single groups reach this sum
            floor = max(floor, float(rates.singles[mask, requests]) / _EQUAL)
        choices = [(float(rates.together[rest, requests]), 0, 0)]
        for others in subsets(rest):
            sums = rates.bound[mask ^ others, 1:][:requests] + rates.together[others, :requests][::-1]
            choices += [(float(bound), mask ^ others, n) for n, bound in enumerate(sums, 1) if bound > floor]
        for bound, members, n in sorted(choices, reverse=True):
            if bound <= floor:
                break
            if not members:  # the first of these devices is not used
                total = self.copies(rest, requests, most, floor)
            else:
                total = self.with_copy(members, n, mask ^ members, requests - n, most, floor)
            if total is not None:
                best, floor = total, total.per_s
        return best

    def with_copy(self, members: int, n: int, rest: int, requests: int, most: int, floor: float) -> Copies | None:
        """Return the best copy on `members` for n requests together with the best copies on `rest` for the others."""
        others = self.copies(rest, requests, most - 1, floor - float(self.rates.bound[members, n]))
        copy = None if others is None else self.copy(members, n, floor - others.per_s)
        if others is None or copy is None:
            return None
        return Copies((*copy.plans, *others.plans), copy.per_s + others.per_s)


class _FrontSearch:
    """Collects non-dominated plans with replicas, and upper bounds of all searched plans."""

    def __init__(
        self, planner: Planner, names: tuple[str, ...], caps: Mapping[str, float], others: Sequence[Placed]
    ) -> None:
        self._planner, self._names, self._caps = planner, names, caps
        self._at = names.index("throughput")
        self._known = [
            tuple(OBJECTIVES[name].cost_of(predicted) for name in names)
            for predicted in (planner.predict(placed.plan, placed.microbatches) for placed in others)
        ]
        # No copy has a lower latency than the best plan without replicas.
        self._least = (
            {}
            if caps
            else {name: min(costs) for name, costs in zip(names, zip(*self._known, strict=True), strict=False)}
        )
        self._bounds: list[tuple[float, ...]] = []
        self.placed: list[Placed] = []

    def groups(self, copying: _Copying, most: int) -> None:
        """Add the best copies on single groups. They are found fast, and spare later searches."""
        requests = self._planner.work.concurrency
        if self._names == ("throughput",):
            for fewer in range(2, most + 1):  # fewer copies may slow each other down less
                total = copying.copies(copying.rates.whole, requests, fewer, 0.0)
                if total is not None and len(total.plans) > 1:
                    self._add(total, None)
            return
        for mask in {sum(1 << i for i in group.members) for group in copying.planner.groups}:
            for n in range(1, requests):
                first = copying.copy(mask, n, 0.0)
                rest = copying.rates.whole ^ mask
                others = None if first is None else copying.copies(rest, requests - n, most - 1, 0.0)
                if first is not None and others is not None:
                    predicted = copying.planner.predict(first.plans[0])
                    costs = {name: OBJECTIVES[name].cost_of(predicted) for name in _LOWER_BOUNDS}
                    total = Copies((*first.plans, *others.plans), first.per_s + others.per_s)
                    if not self._is_beaten(self._vector(costs, total.per_s)):
                        self._add(total, None)

    def exactly(self, copying: _Copying, most: int, searches: int) -> None:
        """Search the copies of up to MOST_EXACT devices, until this number of searches is reached."""
        rates, requests = copying.rates, self._planner.work.concurrency
        bounds = {"latency": rates.latency_s, "ttft": rates.ttft_s}
        least = {name: np.maximum(bounds[name](), self._least.get(name, 0.0)) for name in bounds if name in self._names}
        candidates = []
        for mask in range(1, rates.whole + 1):
            for n in range(1, requests):
                bound = float(rates.bound[mask, n] + rates.together[rates.whole ^ mask, requests - n])
                if bound > 0:
                    costs = {name: float(values[mask]) for name, values in least.items()}
                    candidates.append((self._vector(costs, bound), mask, n))
        candidates.sort(key=lambda candidate: (candidate[0][self._at], candidate[1].bit_count(), candidate[0]))
        for hope, mask, n in candidates:
            if self._is_beaten(hope):
                continue
            if copying.searches >= searches:
                self._bounds.append(hope)
                continue
            floor = self._floor(hope)
            rest = rates.whole ^ mask
            if self._names == ("throughput",):
                total = copying.with_copy(mask, n, rest, requests - n, most, floor)
                if total is not None:
                    self._add(total, self._vector({}, total.per_s))
                continue
            others = copying.copies(rest, requests - n, most - 1, floor - float(rates.bound[mask, n]))
            if others is None:
                continue
            caps = [math.inf if name == "energy" else self._caps.get(name, math.inf) for name in self._names]
            lacking = max(floor, 1 / caps[self._at]) - others.per_s
            caps[self._at] = 1 / lacking if lacking > 0 else math.inf
            copying.searches += 1
            outdone = partial(self._outdone, others.per_s)
            for first in copying.front(mask, n, self._names, caps, outdone=outdone):
                per_s = 1 / first.objectives[self._at] + others.per_s
                own = first.objectives
                reach = (*own[: self._at], 1 / per_s, *own[self._at + 1 :])
                if not self._is_beaten(reach):
                    self._add(Copies((first.plan, *others.plans), per_s), reach)

    def wide(self) -> None:
        """Search copies on single groups of many devices, with a limited number of partial sets."""
        planner, requests = self._planner, self._planner.work.concurrency
        own = planner.speeds[0]
        most = own.memory_bytes // own.runtime_bytes if own.runtime_bytes else len(planner.speeds)
        rates = {index: rate for index, rate in enumerate(group_rates(planner)) if np.isfinite(rate).any()}
        nothing = np.full(requests + 1, -np.inf)
        nothing[0] = 0.0
        labels: list[tuple[frozenset[int], tuple[int, ...], Array]] = [(frozenset(), (), nothing)]
        for i in range(len(planner.speeds)):
            longer = [
                (used | set(members), (*groups, index), np.maximum(join(total, rate)[0], total))
                for used, groups, total in labels
                if i not in used and len(groups) < most
                for index, rate in rates.items()
                if min(members := planner.groups[index].members) == i and used.isdisjoint(members)
            ]
            labels = sorted([*labels, *longer], key=lambda label: -label[2].max())[:WIDE]
        layers = planner.work.limits.sizes.layers
        for _, groups, _ in labels:
            if len(groups) > 1:
                chosen = distribute([[0.0, *rates[index][1:]] for index in groups], requests)
                plans = [
                    planner.plan(Solution((k,), (0, layers), (), (), 0))
                    for k, n in zip(groups, chosen, strict=True)
                    if n
                ]
                if len(plans) > 1:
                    self._add(Copies(tuple(plans), 0.0), None)
        self._bounds.append(self._vector({}, most_per_s(planner)))

    def _add(self, copies: Copies, bound: tuple[float, ...] | None) -> None:
        """Predict a plan with these copies, and keep it unless a known plan dominates it."""
        first, *rest = copies.plans
        if not set(_LOWER_BOUNDS) & set(self._names):
            first, *rest = sorted(copies.plans, key=lambda plan: self._planner.predict(plan).latency_s)
        plan = replace(first, replicas=tuple(rest))
        predicted = self._planner.predict(plan)
        used = [n for n, copy in enumerate(predicted.copies) if copy.throughput_per_s or not n]
        if len(used) < len(plan.copies):  # some copies would be idle
            plan = replace(first, replicas=tuple(plan.copies[n] for n in used[1:]))
            predicted = self._planner.predict(plan)
        if not plan.replicas:
            return
        costs = tuple(OBJECTIVES[name].cost_of(predicted) for name in self._names)
        if bound is not None:
            self._bounds.append(bound)
        within = all(value <= self._caps.get(name, math.inf) for name, value in zip(self._names, costs, strict=True))
        if within and not self._is_beaten(costs):
            self._known.append(costs)
            self.placed.append(Placed(plan, predicted.microbatches, costs))

    def gap(self) -> float:
        """Return the fraction by which an unknown plan may have more throughput than the known plans that cost no more
        otherwise.
        """
        gap = 0.0
        for bound in self._bounds:
            floor = self._floor(bound)
            gap = max(gap, 1 / bound[self._at] / floor - 1 if floor else math.inf)
        return gap

    def _vector(self, costs: Mapping[str, float], per_s: float) -> tuple[float, ...]:
        """Return lower bounds of the costs, from the known ones and an upper bound of the throughput."""
        return tuple(1 / per_s if name == "throughput" else costs.get(name, 0.0) for name in self._names)

    def _floor(self, costs: tuple[float, ...]) -> float:
        """Return the throughput that a plan must exceed, because a known plan costs no more otherwise."""
        return max((1 / known[self._at] for known in self._known if self._is_less(known, costs)), default=0.0)

    def _outdone(self, per_s: float, costs: Array) -> NDArray[np.bool_]:
        """Return which first copies give no new plan with these costs or larger ones: [N].

        per_s: throughput of the other copies.
        costs: [K, N], in the order of the names.
        """
        reach = costs.copy()
        with np.errstate(divide="ignore"):
            reach[self._at] = 1 / (1 / costs[self._at] + per_s)
        known = np.array(self._known).reshape(-1, len(costs)).T[:, :, None]  # [K, known, 1]
        beaten: NDArray[np.bool_] = np.all(known <= reach[:, None] * _EQUAL, axis=0).any(axis=0)
        return beaten

    def _is_less(self, known: tuple[float, ...], costs: tuple[float, ...]) -> bool:
        """Return True if the known costs are no larger, except for the throughput."""
        return all(a <= b * _EQUAL for i, (a, b) in enumerate(zip(known, costs, strict=True)) if i != self._at)

    def _is_beaten(self, costs: tuple[float, ...]) -> bool:
        """Return True if a known plan is as good, or if the costs exceed a cap."""
        if any(value > self._caps.get(name, math.inf) for name, value in zip(self._names, costs, strict=True)):
            return True
        return any(all(a <= b * _EQUAL for a, b in zip(known, costs, strict=True)) for known in self._known)


def _restricted(planner: Planner, mask: int, requests: int) -> Planner:
    """Return a planner for a copy of the model that computes on some of these devices, for this many requests. If
    device 0 is missing, the owner is thin. Costs of groups are shared with the given planner.
    """
    other = copy(planner)
    other.work = replace(planner.work, concurrency=requests)
    other.groups = [group for group in planner.groups if all(mask >> i & 1 for i in group.members)]
    return other
