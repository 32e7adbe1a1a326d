"""Test the search for the cheapest cluster: it equals an enumeration, and no bound excludes a valid cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations_with_replacement, permutations
from math import inf

import numpy as np
import pytest

from devices.catalog import CATALOG
from edge.planning.cheapest import BY, DEVICES, PRICE, WATTS, ClusterSearch, Offer, Targets
from edge.planning.device_kinds import MANY, DeviceKind
from partition.errors import PlanError
from partition.plan.plan import LOCAL
from partition.predict.cost import Work
from partition.predict.predict import predict
from partition.predict.prediction import Prediction
from partition.predict.speeds import Curve, DeviceSpeed, Links, LinkSpeed
from partition.search.cluster_bounds import ClusterBounds
from partition.search.planner import Planner
from partition.simulate.arrivals import poisson
from partition.simulate.simulate import simulate
from tests.support.planning import MS, device, model, work
from tests.support.thorough import some

EPSILON = 1 + 1e-9


class Market:
    """A few kinds of devices with random speeds, memories and prices, a small model, and requests that come."""

    def __init__(self, rng: np.random.Generator) -> None:
        def between(low: float, high: float) -> float:
            return float(rng.uniform(low, high))

        n = int(rng.integers(2, 4))
        built = model([between(4, 12) for _ in range(n)] if rng.random() < 0.5 else n)
        self.work: Work = work(
            built,
            context=64,
            depth=int(rng.choice([0, 100])),
            prompt=int(rng.choice([8, 80])),
            concurrency=int(rng.integers(1, 4)),
        )
        whole = sum(built[0].layer_bytes) + 2 * built[0].head_bytes
        self.offers = []
        for i in range(int(rng.integers(2, 4))):
            layer_s = float(rng.choice([1, 1.5, 2, 5])) * MS
            layer = Curve(((1, layer_s), (4, layer_s * between(1, 3)), (64, layer_s * between(4, 20))))
            speed = DeviceSpeed(
                f"kind{i}",
                f"kind{i}",
                step_s=Curve(((1, between(0, 0.5) * MS),)),
                layer_s=layer,
                token_s=between(0, 1e-6),
                half_layer_s=layer.times(between(0.5, 0.8)),
                head_s=Curve(((1, between(0, 2) * MS), (4, 3 * MS))),
                memory_bytes=round(whole * between(0.4, 1.2)),
                runtime_bytes=round(whole * between(0, 0.1)),
                sum_s=between(0, 1e-4),
                disk_bytes_per_s=1e9,
            )
            preset = replace(CATALOG["pi5"], watts=round(between(3, 60), 1))
            most = int(rng.choice([1, 2, MANY]))
            self.offers.append(Offer(DeviceKind(f"kind{i}", preset, round(between(20, 300), 2), "", most), speed))
        self.link = LinkSpeed(float(rng.choice([0.0, 1e-4, 2e-3])), float(rng.choice([1e6, 1e9])))
        self.tensor = bool(rng.random() < 0.7)
        token_s = n * 1.5 * MS
        limits = {"latency_s": token_s * between(0.8, 7), "ttft_s": token_s * between(3, 60)}
        limited = [["latency_s"], ["ttft_s"], [*limits]][int(rng.integers(3))]
        self.targets = Targets(
            arrivals_per_s=between(0.1, 0.8) / (8 * token_s),
            percentile=str(rng.choice(["p50", "p90", "p99"])),
            tokens=int(rng.integers(2, 6)),
            requests=20,
            seed=int(rng.integers(1000)),
            **{name: limits[name] for name in limited},
        )

    def search(self) -> ClusterSearch:
        return ClusterSearch(self.work, self.offers, self.link, self.targets, tensor=self.tensor)

    def plans(self, members: tuple[int, ...]) -> Iterator[tuple[int, Prediction]]:
        """Every plan on the fronts of these devices, with each of them as the owner's, and how many devices it uses."""
        names = (LOCAL, *(f"d{i}" for i in range(1, len(members))))
        names_of_objectives = [
            name for name, limit in (("latency", self.targets.latency_s), ("ttft", self.targets.ttft_s)) if limit < inf
        ]
        for order in {(owner, *members[:i], *members[i + 1 :]) for i, owner in enumerate(members)}:
            speeds = {
                name: replace(self.offers[kind].speed, device=name, name=name, disk_bytes_per_s=None)
                for name, kind in zip(names, order, strict=True)
            }
            links = Links(dict.fromkeys(permutations(names, 2), self.link))
            planner = Planner(self.work, list(speeds.values()), links, "m", "", tensor=self.tensor, thin=False)
            for placed in planner.front((*names_of_objectives, "throughput"))[0]:
                predicted = predict(placed.plan, self.work, speeds, links, placed.microbatches)
                yield len(set(placed.plan.devices)), predicted

    def serves(self, members: tuple[int, ...]) -> bool:
        targets = self.targets
        arrivals = poisson(targets.arrivals_per_s, targets.requests, self.work.prompt, targets.tokens, targets.seed)
        for _, predicted in self.plans(members):
            result = simulate(predicted, arrivals, seed=targets.seed)
            assert result.ttft_s is not None
            assert result.tpot_s is not None
            if (
                getattr(result.ttft_s, targets.percentile) <= targets.ttft_s * EPSILON
                and getattr(result.tpot_s, targets.percentile) <= targets.latency_s * EPSILON
                and result.capacity_per_s * EPSILON >= targets.arrivals_per_s
            ):
                return True
        return False

    def all(self, size: int) -> list[tuple[int, ...]]:
        """Every cluster of up to so many devices that can be bought."""
        kinds = range(len(self.offers))
        every = [members for n in range(1, size + 1) for members in combinations_with_replacement(kinds, n)]
        return [item for item in every if all(item.count(kind) <= self.offers[kind].kind.most for kind in item)]

    def cheapest(self, by: str, size: int) -> list[str] | None:
        """The kinds of the cheapest cluster, by trying all."""

        def cost(members: tuple[int, ...]) -> tuple[float, ...]:
            price = round(sum(self.offers[kind].kind.price or 0.0 for kind in members), 6)
            watts = round(sum(self.offers[kind].kind.preset.watts for kind in members), 6)
            n = len(members)
            return {PRICE: (price, n, watts), WATTS: (watts, n, price), DEVICES: (n, price, watts)}[by]

        for members in sorted(self.all(size), key=cost):
            if self.serves(members):
                return sorted(self.offers[kind].kind.name for kind in members)
        return None


