"""Processes that are compared: told what to do one after the other, or some at once, and what came of it in ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ranks import Ranks

SCRIPT = Path(__file__).with_name("distributed_side.py")
MEASURE_S = 120.0  # what measures may take at most
NOTHING_ASKED: Mapping[str, str] = {}

Found = dict[str, list[dict[str, float]]]  # by side, what was measured in each round


class Sides(Ranks):
    """Processes by name, each kept to some cores."""

    def __init__(self, cores: Mapping[str, Sequence[int]], script: Path) -> None:
        super().__init__(script, len(cores))
        self.names = list(cores)
        try:
            self.each("pin", {name: {"cores": list(some)} for name, some in cores.items()})
        except BaseException:
            self.close()
            raise

    def each(self, do: str, arguments: Mapping[str, dict[str, Any]], limit_s: float = MEASURE_S) -> dict[str, Any]:
        """Run a method at some sides at once; their answers."""
        answers = self.tell_each(do, [arguments.get(name) for name in self.names], limit_s)
        return {name: answer for name, answer in zip(self.names, answers, strict=True) if name in arguments}

    def at(self, side: str, do: str, limit_s: float = MEASURE_S, **arguments: Any) -> Any:
        """Run a method at one side."""
        return self.each(do, {side: arguments}, limit_s)[side]


@contextmanager
def sides(cores: Mapping[str, Sequence[int]], script: Path = SCRIPT) -> Iterator[Sides]:
    """Side processes for the time of a block; where it ends well, they free everything first."""
    some = Sides(cores, script)
    with some:
        yield some
        some.tell("close")


def alternate(measures: Mapping[str, Callable[[], dict[str, float]]], rounds: int) -> Found:
    """What each side measured in each round. Who goes first changes; a first round is not counted."""
    found: Found = {name: [] for name in measures}
    names = list(measures)
    for turn in range(rounds + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            measured = measures[name]()
            if turn:
                found[name].append(measured)
    return found


def medians(found: Found) -> dict[str, dict[str, float]]:
    return {
        side: {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        for side, rounds in found.items()
    }


def compared(found: Found, side: str, beside: str, asked: Mapping[str, str] = NOTHING_ASKED) -> list[dict[str, Any]]:
    """How many times as fast `side` is, figure by figure. asked: of the ratio, by figure."""
    rows = []
    for key in found[side][0]:
        a, b = ([one[key] for one in found[name]] for name in (side, beside))
        if key.endswith("_s") and not key.endswith("_per_s"):  # a time: the shorter, the faster
            a, b = b, a
        ratios = [x / y for x, y in zip(a, b, strict=True)]
        rows.append(
            {
                "side": side,
                "beside": beside,
                "figure": key,
                "ratio": statistics.median(a) / statistics.median(b),
                "least": min(ratios),
                "most": max(ratios),
                "asked": asked.get(key, ""),
            }
        )
    return rows


def steady(stamps: Sequence[Sequence[float]]) -> float:
    """Tokens a second while every request was generating; each one's own rate in that time, summed."""
    begin, end = max(times[0] for times in stamps), min(times[-1] for times in stamps)
    total = 0.0
    for times in stamps:
        inside = [t for t in times if begin <= t <= end]
        if len(inside) < 2:  # so few tokens that the others had none in the same time
            inside = list(times)
        total += (len(inside) - 1) / (inside[-1] - inside[0])
    return total
