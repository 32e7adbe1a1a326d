"""Several devices that give the same tokens from run to run, also where one of them is lost in the middle of an answer.

What ranks add up depends on how the model is cut. So a plan keeps its cuts: where a device is lost, its ranks go to
those that are left, or at last to processes on this one. Stages of one rank pass on what one device would compute, bit
for bit, so there this device alone does as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edge.cluster.fleet import by_device, device
from edge.deployment.replanning import Replanner
from edge.planning.choice import PlanChoice
from partition.errors import PlanError
from partition.plan.plan import LOCAL, Plan
from quant.gguf.file import GgufFile


def reproducible_plan(plan: Plan) -> Plan:
    """The plan without what workers would measure: layers are on a GPU only where it says so."""
    return plan.with_shards(lambda shard: replace(shard, gpu_layers=shard.gpu_layers or 0))


def check_reproducible(plan: Plan | None, parallel: str, shares: Sequence[float] | None) -> None:
    """PlanError where devices would get their parts by measurement."""
    if plan is None and (parallel == "auto" or shares is None):
        raise PlanError(
            "reproducible answers need the same plan in each run, and shares that are measured differ: give --parallel"
            " and --shares, or a --plan that was saved with --save-plan"
        )


class SameCuts(Replanner):
    """As `Replanner`, by plans whose cuts are those of the first one. Devices that come back, join or became slow
    change nothing: only those that are lost, or leave, are replaced."""

    moves, exact = False, True

    def __init__(self, choice: PlanChoice, file: GgufFile, digest: str, wire: str) -> None:
        """wire: the type of partial sums on their way."""
        super().__init__(choice, file, digest)
        one_rank_a_stage = all(len(stage.shards) == 1 for stage in self._first.stages)
        self.needs_worker = wire != "f32" or not one_rank_a_stage  # this device alone would not compute the same

    def plan(self, workers: Sequence[str]) -> tuple[Plan, str]:
        """As `Replanner.plan`, with the first plan's cuts."""
        if not workers:
            return super().plan(workers)
        return placed_again(self._first, workers), "the same cuts, on the devices that are left"


def placed_again(plan: Plan, workers: Sequence[str]) -> Plan:
    """The same cuts, with the ranks of devices that are not among the workers on these in turn."""
    there, n_moved, stages = {device(worker): worker for worker in workers}, 0, []
    for stage in by_device(plan).stages:
        shards = []
        for shard in stage.shards:
            if shard.device != LOCAL and shard.device not in there:
                address = workers[n_moved % len(workers)]
                n_moved += 1
                # What was said of the other device does not hold of this one.
                shard = replace(shard, device=device(address), threads=None, affinity=(), gpu_layers=0, memory=None)
            shards.append(shard)
        stages.append(replace(stage, shards=tuple(shards)))
    return replace(plan, stages=tuple(stages))
