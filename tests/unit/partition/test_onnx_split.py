"""Test where ONNX graphs are cut for devices with given shares: no other choice is better."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partition.errors import PlanError
from partition.model.onnx_graph import Node, OnnxGraph
from partition.model.onnx_shapes import Value
from partition.plan.onnx_cuts import Cut, cuts
from partition.plan.onnx_split import node_seconds, split
from tests.support.onnx_networks import mobilenet_v2, resnet18
from tests.support.thorough import some

# Whole eighths of a second, and shares that are powers of two: no sum is rounded, so that equals are equal.
_FLOPS = int(20e9) // 8


@st.composite
def graphs(draw: st.DrawFn) -> OnnxGraph:
    """Nodes that take what the one before made, and some more, with any work and tensors of any size."""
    n = draw(st.integers(2, 8))
    nodes, values = [], {"t0": Value("t0", "uint8", (1,), (1,))}
    for i in range(n):
        sources = {i} | draw(st.sets(st.integers(0, i), max_size=1))
        inputs = tuple(f"t{j}" for j in sorted(sources))
        name, flops = f"t{i + 1}", _FLOPS * draw(st.integers(0, 8))
        nodes.append(Node(f"op{i}", (), "Op", inputs, (name,), (), flops, 0, 0, i))
        values[name] = Value(name, "uint8", (size := draw(st.integers(1, 50)),), (size,))
    return OnnxGraph(tuple(nodes), values, ("t0",), (f"t{n}",), MappingProxyType({}), "")


def worth(graph: OnnxGraph, chosen: Sequence[Cut], shares: Sequence[float]) -> tuple[float, int]:
    """Seconds of the slowest stage, where the largest share is 1; bytes that are moved."""
    bounds = [0, *(cut.position for cut in chosen), len(graph.nodes)]
    work = [sum(map(node_seconds, graph.nodes[start:stop])) for start, stop in pairwise(bounds)]
    seconds = max(item / (share / max(shares)) for item, share in zip(work, shares, strict=True))
    return seconds, sum(cut.payload_bytes for cut in chosen)


@settings(max_examples=some(37, 150))
@given(graphs(), st.lists(st.sampled_from([1.0, 2.0, 0.5, 0.25]), min_size=1, max_size=4))
def test_no_other_cuts_are_better(graph: OnnxGraph, shares: list[float]) -> None:
    places = cuts(graph)
    if len(shares) - 1 > len(places):
        with pytest.raises(PlanError, match=f"so it runs on at most {len(places) + 1} device"):
            split(graph, places, shares)
        return
    result = split(graph, places, shares)
    positions = [cut.position for cut in result]
    assert positions == sorted(set(positions))
    best = min(worth(graph, chosen, shares) for chosen in combinations(places, len(shares) - 1))
    assert worth(graph, result, shares) == best


@settings(max_examples=some(25, 100))
@given(graphs(), st.lists(st.sampled_from([1.0, 2.0, 0.5]), min_size=1, max_size=3), st.data())
def test_measured_stages_that_are_alike_are_chosen_by_what_crosses(
    graph: OnnxGraph, shares: list[float], data: st.DataObject
) -> None:
    places, n = cuts(graph), len(graph.nodes)
    seconds = data.draw(st.lists(st.integers(0, 100).map(float), min_size=n, max_size=n))
    if len(shares) - 1 > len(places):
        return

    def slowest(chosen: Sequence[Cut]) -> float:
        bounds = [0, *(cut.position for cut in chosen), n]
        parts = zip(pairwise(bounds), shares, strict=True)
        return max(sum(seconds[start:stop]) / (share / max(shares)) for (start, stop), share in parts)

    every = list(combinations(places, len(shares) - 1))
    alike = [chosen for chosen in every if slowest(chosen) <= 1.05 * min(map(slowest, every))]
    result = split(graph, places, shares, seconds)
    assert tuple(result) in alike
    assert sum(cut.payload_bytes for cut in result) == min(sum(cut.payload_bytes for cut in item) for item in alike)


def test_shares_are_respected() -> None:
    graph = OnnxGraph.from_model(resnet18(batch=1, size=64))
    places = cuts(graph)
    total = sum(map(node_seconds, graph.nodes))
    before = 0
    for share in (0.25, 1.0, 4.0):  # of the first device, by that of the second
        [cut] = split(graph, places, [share, 1])
        assert cut.position > before
        before = cut.position
        work = sum(map(node_seconds, graph.nodes[: cut.position]))
        assert abs(work / total - share / (share + 1)) < 0.15
    assert split(graph, places, [1]) == []
    assert split(graph, places, [2, 2, 2]) == split(graph, places, [1, 1, 1])


def test_cuts_are_taken_from_those_that_are_given() -> None:
    graph = OnnxGraph.from_model(mobilenet_v2(batch=1, size=64))
    blocks = [cut for cut in cuts(graph) if cut.block]
    result = split(graph, blocks, [1, 1, 1])
    assert len(result) == 2
    assert all(cut in blocks for cut in result)


@pytest.mark.parametrize("shares", [[1, 0], [1, -1], [1, float("nan")], [1, float("inf")], []])
def test_shares_that_are_none(shares: list[float]) -> None:
    graph = OnnxGraph.from_model(resnet18(batch=1, size=32))
    with pytest.raises(PlanError, match="expected"):
        split(graph, cuts(graph), shares)
