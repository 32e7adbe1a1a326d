"""Memory need of a model by part, before it is loaded."""

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
from partition.model.file import ModelFile
from partition.model.model import ModelShape
from quant.types import CacheType

MIB = 1 << 20
_COMPUTE = re.compile(r"(\S+) compute buffer size\s*=\s*([\d.]+) MiB")
_OUTPUT = re.compile(r"output buffer size\s*=\s*([\d.]+) MiB")
_LAYERS_CACHE = re.compile(r"(\S+) (?:KV|RS) buffer size\s*=\s*([\d.]+) MiB")  # of the layers in one device's memory
_CACHE = re.compile(r"(?:llama_kv_cache|llama_memory_recurrent)\w*: size\s*=\s*([\d.]+) MiB")

# Compute and output buffers are well below this if `_ample` returns True. Otherwise they are measured.
AMPLE_BUFFERS_BYTES = 2 << 30


@dataclass(frozen=True)
class LoadRequest:
    """Request to load a model with a context."""

    file: ModelFile
    sizes: ContextSizes  # sizes of the context; a budget may reduce its batch
    threads: int
    adapters: Sequence[AdapterFile]
    repack: bool | None  # None: repack if copies fit
    generates: bool  # False: the model only embeds
    new_batch: Callable[[int], llama.Batch]  # creates a batch of this number of rows in the model's form
    hooks: Sequence[Hook]
    progress: Callable[[float], None] | None  # called with the loaded fraction of the weights


@dataclass(frozen=True)
class MemoryNeed:
    """Memory need by part in bytes, and the available memory."""

    parts: dict[str, int]  # "weights", "KV cache", "compute buffers", "output buffer", "runtime"; more under a budget
    available: int  # bytes available to a new allocation; under a budget, the whole budget
    budget: int | None = None  # bytes that the whole process may hold

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def allocated(self) -> int:
        """Bytes that must be in memory. Mapped weights do not count, because they can be read again from the file,
        slowly."""
        return self.total - self.parts.get("weights", 0) - self.parts["runtime"]

    @property
    def fits(self) -> bool:
        """Return whether everything that is not in memory yet would fit."""
        if self.budget is not None:
            return self.total <= self.budget
        return self.total - self.parts["runtime"] <= self.available


def need(path: str | os.PathLike[str], sizes: ContextSizes) -> MemoryNeed:
    """Return the need from a dry run of llama.cpp that reads only metadata. It is exact for every architecture.

    The file must have been checked before. Raises EngineError if llama.cpp refuses the file or the options.
    """
    weights, lines = dry_run(path, sizes)
    parts = {"weights": weights, **context_parts(lines), **_adapters(sizes), "runtime": own_rss()}
    return MemoryNeed(parts, available_memory())


def dry_run(path: str | os.PathLike[str], sizes: ContextSizes, gpu_layers: int = 0) -> tuple[int, list[str]]:
    """Return (bytes of weights, llama.cpp's log) of a load with a context that allocates no memory."""
    with (
        llama.captured_log() as lines,
        closing(llama.Model(path, allocate=False, gpu_layers=gpu_layers, predictors=sizes.predicts)) as model,
    ):
        llama.Context(model, replace(sizes, batch=min(sizes.batch, sizes.context))).close()
        return model.n_bytes, lines


def context_parts(lines: Sequence[str], gpu: str | None = None) -> dict[str, int]:
    """Return the bytes by part of a context, from llama.cpp's log of its creation.

    gpu: name of a GPU's buffers in that log; their bytes are left out. None: the bytes of all devices.
    """

    def total(pattern: re.Pattern[str]) -> float:
        return sum(float(match[1]) for line in lines if (match := pattern.search(line)))

    def of_gpu(pattern: re.Pattern[str]) -> float:
        return sum(float(m[2]) for line in lines if (m := pattern.search(line)) and m[1] == gpu)

    compute = sum(float(m[2]) for line in lines if (m := _COMPUTE.search(line)) and m[1] != gpu)
    parts = {
        "KV cache": total(_CACHE) - of_gpu(_LAYERS_CACHE),
        "compute buffers": compute,
        "output buffer": total(_OUTPUT),
    }
    return {name: round(n_mib * MIB) for name, n_mib in parts.items()}


def check(path: str | os.PathLike[str], shape: ModelShape, sizes: ContextSizes) -> MemoryNeed:
    """Return the memory need of a model that is about to be loaded.

    If an upper bound fits, it is returned, because a dry run takes as long as loading the vocabulary.
    Raises NotEnoughMemory with needed and available bytes if the memory to allocate is not available.
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
    """Return the bytes of adapters with their compute buffers, or nothing without adapters."""
    n_bytes = sum(sizes.adapter_bytes) + sizes.batch * sizes.adapter_row_bytes
    return {"adapters": n_bytes} if n_bytes else {}


def cache_bytes(shape: ModelShape, context: int, kv: CacheType) -> int:
    """Return the bytes of KV cache for `context` tokens. Raises EngineError if the model's heads cannot use type
    `kv`."""
    try:
        return shape.kv_bytes(context, kv.keys, kv.values)
    except ValueError as error:  # the type's block size does not divide the head size
        raise EngineError(f"the KV cache of {shape.name} cannot be {kv.name}: {error}; use f16") from error


def _ample(sizes: ContextSizes) -> bool:
    """Return whether buffers are certainly small.

    They grow with batch x width, with outputs x vocabulary, and, without flash attention, with batch x context x heads.
    The setting "auto" may turn flash attention off.
    """
    return sizes.batch <= 512 and sizes.outputs <= 32 and (sizes.flash_attention == "on" or sizes.context <= 8192)
