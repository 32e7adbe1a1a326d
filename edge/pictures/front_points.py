"""A front as its JSON object tells it: which plans stand out, and their figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edge.planning.measuring import OFF, SCATTER, is_off
from quant.text import bytes_text

Point = Mapping[str, Any]  # one of "points"
Result = Mapping[str, Any]  # the object of `edge pareto --json`

KNEE = "beyond it, a little more of one costs much of the other"
DOMINATED = "no better in anything, worse in some"
_MOST_ERRORS = 5  # that are told
LOG_FROM = 20  # an axis whose values span more is logarithmic
# Dominated plans are shown where they are so many times worse than all that stands out, or within a range that is so
# many times wider; so what stands out has a good part of the picture.
_NEAR, _WIDER = 1.25, 2.2


def front(result: Result) -> list[Point]:
    """The plans that none dominates, by measurement where there is one; the one with the least latency first."""
    return in_order(point for point in result["points"] if point["on_front"])


def dominated(result: Result) -> list[Point]:
    """The other plans, in the same order."""
    return in_order(point for point in result["points"] if not point["on_front"])


def in_order(points: Iterable[Point]) -> list[Point]:
    """By latency; of equal ones, the one with the most throughput first."""
    return sorted(points, key=lambda point: (latency_s(point), -throughput(point)))


def to_show(result: Result) -> tuple[list[Point], list[Point]]:
    """The plans to stand out (the front, what was measured, the best single device), and dominated ones near them."""
    single = best_single(result)
    shown = in_order(point for point in result["points"] if point["on_front"] or point["measured"] or point is single)
    latencies, throughputs = [latency_s(point) for point in shown], [throughput(point) for point in shown]
    most = max(max(latencies) * _NEAR, min(latencies) + _WIDER * (max(latencies) - min(latencies)))
    least = min(min(throughputs) / _NEAR, max(throughputs) - _WIDER * (max(throughputs) - min(throughputs)))
    others = [point for point in dominated(result) if not any(point is one for one in shown)]
    return shown, [point for point in others if throughput(point) >= least and latency_s(point) <= most]


def staircase(points: Iterable[Point]) -> list[Point]:
    """Those that none dominates in latency and throughput alone, by latency: the line of a picture.

    A front of more than these two objectives has others, too.
    """
    found: list[Point] = []
    for point in in_order(points):
        if not found or throughput(point) > throughput(found[-1]):
            found.append(point)
    return found


def line(result: Result) -> list[Point]:
    """The corners of a picture's line: the front as measured, where plans were measured; else as predicted."""
    on_front = front(result)
    return staircase([point for point in on_front if point["measured"]] or on_front)


def best_single(result: Result) -> Point | None:
    """The plan for one device with the least latency; None where there is none."""
    return next(iter(in_order(point for point in result["points"] if point["parallel"] == "single")), None)


def knee(result: Result) -> Point | None:
    """The plan of the front that is called its knee; None where none is."""
    return next((point for point in front(result) if point["knee"]), None)


def latency_s(point: Point) -> float:
    """Seconds: as measured, where it was; else as predicted."""
    return float((point.get("measured") or point["predicted"])["latency_s"])


def throughput(point: Point) -> float:
    """Tokens or inputs a second, likewise."""
    return float((point.get("measured") or point["predicted"])["throughput_per_s"])


def fullest(figures: Mapping[str, Any]) -> tuple[str, int] | None:
    """The device on which a plan needs the most memory, and those bytes; None where nobody knows."""
    needed: Mapping[str, int] = figures.get("memory_bytes") or {}
    return max(needed.items(), key=lambda one: (one[1], one[0]), default=None)


def error(point: Point, what: str) -> float | None:
    """By what part of the measured `what` (latency_s, throughput_per_s) the prediction is above it; None where it was
    not measured."""
    measured = (point.get("measured") or {}).get(what)
    return point["predicted"][what] / measured - 1 if measured else None


def several_types(result: Result) -> list[str]:
    """The types of the plans in the order they come, where there is more than one; else nothing."""
    types = list(dict.fromkeys(str(point["type"]) for point in result["points"] if point["type"] is not None))
    return types if len(types) > 1 else []


