"""Plans for devices: tensor parallel, pipeline stages, or stages of several ranks each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import TypeVar

from partition.errors import PlanError
from partition.plan.apportion import checked_shares
from partition.plan.plan import NOTHING, Plan, Range, Stage, clean_name
from partition.plan.tensor import Limits, shards

PARALLEL = ("tensor", "pipeline")
Cost = TypeVar("Cost", float, tuple[float, int])


def make_plan(
    limits: Limits,
    model: str,
    digest: str,
    devices: Sequence[str],
    parallel: str = "tensor",
    shares: Sequence[float] | None = None,
    stages_of: Sequence[int] | None = None,
) -> Plan:
    """Return a plan with one rank for each of `devices`, in proportion to `shares`.

    model: name of the model; unprintable characters are removed
    devices: the first one is LOCAL
    parallel: "tensor" for one stage with all ranks, "pipeline" for one stage per rank
    shares: relative shares; None: equal. If the first share is 0, rank 0 is a thin owner: it has a stage without
        layers, and the other ranks share the model.
    stages_of: number of ranks in each stage, such as (2, 2); overrides `parallel`

    Raises PlanError if the model has too little to share.
    """
    n = len(devices)
    wishes = [1.0] * n if shares is None else list(shares)
    thin = len(wishes) == n > 1 and wishes[0] == 0
    parts = [0.0] * thin + checked_shares(wishes[thin:], n - thin, first=int(thin))
    if stages_of is None:
        if parallel not in PARALLEL:
            raise PlanError(f"parallel is {parallel[:40]!r}; known are {', '.join(PARALLEL)}")
        computing = (n - thin,) if parallel == "tensor" else (1,) * (n - thin)
        stages_of = (1,) * thin + computing
    if sum(stages_of) != n or any(ranks < 1 for ranks in stages_of):
        raise PlanError(f"stages of {', '.join(map(str, stages_of))} ranks for {n} devices; expected one rank for each")
    if thin and stages_of[0] != 1:
        raise PlanError(
            f"rank 0 has a share of 0, but is in a stage of {stages_of[0]} ranks; give it a stage of its own"
        )
    own = [Stage(NOTHING, shards(limits, devices[:1], [1.0], last=False))] * thin
    edges = list(accumulate(stages_of[thin:], initial=int(thin)))
    members = [slice(start, stop) for start, stop in pairwise(edges)]
    layers = stages(limits, len(members), [sum(parts[ranks]) for ranks in members])
    cut_stages = [
        Stage(
            stage_layers,
            shards(
                limits,
                devices[ranks],
                parts[ranks],
                last=ranks.stop == n,
            ),
        )
        for stage_layers, ranks in zip(layers, members, strict=True)
    ]
    return Plan(clean_name(model), digest, limits.sizes, (*own, *cut_stages))


def stages(limits: Limits, n: int, shares: Sequence[float]) -> tuple[Range, ...]:
    """Return the layers of `n` consecutive stages, by bytes in proportion to `shares`. The last stage also has the
    head.

    The largest (bytes / share) is minimal for whole layers and at least one layer per stage. Among such divisions, the
    other stages are as close to their shares as possible. Raises PlanError for more stages than layers, or for bad
    shares.
    """
    layers = limits.sizes.layers
    if n > len(limits.begins):
        clause = f", and a stage can begin with {len(limits.begins)} of them" if len(limits.begins) < layers else ""
        raise PlanError(f"{n} stages share {layers} layers{clause}; use at most {len(limits.begins)} stages")
    parts = checked_shares(shares, n)
    before = list(accumulate(limits.layer_bytes, initial=0.0))  # bytes of the layers before each layer
    head = limits.vocab_bytes * limits.sizes.vocab

    def load(stage: int, start: int, stop: int) -> float:
        if not limits.can_be_stage(start, stop):
            return inf
        return before[stop] - before[start] + (head if stage == n - 1 else 0.0)

    slowest, _ = split_in_order(n, (*limits.begins, layers), lambda *cut: load(*cut) / parts[cut[0]], max, 0.0)
    if slowest == inf:
        never = ", ".join(map(str, limits.no_stage_of))
        raise PlanError(f"{n} stages share {layers} layers, and none can have {never} of them; use other devices")

    def strain(stage: int, start: int, stop: int) -> float:
        weight = load(stage, start, stop)
        # This makes the remaining choice proportional to the shares.
        return weight * weight / parts[stage] if weight / parts[stage] <= slowest else inf

    _, edges = split_in_order(n, (*limits.begins, layers), strain, lambda a, b: a + b, 0.0)
    return tuple(Range(start, stop) for start, stop in pairwise(edges))


def split_in_order(
    n: int,
    edges: Sequence[int],
    cost: Callable[[int, int, int], Cost],
    joined: Callable[[Cost, Cost], Cost],
    zero: Cost,
) -> tuple[Cost, list[int]]:
    """Return the least cost of `n` stages in order, and the edges between them, from the first of `edges` to the last.

    cost: returns the cost of a stage, from its number, its first layer (or node) and the one after its last
    joined: combines the costs of two stages
    zero: cost of no stages

    Of equal divisions, the one with the earliest edges is returned.
    """
    # Best division by the end of the stages so far.
    best: dict[int, tuple[Cost, list[int]]] = {edges[0]: (zero, [edges[0]])}
    for stage in range(n):
        reached: dict[int, tuple[Cost, list[int]]] = {}
        for stop in edges[stage + 1 : len(edges) - (n - stage - 1)]:
            before = {
                start: joined(so_far, cost(stage, start, stop)) for start, (so_far, _) in best.items() if start < stop
            }
            last: int = min(before, key=lambda start: before[start])
            reached[stop] = before[last], [*best[last][1], stop]
        best = reached
    return best[edges[-1]]
