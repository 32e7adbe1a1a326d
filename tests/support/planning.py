"""Made-up models, devices and links, for tests of the cost of plans and of the search."""

from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any

import numpy as np

from partition.model.model import ModelShape
from partition.plan.plan import LOCAL, Plan, Sizes
from partition.plan.tensor import Limits
from partition.predict.cost import Work
from partition.predict.speeds import Curve, DeviceSpeed, Links, LinkSpeed
from partition.search.explain import best, reason
from partition.search.planner import Planner
from quant.types import cache_type

MS = 1e-3
MIB = 1 << 20
F16 = cache_type("f16")
FAST = LinkSpeed(0.0, 1e10)


def model(
    layers: int | Sequence[float], *, heads: int = 8, kv: int = 4, ff: int = 64, vocab: int = 1024, embd: int = 128
) -> tuple[ModelShape, Limits]:
    """A model whose layers have so many MiB each, or 8: a quarter is attention's, of which KV heads have a fifth."""
    sizes = [8.0] * layers if isinstance(layers, int) else list(layers)
    total = sum(sizes) / len(sizes) * MIB
    current = tuple(round(size * MIB) for size in sizes)
    head = embd // heads
    limits = Limits(
        Sizes(len(sizes), heads, kv, ff, vocab),
        head_unit=1,
        ff_unit=1,
        head_bytes=0.2 * total / heads,
        kv_head_bytes=0.05 * total / kv,
        ff_bytes=0.75 * total / ff,
        vocab_bytes=4 * MIB / vocab,
        layer_bytes=tuple(map(float, current)),
    )
    shape = ModelShape(
        "llama", "made up", len(sizes), embd, (heads,) * len(sizes), (kv,) * len(sizes), head, head, (ff,) * len(sizes),
        0, 0, vocab, 4096, 0, sum(current) + 4 * MIB, {}, current, 4 * MIB, 4 * MIB, True,
    )  # fmt: skip
    return shape, limits


def work(
    layers: int | Sequence[float] | tuple[ModelShape, Limits] = 4,
    *,
    context: int = 1024,
    depth: int = 0,
    prompt: int = 128,
    concurrency: int = 1,
) -> Work:
    """Something to be done with such a model. Sums take one hop and all bytes but one's own."""
    is_made = isinstance(layers, tuple) and isinstance(layers[0], ModelShape)
    shape, limits = layers if is_made else model(layers)  # type: ignore[misc,arg-type]
    return Work(shape, limits, context, depth, prompt, concurrency, F16, mesh_s)


def mesh_s(_: int, wire_bytes: int, ranks: int, latency_s: float, bytes_per_s: float) -> float:
    """An allreduce in which everybody sends to everybody."""
    return latency_s + (ranks - 1) * wire_bytes / bytes_per_s


def device(
    name: str = LOCAL,
    layer_s: float = MS,
    *,
    half_s: float | None = None,
    head_s: float = 0.0,
    step_s: float = 0.0,
    by_row: bool = False,
    **more: Any,
) -> DeviceSpeed:
    """A device that takes so long for a layer, and half for a half, of 1 GiB that are all the model's.

    That is for any number of rows; by_row: for each of them.
    """

    def curve(seconds: float) -> Curve:
        return Curve(((1, seconds), (2, 2 * seconds)) if by_row else ((1, seconds),))

    half = layer_s / 2 if half_s is None else half_s
    total = {"token_s": 0.0, "memory_bytes": 1 << 30, "runtime_bytes": 0} | more
    return DeviceSpeed(
        name, name, curve(step_s), curve(layer_s), half_layer_s=curve(half), head_s=curve(head_s), **total
    )


def best_of(planner: Planner) -> tuple[Plan, str]:
    """The plan to take for the least latency, and why, in one line."""
    placed = best(planner, "latency")
    return placed.plan, reason(planner, placed, "latency")


def linked(
    names: Sequence[str], way: LinkSpeed = FAST, but: Mapping[tuple[str, str], LinkSpeed] | None = None
) -> Links:
    """The same link between all of them, `but` for some."""
    return Links(dict.fromkeys(permutations(names, 2), way) | dict(but or {}))


def uneven_links(rng: np.random.Generator, names: Sequence[str]) -> Links:
    """Any ways, each other than the one back."""
    return Links(
        {
            pair: LinkSpeed(float(rng.choice([0.0, 1e-5, 2e-4, 3e-3])), float(rng.choice([1e5, 1e7, 1e9])))
            for pair in permutations(names, 2)
        }
    )
