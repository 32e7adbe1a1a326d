"""What a model needs when devices are lost, found out and put in place before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edge.cluster.fleet import Fleet, device
from edge.cluster.lost import listed
from edge.cluster.standby import Standby, keep_slices
from edge.errors import EdgeError
from edge.llama.llama import Model
from edge.llm.options import EngineOptions
from edge.parallel.mirror import MirroredHistory
from edge.tasks import Steps
from partition.errors import CannotSlice, PlanError
from partition.plan.plan import LOCAL, Plan
from quant.gguf.file import GgufFile
from quant.text import counted

MOST_CASES = 64  # of losses that are prepared for

Planned = Callable[[Sequence[str]], tuple[Plan, str]]
"""What is done where just these workers answer, and why. The errors of a planner."""


def stand_by(
    losses: int,
    fleet: Fleet,
    plan: Plan,
    addresses: Sequence[str],
    planned: Planned,
    file: GgufFile,
    digest: str,
    options: EngineOptions,
    vocabulary: Model,
    steps: Steps,
) -> Standby:
    """Have everything where it is needed when so many devices are lost. addresses: of all workers.

    PlanError for more losses than there are workers, or than MOST_CASES plans cover. What cannot be prepared is said.
    """
    if not 0 <= losses <= len(addresses):
        raise PlanError(
            f"it is to be ready for the loss of {counted(losses, 'device')} and has"
            f" {counted(len(addresses), 'worker')}: ask for 0 to {len(addresses)}"
        )
    standby = Standby(losses)
    try:
        standby.mirror = MirroredHistory.of(file, options, vocabulary, options.memory or plan.shard(0).memory)
    except CannotSlice as error:
        standby.missing.append(f"keys and values are not copied, but computed again: {error}")
    cases = _Cases(losses, addresses, planned)
    cases.after(plan, frozenset())
    standby.missing += cases.missing
    with steps.step("Preparing for a loss") as show:
        keep_slices(fleet, file, digest, plan, list(cases.plans.values()), standby, show)
    for line in standby.lines():
        steps.say(line)
    return standby


class _Cases:
    """The plans after losses, by the devices that are lost then."""

    def __init__(self, losses: int, addresses: Sequence[str], planned: Planned) -> None:
        self._losses, self._addresses, self._planned = losses, addresses, planned
        self.plans: dict[frozenset[str], Plan] = {}
        self.missing: list[str] = []  # a sentence for each case in which nothing fits

    def after(self, plan: Plan, lost: frozenset[str]) -> None:
        """Add what is done when devices of a plan are lost, and after them others. lost: already."""
        for one in sorted(set(map(device, plan.devices)) - {LOCAL}):
            now = lost | {one}
            if now in self.plans:
                continue
            if len(self.plans) == MOST_CASES:
                raise PlanError(
                    f"to be ready for the loss of {counted(self._losses, 'device')} takes more than {MOST_CASES} plans"
                    f" of {counted(len(self._addresses), 'worker')}; ask for fewer"
                )
            try:
                self.plans[now], _ = self._planned([one for one in self._addresses if one not in now])
            except EdgeError as error:
                self.missing.append(f"nothing is prepared for the loss of {listed(sorted(now))}: {error}")
                continue
            if len(now) < self._losses:
                self.after(self.plans[now], now)
