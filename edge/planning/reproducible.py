"""Several devices that give the same tokens from run to run, also where one of them is lost in the middle of an answer.

What ranks add up depends on how the model is cut. So a plan keeps its cuts: where a device is lost, its ranks go to
those that are left, or at last to processes on this one. Stages of one rank pass on what one device would compute, bit
for bit, so there this device alone does as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from edge.cluster.connect import CONNECT_TIMEOUT_S
from edge.cluster.fleet import Fleet, by_device, device
from edge.parallel.surviving import SurvivingEngine
from edge.planning.arrange import shared
from edge.planning.supervisor import Supervisor
from edge.worker.local import local_worker
from partition.errors import PlanError
from partition.plan.plan import LOCAL, Plan


def settled(plan: Plan) -> Plan:
    """The plan without what workers would measure: layers are on a GPU only where it says so."""
    stages = (
        replace(stage, shards=tuple(replace(shard, gpu_layers=shard.gpu_layers or 0) for shard in stage.shards))
        for stage in plan.stages
    )
    return replace(plan, stages=tuple(stages))


def check_settled(plan: Plan | None, parallel: str, shares: Sequence[float] | None) -> None:
    """PlanError where devices would get their parts by measurement."""
    if plan is None and (parallel == "auto" or shares is None):
        raise PlanError(
            "reproducible answers need the same plan in each run, and shares that are measured differ: give --parallel"
            " and --shares, or a --plan that was saved with --save-plan"
        )


class SameCuts(Supervisor):
    """As `Supervisor`, by plans whose cuts are those of the first one. Devices that come back, join or became slow
    change nothing: only those that are lost, or leave, are replaced."""

    def start(self, fleet: Fleet, plan: Plan) -> SurvivingEngine:
        """As `Supervisor.start`."""
        engine = super().start(fleet, plan)
        engine.exact = True
        return engine

    @contextmanager
    def _reachable(
        self, timeout_s: float = CONNECT_TIMEOUT_S, addresses: Sequence[str] | None = None
    ) -> Iterator[tuple[Fleet | None, list[str]]]:
        """As `Supervisor`; where no worker is left and this device alone would not compute the same, one on it."""
        with super()._reachable(timeout_s, addresses) as (fleet, notes):
            if fleet is not None or self._alone_is_same:
                yield fleet, notes
                return
            with local_worker() as address, Fleet([address]) as here:
                yield here, notes

    @property
    def _alone_is_same(self) -> bool:
        return self._exchange.wire == "f32" and all(len(stage.shards) == 1 for stage in self._plan.stages)

    def _planned(self, workers: Sequence[str]) -> tuple[Plan, str]:
        if not workers:
            return shared({LOCAL: 1.0}, "pipeline", self._file, self._digest), "no other device answers"
        return placed_again(self._plan, workers), "the same cuts, on the devices that are left"

    def _take_back(self) -> None:
        """Answers stay what they are without it."""

    def _meet(self) -> None:
        """Likewise."""

    def _look_for_slow(self) -> None:
        """Likewise."""


def placed_again(plan: Plan, workers: Sequence[str]) -> Plan:
    """The same cuts, with the ranks of devices that are not among the workers on these in turn."""
    there, n_moved, stages = {device(one): one for one in workers}, 0, []
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