def test_the_cheapest_is_what_trying_all_finds() -> None:
    n = some(24, 1000)
    rng = np.random.default_rng(n)
    none, several, cheaper = 0, 0, 0
    for i in range(n):
        market, by = Market(rng), BY[i % 3]
        expected = market.cheapest(by, 3)
        if expected is None:
            with pytest.raises(PlanError, match="no cluster of up to 3 of these devices reaches"):
                market.search().cheapest(by, 3)
            none += 1
            continue
        result = market.search().cheapest(by, 3)
        assert sorted(kind.name for kind in result.served.kinds) == expected, (i, by)
        assert result.served.excess <= EPSILON
        assert result.planned <= result.cheaper + 1
        several += len(expected) > 1
        cheaper += result.cheaper
    assert 0 < none < 0.8 * n
    assert several > n / 20
    assert cheaper > n / 2


def test_no_plan_is_better_than_the_bounds() -> None:
    """Bounds hold for the figures as they are predicted, and as they are simulated at the least."""
    rng = np.random.default_rng(3)
    ruled_out = 0
    for _ in range(some(10, 200)):
        market = Market(rng)
        targets, speeds = market.targets, [replace(offer.speed, disk_bytes_per_s=None) for offer in market.offers]
        bounds = ClusterBounds(market.work, speeds, market.link, tokens=targets.tokens, tensor=market.tensor)
        arrivals = poisson(targets.arrivals_per_s, 10, market.work.prompt, targets.tokens, 0)
        for members in market.all(3):
            least = bounds.bound(members, groups=market.tensor)
            ruled_out += least.latency_s == inf
            for used, predicted in market.plans(members):
                if used < len(members):
                    continue
                result = simulate(predicted, arrivals)
                assert result.ttft_s is not None
                assert result.tpot_s is not None
                assert least.latency_s <= min(predicted.latency_s, result.tpot_s.p50) * EPSILON
                assert least.ttft_s <= result.ttft_s.p50 * EPSILON
                assert least.capacity_per_s * EPSILON >= result.capacity_per_s
    assert ruled_out > 5


