"""How plans are shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from quant.text import bytes_text, counted, ms_text, seconds_text, with_article

if TYPE_CHECKING:
    from partition.predict.prediction import Prediction

COLUMNS = ("stage", "device", "holds", "computes", "then sends", "memory")


def stage_rows(predicted: Prediction, names: Mapping[str, str]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns, and a row for each stage."""
    rows: list[tuple[str, ...]] = []
    for i, stage in enumerate(predicted.stages):
        sums = f", {ms_text(1e3 * stage.sums_s)} of it sums" if stage.sums_s else ""
        paged = f", pages {bytes_text(stage.paged_bytes)}" if stage.paged_bytes else ""
        memory = " + ".join(bytes_text(n) for n in stage.memory_bytes.values())
        rows.append(
            (
                str(i),
                " + ".join(names.get(device, device) for device in stage.devices),
                stage.what,
                f"{seconds_text(stage.compute_s)}{sums}",
                seconds_text(stage.transfer_s),
                f"{memory}{paged}",
            )
        )
    return COLUMNS, rows


def prediction_rows(predicted: Prediction, names: Mapping[str, str]) -> list[tuple[str, str]]:
    """What the whole plan is predicted to do."""
    unit = "token" if predicted.ttft_s is not None else "input"
    many = f"{predicted.in_flight} in flight"
    if predicted.ttft_s is not None:
        many = f"{counted(predicted.in_flight, 'request')} in {counted(predicted.microbatches, 'microbatch')}"
    rows = [
        ("latency", f"{seconds_text(predicted.latency_s)} {with_article(unit)}, one alone"),
        ("throughput", f"{predicted.throughput_per_s:.3g} {unit}s/s with {many}"),
    ]
    if predicted.draft is not None:
        draft = predicted.draft
        told = f"{draft}: {draft.tokens:.2f} tokens a pass; {seconds_text(predicted.plain_s)} a token without"
        rows.append(("guesses", told))
    if predicted.ttft_s is not None:
        rows.append(("first token", f"{predicted.ttft_s:.3g} s after a prompt of {predicted.prompt} tokens"))
    if predicted.energy_j is not None:
        rows.append(("energy", f"{predicted.energy_j:.3g} J {with_article(unit)}"))
    from edge.planning.describe import bound_text

    return [*rows, ("bound", bound_text(predicted, names))]


def unit_text(objective: str, value: float | None) -> str:
    """An objective as a person reads it; None: still nothing fits."""
    if value is None:
        return "no plan either"
    if objective in ("latency", "throughput"):
        return f"{seconds_text(value)} a token or an input" + (
            f" ({1 / value:.3g}/s)" if objective == "throughput" else ""
        )
    return {"ttft": f"{value:.3g} s", "memory": bytes_text(round(value)), "energy": f"{value:.3g} J"}[objective]
