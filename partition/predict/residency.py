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
SPARE_BYTES = 512 << 20  # GPU memory for the driver and for rounding, which a device's own choice leaves free
_PRODUCTS_BYTES = 64 << 20  # driver memory, in addition to the rows of a pass
_ROW_COPIES = 4  # driver memory in copies of the widest row of a product, as floats
_LEAST_STREAMED = 3  # minimum number of streamed layers; fewer would save no memory over the two buffers
MOST_SUMS = 5_000  # sums that `fullest` tries; a model has few different sizes, so that far fewer suffice


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


def products_bytes(batch: int, widest: int) -> int:
    """Return an upper bound of the driver's memory for passes of `batch` rows. widest: values of a product's row."""
    return _PRODUCTS_BYTES + _ROW_COPIES * 4 * batch * widest


def fixed_bytes(batch: int, widest: int) -> int:
    """Return the GPU memory that a model takes beside layers, KV cache and head, estimated before it is loaded.

    llama.cpp's compute buffers are assumed to be as large as the driver's memory for products.
    """
    return SPARE_BYTES + 2 * products_bytes(batch, widest)


def place_on_gpu(
    layers: Sequence[LayerBytes], room: int, expert_share: float = 1.0, first_layer: int = 0
) -> GpuPlacement:
    """Return the placement within `room` bytes that lets a token read as many bytes as possible from the GPU.

    llama.cpp keeps the last layers of a model on a GPU, so the dense weights of the others stay in host memory. The
    experts of any of these layers may be on the GPU, all experts of a layer together, because they are one tensor.

    expert_share: share of a layer's experts that a token uses. Every token uses all dense weights, so these come first.
    first_layer: layers before this one stay in host memory.
    """
    dense_bytes = [0, *accumulate(layer.dense + layer.kv for layer in reversed(layers))][::-1]  # from a layer on
    expert_bytes = [0, *accumulate(layer.experts for layer in reversed(layers))][::-1]
    best, best_read = GpuPlacement((), ()), 0.0
    for first, (of_dense, of_experts) in enumerate(zip(dense_bytes, expert_bytes, strict=True)):
        left = room - of_dense
        if left < 0 or first < first_layer:
            continue
        if of_dense + expert_share * min(left, of_experts) <= best_read:
            break  # fewer dense weights can only be worse
        dense = tuple(range(first, len(layers)))
        chosen = fullest([layers[n].experts for n in dense], left) if of_experts else []
        placement = GpuPlacement(dense, tuple(dense[i] for i in chosen if layers[dense[i]].experts))
        read = placement.token_bytes(layers, expert_share)
        if read > best_read:
            best, best_read = placement, read
    return best


def fullest(sizes: Sequence[int], room: int) -> list[int]:
    """Return the indices of the sizes whose sum is the largest within `room`, in order.

    All counts of the rarest sizes are tried. As many as fit of the most frequent size are then the best. The search is
    exact if it ends within `MOST_SUMS` sums, and the best sum until then otherwise.
    """
    equal: dict[int, list[int]] = {}
    for i in range(len(sizes) - 1, -1, -1):
        equal.setdefault(sizes[i], []).append(i)
    kinds = sorted(equal, key=lambda size: (len(equal[size]), -size))
    rest = [0, *accumulate(size * len(equal[size]) for size in reversed(kinds))][::-1]  # sum of this and later sizes
    best: tuple[int, ...] = ()
    best_sum = tried = 0
    stack: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]  # kind, sum, count of each kind before
    while stack and tried < MOST_SUMS and best_sum < min(room, rest[0]):
        kind, total, counts = stack.pop()
        tried += 1
        if total > best_sum:
            best, best_sum = counts, total
        if kind == len(kinds) or total + rest[kind] <= best_sum:
            continue
        size = kinds[kind]
        most = min(len(equal[size]), (room - total) // size) if size else 0
        least = most if kind + 1 == len(kinds) else 0
        stack += [(kind + 1, total + n * size, (*counts, n)) for n in range(least, most + 1)]  # most of them first
    return sorted(i for size, n in zip(kinds, best, strict=False) for i in equal[size][:n])


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
