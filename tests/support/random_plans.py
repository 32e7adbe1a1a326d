"""Small random planning problems, and all plans of each by enumeration."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np

from partition.errors import PlanError
from partition.plan.plan import LOCAL, NOTHING, Plan, Range, Shard, Stage
from partition.predict.hosts import Host
from partition.predict.predict import predict
from partition.predict.prediction import Prediction
from partition.predict.speeds import Curve, DeviceSpeed
from partition.search.planner import Planner
from partition.search.stage_group import StageGroup
from tests.support.planning import MS, model, uneven_links, work

NAMES = (LOCAL, "b", "c", "d")


class Case:
    """A small random instance. Memory is short in some, so that devices page or nothing fits at all."""

    def __init__(self, rng: np.random.Generator, layers: int, devices: int, tensor: bool) -> None:
        def some(low: float, high: float) -> float:
            return float(rng.uniform(low, high))

        provided = model([some(4, 12) for _ in range(layers)] if rng.random() < 0.5 else layers)
        self.tensor = tensor
        self.work = work(
            provided,
            context=int(rng.choice([64, 4096])),
            depth=int(rng.choice([0, 200])),
            prompt=int(rng.choice([8, 300])),
            concurrency=int(rng.choice([1, 1, 1, 2, 3, 4])),
        )
        whole = sum(provided[0].layer_bytes) + provided[0].head_bytes
        short, watts = rng.random() < 0.4, rng.random() < 0.8
        self.speeds = []
        for name in NAMES[:devices]:
            layer_s = float(rng.choice([1, 1, 2, 5])) * MS
            layer = Curve(((1, layer_s), (4, layer_s * some(1, 3)), (64, layer_s * some(4, 20))))
            self.speeds.append(
                DeviceSpeed(
                    name,
                    name,
                    step_s=Curve(((1, some(0, 1) * MS),)),
                    layer_s=layer,
                    token_s=some(0, 1e-6),
                    half_layer_s=layer.times(some(0.5, 0.8)),
                    head_s=Curve(((1, some(0, 2) * MS), (4, 3 * MS))),
                    memory_bytes=round(whole * some(0.05, 1.2)) if short else 1 << 30,
                    runtime_bytes=round(whole * some(0, 0.1)),
                    sum_s=some(0, 1e-4),
                    disk_bytes_per_s=1e9 * some(0.2, 2) if short and rng.random() < 0.4 else None,
                    watts=some(3, 60) if watts else None,
                )
            )
        apart = np.random.default_rng(round(1e12 * self.speeds[0].token_s))  # the numbers above stay those of the seed
        if watts and apart.random() < 0.5:
            self.speeds = [replace(speed, idle_watts=float(apart.uniform(0, 3))) for speed in self.speeds]
        self.links = uneven_links(rng, NAMES[:devices])
        if rng.random() < 0.5:  # some of them on one machine
            hosts = [Host("x", 2, int(rng.choice([1, 2]))), Host("x", 2, 2), None]
            self.speeds = [replace(speed, host=hosts[rng.integers(3)]) for speed in self.speeds]

    def planner(self) -> Planner:
        return Planner(self.work, self.speeds, self.links, "m", "", tensor=self.tensor)

    def predict(self, plan: Plan, microbatches: int) -> Prediction:
        return predict(plan, self.work, {speed.device: speed for speed in self.speeds}, self.links, microbatches)

    def plans(self, *, for_prompts: bool = False) -> Iterator[Plan]:
        """Every sequence of groups without a common device, with every choice of cuts: the owner is in the first stage,
        or alone in one without layers before it. for_prompts: as of `StageGroup`."""
        n = self.work.limits.sizes.layers
        everybody = range(len(self.speeds))
        sizes = everybody if self.tensor else (0,)
        members = [group for size in sizes for group in combinations(everybody, size + 1)]
        groups = {
            member: StageGroup(self.work, self.speeds, self.links, member, for_prompts=for_prompts)
            for member in members
        }

        def sequences(so_far: tuple[tuple[int, ...], ...], used: set[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
            if so_far:
                yield so_far
            for group in members if len(so_far) < n else ():
                if not used & set(group) and not (so_far and 0 in group):
                    yield from sequences((*so_far, group), used | set(group))

        for chosen in sequences((), set()):
            for inner in combinations(range(1, n), len(chosen) - 1):
                cuts = pairwise((0, *inner, n))
                stages = [Stage(Range(*cut), groups[item].shards(*cut)) for item, cut in zip(chosen, cuts, strict=True)]
                thin = [] if 0 in chosen[0] else [self.thin_stage]
                yield Plan("m", "", self.work.limits.sizes, (*thin, *stages))

    @property
    def thin_stage(self) -> Stage:
        """That of an owner without layers."""
        sizes = self.work.limits.sizes
        return Stage(NOTHING, (Shard(LOCAL, Range(0, sizes.heads), Range(0, sizes.ff)),))

    def all(self) -> list[dict[str, float]]:
        """Every objective of every plan that is possible, with each number of microbatches."""
        results = []
        for plan in self.plans():
            for many in {1, 2, 4, self.work.concurrency}:
                if many <= self.work.concurrency:
                    try:
                        predicted = self.predict(plan, many)
                    except PlanError:
                        break  # no room for it
                    results.append(objectives(predicted))
        return results


def objectives(total: Prediction) -> dict[str, float]:
    """Return a prediction's values, each to be small."""
    assert total.ttft_s is not None
    return {
        "latency": total.latency_s,
        "throughput": 1 / total.throughput_per_s,
        "ttft": total.ttft_s,
        "memory": max(total.memory_bytes.values()),
        "energy": float("nan") if total.energy_j is None else total.energy_j,
    }