def test_the_bounds_of_one_device_are_what_it_takes() -> None:
    to_do = work(4, depth=50, prompt=8, concurrency=2)
    speed = device("one", 2 * MS, head_s=MS, step_s=MS / 2, token_s=1e-6)
    bounds = ClusterBounds(to_do, [speed], LinkSpeed(0.0, 1e9), tokens=11, tensor=True)
    assert bounds.bound((0,), groups=True).latency_s == pytest.approx((0.5 + 4 * (2 + 0.05) + 1) * MS)
    quick = ClusterBounds(to_do, [device("one", 2 * MS)], LinkSpeed(0.0, 1e9), tokens=11, tensor=True)
    # Decoding a row takes as long for two requests as for one, so half for each.
    assert quick.bound((0,), groups=True).capacity_per_s == pytest.approx(1 / (4 * (2 + 10 * 2 / 2) * MS))
    assert quick.bound((0, 0), groups=True).ttft_s == pytest.approx(4 * 2 * MS / 2)
    small = replace(speed, memory_bytes=20 << 20)
    assert (
        ClusterBounds(to_do, [small], LinkSpeed(0.0, 1e9), tokens=11, tensor=True).bound((0,), groups=True).latency_s
        == inf
    )


def test_what_cannot_be_reached_is_told_with_what_is_near() -> None:
    to_do = work(4, context=64, prompt=8)
    offers = [
        Offer(DeviceKind("slow", CATALOG["pi4"], 10.0), device("slow", 8 * MS)),
        Offer(DeviceKind("fast", CATALOG["pi5"], 90.0), device("fast", 4 * MS)),
    ]
    targets = Targets(0.01, latency_s=2 * MS, tokens=4, requests=10)
    search = ClusterSearch(to_do, offers, LinkSpeed(0.1, 1e9), targets)
    with pytest.raises(PlanError, match=r"reaches 2\.00 ms a token .*nearest of those tried, 1 fast, takes 16\.0 ms"):
        search.cheapest(PRICE, 2)
    tiny = [Offer(offer.kind, replace(offer.speed, memory_bytes=1 << 20)) for offer in offers]
    with pytest.raises(PlanError, match="no cluster has room for the model's 3"):
        ClusterSearch(to_do, tiny, LinkSpeed(0.1, 1e9), targets).cheapest(PRICE, 2)


def test_prices_and_watts_choose_differently() -> None:
    """Two slow ones cost less and draw more than the fast one, and one device is the fewest."""
    to_do = work(4, context=64, prompt=8, concurrency=2)
    offers = [
        Offer(DeviceKind("slow", replace(CATALOG["pi4"], watts=40.0), 10.0), device("slow", 2 * MS)),
        Offer(DeviceKind("fast", replace(CATALOG["pi5"], watts=50.0), 90.0), device("fast", MS)),
    ]
    targets = Targets(60.0, latency_s=1.0, tokens=4, requests=50)
    search = ClusterSearch(to_do, offers, LinkSpeed(1e-6, 1e9), targets)
    counts = {by: search.cheapest(by, 4).served.counts for by in BY}
    assert counts[WATTS] == counts[DEVICES] == {"fast": 1}
    assert counts[PRICE] == {"slow": 2}
    cheapest = search.cheapest(PRICE, 4).served
    assert (cheapest.price, cheapest.watts, cheapest.names) == (20.0, 80.0, ("slow", "slow:2"))
