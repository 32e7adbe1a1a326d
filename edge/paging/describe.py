"""Description of an engine's memory and of the cost of paging, for people."""

from __future__ import annotations

from edge.paging.memory import MemoryNeed
from edge.paging.plan import PagePlan
from edge.paging.stats import PassStats
from edge.paging.weights import PagedWeights
from quant.text import bytes_text


def memory_line(need: MemoryNeed, plan: PagePlan) -> str:
    """A budget part by part, and what is read for every token."""
    assert need.budget is not None
    parts = ", ".join(f"{name} {bytes_text(n)}" for name, n in need.parts.items() if n)
    line = f"{bytes_text(need.total)} of {bytes_text(need.budget)}: {parts}"
    if plan.streamed:
        line += f"; {bytes_text(plan.streamed_bytes)} of weights are read for every token"
    return line


def paging_rows(need: MemoryNeed, paging: PagedWeights | None) -> list[tuple[str, str]]:
    """(name, figures) of what the budget is used for and what paging took, for people; nothing without a budget."""
    if paging is None:
        return []
    rows = [("memory", memory_line(need, paging.plan))]
    if paging.plan.pages:
        stats = paging.stats()
        rows += [
            (name, _costs(kind)) for name, kind in (("decode", stats.decode), ("prefill", stats.prefill)) if kind.tokens
        ]
    return rows


def _costs(kind: PassStats) -> str:
    parts = [
        f"{bytes_text(round(kind.bytes_per_token))} read a token at {kind.disk_gbps:.2f} GB/s",
        f"{kind.stall_ms:.1f} ms waited for, {kind.compute_ms:.1f} ms computing, {kind.hidden_ms:.1f} ms of reading"
        " hidden behind that",
    ]
    if kind.hit_rate is not None:
        parts.append(f"{kind.hit_rate:.0%} of the experts were in memory")
    if kind.predicted_right is not None:
        parts.append(f"{kind.predicted_right:.0%} of those expected were chosen")
    return ", ".join(parts)
