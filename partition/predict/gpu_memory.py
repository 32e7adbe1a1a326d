"""Division of a budget of a GPU's memory: which layers stay there, and which pass through two buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SLOTS = 2  # one layer computes while the next arrives
_LEAST_STREAMED = 3  # layers: one or two would take no less than the two buffers


@dataclass(frozen=True)
class GpuBudget:
    """Division of a budget of a GPU's memory."""

    budget: int  # bytes
    parts: Mapping[str, int]  # bytes by part
    streamed: tuple[int, ...]  # layers that pass through the buffers
    processor_rows: int = 0  # in a pass of so many rows or fewer the processor computes those

    def to_json(self) -> dict[str, Any]:
        """Plain values, as docs/cli/chat.md says."""
        return {
            "budget_bytes": self.budget,
            "total_bytes": sum(self.parts.values()),
            "parts": dict(self.parts),
            "streamed_layers": list(self.streamed),
            "processor_rows": self.processor_rows,
        }


def share_out(layer_bytes: Mapping[int, int], room: int) -> tuple[int, ...] | None:
    """Choose the layers to stream: as few as fit into `room` bytes with the others and the buffers, and evenly between
    them, so that each has as long to arrive. (): all can stay. None: there is no room for the buffers."""
    layers, total = sorted(layer_bytes), sum(layer_bytes.values())
    if total <= room:
        return ()
    buffers = SLOTS * max(layer_bytes.values())
    for count in range(min(_LEAST_STREAMED, len(layers)), len(layers) + 1):
        streamed = tuple(layers[(2 * i + 1) * len(layers) // (2 * count)] for i in range(count))
        if total - sum(layer_bytes[layer] for layer in streamed) + buffers <= room:
            return streamed
    return None
