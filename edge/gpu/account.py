"""Account of a budget of a GPU's memory: what is needed beside the layers, before any is there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from edge.errors import NotEnoughMemory
from edge.llama.llama import ContextSizes
from edge.paging.memory import MIB, context_parts
from partition.model.model import ModelShape, block_of
from quant.gguf.file import GgufFile

BUFFERS, PRODUCTS = "two buffers", "products"
MARGIN_BYTES = 16 * MIB  # for passes that take more for their products than the first one
_TABLE, _HEAD = "token_embd.weight", "output.weight"
_COMPUTE = re.compile(r"(\S+) compute buffer size\s*=\s*([\d.]+) MiB")
_PRODUCTS_BYTES = 64 * MIB  # a driver's, beside the rows of a pass
_ROW_COPIES = 4  # a driver's, in floats, of the widest row of a product


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
