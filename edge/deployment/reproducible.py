"""Reproducible plans: several devices give the same tokens in every run, even if a device is lost during a response.

Partial sums depend on how the model is cut, so a plan keeps its cuts. If a device is lost, its ranks move to the
remaining workers, or finally to processes on this device. Stages of one rank compute the same bits as a single device.
So in that case this device alone can take over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edge.cluster.fleet import by_device, device
from edge.deployment.replanning import Replanner
from edge.planning.choice import PlanChoice
from partition.errors import PlanError
from partition.model.file import ModelFile
from partition.plan.plan import LOCAL, Plan


def reproducible_plan(plan: Plan) -> Plan:
    """Return the plan without values that workers would measure. Layers are on a GPU only if the plan assigns them."""
    return plan.with_shards(lambda shard: replace(shard, gpu_layers=shard.gpu_layers or 0))


def check_reproducible(plan: Plan | None, parallel: str, shares: Sequence[float] | None) -> None:
    """Raise PlanError if the shares of devices would be measured, because measurements differ between runs."""
    if plan is None and (parallel == "auto" or shares is None):
        raise PlanError(
            "reproducible answers need the same plan in each run, and shares that are measured differ: give --parallel"
            " and --shares, or a --plan that was saved with --save-plan"
        )


class SameCuts(Replanner):
    """Planner that keeps the cuts of the first plan. It replaces devices that are lost or leave, and ignores
    devices that come back, join or become slow.
    """

    moves, exact = False, True

    def __init__(self, choice: PlanChoice, file: ModelFile, digest: str, wire: str) -> None:
        """wire: type of partial sums on the wire."""
        super().__init__(choice, file, digest)
        one_rank_a_stage = all(len(stage.shards) == 1 for stage in self._first.stages)
        self.needs_worker = wire != "f32" or not one_rank_a_stage  # otherwise this device alone computes the same bits

    def plan(self, workers: Sequence[str], *, several: bool = False) -> tuple[Plan, str]:
        """Return the first plan, with the ranks of missing devices moved to the given workers."""
        if not workers:
            return super().plan(workers)
        return placed_again(self._first, workers), "the same cuts, on the devices that are left"


def placed_again(plan: Plan, workers: Sequence[str]) -> Plan:
    """Return a plan with the same cuts. Ranks of devices that are not among `workers` are dealt to the workers in
    turn.
    """
    there, n_moved, stages = {device(worker): worker for worker in workers}, 0, []
    for stage in by_device(plan).stages:
        shards = []
        for shard in stage.shards:
            if shard.device != LOCAL and shard.device not in there:
                address = workers[n_moved % len(workers)]
                n_moved += 1
                # Settings for the lost device do not apply to another one.
                shard = replace(shard, device=device(address), threads=None, affinity=(), gpu_layers=0, memory=None)
            shards.append(shard)
        stages.append(replace(stage, shards=tuple(shards)))
    return replace(plan, stages=tuple(stages))
