"""Split of an ONNX graph for devices of known shares: the cuts that balance their work best."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from partition.model.onnx_graph import Node, OnnxGraph
from partition.plan.apportion import checked_shares
from partition.plan.onnx_cuts import Cut, check_enough

# One core of a small device, roughly. Only the ratio matters here: products of large matrices are bound by arithmetic,
# depthwise convolutions and additions by memory.
_FLOPS_PER_S = 20e9
_BYTES_PER_S = 5e9
_ALIKE = 1.05


def node_seconds(node: Node) -> float:
    """An estimate: flops / 20e9 + bytes that it reads and writes / 5e9."""
    return node.flops / _FLOPS_PER_S + (node.weight_bytes + 2 * node.output_bytes) / _BYTES_PER_S


def split(
    graph: OnnxGraph, cuts: Sequence[Cut], shares: Sequence[float], seconds: Sequence[float] | None = None
) -> list[Cut]:
    """The cuts, one less than there are `shares`, that make the slowest stage fastest; among equals those that move
    the least.

    A stage takes the sum of the seconds of its nodes, divided by the share of its device. Exact, by dynamic
    programming over `cuts`, which ascend: best[s][c] = min over b < c of max(best[s-1][b], work(b, c) / share[s]).
    seconds: of each node, measured: stages that are no more than 5 % slower than that are as good, as measurements
    differ by so much; None: `node_seconds`. PlanError if there are too few places.
    """
    shares = checked_shares(shares, len(shares))
    check_enough(graph, cuts, len(shares))
    done = list(accumulate(map(node_seconds, graph.nodes) if seconds is None else seconds, initial=0.0))
    ends = [0, *(cut.position for cut in cuts), len(graph.nodes)]
    moved = [0, *(cut.payload_bytes for cut in cuts), 0]
    # (seconds of the slowest stage, bytes moved, place of the cut before) for each place a stage may end at.
    best: list[list[tuple[float, int, int]]] = []
    least = 0.0
    for _ in range(2):  # at last, stages that are no slower than the slowest has to be are equal: bytes decide
        best = []
        for i, share in enumerate(shares):
            row: list[tuple[float, int, int]] = []
            for at, end in enumerate(ends):
                candidate = (float("inf"), 0, 0)
                for before in range(at) if i else range(min(at, 1)):
                    slowest, bytes_, _ = best[i - 1][before] if i else (least, 0, 0)
                    slowest = max(slowest, (done[end] - done[ends[before]]) / share)
                    candidate = min(candidate, (slowest, bytes_ + moved[at], before))
                row.append(candidate)
            best.append(row)
        least = best[-1][-1][0] * (1.0 if seconds is None else _ALIKE)
    at, chosen = len(ends) - 1, []
    for row in best[:0:-1]:
        at = row[at][2]
        chosen.append(cuts[at - 1])
    return chosen[::-1]
