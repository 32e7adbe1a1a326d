"""Sizes and memory of a language model: needed memory before loading, and used memory afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from edge.llama.llama import ContextSizes
from edge.llm.interface import TextEngine
from edge.llm.options import DEFAULTS, EngineOptions
from edge.llm.resolve import context_sizes
from edge.weights import memory
from edge.weights.memory import MemoryNeed
from partition.architectures.table import RULES
from partition.errors import CannotSlice
from partition.model.file import ModelFile
from partition.slices.gguf_slice import check_tensor, limits
from quant.gguf.elastic import ElasticSize, elastic_sizes


@dataclass(frozen=True)
class ModelInfo:
    """Sizes and needed memory of one model file."""

    file: ModelFile
    context_sizes: ContextSizes
    need: MemoryNeed  # memory for this context

    @classmethod
    def from_file(cls, file: ModelFile, options: EngineOptions = DEFAULTS) -> ModelInfo:
        """Return the information about a model file for an engine with these options. Raises EngineError."""
        sizes = context_sizes(options, file.shape)
        return cls(file, sizes, memory.need(file.path, sizes))

    @cached_property
    def sizes(self) -> tuple[ElasticSize, ...]:
        """Sizes of an elastic model in the file, largest first."""
        return elastic_sizes(self.file)

    @cached_property
    def cuts(self) -> tuple[str, str]:
        """Reasons why the model cannot be split by layers, and by parts of layers; "" if it can."""
        reasons = []
        for cut in (limits, check_tensor):
            try:
                cut(self.file)
                reasons.append("")
            except CannotSlice as exc:
                reasons.append(str(exc))
        return reasons[0], reasons[1]

    @property
    def whole_attention(self) -> str:
        """Reason why devices that share layers each compute all of attention; "" if they share attention, too."""
        rules = RULES.get(self.file.architecture)
        return rules.whole_attention if rules and not self.cuts[1] else ""

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON, as described in docs/cli/model.md."""
        shape, need = self.file.shape, self.need
        stages, shards = self.cuts
        parts = {f"{name.lower().replace(' ', '_')}_bytes": n for name, n in need.parts.items()}
        return {
            "path": str(self.file.path),
            "architecture": shape.architecture,
            "name": shape.name,
            "layers": shape.n_layers,
            "embd": shape.n_embd,
            "heads_per_layer": shape.n_heads,
            "kv_heads_per_layer": shape.n_heads_kv,
            "ff_per_layer": shape.n_ff,
            "experts": shape.n_experts,
            "experts_used": shape.n_experts_used,
            "vocab": shape.n_vocab,
            "trained_context": shape.context_length,
            "parameters": shape.n_params,
            "size_bytes": self.file.size_bytes,
            "bytes_by_type": dict(shape.bytes_by_type),
            "sizes": [{"size_bytes": size.file_bytes, "divergence": size.divergence} for size in self.sizes],
            "stages": not stages,
            "no_stages_because": stages or None,
            "shards": not shards,
            "no_shards_because": shards or None,
            "whole_attention_because": self.whole_attention or None,
            "memory": {
                "context": self.context_sizes.context,
                "kv_type": self.context_sizes.kv.name,
                **parts,
                "total_bytes": need.total,
                "available_bytes": need.available,
            },
        }


def memory_news(engine: TextEngine) -> list[str]:
    """Return lines for people about memory changes since the last call."""
    return [f"memory: {line}" for line in engine.paging.news()] if engine.paging is not None else []


def memory_json(engine: TextEngine) -> dict[str, Any]:
    """Return the keys "gpu_layers", "memory" and "paging" of a command's --json. Values are None without a GPU or a
    budget.
    """
    paging = engine.paging
    on_gpu = {"gpu_layers": engine.gpu_layers.to_json() if engine.gpu_layers else None}
    if paging is None:
        return {**on_gpu, "memory": None, "paging": None}
    need, plan, stats = engine.memory, paging.plan, paging.stats()
    return {
        **on_gpu,
        "memory": {
            "budget_bytes": need.budget,
            "total_bytes": need.total,
            "parts": need.parts,
            "changes": paging.news(),
        },
        "paging": {
            "resident_bytes": sum(piece.n_bytes for piece in plan.resident),
            "streamed_bytes": plan.streamed_bytes,
            "window_bytes": plan.window,
            "io_threads": paging.reader.threads,
            "io_chunk_bytes": paging.reader.chunk,
            "reads": paging.reads,
            "decode": stats.decode.to_json(),
            "prefill": stats.prefill.to_json(),
        },
    }
