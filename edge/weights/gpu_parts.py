"""GPU memory that a model needs in addition to its layers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from edge.errors import NotEnoughMemory
from edge.llama.llama import ContextSizes
from edge.weights.memory import MIB, context_parts
from edge.weights.roles import HEAD, TABLE
from partition.model.file import ModelFile
from partition.model.model import ModelShape, block_of
from partition.predict.residency import products_bytes

PRODUCTS = "products"
_COMPUTE = re.compile(r"(\S+) compute buffer size\s*=\s*([\d.]+) MiB")


def fixed_parts(file: ModelFile, sizes: ContextSizes, lines: Sequence[str], name: str) -> dict[str, int]:
    """Return the bytes by part that a GPU needs in addition to the layers. The driver's part is an upper bound.

    lines: llama.cpp's log of a dry run with all layers on the GPU.
    name: name of the GPU's buffers in that log.
    """
    outside = [t.n_bytes for t in file.tensors.values() if block_of(t.name) is None and t.name != TABLE]
    if HEAD not in file.tensors:
        outside.append(file.shape.head_bytes)  # copy of the token table
    compute = sum(float(m[2]) for line in lines if (m := _COMPUTE.search(line)) and m[1] == name)
    shape = file.shape
    widest = max(shape.n_embd, *shape.n_ff, shape.n_vocab if sizes.outputs > 1 else 0)
    return {
        "head": sum(outside),
        "KV cache": context_parts(lines)["KV cache"],
        "compute buffers": round(compute * MIB),
        PRODUCTS: products_bytes(sizes.batch, widest),
    }


def too_little(shape: ModelShape, parts: Mapping[str, int], budget: int, free: int | None) -> NotEnoughMemory:
    """Return the error for a budget, or free memory, that is too small for `parts`."""
    need, named = sum(parts.values()), ", ".join(f"{name} {n / MIB:,.0f}" for name, n in parts.items())
    have = f"the budget has {budget / MIB:,.0f}" + (f" and {free / MIB:,.0f} are free" if free is not None else "")
    return NotEnoughMemory(
        f"{shape.name} needs at least {need / MIB:,.0f} MiB of the GPU's memory ({named}), {have};"
        " use a smaller --context, --batch or --kv-type, or a larger --gpu-memory"
    )
