"""Memory need of a model, part by part, before it is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from devices.probe import available_memory, own_rss
from edge.errors import EngineError, NotEnoughMemory
from edge.llama import llama
from edge.llama.hooks import Hook
from edge.llama.llama import ContextSizes
from edge.weights.adapter_file import AdapterFile
from partition.model.model import ModelShape
from quant.gguf.file import GgufFile
from quant.types import CacheType

MIB = 1 << 20
_COMPUTE = re.compile(r"compute buffer size\s*=\s*([\d.]+) MiB")
_OUTPUT = re.compile(r"output buffer size\s*=\s*([\d.]+) MiB")
_CACHE = re.compile(r"(?:llama_kv_cache|llama_memory_recurrent)\w*: size\s*=\s*([\d.]+) MiB")

# Compute and output buffers stay well below this where `_ample` says so; all else is measured.
AMPLE_BUFFERS_BYTES = 2 << 30


@dataclass(frozen=True)
class LoadRequest:
    """A model that is to be loaded, with a context, in whichever way."""

    file: GgufFile
    shape: ModelShape
    sizes: ContextSizes  # of the context; under a budget its batch may become smaller
    threads: int
    adapters: Sequence[AdapterFile]
    repack: bool | None  # None: where there is room for copies
    generates: bool  # False: it only embeds
    new_batch: Callable[[int], llama.Batch]  # makes a batch of so many rows, as the model takes them
    hooks: Sequence[Hook]
    progress: Callable[[float], None] | None  # called with the fraction of the weights that is loaded


@dataclass(frozen=True)
class MemoryNeed:
    """Memory need by part, in bytes, and the memory that is available."""

    parts: dict[str, int]  # "weights", "KV cache", "compute buffers", "output buffer", "runtime"; more under a budget
    available: int  # bytes a new allocation could have now; under a budget, all of it
    budget: int | None = None  # bytes that the whole process may hold

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def allocated(self) -> int:
        """Bytes that must be in memory; mapped weights may be read from the file again, slowly."""
        return self.total - self.parts.get("weights", 0) - self.parts["runtime"]

    @property
    def fits(self) -> bool:
        """True if there is room for everything that is not in memory already."""
        if self.budget is not None:
            return self.total <= self.budget
        return self.total - self.parts["runtime"] <= self.available


def need(path: str | os.PathLike[str], sizes: ContextSizes) -> MemoryNeed:
    """Ask llama.cpp itself, by a dry run that reads only the metadata: exact for every architecture it knows.

    EngineError if llama.cpp refuses the file or the options. The file must have been checked before.
    """
    weights, lines = dry_run(path, sizes)
    parts = {"weights": weights, **context_parts(lines), **_adapters(sizes), "runtime": own_rss()}
    return MemoryNeed(parts, available_memory())


def dry_run(path: str | os.PathLike[str], sizes: ContextSizes, gpu_layers: int = 0) -> tuple[int, list[str]]:
    """(bytes of weights, what llama.cpp logs) of loading a model and making a context without taking their memory."""
    with (
        llama.captured_log() as lines,
        closing(llama.Model(path, allocate=False, gpu_layers=gpu_layers, predictors=sizes.predicts)) as model,
    ):
        llama.Context(model, replace(sizes, batch=min(sizes.batch, sizes.context))).close()
        return model.n_bytes, lines


def context_parts(lines: Sequence[str]) -> dict[str, int]:
    """Bytes by part that llama.cpp said it takes for a context, in what it logged while making one."""

    def total(pattern: re.Pattern[str]) -> int:
        return round(sum(float(match[1]) for line in lines if (match := pattern.search(line))) * MIB)

    return {"KV cache": total(_CACHE), "compute buffers": total(_COMPUTE), "output buffer": total(_OUTPUT)}


def check(path: str | os.PathLike[str], shape: ModelShape, sizes: ContextSizes) -> MemoryNeed:
    """The need of a model about to be loaded. NotEnoughMemory, with need and have, where what must be allocated has
    no room.

    Where an upper bound fits, that is returned, because the dry run takes as long as loading the vocabulary.
    """
    kv_bytes = cache_bytes(shape, sizes.context, sizes.kv)
    bound = MemoryNeed(
        {
            "weights": shape.weight_bytes,
            "KV cache": kv_bytes,
            "compute buffers": AMPLE_BUFFERS_BYTES,
            "output buffer": 0,
            **_adapters(sizes),
            "runtime": own_rss(),
        },
        available_memory(),
    )
    if bound.fits and _ample(sizes):
        return bound
    exact = need(path, sizes)
    if exact.allocated > exact.available:
        per_token = max(1, exact.parts["KV cache"] // sizes.context)
        most = sizes.context - (exact.allocated - exact.available + per_token - 1) // per_token
        advice = f"use --context {most // 256 * 256}" if most >= 256 else "free memory or use a smaller model"
        fixed_parts = {name: n for name, n in exact.parts.items() if name not in ("weights", "runtime")}
        parts = ", ".join(f"{name} {n / MIB:,.0f}" for name, n in fixed_parts.items())
        raise NotEnoughMemory(
            f"a context of {sizes.context} tokens needs {exact.allocated / MIB:,.0f} MiB beside the weights ({parts}),"
            f" {exact.available / MIB:,.0f} MiB are available; {advice}, or a smaller --kv-type"
        )
    return exact


def _adapters(sizes: ContextSizes) -> dict[str, int]:
    """Return the bytes that adapters take, with what they compute; nothing without any."""
    n_bytes = sum(sizes.adapter_bytes) + sizes.batch * sizes.adapter_row_bytes
    return {"adapters": n_bytes} if n_bytes else {}


def cache_bytes(shape: ModelShape, context: int, kv: CacheType) -> int:
    """Bytes of KV cache for `context` tokens. EngineError if the model's heads cannot be stored as `kv`."""
    try:
        return shape.kv_bytes(context, kv.keys, kv.values)
    except ValueError as error:  # blocks of the type do not divide a head's values
        raise EngineError(f"the KV cache of {shape.name} cannot be {kv.name}: {error}; use f16") from error


def _ample(sizes: ContextSizes) -> bool:
    """Return whether buffers are certainly small.

    They grow with batch x width, with outputs x vocabulary, and without flash attention (which "auto" may come to
    mean) with batch x context x heads.
    """
    return sizes.batch <= 512 and sizes.outputs <= 32 and (sizes.flash_attention == "on" or sizes.context <= 8192)
