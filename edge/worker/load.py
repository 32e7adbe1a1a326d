"""What an engine process loads: a slice with its place among the ranks, or a whole model, within a limit of memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import get_type_hints

from edge.errors import EdgeError, NotEnoughMemory
from edge.llama import llama
from edge.llama.llama import ContextSizes
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions, resolve
from edge.paging import memory
from edge.paging.memory import MemoryNeed
from edge.parallel.shard import Shard
from edge.parallel.topology import place
from edge.worker.limits import ResourceLimits
from partition.model.check import check_loadable
from partition.model.model import ModelShape
from quant.gguf.file import GgufFile
from transport import edge_pb2 as pb


def load(
    asked: pb.Load, rank: int, lent: ResourceLimits, progress: Callable[[float], None]
) -> tuple[Engine | Shard, MemoryNeed]:
    """What was asked for, loaded, and what it takes. The errors are those of Engine, and NotEnoughMemory where more
    than the limit would be needed. lent: what of the device may be used."""
    options = _options(asked.options_json, lent)
    stages = tuple(asked.stages)
    here = place(rank, stages) if stages else None
    if here is not None and not here.last:
        options = replace(options, outputs=options.rows)  # every row goes on to the next stage
    file = GgufFile.open(asked.path)
    check_loadable(file)
    context, _, kv = resolve(options, ModelShape.from_gguf(file))
    options.check_sequences(min(options.rows, context))  # the dry run ends the process, too
    limit = asked.memory_limit_bytes
    on_gpu = llama.has_gpu() and options.gpu_layers != 0
    if limit and not on_gpu:
        options = replace(options, memory=min(limit, options.memory or limit))
    if options.memory is None:
        sizes = ContextSizes(
            context,
            kv,
            batch=options.rows,
            sequences=options.sequences,
            outputs=min(options.outputs or options.sequences, options.rows, context),
            flash_attention=options.flash_attention,
        )
        need = memory.need(asked.path, sizes)
        _check_limit(need, limit)
    else:  # the engine accounts for itself, and pages what does not fit
        need = None
    loaded = (
        Engine(asked.path, options, progress=progress) if here is None else Shard(asked.path, options, here, progress)
    )
    return loaded, need or (loaded if isinstance(loaded, Engine) else loaded.engine).memory


def _check_limit(need: MemoryNeed, limit: int) -> None:
    """limit: bytes; 0 for none."""
    if limit and need.total > limit:
        parts = ", ".join(f"{name} {n / memory.MIB:,.0f}" for name, n in need.parts.items())
        raise NotEnoughMemory(
            f"the slice needs {need.total / memory.MIB:,.0f} MiB ({parts}), this worker has"
            f" {limit / memory.MIB:,.0f} MiB left of its limit; use a smaller --context, or a smaller share"
        )


def _options(text: str, lent: ResourceLimits) -> EngineOptions:
    """Engine options from JSON, with no more than the device lends. EdgeError names what is not one."""
    try:
        given = json.loads(text or "{}")
        types = get_type_hints(EngineOptions)
        for name, value in given.items() if isinstance(given, dict) else ():
            if not isinstance(value, types.get(name, object)):
                raise TypeError(f"{name} cannot be {value!r}")
        options = EngineOptions(**{"threads": lent.threads, **given})
    except (ValueError, TypeError, RecursionError) as error:
        raise EdgeError(f"these engine options cannot be used: {error}") from error
    return replace(
        options,
        threads=min(options.threads or lent.threads, lent.threads),
        gpu_layers=_gpu_layers(options.gpu_layers, lent.gpu_layers),
    )


def _gpu_layers(asked: int | None, most: int | None) -> int | None:
    """As many as are asked for, but no more than `most`. None: all."""
    if most is None:
        return asked
    if asked is None:
        return most if llama.has_gpu() else None  # where there is no GPU, all are none, and a number would be refused
    return min(asked, most)
