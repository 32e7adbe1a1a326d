"""The figures of well-known models, as their published configuration files give them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edge.models.shapes import Shape, ShapeError, shape

REQUIRED = ("layers", "embd", "ff", "heads", "vocab")  # where no known model is named


def _llama(layers: int, embd: int, ff: int, heads: int, kv: int, vocab: int = 32_000, **more: Any) -> Shape:
    return shape("llama", layers=layers, embd=embd, ff=ff, heads=heads, kv=kv, vocab=vocab, **more)


def _llama3(layers: int, embd: int, ff: int, heads: int, kv: int, **more: Any) -> Shape:
    more = {"context": 131_072, "rope_base": 500_000.0, "rope_freqs": True, **more}
    return _llama(layers, embd, ff, heads, kv, vocab=128_256, **more)


def _qwen2(layers: int, embd: int, ff: int, heads: int, kv: int, vocab: int = 151_936, **more: Any) -> Shape:
    more = {"context": 32_768, **more}
    return shape("qwen2", layers=layers, embd=embd, ff=ff, heads=heads, kv=kv, vocab=vocab, **more)


def _qwen3(layers: int, embd: int, ff: int, heads: int, kv: int, arch: str = "qwen3", **more: Any) -> Shape:
    more = {"head_size": 128, "vocab": 151_936, "context": 40_960, **more}
    return shape(arch, layers=layers, embd=embd, ff=ff, heads=heads, kv=kv, **more)


def _gemma(arch: str, layers: int, embd: int, ff: int, heads: int, kv: int, **more: Any) -> Shape:
    more = {"head_size": 256, "vocab": 256_000, "context": 8192, **more}
    return shape(arch, layers=layers, embd=embd, ff=ff, heads=heads, kv=kv, **more)


def _gemma3(layers: int, embd: int, ff: int, heads: int, kv: int, **more: Any) -> Shape:
    more = {"window": 1024, "context": 131_072, "rope_scaling": "linear", "rope_factor": 8.0, **more}
    return _gemma("gemma3", layers, embd, ff, heads, kv, vocab=262_144, **more)


# layers, embd, ff, heads, KV heads
SHAPES: Mapping[str, Shape] = {
    "tinyllama-1.1b": _llama(22, 2048, 5632, 32, 4, context=2048),
    "llama-2-7b": _llama(32, 4096, 11_008, 32, 32),
    "llama-2-13b": _llama(40, 5120, 13_824, 40, 40),
    "llama-2-70b": _llama(80, 8192, 28_672, 64, 8),
    "llama-3.2-1b": _llama3(16, 2048, 8192, 32, 8, tied=True),
    "llama-3.2-3b": _llama3(28, 3072, 8192, 24, 8, tied=True),
    "llama-3.1-8b": _llama3(32, 4096, 14_336, 32, 8),
    "llama-3.1-70b": _llama3(80, 8192, 28_672, 64, 8),
    "mistral-7b": _llama(32, 4096, 14_336, 32, 8, vocab=32_768, context=32_768, rope_base=1e6),
    "mixtral-8x7b": _llama(32, 4096, 14_336, 32, 8, context=32_768, rope_base=1e6, experts=8, experts_used=2),
    "qwen2.5-0.5b": _qwen2(24, 896, 4864, 14, 2, tied=True),
    "qwen2.5-1.5b": _qwen2(28, 1536, 8960, 12, 2, tied=True),
    "qwen2.5-7b": _qwen2(28, 3584, 18_944, 28, 4, vocab=152_064),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, 8, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, 8, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, 8, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12_288, 32, 8),
    "qwen3-14b": _qwen3(40, 5120, 17_408, 40, 8),
    "qwen3-32b": _qwen3(64, 5120, 25_600, 64, 8),
    "qwen3-30b-a3b": _qwen3(48, 2048, 6144, 32, 4, "qwen3moe", experts=128, experts_used=8, expert_ff=768),
    "gemma-2b": _gemma("gemma", 18, 2048, 16_384, 8, 1),
    "gemma-2-2b": _gemma("gemma2", 26, 2304, 9216, 8, 4),
    "gemma-2-9b": _gemma("gemma2", 42, 3584, 14_336, 16, 8),
    "gemma-3-1b": _gemma3(26, 1152, 6912, 4, 1, window=512, context=32_768, rope_scaling="", rope_factor=0.0),
    "gemma-3-4b": _gemma3(34, 2560, 10_240, 8, 4),
    "gemma-3-12b": _gemma3(48, 3840, 15_360, 16, 8),
    "phi-3-mini": shape("phi3", layers=32, embd=3072, ff=8192, heads=32, vocab=32_064),
    "gpt-oss-20b": shape(
        "gpt-oss", layers=24, embd=2880, ff=2880, heads=64, kv=8, head_size=64, vocab=201_088, context=131_072,
        experts=32, experts_used=4, expert_ff=2880,
    ),
}  # fmt: skip


def shape_of(name: str | None, arch: str | None, figures: Mapping[str, Any]) -> Shape:
    """The shape of a known model with other `figures`, or one of an architecture (None: llama) with these figures
    alone. ShapeError if they do not make one."""
    if name is None:
        missing = [f"--{figure}" for figure in REQUIRED if figure not in figures]
        if missing:
            raise ShapeError(f"give --shape NAME, or also {' '.join(missing)}")
        return shape(arch or "llama", **figures)
    if arch is not None:
        raise ShapeError("--arch goes with single figures; --shape has an architecture already")
    if name not in SHAPES:
        raise ShapeError(f"no shape {name!r}; known: {', '.join(SHAPES)}")
    return replace(SHAPES[name], **figures)
