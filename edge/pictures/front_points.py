"""Plans of a front from its JSON object: selection, order and figures for charts, pages and tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edge.planning.measuring import OFF, SCATTER, is_off
from partition.predict.objectives import OBJECTIVES, Objective
from quant.front import non_dominated
from quant.text import bytes_text

Point = Mapping[str, Any]  # one entry of "points"
Result = Mapping[str, Any]  # the object of `edge pareto --json`

KNEE = "beyond it, a little more of one costs much of the other"
DOMINATED = "no better in anything, worse in some"
_MOST_ERRORS = 5  # maximum number of listed errors
_ALWAYS = ("latency_s", "throughput_per_s", "memory_bytes")  # columns of every table
TTFT = "ttft_s"  # key of the time to first token
LOG_FROM = 20  # an axis is logarithmic if its values span more than this factor
# Dominated plans are drawn if they are at most _NEAR times worse than the prominent plans, or within a range that is
# _WIDER times as wide. Prominent plans then take up a good part of the chart.
_NEAR, _WIDER = 1.25, 2.2


def front(result: Result) -> list[Point]:
    """Return the plans on the front by latency. Measured values are used if available."""
    return in_order(point for point in result["points"] if point["on_front"])


def dominated(result: Result) -> list[Point]:
    """Return the plans that are not on the front, by latency."""
    return in_order(point for point in result["points"] if not point["on_front"])


def in_order(points: Iterable[Point]) -> list[Point]:
    """Return the plans by latency. Among equal latencies, the highest throughput comes first."""
    return sorted(points, key=_place)


def _place(point: Point) -> tuple[float, float]:
    """Return a plan's latency and negated throughput, so that smaller is better for both."""
    return latency_s(point), -throughput(point)


def visible_plans(result: Result) -> tuple[list[Point], list[Point]]:
    """Return the prominent plans (the front, measured plans, the best single device) and dominated plans near them."""
    single = best_single(result)
    shown = in_order(point for point in result["points"] if point["on_front"] or point["measured"] or point is single)
    latencies, throughputs = [latency_s(point) for point in shown], [throughput(point) for point in shown]
    most = max(max(latencies) * _NEAR, min(latencies) + _WIDER * (max(latencies) - min(latencies)))
    least = min(min(throughputs) / _NEAR, max(throughputs) - _WIDER * (max(throughputs) - min(throughputs)))
    others = [point for point in dominated(result) if not any(point is other for other in shown)]
    return shown, [point for point in others if throughput(point) >= least and latency_s(point) <= most]


def staircase(points: Iterable[Point]) -> list[Point]:
    """Return the plans that are non-dominated in latency and throughput alone, by latency. They form the chart's line.

    A front of more than these two objectives has additional plans.
    """
    return non_dominated(points, _place)


def line(result: Result) -> list[Point]:
    """Return the corners of the chart's line: of the measured plans on the front if there are any, else of all."""
    on_front = front(result)
    return staircase([point for point in on_front if point["measured"]] or on_front)


def best_single(result: Result) -> Point | None:
    """Return the single-device plan with the least latency, or None.

    A plan with a separate prefill placement uses other devices for prompts, so it does not count.
    """
    alone = (point for point in result["points"] if point["parallel"] == "single" and len(point["devices"]) == 1)
    return next(iter(in_order(alone)), None)


def knee(result: Result) -> Point | None:
    """Return the knee of the front, or None."""
    return next((point for point in front(result) if point["knee"]), None)


def roles(result: Result) -> dict[str, list[str]]:
    """Return role names by plan id: the knee, the best single device, and the ends of the line."""
    corners = line(result)
    named: list[tuple[str, Point | None]] = [
        ("knee", knee(result)),
        ("best single device", best_single(result)),
        ("least latency", corners[0]),
        ("soonest first token" if of_first_tokens(result) else "most throughput", corners[-1]),
    ]
    if len(front(result)) == 1:
        named = [named[1], ("best in both", corners[0])]
    by_id: dict[str, list[str]] = {}
    for role, point in named:
        if point is not None:
            by_id.setdefault(point["id"], []).append(role)
    return by_id


