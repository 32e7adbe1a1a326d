"""Made-up results of `edge pareto --json`, for demonstrations and tests."""

import random
from typing import Any

GIB = 1 << 30
SPEEDS = {"local": 5.0, "laptop": 3.0, "pi": 1.0, "phone": 0.6, "attic-box": 2.2, "old-laptop": 1.4}
TYPES = {"q4_0": 1.0, "q5_0": 1.2, "q6_k": 1.4, "q8_0": 1.7}  # sizes
DIVERGENCES = {"q4_0": 0.042, "q5_0": 0.0131, "q6_k": 0.0049, "q8_0": 0.00071}


def pareto_result(
    n_points: int = 120,
    *,
    kind: str = "llm",
    types: tuple[str | None, ...] = ("q4_0",),
    devices: tuple[str, ...] = ("local", "laptop", "pi"),
    measured: int = 0,
    n_layers: int = 22,
    spread: float = 1.0,
    seed: int = 7,
    divergence: bool = False,
) -> dict[str, Any]:
    """The object, with so many plans of which the `measured` best ones of the front were measured.

    spread: latencies and throughputs differ by this factor more than they would. divergence: is an axis, too.
    """
    dice = random.Random(seed)
    unlike: dict[tuple[Any, ...], dict[str, Any]] = {}
    for i in range(8 * n_points):
        point = _point(dice, types, devices, n_layers, kind, spread, "" if i else "single")
        unlike.setdefault((point["label"], point["type"], point["microbatches"]), point)
        if len(unlike) == n_points:
            break
    points = list(unlike.values())
    for point in points:
        point["predicted"]["divergence"] = DIVERGENCES[point["type"]] if divergence else None
    seen: set[tuple[str, ...]] = set()
    for point in points:
        point["on_front"] = not any(_better(other, point) for other in points) and _figures(point) not in seen
        seen.add(_figures(point))
    points.sort(key=lambda point: (not point["on_front"], point["predicted"]["latency_s"]))
    on_front = [point for point in points if point["on_front"]]
    on_front[len(on_front) // 2]["knee"] = True
    for i, point in enumerate(points):
        point["id"] = f"p{i + 1}"
        if i < measured:
            point["measured"] = _measured(dice, point["predicted"])
    return {
        "format": "edge-pareto-1",
        "model": "edge-demo" if kind == "llm" else "mobilenetv2",
        "kind": kind,
        "objectives": ["latency_s", "throughput_per_s", *(["divergence"] if divergence else [])],
        "concurrency": 4,
        "exact": True,
        "devices": [
            {"name": name, "address": name, "estimate": name == "phone", "preset": False, "measured_age_s": 12.0}
            for name in devices
        ],
        "points": points,
    }


def _point(
    dice: random.Random,
    types: tuple[str | None, ...],
    devices: tuple[str, ...],
    n_layers: int,
    kind: str,
    spread: float,
    parallel: str = "",
) -> dict[str, Any]:
    if not parallel:
        kinds = ("pipeline", "pipeline", "pipeline", "tensor", "hybrid", "single")
        parallel = dice.choice(kinds) if len(devices) > 1 else "single"
    chosen = dice.sample(devices, 1 if parallel == "single" else dice.randint(2, len(devices)))
    if parallel == "hybrid" and len(chosen) < 3:
        parallel = "pipeline"
    groups = [chosen] if parallel in ("tensor", "single") else [[name] for name in chosen]
    if parallel == "hybrid":
        groups = [chosen[:2], *([name] for name in chosen[2:])]
    type_ = dice.choice(types)
    size = TYPES.get(str(type_), 1.0)
    rates = [sum(SPEEDS.get(name, 1.0) for name in group) for group in groups]
    cuts = _cuts(dice, rates, n_layers)
    stages, at = [], 0
    for group, rate, end in zip(groups, rates, [*cuts, n_layers], strict=True):
        what = f"layers {at}-{end - 1}" if kind == "llm" else f"nodes {at}-{end - 1}, up to features.{end}"
        compute = size * (end - at) / rate * 4e-3
        transfer = 4e-4 + (len(group) - 1) * 350e-6 * (end - at)
        memory = {name: int((end - at) / n_layers * size * 0.6 * GIB / len(group)) for name in group}
        stages.append(
            {"devices": group, "what": what, "compute_s": compute, "transfer_s": transfer, "memory_bytes": memory}
        )
        at = end
    latency = sum(stage["compute_s"] + stage["transfer_s"] for stage in stages)
    slowest = max(stage["compute_s"] + stage["transfer_s"] for stage in stages)
    microbatches = 1 if len(groups) == 1 else dice.choice((1, 2, 4))
    throughput = (1.3 if len(chosen) == 1 else 2) * microbatches / (latency + (microbatches - 1) * slowest)
    latency *= 1 + 0.05 * (microbatches - 1)  # type: ignore[assignment]
    label = " | ".join(f"{'+'.join(stage['devices'])} {stage['what'].split(',')[0]}" for stage in stages)  # type: ignore[attr-defined, misc]
    return {
        "id": "",
        "label": label,
        "type": type_,
        "parallel": parallel,
        "plan": None if chosen == ["local"] else {"format": "edge-plan-1", "stages": [s["what"] for s in stages]},
        "on_front": False,
        "knee": False,
        "microbatches": microbatches,
        "devices": chosen,
        "predicted": {
            "latency_s": latency**spread,
            "throughput_per_s": throughput**spread,
            "ttft_s": 12 * latency if kind == "llm" else None,
            "memory_bytes": {name: size for stage in stages for name, size in stage["memory_bytes"].items()},  # type: ignore[attr-defined]
            "energy_j": None,
            "bound": f"{groups[0][0]} computes {1e3 * slowest:.1f} ms of {1e3 * latency:.1f}",
            "stages": stages,
        },
        "measured": None,
        "error": None,
    }


def _cuts(dice: random.Random, rates: list[float], n_layers: int) -> list[int]:
    """Where stages end that have layers by their speed, more or less."""
    weights = [rate * dice.uniform(0.5, 1.6) for rate in rates]
    results: list[int] = []
    for i in range(1, len(weights)):
        expected = round(n_layers * sum(weights[:i]) / sum(weights))
        results.append(min(max(expected, len(results) and results[-1] + 1, i), n_layers - len(weights) + i))
    return results


def _measured(dice: random.Random, predicted: dict[str, Any]) -> dict[str, Any]:
    return {
        "latency_s": predicted["latency_s"] * dice.uniform(0.95, 1.15),
        "throughput_per_s": predicted["throughput_per_s"] * dice.uniform(0.85, 1.05),
        "memory_bytes": {name: int(size * 1.04) for name, size in predicted["memory_bytes"].items()},
    }


def _figures(point: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"{point['predicted'][what] or 0:.6g}" for what in ("latency_s", "throughput_per_s", "divergence"))


def _better(item: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether `one` dominates the other."""
    a, b = item["predicted"], other["predicted"]
    pairs = [(a["latency_s"], b["latency_s"]), (-a["throughput_per_s"], -b["throughput_per_s"])]
    pairs.append((a["divergence"] or 0, b["divergence"] or 0))
    return all(x <= y for x, y in pairs) and any(x < y for x, y in pairs)