def names(result: Result) -> list[str]:
    """The devices; those with figures from a preset are marked."""
    return [device["name"] + (" (estimate)" if device["estimate"] else "") for device in result["devices"]]


def some(words: Sequence[str], most: int) -> str:
    """The first words, with commas between, and how many there are more."""
    more = len(words) - most
    return ", ".join(words[:most]) + (f" and {more} more" if more > 0 else "")


def unit(result: Result) -> str:
    """What throughput counts."""
    return "tokens" if result["kind"] == "llm" else "inputs"


def notes(result: Result) -> list[str]:
    """What to know about a front, a sentence each."""
    found = []
    if knee(result) is not None:
        found.append(f"* the knee: {KNEE}.")
    if any(point["measured"] for point in front(result)):
        found.append("In brackets: by how much the prediction is above what was measured.")
    if any(len(point["devices"]) > 1 for point in front(result)):
        found.append("Memory is that of the device which needs the most.")
    found += _of_measuring(result)
    n = len(dominated(result))
    if n:
        found.append(f"{n} other {'plan is' if n == 1 else 'plans are'} dominated: {DOMINATED}.")
    if not result["exact"]:
        found.append("Too many plans for all to be looked at: there may be better ones.")
    estimated = [device["name"] for device in result["devices"] if device["estimate"]]
    if estimated:
        found.append(f"Estimated, not measured: {', '.join(estimated)}.")
    failed = [point for point in result["points"] if point["error"]]
    found += [f"{point['id']} could not be measured: {point['error']}" for point in failed[:_MOST_ERRORS]]
    if len(failed) > _MOST_ERRORS:
        found.append(f"{len(failed) - _MOST_ERRORS} more could not be measured.")
    return found


def _of_measuring(result: Result) -> list[str]:
    """What was measured, and how far it is to be believed."""
    taken = [point for point in result["points"] if point["measured"]]
    if not taken:
        return []
    n = len(taken)
    found = [
        f"Front and knee are those of the {n} measured {'plan' if n == 1 else 'plans'}; others are only predicted."
    ]
    off = [point["id"] for point in taken if is_off(point["predicted"], point["measured"])]
    if off:
        found.append(f"Predicted more than {100 * OFF:.0f} % off: {some(off, _MOST_ERRORS)}; they were measured again.")
    apart = [f"{point['id']} {100 * point['measured']['spread']:.0f} %" for point in taken if _scatters(point)]
    if apart:
        told = some(apart, _MOST_ERRORS)
        found.append(f"Other work disturbed what was measured, by: {told}. The best counts; --fresh measures again.")
    return found


def _scatters(point: Point) -> bool:
    return bool(point["measured"].get("spread", 0.0) > SCATTER)


def figure(value: float) -> str:
    """Three digits that count: "0.0123", "12.3", "123", "12300"."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def table(result: Result) -> tuple[list[str], list[list[str]]]:
    """The names of the columns, and a row for each plan of the front."""
    types, measured = several_types(result), any(point["measured"] for point in front(result))
    columns = ["id", "plan", "latency ms", f"{unit(result)}/s", "memory"]
    if types:
        columns.insert(2, "type")
    if measured:
        at = columns.index("latency ms")
        columns[at : at + 2] = ["latency ms", "measured", f"{unit(result)}/s", "measured"]
    rows = []
    for point in front(result):
        row = [point["id"] + (" *" if point["knee"] else ""), point["label"]]
        if types:
            row.append(point["type"] or "-")
        for what, scale in (("latency_s", 1e3), ("throughput_per_s", 1.0)):
            row.append(figure(scale * point["predicted"][what]))
            if measured:
                row.append(_measured(point, what, scale))
        rows.append([*row, _memory(point)])
    return columns, rows


def _measured(point: Point, what: str, scale: float) -> str:
    off = error(point, what)
    measured: Mapping[str, Any] = point["measured"] or {}
    return "-" if off is None else f"{figure(scale * measured[what])} ({100 * off:+.0f} %)"


def _memory(point: Point) -> str:
    """What is needed on the fullest device: as measured, where it was."""
    found = fullest(point["measured"] or {}) or fullest(point["predicted"])
    return "-" if found is None else bytes_text(found[1])
