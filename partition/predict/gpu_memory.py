"""Split a GPU memory budget between layers that stay on the GPU and layers that are streamed through two buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SLOTS = 2  # buffers: one layer computes while the next one arrives
_LEAST_STREAMED = 3  # minimum number of streamed layers; fewer would save no memory over the two buffers


@dataclass(frozen=True)
class GpuBudget:
    """Split of a GPU memory budget."""

    budget: int  # bytes
    parts: Mapping[str, int]  # bytes by purpose
    streamed: tuple[int, ...]  # layers that pass through the buffers
    processor_rows: int = 0  # in a pass of at most this many rows, the CPU computes the streamed layers

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON, as described in docs/cli/chat.md."""
        return {
            "budget_bytes": self.budget,
            "total_bytes": sum(self.parts.values()),
            "parts": dict(self.parts),
            "streamed_layers": list(self.streamed),
            "processor_rows": self.processor_rows,
        }


def share_out(layer_bytes: Mapping[int, int], room: int) -> tuple[int, ...] | None:
    """Choose the layers to stream, as few as possible, so that the other layers and the buffers fit into `room` bytes.

    Streamed layers are spread evenly, so that each has equal time to arrive. Return () if all layers fit, or None if
    the buffers do not fit.
    """
    layers, total = sorted(layer_bytes), sum(layer_bytes.values())
    if total <= room:
        return ()
    buffers = SLOTS * max(layer_bytes.values())
    for count in range(min(_LEAST_STREAMED, len(layers)), len(layers) + 1):
        streamed = tuple(layers[(2 * i + 1) * len(layers) // (2 * count)] for i in range(count))
        if total - sum(layer_bytes[layer] for layer in streamed) + buffers <= room:
            return streamed
    return None
