"""Readiness for the loss of devices: the plans after it, the slices that these need beside those that
run, and whether devices lend as much."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from edge.cluster.model_slices import FileSlice, ModelSlices
from edge.errors import EdgeError
from partition.errors import PlanError
from partition.plan.plan import LOCAL, Plan, Sizes, Slice
from quant.text import bytes_text, counted, listed

MOST_CASES = 64  # of losses that are prepared for
AUTO = "auto"  # in place of a number of losses: as many as devices lend for

Planned = Callable[[Sequence[str]], tuple[Plan, str]]
"""Return the plan for the case that just these workers answer, and the reason for it. The errors of a planner."""


@dataclass(frozen=True)
class StandbySlice:
    """A slice that a device keeps on its disk for a plan that may come, beside those of the plan that runs."""

    address: str
    cut: Slice
    part: FileSlice

    def describe(self, sizes: Sizes) -> str:
        """Describe it for people. sizes: of the model."""
        parts = [f"layers {self.cut.layers}"]
        if len(self.cut.heads) < sizes.heads or len(self.cut.ff) < sizes.ff:
            parts += [f"heads {self.cut.heads}", f"ff {self.cut.ff}"]
        return " ".join(parts)


@dataclass(frozen=True)
class Spare:
    """Plans and slices for the loss of so many devices."""

    losses: int
    plans: Mapping[frozenset[str], Plan] = field(default_factory=dict)  # after losses, by who is lost
    standby: tuple[StandbySlice, ...] = ()
    missing: tuple[str, ...] = ()  # a sentence for each loss that nothing is left for


@dataclass(frozen=True)
class Room:
    """Room that devices lend."""

    memory: Callable[[Plan], int]  # bytes of this device that a plan leaves
    disk: Mapping[str, int]  # bytes of slices that a device keeps, by address; not known of those that are not there


class Spares:
    """Prepares for losses of a plan's devices."""

    def __init__(self, plan: Plan, addresses: Sequence[str], planned: Planned, slices: ModelSlices) -> None:
        """addresses: of all workers, as `plan` and those of `planned` write them. slices: of the model."""
        self.plan, self.slices, self._addresses, self._planned = plan, slices, addresses, planned

    def after(self, losses: int) -> Spare:
        """For so many losses. PlanError for more than there are workers, or than MOST_CASES plans cover."""
        if not 0 <= losses <= len(self._addresses):
            raise PlanError(
                f"it is to be ready for the loss of {counted(losses, 'device')} and has"
                f" {counted(len(self._addresses), 'worker')}: ask for 0 to {len(self._addresses)}"
            )
        plans, missing = self._after_losses(losses)
        there = _parts(self.plan)
        lacking = dict.fromkeys(part for plan in plans.values() for part in _parts(plan) if part not in there)
        standby = tuple(StandbySlice(address, cut, part) for address, cut in lacking for part in self.slices.files(cut))
        return Spare(losses, plans, standby, tuple(missing))

    def _after_losses(self, losses: int) -> tuple[dict[frozenset[str], Plan], list[str]]:
        """Return the plans after losses, by the devices that are lost then, and a sentence for each case in which
        nothing fits."""
        plans: dict[frozenset[str], Plan] = {}
        missing: list[str] = []

        def add(plan: Plan, lost: frozenset[str]) -> None:
            """Add what is done when devices of a plan are lost, and after them others. lost: already."""
            for address in sorted(set(plan.devices) - {LOCAL}):
                now = lost | {address}
                if now in plans:
                    continue
                if len(plans) == MOST_CASES:
                    raise PlanError(
                        f"to be ready for the loss of {counted(losses, 'device')} takes more than {MOST_CASES} plans of"
                        f" {counted(len(self._addresses), 'worker')}; ask for fewer"
                    )
                try:
                    plans[now], _ = self._planned([address for address in self._addresses if address not in now])
                except EdgeError as error:
                    missing.append(f"nothing is prepared for the loss of {listed(sorted(now))}: {error}")
                    continue
                if len(now) < losses:
                    add(plans[now], now)

        if losses:
            add(self.plan, frozenset())
        return plans, missing

    def most(self, room: Room, mirror_bytes: int) -> tuple[Spare, str]:
        """For as many losses as devices lend for beside the plan, and why for no more; "": there are no more to lose.

        mirror_bytes: of this device's memory, for a copy of keys and values.
        """
        best = self.after(0)
        for losses in range(1, len(self._addresses) + 1):
            try:
                spare = self.after(losses)
                why = spare.missing[0] if spare.missing else self._lacking(spare, room, mirror_bytes)
            except PlanError as error:  # too many cases, or a plan that has no room by now
                return best, str(error)
            if why or len(spare.plans) == len(best.plans):
                return best, why
            best = spare
        return best, ""

    def _lacking(self, spare: Spare, room: Room, mirror_bytes: int) -> str:
        """Describe the room that devices do not lend; "" where they lend all."""
        several = [plan for plan in (self.plan, *spare.plans.values()) if plan.world_size > 1]
        left = min((room.memory(plan) for plan in several), default=mirror_bytes)
        if left < mirror_bytes:
            return (
                f"a copy of keys and values takes {bytes_text(mirror_bytes)} of this device's memory, and its plans"
                f" leave {bytes_text(max(0, left))}"
            )
        running = [(address, part.recipe) for address, cut in _parts(self.plan) for part in self.slices.files(cut)]
        for address, limit in room.disk.items():
            slices = [*running, *((standby.address, standby.part.recipe) for standby in spare.standby)]
            need = sum(recipe.n_bytes for at, recipe in slices if at == address)
            if need > limit:
                return f"slices take {bytes_text(need)} on {address}, which keeps {bytes_text(limit)}"
        return ""


def _parts(plan: Plan) -> list[tuple[str, Slice]]:
    """Return the parts that devices need from a cache. A device that does all of it needs the model's file alone, and
    so does a thin owner."""
    if plan.world_size == 1:
        return []
    parts = ((address, plan.slice(rank)) for rank, address in enumerate(plan.devices))
    return [(address, cut) for address, cut in parts if cut.layers]
