"""Choice of the allreduce algorithm by the predicted cost of each.

d is the one-way latency in seconds, B what one device can send (and, at the same time, receive) in bytes/s, N the
ranks, S the bytes of the float32 tensor and w the bytes of one rank's tensor in the wire type. Only a rank's own
tensor is sent in the wire type. Sums are always sent as float32, so that all ranks hold the same sum.

| algorithm | seconds              | messages                                              |
| star      | 2d + (N-1)(w+S)/B    | all tensors go to rank 0, the sum goes back           |
| mesh      | d + (N-1)w/B         | each rank sends its tensor to all others              |
| split     | 2d + (N-1)/N (w+S)/B | each rank sums one part, then sends that sum to all   |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Algorithm = Literal["star", "mesh", "split"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)  # sorted by number of messages


@dataclass(frozen=True)
class Choice:
    """The chosen algorithm, with the predicted times of all."""

    algorithm: Algorithm
    seconds: dict[Algorithm, float]  # by algorithm


def seconds(
    algorithm: Algorithm, n_bytes: int, wire_bytes: int, ranks: int, latency_s: float, bandwidth: float
) -> float:
    """Return the predicted seconds of one allreduce, by the formulas above. bandwidth in bytes/s."""
    others, full, small = ranks - 1, n_bytes / bandwidth, wire_bytes / bandwidth
    if algorithm == "star":
        return 2 * latency_s + others * (small + full)
    if algorithm == "mesh":
        return latency_s + others * small
    return 2 * latency_s + others / ranks * (small + full)


def choose(n_bytes: int, wire_bytes: int, ranks: int, latency_s: float, bandwidth: float) -> Choice:
    """Choose the algorithm with the least predicted time, and of equal times the one with the fewest messages."""
    costs = {a: seconds(a, n_bytes, wire_bytes, ranks, latency_s, bandwidth) for a in ALGORITHMS}
    return Choice(min(costs, key=costs.__getitem__), costs)  # of equal times, the first
