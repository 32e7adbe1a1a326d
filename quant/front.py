"""Pareto dominance: an item dominates another item if each of its costs is at most as large."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def non_dominated(items: Iterable[T], costs: Callable[[T], tuple[float, ...]]) -> list[T]:
    """Return the items that no other item dominates, sorted by their costs. Of items with equal costs the first stays.

    costs: a function that returns the costs of an item. Small costs are good.
    """
    front: list[T] = []
    front_costs: list[tuple[float, ...]] = []
    for item in sorted(items, key=costs):  # an item comes behind each item that dominates it
        values = costs(item)
        if not any(all(a <= b for a, b in zip(other, values, strict=True)) for other in front_costs):
            front.append(item)
            front_costs.append(values)
    return front
