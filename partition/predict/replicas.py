"""Requests and shared resources of several copies of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def join(a: Array, b: Array) -> tuple[Array, NDArray[np.int64]]:
    """Return the largest a[c - j] + b[j] for each number of requests c, and its j. a, b: throughput by the number of
    requests, [C + 1]; -inf for a number that is impossible.
    """
    n = len(a)
    sums = np.full((n, n), -np.inf)
    for j in range(n):
        sums[j, j:] = a[: n - j] + b[j]
    best = sums.argmax(axis=0)
    return sums[best, np.arange(n)], best


def distribute(rates: Sequence[Sequence[float]], requests: int) -> list[int]:
    """Return the number of requests of each copy for which the sum of throughputs is largest.

    rates: throughput of each copy with 0, 1, ... `requests` requests.

    Throughputs may grow faster with each further request, so a greedy choice may miss the best sum. Copies are
    therefore added one by one, with the best sum for each number of requests.
    """
    total = np.full(requests + 1, -np.inf)
    total[0] = 0.0
    choices = []
    for rate in rates:
        total, chosen = join(total, np.asarray(rate, float))
        choices.append(chosen)
    result = []
    for chosen in reversed(choices):
        result.append(int(chosen[requests]))
        requests -= result[-1]
    return result[::-1]


def slowdowns(rates: Sequence[float], uses: Sequence[Mapping[Hashable, float]]) -> list[float]:
    """Return by which factor each copy is slower while all copies work.

    rates: tokens per second of each copy if the others are idle.
    uses: seconds per token in which each copy occupies a resource.

    A resource that is needed for more than one second per second slows all copies that use it by this ratio.
    """
    busy: Counter[Hashable] = Counter()
    for rate, seconds in zip(rates, uses, strict=True):
        for resource, use_s in seconds.items():
            busy[resource] += rate * use_s  # type: ignore[assignment]  # typeshed counts in whole numbers
    return [max([1.0, *(busy[resource] for resource in seconds)]) for seconds in uses]
