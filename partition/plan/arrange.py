"""Makes a plan for devices: tensor-parallel, pipeline stages, or stages of several ranks each."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from partition.errors import PlanError
from partition.plan.apportion import checked_shares
from partition.plan.pipeline import stages
from partition.plan.plan import Plan, Stage, clean_name
from partition.plan.tensor import Limits, shards

PARALLEL = ("tensor", "pipeline")


def make_plan(
    limits: Limits,
    model: str,
    digest: str,
    devices: Sequence[str],
    parallel: str = "tensor",
    shares: Sequence[float] | None = None,
    stages_of: Sequence[int] | None = None,
) -> Plan:
    """A plan with one rank for each of `devices`, of which the first is LOCAL, in proportion to `shares`, else equal.

    "tensor" is one stage that all ranks share, "pipeline" a stage for each rank. `stages_of`, where given, is taken
    instead of `parallel`: how many ranks each stage has, such as (2, 2). Of `model`, its name, what can be printed is
    kept. PlanError if the model has too little to share.
    """
    n = len(devices)
    parts = checked_shares([1.0] * n if shares is None else shares, n)
    if stages_of is None:
        if parallel not in PARALLEL:
            raise PlanError(f"parallel is {parallel[:40]!r}; known are {', '.join(PARALLEL)}")
        stages_of = (n,) if parallel == "tensor" else (1,) * n
    if sum(stages_of) != n or any(ranks < 1 for ranks in stages_of):
        raise PlanError(
            f"stages of {', '.join(map(str, stages_of))} ranks for {n} devices; needed is one rank for each"
        )
    edges = list(accumulate(stages_of, initial=0))
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
    return Plan(clean_name(model), digest, limits.sizes, tuple(cut_stages))
