"""Choice of the allreduce algorithm: the predicted cost of each from latency, bandwidth, ranks and bytes.

d is the one-way latency in seconds, B what one device can send (and, at the same time, receive) in bytes/s, N the
ranks, S the bytes of the float32 tensor and w those of one rank's tensor as it crosses the wire. Only a rank's own
tensor is made smaller by the wire type: sums always travel as float32, so that no rank holds a rounder one.

| algorithm | seconds                                          | how                                             |
| star      | 2d + (N-1)(w+S)/B                                | all to rank 0, the sum back                     |
| mesh      | d + (N-1)w/B                                     | everybody to everybody                          |
| split     | 2d + (N-1)/N (w+S)/B                             | mesh for a part each, then the sums to all      |
| ring      | (2(N-1) + qN)(d+s) + 2(C-1)s                     | along the ranks and round again, in C chunks    |

In the ring s = S/(CB) is the time of a chunk and W the chunks that may be on their way before the first sum has come
back to rank 0, which takes N hops and happens q = (C-1) // W times. Partial sums are float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Algorithm = Literal["star", "mesh", "split", "ring"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)  # the fewest messages first

RING_CHUNK_BYTES = 8 << 10  # at most; small tensors are cut into 2N, so that several are under way
RING_WINDOW = 16  # chunks under way; twice as many fit in a socket's buffers, so that nobody ever waits to send


@dataclass(frozen=True)
class Choice:
    """The chosen algorithm, with the predicted times of all."""

    algorithm: Algorithm
    seconds: dict[Algorithm, float]  # predicted, for all algorithms


def ring_chunks(n_bytes: int, ranks: int) -> int:
    """Return the number of chunks into which the ring cuts a tensor of `n_bytes` (float32)."""
    n_floats = n_bytes // 4
    return max(1, math.ceil(n_bytes / RING_CHUNK_BYTES), min(2 * ranks, n_floats // 128))


def seconds(
    algorithm: Algorithm, n_bytes: int, wire_bytes: int, ranks: int, latency_s: float, bandwidth: float
) -> float:
    """Return the predicted seconds of one allreduce, by the formulas above. bandwidth in bytes/s."""
    others, full, small = ranks - 1, n_bytes / bandwidth, wire_bytes / bandwidth
    if algorithm == "star":
        return 2 * latency_s + others * (small + full)
    if algorithm == "mesh":
        return latency_s + others * small
    if algorithm == "split":
        return 2 * latency_s + others / ranks * (small + full)
    chunks = ring_chunks(n_bytes, ranks)
    chunk_s = full / chunks
    hops = 2 * others + (chunks - 1) // RING_WINDOW * ranks
    return hops * (latency_s + chunk_s) + 2 * (chunks - 1) * chunk_s


def choose(n_bytes: int, wire_bytes: int, ranks: int, latency_s: float, bandwidth: float) -> Choice:
    """Choose the algorithm with the least predicted time; among equals, the one with fewer messages."""
    costs = {a: seconds(a, n_bytes, wire_bytes, ranks, latency_s, bandwidth) for a in ALGORITHMS}
    return Choice(min(costs, key=costs.__getitem__), costs)  # the first of equals
