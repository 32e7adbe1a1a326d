"""Split of an ONNX graph for devices of known shares: the cuts that balance their work best."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from partition.model.onnx_graph import Node, OnnxGraph
from partition.plan.apportion import checked_shares
from partition.plan.arrange import split_in_order
from partition.plan.onnx_cuts import Cut, check_enough

# Approximately one core of a small device. Only the ratio matters: products of large matrices are bound by arithmetic,
# depthwise convolutions and additions by memory.
_FLOPS_PER_S = 20e9
_BYTES_PER_S = 5e9
_ALIKE = 1.05


def node_seconds(node: Node) -> float:
    """Return an estimate of a node's seconds: flops / 20e9 + bytes that it reads and writes / 5e9."""
    return node.flops / _FLOPS_PER_S + (node.weight_bytes + 2 * node.output_bytes) / _BYTES_PER_S


def split(
    graph: OnnxGraph, cuts: Sequence[Cut], shares: Sequence[float], seconds: Sequence[float] | None = None
) -> list[Cut]:
    """Return the cuts that make the slowest stage fastest. Among equal divisions, the one that moves the least wins.

    A stage takes the sum of its nodes' seconds, divided by the share of its device. The result is exact.

    cuts: possible cuts in ascending order
    shares: share of each device; there is one cut less
    seconds: measured seconds of each node; None: `node_seconds`. Measurements vary, so stages up to 5 % slower than the
        fastest division count as equal.

    Raises PlanError if there are too few possible cuts.
    """
    shares = checked_shares(shares, len(shares))
    check_enough(graph, cuts, len(shares))
    done = list(accumulate(map(node_seconds, graph.nodes) if seconds is None else seconds, initial=0.0))
    at = {cut.position: cut for cut in cuts}
    ends = (0, *at, len(graph.nodes))

    def cost(stage: int, start: int, stop: int) -> tuple[float, int]:
        return (done[stop] - done[start]) / shares[stage], at[stop].payload_bytes if stop in at else 0

    least = 0.0
    for _ in range(2):  # the second pass minimizes bytes among divisions that are as fast as the first result
        (slowest, _), edges = split_in_order(
            len(shares), ends, cost, lambda a, b: (max(a[0], b[0]), a[1] + b[1]), (least, 0)
        )
        least = slowest * (1.0 if seconds is None else _ALIKE)
    return [at[edge] for edge in edges[1:-1]]
