"""Before anything is sent or loaded: whether every device has room for what a plan gives it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from devices.probe import available_memory
from edge.engine import EngineOptions, resolve
from edge.errors import NotEnoughMemory
from edge.fleet import Fleet, device
from edge.memory import MIB
from partition.model import ModelShape
from partition.plan import LOCAL, Plan
from partition.recipe import Recipe
from partition.tensor import kv_heads


def check_room(fleet: Fleet, plan: Plan, recipes: Sequence[Recipe], shape: ModelShape, options: EngineOptions) -> None:
    """NotEnoughMemory names every device without room for the weights and KV cache of its ranks: need and have.

    Compute buffers come on top; what they take is known when a rank loads, and checked again then.
    """
    weights: dict[str, int] = defaultdict(int)
    cache: dict[str, int] = defaultdict(int)
    addresses = {}
    for rank, address in enumerate(plan.devices):
        one = device(address)
        addresses[one] = address
        weights[one] += recipes[rank].n_bytes
        cache[one] += kv_bytes(plan, rank, shape, options)
    lacking = []
    for one, address in addresses.items():
        name, have = "this device", available_memory()
        if one != LOCAL:
            profile = fleet.profiles[address]
            name, have = fleet.workers[address].name, profile.memory_available_bytes
            have = min(have, profile.memory_limit_bytes or have)
        need = weights[one] + cache[one]
        if need > have:
            lacking.append(
                f"{name} needs {need / MIB:,.0f} MiB or more (weights {weights[one] / MIB:,.0f}, KV cache"
                f" {cache[one] / MIB:,.0f}) and has {have / MIB:,.0f}"
            )
    if lacking:
        raise NotEnoughMemory(f"{'; '.join(lacking)}: give it a smaller share, a smaller --context, or add a device")


def kv_bytes(plan: Plan, rank: int, shape: ModelShape, options: EngineOptions) -> int:
    """Bytes of KV cache that a rank will hold."""
    context, _, kv = resolve(options, shape)
    cut = plan.slice(rank)
    total = 0
    for layer in range(cut.layers.start, cut.layers.stop):
        heads_kv = shape.n_heads_kv[layer]
        own = len(kv_heads(cut.heads, plan.sizes.heads, heads_kv)) if cut.heads else heads_kv
        total += shape.kv_layer_bytes(layer, context, kv, kv) * own // max(1, heads_kv)
    return total