def of_first_tokens(result: Result) -> bool:
    """Return whether TTFT is an objective of the front and throughput is not."""
    return TTFT in result["objectives"] and "throughput_per_s" not in result["objectives"]


def by_first_token(result: Result) -> Result:
    """Return the object with first tokens per second instead of throughput, so that more is better."""

    def changed(figures: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        return figures and {**figures, "throughput_per_s": 1 / figures[TTFT]}

    points = [
        {**point, "predicted": changed(point["predicted"]), "measured": changed(point["measured"])}
        for point in result["points"]
    ]
    return {**result, "points": points}


def latency_s(point: Point) -> float:
    """Return the latency in seconds: measured if available, else predicted."""
    return float((point.get("measured") or point["predicted"])["latency_s"])


def throughput(point: Point) -> float:
    """Return tokens or inputs per second: measured if available, else predicted."""
    return float((point.get("measured") or point["predicted"])["throughput_per_s"])


def fullest(figures: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the device on which a plan needs the most memory, and the bytes, or None if unknown."""
    needed: Mapping[str, int] = figures.get("memory_bytes") or {}
    return max(needed.items(), key=lambda need: (need[1], need[0]), default=None)


def relative_error(point: Point, what: str) -> float | None:
    """Return the relative error of the predicted `what` (latency_s, throughput_per_s), or None without a measurement.

    The error is positive if the prediction is above the measurement.
    """
    measured = (point.get("measured") or {}).get(what)
    return point["predicted"][what] / measured - 1 if measured else None


def several_types(result: Result) -> list[str]:
    """Return the types of the plans by divergence, or an empty list if there is only one type."""
    divergences = {str(point["type"]): _divergence(point) for point in result["points"] if point["type"] is not None}
    return sorted(divergences, key=divergences.__getitem__) if len(divergences) > 1 else []


def has_quality(result: Result) -> bool:
    """Return whether divergence is an objective of the front and the plans have several types."""
    return "divergence" in result["objectives"] and bool(several_types(result))


def type_label(result: Result, type_: str) -> str:
    """Return a type's name, with its divergence if that was measured."""
    divergence = next(_divergence(point) for point in result["points"] if str(point["type"]) == type_)
    return f"{type_}: {figure(divergence)} nats" if math.isfinite(divergence) else type_


def _divergence(point: Point) -> float:
    """Return the divergence of a plan's type in nats per token, or infinity if it was not measured."""
    value = point["predicted"].get("divergence")
    return math.inf if value is None else float(value)


def _nats(kind: Mapping[str, Any]) -> str:
    """Describe the divergence of an entry of "types"."""
    return "not finite" if kind["divergence"] is None else f"{figure(kind['divergence'])} nats a token"


def lines(result: Result) -> dict[str, list[Point]]:
    """Return the corners of the chart's line by type name, if divergence is an objective. Otherwise return an empty
    dict."""
    by_kind = {}
    for type_ in several_types(result) if has_quality(result) else ():
        points = [point for point in result["points"] if str(point["type"]) == type_]
        by_kind[type_] = line({**result, "points": points})
    return {type_: corners for type_, corners in by_kind.items() if corners}


def names(result: Result) -> list[str]:
    """Return the device names. Devices with preset figures are marked as estimates."""
    return [device["name"] + (" (estimate)" if device["estimate"] else "") for device in result["devices"]]


def first_few(words: Sequence[str], most: int) -> str:
    """Return the first words separated by commas, and the number of further words."""
    more = len(words) - most
    return ", ".join(words[:most]) + (f" and {more} more" if more > 0 else "")


def unit(result: Result) -> str:
    """Return the unit of throughput."""
    return "tokens" if result["kind"] == "llm" else "inputs"


def notes(result: Result) -> list[str]:
    """Return notes about a front, one sentence each."""
    sentences = []
    if knee(result) is not None:
        sentences.append(f"* the knee: {KNEE}.")
    if any(point["measured"] for point in front(result)):
        sentences.append("In brackets: by how much the prediction is above the measurement.")
    if any(len(point["devices"]) > 1 for point in front(result)):
        sentences.append("Memory is that of the device which needs the most.")
    sentences += _of_measuring(result)
    n = len(dominated(result))
    if n:
        sentences.append(f"{n} other {'plan is' if n == 1 else 'plans are'} dominated: {DOMINATED}.")
    if not result["exact"]:
        sentences.append("Not all plans were looked at: there may be better ones.")
        if result.get("pairs_gap"):
            within = f"{100 * result['pairs_gap']:.1f} %"
            sentences.append(f"With a placement for prompts, first tokens are within {within} of the soonest possible.")
        if result.get("replicas_gap"):
            within = f"{100 * result['replicas_gap']:.1f} %"
            sentences.append(f"With several copies, throughputs are within {within} of the largest possible.")
    left_out = [f"{kind['type']} ({_nats(kind)})" for kind in result.get("types", ()) if kind["left_out"]]
    if left_out:
        sentences.append(f"Left out by the limit of divergence: {first_few(left_out, _MOST_ERRORS)}.")
    if has_quality(result):
        sentences.append("Divergence: mean KL of the type's predictions from the model's, measured on text.")
    estimated = [device["name"] for device in result["devices"] if device["estimate"]]
    if estimated:
        sentences.append(f"Estimated, not measured: {', '.join(estimated)}.")
    failed = [point for point in result["points"] if point["error"]]
    sentences += [f"{point['id']} could not be measured: {point['error']}" for point in failed[:_MOST_ERRORS]]
    if len(failed) > _MOST_ERRORS:
        sentences.append(f"{len(failed) - _MOST_ERRORS} more could not be measured.")
    return sentences


def _of_measuring(result: Result) -> list[str]:
    """Return notes about the measurements and their reliability."""
    measured = [point for point in result["points"] if point["measured"]]
    if not measured:
        return []
    n = len(measured)
    sentences = [
        f"Front and knee are those of the {n} measured {'plan' if n == 1 else 'plans'}; others are only predicted."
    ]
    off = [point["id"] for point in measured if is_off(point["predicted"], point["measured"])]
    if off:
        sentences.append(
            f"Predicted more than {100 * OFF:.0f} % off: {first_few(off, _MOST_ERRORS)}; they were measured again."
        )
    scattered = [point for point in measured if point["measured"].get("spread", 0.0) > SCATTER]
    apart = [f"{point['id']} {100 * point['measured']['spread']:.0f} %" for point in scattered]
    if apart:
        spreads = first_few(apart, _MOST_ERRORS)
        sentences.append(
            f"Other work disturbed measurements, by: {spreads}. The best run counts; --fresh measures again."
        )
    return sentences


def figure(value: float) -> str:
    """Return a number with three significant digits: "0.0123", "12.3", "123", "12300"."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def table(result: Result) -> tuple[list[str], list[list[str]]]:
    """Return the column names and a row for each plan of the front."""
    types, measured = several_types(result), any(point["measured"] for point in front(result))
    further = [row for row in OBJECTIVES.values() if row.key in result["objectives"] and row.key not in _ALWAYS]
    columns = [
        "id",
        "plan",
        "latency ms",
        f"{unit(result)}/s",
        *(f"{row.label} {row.unit.split()[0]}" for row in further),
        "memory",
    ]
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
        rows.append([*row, *(_further(point, objective) for objective in further), _memory(point)])
    return columns, rows


def _further(point: Point, objective: Objective) -> str:
    """Return the value of another objective: measured if available, else predicted."""
    value = (point["measured"] or {}).get(objective.key, point["predicted"].get(objective.key))
    return "-" if value is None else figure(objective.scale * objective.figure(value))


def _measured(point: Point, what: str, scale: float) -> str:
    off = relative_error(point, what)
    measured: Mapping[str, Any] = point["measured"] or {}
    return "-" if off is None else f"{figure(scale * measured[what])} ({100 * off:+.0f} %)"


def _memory(point: Point) -> str:
    """Return the memory on the fullest device: measured if available, else predicted."""
    need = fullest(point["measured"] or {}) or fullest(point["predicted"])
    return "-" if need is None else bytes_text(need[1])
