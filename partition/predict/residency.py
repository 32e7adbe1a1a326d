"""Choose the weights that stay in GPU memory, within a budget.

The other weights stay in host memory, where the CPU computes them or from where they are streamed through two buffers
on the GPU. Of those, `partition/predict/paging.py` chooses the weights that are read from disk for every token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

SLOTS = 2  # buffers: one layer computes while the next one arrives
_LEAST_STREAMED = 3  # minimum number of streamed layers; fewer would save no memory over the two buffers
_MOST_SUMS = 5_000  # sums that `fullest` tries; a model has few different sizes, so that far fewer suffice


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer."""

    dense: int  # weights that every token uses
    experts: int = 0  # weights of all experts; a token uses a share of them
    kv: int = 0  # KV cache


@dataclass(frozen=True)
class GpuPlacement:
    """Layers on a GPU. The KV cache of a layer is where its dense weights are."""

    dense: tuple[int, ...]  # layers whose dense weights are on the GPU: the last ones of the model
    experts: tuple[int, ...]  # layers among them whose experts are on the GPU, too

    def n_bytes(self, layers: Sequence[LayerBytes]) -> int:
        """Return the bytes of GPU memory that the placement takes."""
        return sum(layers[n].dense + layers[n].kv for n in self.dense) + sum(layers[n].experts for n in self.experts)

    def token_bytes(self, layers: Sequence[LayerBytes], expert_share: float) -> float:
        """Return the bytes of GPU memory that a token reads. expert_share: share of the experts that it uses."""
        dense = sum(layers[n].dense + layers[n].kv for n in self.dense)
        return dense + expert_share * sum(layers[n].experts for n in self.experts)


@dataclass(frozen=True)
class GpuBudget:
    """Split of a GPU memory budget."""

    budget: int  # bytes
    parts: Mapping[str, int]  # bytes by purpose
    streamed: tuple[int, ...]  # layers that pass through the buffers
    processor_rows: int = 0  # in a pass of at most this many rows, the CPU computes the streamed layers
    processor_experts: tuple[int, ...] = ()  # layers on the GPU whose experts the CPU computes

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON, as described in docs/cli/chat.md."""
        return {
            "budget_bytes": self.budget,
            "total_bytes": sum(self.parts.values()),
            "parts": dict(self.parts),
            "streamed_layers": list(self.streamed),
            "processor_rows": self.processor_rows,
            "processor_experts": list(self.processor_experts),
        }


def place_on_gpu(layers: Sequence[LayerBytes], room: int, expert_share: float = 1.0) -> GpuPlacement:
    """Return the placement within `room` bytes that lets a token read as many bytes as possible from the GPU.

    llama.cpp keeps the last layers of a model on a GPU, so the dense weights of the others stay in host memory. The
    experts of any of these layers may be on the GPU, all experts of a layer together, because they are one tensor.

    expert_share: share of a layer's experts that a token uses. Every token uses all dense weights, so these come first.
    """
    room_for_dense = [
        room - sum(layer.dense + layer.kv for layer in layers[first:]) for first in range(len(layers) + 1)
    ]
    best = GpuPlacement((), ())
    for first, left in enumerate(room_for_dense):
        dense = tuple(range(first, len(layers)))
        most = GpuPlacement(dense, ()).token_bytes(layers, expert_share) + expert_share * left
        if left < 0 or most <= best.token_bytes(layers, expert_share):
            continue
        chosen = fullest([layers[n].experts for n in dense], left)
        placement = GpuPlacement(dense, tuple(dense[i] for i in chosen if layers[dense[i]].experts))
        if placement.token_bytes(layers, expert_share) > best.token_bytes(layers, expert_share):
            best = placement
    return best


def fullest(sizes: Sequence[int], room: int) -> list[int]:
    """Return the indices of the sizes whose sum is the largest within `room`, in order.

    The search is exact if it ends within `_MOST_SUMS` sums, and the best sum until then otherwise.
    """
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], -i))
    rest = [0, *accumulate(sizes[i] for i in reversed(order))][::-1]  # sum of the sizes from a place in the order on
    best, best_sum, tried = list[int](), 0, 0
    stack: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]  # place in the order, sum, chosen indices
    while stack and tried < _MOST_SUMS and best_sum < min(room, rest[0]):
        place, total, chosen = stack.pop()
        tried += 1
        if total > best_sum:
            best, best_sum = sorted(chosen), total
        if place == len(order) or total + rest[place] <= best_sum:
            continue
        size = sizes[order[place]]
        other = next((p for p in range(place, len(order)) if sizes[order[p]] != size), len(order))
        stack.append((other, total, chosen))  # without this size: equal sizes give equal sums
        if total + size <= room:
            stack.append((place + 1, total + size, (*chosen, order[place])))
    return best


def share_out(layer_bytes: Mapping[int, int], room: int) -> tuple[int, ...] | None:
    """Choose the layers to stream, as few as possible, so that the other layers and the buffers fit into `room` bytes.

    Streamed layers are spread evenly, so that each has equal time to arrive. Return () if all layers fit, or None if
    the buffers do not fit.
    """
    layers, total = sorted(layer_bytes), sum(layer_bytes.values())
    if total <= room:
        return ()
    buffers = SLOTS * max(layer_bytes.values(), default=0)
    for count in range(min(_LEAST_STREAMED, len(layers)), len(layers) + 1):
        streamed = tuple(layers[(2 * i + 1) * len(layers) // (2 * count)] for i in range(count))
        if total - sum(layer_bytes[layer] for layer in streamed) + buffers <= room:
            return streamed
    return None
