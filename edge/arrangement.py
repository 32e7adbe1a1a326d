"""Which rank gets what: as the person says, and for the rest by what was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edge.fleet import Fleet
from edge.survey import Survey, survey
from partition.arrange import make_plan
from partition.errors import CannotSlice, PlanError
from partition.gguf_slice import check_tensor, limits
from partition.plan import LOCAL, Plan
from partition.tensor import Limits, attention_bytes
from quant.gguf_file import GgufFile

PARALLEL = ("auto", "tensor", "pipeline")
_SUMS_A_LAYER = 2
# Of a core's time for a sum: system calls, Python and adding, with caches that hold the last layer's weights. Measured
# on two devices: 50 us where a rank polls, 95 where a CPU quota forbids that. Slow devices take longer in proportion.
_SUM_CPU_S = 90e-6
_LEAST_SHARE = 0.02  # of the largest: who would be left less has at least that, for every rank holds something


@dataclass(frozen=True)
class Arrangement:
    """A plan and the reason for it, in one line."""

    plan: Plan
    why: str
    survey: Survey | None  # None where nothing had to be measured


def arrange(
    fleet: Fleet,
    addresses: Sequence[str],
    file: GgufFile,
    model_digest: str,
    *,
    parallel: str = "auto",
    shares: Sequence[float] | None = None,
    threads: int | None = None,
    transport: str = "auto",
    on_step: Callable[[float, float], None] = lambda done, of: None,
) -> Arrangement:
    """A plan for this device and the workers at `addresses`, in this order.

    parallel: "tensor", "pipeline", or "auto": what is predicted to decode sooner. shares: how much each device is to
    compute, this one first; None: by measured speed. PlanError for shares or ranks that cannot be, CannotSlice where
    the model cannot be cut so; else the errors of `survey`.
    """
    if parallel not in PARALLEL:
        raise PlanError(f"parallel is {parallel[:40]!r}; known are {', '.join(PARALLEL)}")
    if parallel == "tensor":
        check_tensor(file)
    can, devices = limits(file), [LOCAL, *addresses]
    name = str(file.metadata.get("general.name") or file.path.stem)

    def plan(kind: str, parts: Sequence[float]) -> Plan:
        return make_plan(can, name, model_digest, devices, kind, parts)

    if shares is not None and parallel != "auto":
        return Arrangement(plan(parallel, shares), f"{parallel}, with shares as given", None)
    found = survey(fleet, addresses, file, model_digest, threads=threads, transport=transport, on_step=on_step)
    by = "by measured speed" if shares is None else "as given"
    plans, refused = {}, {}
    for kind in ("tensor", "pipeline") if parallel == "auto" else (parallel,):
        measured = tensor_shares(found) if kind == "tensor" else speeds(found)
        try:
            if kind == "tensor":
                check_tensor(file)
            plans[kind] = plan(kind, measured if shares is None else shares)
        except (CannotSlice, PlanError) as error:
            refused[kind] = error
    if not plans:
        raise next(iter(refused.values()))
    if len(plans) == 1:
        kind, only = next(iter(plans.items()))
        return Arrangement(only, f"{kind}, shares {by}" + "".join(f": {error}" for error in refused.values()), found)
    tensor_s, pipeline_s = tensor_seconds(plans["tensor"], can, found), pipeline_seconds(plans["pipeline"], can, found)
    told = f"a token is predicted to take {tensor_s * 1e3:.3g} ms tensor-parallel, {pipeline_s * 1e3:.3g} ms in stages"
    kind = "tensor" if tensor_s < pipeline_s else "pipeline"
    return Arrangement(plans[kind], f"{kind}, shares {by}: {told}", found)


def speeds(found: Survey) -> list[float]:
    """Layers a second, by rank."""
    return [1 / speed.decode_s for speed in found.speeds]


def tensor_shares(found: Survey) -> list[float]:
    """The parts with which all ranks end their part of a layer at once, the sums included.

    Every rank does every sum, whatever its part; that takes k of a layer's time, k being what it is on the fastest. So
    (part + k) * time is to be equal for all N ranks, and the parts add up to 1: part = (1 + N k) speed / speeds - k.
    """
    rates = speeds(found)
    k = _SUMS_A_LAYER * _SUM_CPU_S * max(rates)
    parts = [(1 + len(rates) * k) * rate / sum(rates) - k for rate in rates]
    return [max(part, _LEAST_SHARE * max(parts)) for part in parts]


def tensor_seconds(plan: Plan, can: Limits, found: Survey) -> float:
    """A token, every rank computing its part of every layer: the slowest rank's parts and sums, and a hop for each sum.

    Computing is taken to be in proportion to the bytes of weights it reads.
    """
    layers, fastest, layer_bytes = can.sizes.layers, max(speeds(found)), _layer_bytes(can)
    slowest = 0.0
    for rank, speed in enumerate(found.speeds):
        shard = plan.shard(rank)
        layer = attention_bytes(can, shard.heads) + len(shard.ff) * can.ff_bytes
        own = layers * layer + len(shard.vocab) * can.vocab_bytes
        sums_s = layers * _SUMS_A_LAYER * _SUM_CPU_S * speed.decode_s * fastest
        slowest = max(slowest, speed.decode_s * own / layer_bytes + sums_s)
    return slowest + layers * _SUMS_A_LAYER * found.hop_s


def pipeline_seconds(plan: Plan, can: Limits, found: Survey) -> float:
    """A token through one stage after the other, with a hop after each; the last has the head."""
    total, layer_bytes = 0.0, _layer_bytes(can)
    for rank, speed in enumerate(found.speeds):
        cut = plan.slice(rank)
        own = sum(can.layer_bytes[cut.layers.start : cut.layers.stop]) + len(cut.vocab) * can.vocab_bytes
        total += speed.decode_s * own / layer_bytes + found.hop_s
    return total


def _layer_bytes(can: Limits) -> float:
    """Of the layer that was timed: the average one."""
    return sum(can.layer_bytes) / len(can.layer_bytes)
