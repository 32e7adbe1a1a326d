"""Step times of every rank, as rows of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge.parallel.step_times import Figure, Summary

NAMES = ("rank", "device", "kind", "steps", "compute ms", "communication ms", "stall ms", "sent kB", "received kB")
NOTE = "Times are median / 99th percentile of a step, kB the median. Stalls are waits for other ranks."
WHOLE = ("rank", "device", "kind", "steps")  # columns that are not broken into lines


def rows(names: Sequence[str], times: Sequence[Mapping[str, Summary]]) -> list[tuple[str, ...]]:
    """Return a row for each rank and each kind of step that it computed."""
    table: list[tuple[str, ...]] = []
    for rank, (name, kinds) in enumerate(zip(names, times, strict=True)):
        for kind in ("decode", "prefill"):
            if kind not in kinds:
                continue
            by_rank = kinds[kind]
            figures = (_ms(by_rank.compute_ms), _ms(by_rank.communication_ms), _ms(by_rank.stall_ms))
            moved = (f"{by_rank.sent_bytes.median / 1e3:.1f}", f"{by_rank.received_bytes.median / 1e3:.1f}")
            table.append((str(rank), name, kind, str(by_rank.steps), *figures, *moved))
    return table


def slowest_text(names: Sequence[str], times: Sequence[Mapping[str, Summary]]) -> list[str]:
    """Return a sentence on the rank with the longest decode step, or [] if no rank has decoded."""
    decoding = [(rank, kinds["decode"]) for rank, kinds in enumerate(times) if "decode" in kinds]
    if not decoding:
        return []
    rank, decode = max(decoding, key=lambda pair: pair[1].compute_ms.median)
    computes, communicates = decode.compute_ms.median, decode.communication_ms.median
    return [
        f"rank {rank} ({names[rank]}) computes the longest, {computes:.2f} ms, and communicates for"
        f" {communicates:.2f} ms"
    ]


def _ms(figure: Figure) -> str:
    return f"{figure.median:.2f} / {figure.p99:.2f}"
