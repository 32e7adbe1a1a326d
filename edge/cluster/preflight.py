"""Memory check before anything is sent or loaded: every device must have room for its part of a plan."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from devices.probe import available_memory
from edge.cluster.fleet import Fleet, device
from edge.cluster.model_slices import FileSlice, ModelSlices, adapter_bytes
from edge.errors import NotEnoughMemory
from edge.llm.options import EngineOptions
from edge.llm.resolve import resolve
from edge.llm.snapshots import ROLLBACK_PART, affordable
from edge.weights.memory import MIB
from partition.model.file import ModelFile
from partition.model.model import ModelShape
from partition.plan.plan import LOCAL, Plan
from partition.plan.tensor import kv_heads

LEAST_PROCESS_BYTES = 64 << 20  # lower bound; Python, numpy and llama.cpp take more before anything is loaded


def check_room(
    fleet: Fleet,
    placements: Iterable[tuple[Plan, Mapping[int, Sequence[FileSlice]]]],
    shape: ModelShape,
    options: EngineOptions,
) -> None:
    """Raise NotEnoughMemory, naming every device without room for the weights and KV cache of its ranks.

    placements: placements that run at the same time, each with the slices of its ranks. A thin owner has no slices.

    Compute buffers are not counted here; a rank checks them when it loads. A rank with a memory budget pages weights
    from disk, so its process is counted instead of its weights. Adapters always stay in memory.
    """
    needs = []
    for plan, slices in placements:
        for rank, address in enumerate(plan.devices):
            paged = _pages(fleet, plan, rank, options)
            own = slices.get(rank, ())
            weights = own[0].weight_bytes if own else 0
            parts = {"runtime": LEAST_PROCESS_BYTES} if paged else {"weights": weights}
            parts |= {"adapters": n_bytes} if (n_bytes := adapter_bytes(own)) else {}
            needs.append((address, {**parts, "KV cache": kv_bytes(plan, rank, shape, options)}))
    check_memory(
        fleet,
        needs,
        "give it a smaller share, a smaller --context, or a budget (--memory, on a worker or here) so that it pages, or"
        " add a device",
    )


def shared_rollback(
    fleet: Fleet,
    plan: Plan,
    slices: Mapping[int, Sequence[FileSlice]],
    file: ModelFile,
    options: EngineOptions,
) -> int:
    """Return the number of rows that the recurrent layers of every rank can roll back.

    The number is at most that of the options, and every device must have memory for it in addition to weights and KV
    cache. A thin owner holds no recurrent state, so the result is 0.
    """
    if plan.thin_owner:
        return 0
    rollback, own = options.rollback, defaultdict[str, list[int]](list)
    for rank, address in enumerate(plan.devices):
        own[address].append(rank)
    for address, ranks in own.items():
        have = (options.memory or available_memory()) if device(address) == LOCAL else fleet.memory_of(address)
        have = min([have, *(memory for rank in ranks if (memory := plan.shard(rank).memory) is not None)])
        used = sum(
            kv_bytes(plan, rank, file.shape, options)
            + adapter_bytes(slices[rank])
            + (0 if _pages(fleet, plan, rank, options) else slices[rank][0].weight_bytes)
            for rank in ranks
        )
        free = max(0, have - used - LEAST_PROCESS_BYTES) // 2  # the other half is for compute buffers
        layers = sum(len(plan.slice(rank).layers) for rank in ranks)
        budget = max(1, min(have, ROLLBACK_PART * free))
        rollback = affordable(rollback, file, budget, layers)
    return rollback


def held_here(plan: Plan, slices: ModelSlices, options: EngineOptions) -> int:
    """Return the bytes of weights, adapters and KV cache of a placement on this device."""
    return sum(
        sum(part.weight_bytes for part in own) + kv_bytes(plan, rank, slices.file.shape, options)
        for rank, own in slices.of_ranks(plan).items()
        if plan.devices[rank] == LOCAL
    )


def check_memory(fleet: Fleet | None, needs: Iterable[tuple[str, Mapping[str, int]]], remedy: str) -> None:
    """Raise NotEnoughMemory, naming every device whose ranks need more memory than it has.

    fleet: the workers; None if all ranks are on this device.
    needs: for each rank, the address of its device and its bytes by purpose.
    remedy: advice at the end of the message.
    """
    total: dict[str, Counter[str]] = defaultdict(Counter)
    addresses = {}
    for address, parts in needs:
        addresses[device(address)] = address
        total[device(address)].update(parts)
    lacking: dict[str, str] = {}
    for device_address, address in addresses.items():
        name, have = "this device", available_memory()
        if device_address != LOCAL:
            assert fleet is not None
            name, have = fleet.workers[address].label, fleet.memory_of(address)
        need = sum(total[device_address].values())
        if need > have:
            shown = ", ".join(f"{part} {n / MIB:,.0f}" for part, n in total[device_address].items())
            others = f" ({shown})" if len(total[device_address]) > 1 else ""
            lacking[device_address] = f"{name} needs {need / MIB:,.0f} MiB or more{others} and has {have / MIB:,.0f}"
    if lacking:
        error = NotEnoughMemory(f"{'; '.join(lacking.values())}: {remedy}")
        error.devices = tuple(device_address for device_address in lacking if device_address != LOCAL)
        raise error


def _pages(fleet: Fleet, plan: Plan, rank: int, options: EngineOptions) -> bool:
    """Return True if a rank has a memory budget and pages weights that exceed it."""
    address = plan.devices[rank]
    if plan.shard(rank).memory is not None:
        return True
    if device(address) == LOCAL:
        return options.memory is not None
    return fleet.profiles[address].memory_limit_bytes is not None


def kv_bytes(plan: Plan, rank: int, shape: ModelShape, options: EngineOptions) -> int:
    """Return the bytes of KV cache that a rank will hold."""
    context, kv = resolve(options, shape)
    cut = plan.slice(rank)
    total = 0
    for layer in range(cut.layers.start, cut.layers.stop):
        heads_kv = shape.n_heads_kv[layer]
        own = len(kv_heads(cut.heads, plan.sizes.heads, heads_kv)) if cut.heads else heads_kv
        total += shape.kv_layer_bytes(layer, context, kv.keys, kv.values) * own // max(1, heads_kv)
    return total
