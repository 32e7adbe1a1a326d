"""Split of an ONNX graph for devices of known shares: the cuts that balance their work best."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from partition.model.onnx_graph import Node, OnnxGraph
from partition.plan.apportion import checked_shares
from partition.plan.arrange import split_in_order
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

    A stage takes the sum of the seconds of its nodes, divided by the share of its device. Exact; `cuts` ascend.
    seconds: of each node, measured: stages that are no more than 5 % slower than that are as good, as measurements
    differ by so much; None: `node_seconds`. PlanError if there are too few places.
    """
    shares = checked_shares(shares, len(shares))
    check_enough(graph, cuts, len(shares))
    done = list(accumulate(map(node_seconds, graph.nodes) if seconds is None else seconds, initial=0.0))
    at = {cut.position: cut for cut in cuts}
    ends = (0, *at, len(graph.nodes))

    def cost(stage: int, start: int, stop: int) -> tuple[float, int]:
        return (done[stop] - done[start]) / shares[stage], at[stop].payload_bytes if stop in at else 0

    least = 0.0
    for _ in range(2):  # at last, stages that are no slower than the slowest has to be are equal: bytes decide
        (slowest, _), edges = split_in_order(
            len(shares), ends, cost, lambda a, b: (max(a[0], b[0]), a[1] + b[1]), (least, 0)
        )
        least = slowest * (1.0 if seconds is None else _ALIKE)
    return [at[edge] for edge in edges[1:-1]]
