"""Test fronts over several networks: equal plans over free links, slower networks, and the moves of the best plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge.planning.front import Front
from edge.planning.moves import Move, MoveScan
from edge.planning.onnx_space import OnnxSpace
from edge.planning.over_networks import NetworkPlans, network_of
from edge.planning.plan_options import PlanOptions
from edge.planning.space import PlanSpace
from edge.profiling.profile import ClusterProfile
from partition.errors import PlanError
from partition.plan.plan import LOCAL
from partition.predict.objectives import OBJECTIVES
from partition.predict.onnx_predict import OnnxDevice, OnnxWork
from partition.predict.speeds import Links, LinkSpeed
from tests.support.thorough import some

NAMES = (LOCAL, "a", "b")
SEEDS = range(some(3, 60))


class MadeUpNetwork(OnnxSpace):
    """Plans of a made-up ONNX network: seven segments that shrink the data, on a slow device and two faster ones."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        n = 7
        crossing = [int(1e6 * rng.random() * 0.6**i) + 100 for i in range(n + 1)]
        labels = ("", *(f"s{i}" for i in range(1, n)), "")
        self.work = OnnxWork(tuple(range(n + 1)), labels, tuple(crossing), (1000,) * n, (), (1000,) * n)
        times = [10 ** rng.uniform(-0.5, 0), *(10 ** rng.uniform(-2, -0.7) for _ in NAMES[1:])]
        speeds = [
            OnnxDevice(name, name, tuple(time * rng.uniform(0.05, 0.2, n)), 1e-4, 1 << 30, 0)
            for name, time in zip(NAMES, times, strict=True)
        ]
        links = Links(dict.fromkeys(permutations(NAMES, 2), LinkSpeed(1e-3, 1e7)))
        PlanSpace.__init__(self, Path("net.onnx"), ClusterProfile(tuple(speeds), links, ()), PlanOptions())
        self.title, self.model = "net", SimpleNamespace(name="net.onnx", digest="")  # type: ignore[assignment]


def plans(space: PlanSpace, network: str) -> NetworkPlans:
    return NetworkPlans(network_of(network), Front([space]))


@pytest.mark.parametrize("seed", SEEDS)
def test_networks_that_cost_nothing_have_equal_plans(seed: int) -> None:
    fronts = [plans(MadeUpNetwork(seed), f"{rate}gbit/0us").front.to_json() for rate in (400, 390, 380)]
    labels = [[point["label"] for point in front["points"] if point["on_front"]] for front in fronts]
    assert labels[0] == labels[1] == labels[2]


@pytest.mark.parametrize("seed", SEEDS)
def test_slower_network_is_never_better(seed: int) -> None:
    space = MadeUpNetwork(seed)
    networks = ["1gbit/100us", "1gbit/2ms", "100mbit/2ms", "5mbit/20ms", "100kbit/200ms"]
    best = [plans(space, network).best for network in networks]
    for fast, slow in pairwise(best):
        assert fast["latency"].predicted.latency_s <= slow["latency"].predicted.latency_s * (1 + 1e-9)
        assert fast["throughput"].predicted.throughput_per_s >= slow["throughput"].predicted.throughput_per_s * (
            1 - 1e-9
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_move_separates_two_best_plans(seed: int) -> None:
    space = MadeUpNetwork(seed)
    network = plans(space, "20mbit/5ms")
    for (objective, key), scan in network.scans.items():
        assert scan.complete
        for move in scan.moves:
            sides = [space.with_link(replace(network.network.link, **{key: move.at * by})) for by in (0.997, 1.003)]
            best = [side.fastest(objective) for side in sides]
            costs = [OBJECTIVES[objective].cost_of(point.predicted) for point in best]
            assert best[0].label != best[1].label
            assert sides[0].cost(move.below, objective) == pytest.approx(costs[0], rel=0.004)
            assert sides[1].cost(move.above, objective) == pytest.approx(costs[1], rel=0.004)
    assert network.scans["latency", "bytes_per_s"].moves


@pytest.mark.parametrize("seed", SEEDS)
def test_scan_finds_all_moves_of_latency(seed: int) -> None:
    """Between two moves, the plan between them is the best at every bandwidth."""
    space = MadeUpNetwork(seed)
    network = plans(space, "20mbit/5ms")
    moves = network.scans["latency", "bytes_per_s"].moves
    for before, after in pairwise(moves):
        assert before.above.label == after.below.label
    for value in np.geomspace(13e3, 1.2e9, 40):
        side = space.with_link(replace(network.network.link, bytes_per_s=float(value)))
        least = OBJECTIVES["latency"].cost_of(side.fastest("latency").predicted)
        if moves:
            plan = next((move.below for move in moves if value < move.at), moves[-1].above)
            assert side.cost(plan, "latency") == pytest.approx(least, rel=1e-5)


def test_scan_without_searches_left_is_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.planning.moves.MOST_PLANS", 3)

    def best(value: float) -> Any:
        return SimpleNamespace(label=f"{round(10 * np.log(value))}", at=value)

    def cost(point: Any, value: float) -> float:
        return float(abs(np.log(point.at / value)))

    scan = MoveScan(best, cost)
    scan.search(1.0, 1000.0)
    assert not scan.complete
    assert all(isinstance(move, Move) for move in scan.moves)


@pytest.mark.parametrize(
    ("text", "bytes_per_s", "latency_s"),
    [("wifi", 12.5e6, 2e-3), ("100mbit/20ms", 12.5e6, 0.02), ("1.5Gbit/500us", 187.5e6, 5e-4), ("64kbit/1s", 8e3, 1.0)],
)
def test_network_of_text(text: str, bytes_per_s: float, latency_s: float) -> None:
    network = network_of(text)
    assert (network.link.bytes_per_s, network.link.latency_s) == pytest.approx((bytes_per_s, latency_s))


@pytest.mark.parametrize(
    "text",
    ["", "lan/wifi", "100mbit", "100/20", "-1mbit/1ms", "1e9mbit/1ms", "0mbit/1ms", "401gbit/1ms", "1mbit/61s", "nan"],
)
def test_invalid_networks_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="the network"):
        network_of(text)
