"""Replanning of a running language model over the devices that answer, from measurements taken earlier.

Nothing is measured here, because a request may be waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from edge.cluster.fleet import Fleet, by_device, device
from edge.deployment.kinds import Deciding
from edge.planning.arrange import again, chosen, kind_of, of_kind, shared
from edge.planning.choice import PlanChoice
from edge.profiling.survey import Survey
from edge.tasks import Steps
from partition.errors import CannotSlice, PlanError
from partition.model.file import ModelFile
from partition.plan.plan import LOCAL, Plan
from partition.predict.hysteresis import NEW_PLAN, PREFILL, clearly_better, plan_threshold
from partition.predict.objectives import OBJECTIVES
from partition.predict.predict import predict
from partition.predict.speeds import DeviceSpeed
from partition.search.explain import is_busy, reason
from partition.search.phases import paired, prefill_reason
from partition.search.planner import Placed, Planner, with_microbatches
from partition.search.replicas import replicated


class Replanner(Deciding[Plan]):
    """Planner of the next plan of a language model. Its plans have canonical addresses, as `device` returns them."""

    exact = False  # True if another plan must compute the same bits

    def __init__(self, choice: PlanChoice, file: ModelFile, digest: str) -> None:
        """choice: the first plan, and its planner if a planner chose it.
        digest: SHA-256 of the model file.
        """
        assert isinstance(choice.plan, Plan)
        self._first, self._file, self._digest = by_device(choice.plan), file, digest
        self._objective, self._limits, self._encoder = choice.objective, choice.limits, choice.encoder
        self._parallel = choice.parallel
        self.planner = None if choice.planner is None else _without_presets(choice.planner)
        self.shunned: set[str] = set()  # addresses of workers that failed at their part
        self.replicates = False  # True if plans may have several copies of the model

    @property
    def addresses(self) -> list[str]:
        """Addresses of the workers that may take part: workers that were measured, or that a given plan names."""
        devices = [speed.device for speed in self.planner.speeds] if self.planner else self._first.all_devices
        others = {LOCAL, *self.shunned, *self.left_out}
        return [name for name in dict.fromkeys(map(device, devices)) if name not in others]

    @property
    def survey(self) -> Survey[DeviceSpeed] | None:
        """Measurements behind the plans; None if a person gave the plan."""
        return Survey(self.planner.speeds, self.planner.links) if self.planner else None

    def measured(self, survey: Survey[DeviceSpeed]) -> None:
        """Use these measurements for later plans."""
        if self.planner is not None:
            self.planner = self.planner.like(survey.speeds, survey.links)

    def over(self, fleet: Fleet | None, notes: list[str], steps: Steps, *, several: bool = False) -> tuple[Plan, str]:
        """Return the plan for the workers of a fleet, as `plan` does."""
        return self.plan(list(fleet.workers) if fleet else [], several=several)

    def copies(self, plan: Plan) -> tuple[Plan, ...]:
        return plan.copies

    def is_same(self, plan: Plan, other: Plan) -> bool:
        return _cuts(plan) == _cuts(other)

    def plan(self, workers: Sequence[str], *, several: bool = False) -> tuple[Plan, str]:
        """Return the plan for this device and the given workers, with the reason for it.

        several: as in `over`.
        Raises PlanError if no plan fits.
        """
        if not workers:
            why = "no other device takes part" if self.left_out else "no other device answers"
            return shared({LOCAL: 1.0}, "pipeline", self._file, self._digest), why
        if self.planner is None:
            return again(self._first, workers, self._file, self._digest)
        there = [speed for speed in self.planner.speeds if device(speed.device) in (LOCAL, *workers)]
        if self._parallel != "auto":
            try:
                planner = self.planner.like(there, self.planner.links)
                names = [speed.device for speed in there]
                plan = of_kind(planner, self._file, self._digest, self._parallel, names)
                return by_device(plan), f"{self._parallel} as asked, shares by speed"
            except (CannotSlice, PlanError):
                pass  # another kind is better than no answer
        with_encoder = there if self._encoder is None else self._encoder.held_after_loss(self.planner.speeds, there)
        tries = [(with_encoder, self._limits)]
        tries += [(with_encoder, {})] if self._limits else []  # fewer devices may be unable to keep the limits
        if with_encoder != there:  # if the encoder fits on no device, at least text requests are served
            tries += [(there, limits) for _, limits in tries]
        for speeds, limits in tries:
            try:
                planner = self.planner.like(speeds, self.planner.links)
                placed, why = self._placed(planner, limits)
            except PlanError:
                if (speeds, limits) == tries[-1]:
                    raise
            else:
                break
        if several and self.replicates and placed.plan.prefill is None:
            copies = replicated(planner, placed, self._objective, limits)
            if copies is not None:
                return by_device(copies.plan), reason(planner, copies, self._objective, limits)
        return by_device(with_microbatches(placed.plan, placed.microbatches, planner.work.concurrency)), why

    def _placed(self, planner: Planner, limits: Mapping[str, float]) -> tuple[Placed, str]:
        """Return the best plan within the limits, and the reason for it.

        If the first plan had a prefill placement, the new plan keeps one if it is faster or if only so the limits are
        met.

        Raises PlanError if no plan fits.
        """
        plain, why, refused = None, "", None
        try:
            plain, why = chosen(planner, self._objective, limits)
        except PlanError as error:
            refused = error
        pair = paired(planner, plain, self._objective, limits) if self._first.prefill is not None else None
        if pair is None:
            if plain is None:
                assert refused is not None
                raise refused
            return plain, why
        if plain is None or pair.plan.placements[0] != plain.plan:
            why = reason(planner, pair, self._objective, limits)
        return pair, f"{why}; {prefill_reason(planner, pair)}"

    def pays(self, plan: Plan, current: Plan, least: float = NEW_PLAN) -> bool:
        """Return True if a plan is clearly better than the current one. Of given plans, any other than the current
        one is better. A plan of another kind than the user chose never is.

        least: threshold for devices that were not busy.
        """
        if self.planner is None:
            return plan != current
        if kind_of(plan) != self._parallel == kind_of(current):
            return False
        own, *others = self.planner.speeds
        at_best = self.planner.like([own.at_best, *others], self.planner.links)
        new, old = (self._value(at_best, candidate) for candidate in (plan, current))
        busy = plan.world_size > 1 and is_busy(self.planner.speeds, plan.devices)
        if clearly_better(new, old, by=plan_threshold(busy, least)):
            return True
        if plan.prefill is None or new > old:
            return False
        new, old = (self._value(at_best, candidate, "ttft") for candidate in (plan, current))
        return clearly_better(new, old, by=plan_threshold(is_busy(self.planner.speeds, plan.prefill.devices), PREFILL))

    def _value(self, planner: Planner, plan: Plan, name: str = "") -> float:
        """Return the cost of a plan by an objective; smaller is better, infinity if the plan is impossible. name:
        by default, the objective of the first plan.
        """
        name = name or self._objective
        try:
            predicted = predict(plan, planner.work, _by_address(planner), planner.links)
        except PlanError:
            return float("inf")
        return OBJECTIVES[name].cost_of(predicted)


def _cuts(plan: Plan) -> Plan:
    """Return a plan without what a user or a worker chooses for its own part."""
    shards = by_device(plan).with_shards(
        lambda shard: replace(shard, threads=None, affinity=(), gpu_layers=None, memory=None)
    )
    prefill = shards.prefill and replace(shards.prefill, model="", model_digest="")
    return replace(shards, model="", model_digest="", prefill=prefill)


def _by_address(planner: Planner) -> dict[str, DeviceSpeed]:
    return {device(speed.device): speed for speed in planner.speeds}


def _without_presets(planner: Planner) -> Planner:
    """Return the planner without preset devices, because a plan can run only on real devices."""
    own, *others = planner.speeds
    return planner.like([own, *(speed for speed in others if not speed.preset)], planner.links)
