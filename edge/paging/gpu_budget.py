"""Division of a budget of a GPU's memory: which layers stay there, and which pass through two buffers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge.errors import NotEnoughMemory
from edge.llama.llama import ContextSizes
from edge.paging.layer_stream import SLOTS
from edge.paging.memory import MIB, context_parts
from partition.model.model import ModelShape, block_of
from quant.gguf.file import GgufFile

BUFFERS, PRODUCTS = "two buffers", "products"
MARGIN_BYTES = 16 * MIB  # for passes that take more for their products than the first one
_TABLE, _HEAD = "token_embd.weight", "output.weight"
_COMPUTE = re.compile(r"(\S+) compute buffer size\s*=\s*([\d.]+) MiB")
_PRODUCTS_BYTES = 64 * MIB  # a driver's, beside the rows of a pass
_ROW_COPIES = 4  # a driver's, in floats, of the widest row of a product
_LEAST_STREAMED = 3  # layers: one or two would take no less than the two buffers


@dataclass(frozen=True)
class GpuBudget:
    """Division of a budget of a GPU's memory."""

    budget: int  # bytes
    parts: Mapping[str, int]  # bytes by part
    streamed: tuple[int, ...]  # layers that pass through the buffers
    least_rows: int  # of a pass that brings them there; in smaller ones the processor computes them

    def to_json(self) -> dict[str, Any]:
        """Plain values, as docs/cli/chat.md says."""
        return {
            "budget_bytes": self.budget,
            "total_bytes": sum(self.parts.values()),
            "parts": dict(self.parts),
            "streamed_layers": list(self.streamed),
            "streamed_from_rows": self.least_rows,
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


def fixed_parts(
    file: GgufFile, shape: ModelShape, sizes: ContextSizes, lines: Sequence[str], name: str
) -> dict[str, int]:
    """Return the bytes by part that a GPU needs beside the layers. lines: llama.cpp's log of a dry run with all layers
    there. name: of the GPU's buffers in it. The driver's part is an upper bound."""
    outside = [t.n_bytes for t in file.tensors.values() if block_of(t.name) is None and t.name != _TABLE]
    if _HEAD not in file.tensors:
        outside.append(shape.head_bytes)  # a copy of the token table
    compute = sum(float(m[2]) for line in lines if (m := _COMPUTE.search(line)) and m[1] == name)
    widest = max(shape.n_embd, *shape.n_ff, shape.n_vocab if sizes.outputs > 1 else 0)
    return {
        "head": sum(outside),
        "KV cache": context_parts(lines)["KV cache"],
        "compute buffers": round(compute * MIB),
        PRODUCTS: _PRODUCTS_BYTES + _ROW_COPIES * 4 * sizes.batch * widest,
    }


def too_little(shape: ModelShape, parts: Mapping[str, int], budget: int, free: int | None) -> NotEnoughMemory:
    """Return the error of a budget, or of free memory, that has no room for `parts`."""
    need, named = sum(parts.values()), ", ".join(f"{name} {n / MIB:,.0f}" for name, n in parts.items())
    have = f"the budget has {budget / MIB:,.0f}" + (f" and {free / MIB:,.0f} are free" if free is not None else "")
    return NotEnoughMemory(
        f"{shape.name} needs at least {need / MIB:,.0f} MiB of the GPU's memory ({named}), {have};"
        " use a smaller --context, --batch or --kv-type, or a larger --gpu-memory"
    )
