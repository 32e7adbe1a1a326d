"""Makes a plan for devices: tensor-parallel, pipeline stages, or stages of several ranks each."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from partition.errors import PlanError
from partition.plan.apportion import checked_shares
from partition.plan.pipeline import stages
from partition.plan.plan import NOTHING, Plan, Stage, clean_name
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
    instead of `parallel`: how many ranks each stage has, such as (2, 2). With a first share of 0 rank 0 is a thin
    owner: it has a stage of its own, without layers, and the others share the model. Of `model`, its name, what can be
    printed is kept. PlanError if the model has too little to share.
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
        raise PlanError(
            f"stages of {', '.join(map(str, stages_of))} ranks for {n} devices; needed is one rank for each"
        )
    if thin and stages_of[0] != 1:
        raise PlanError(f"rank 0 has no share of a stage of {stages_of[0]} ranks; needed is a stage of its own")
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
