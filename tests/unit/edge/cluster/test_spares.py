"""The losses that are prepared for: which, and how many."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

import pytest

from edge.cluster import spares
from edge.cluster.fleet import Fleet
from edge.cluster.model_slices import ModelSlices
from edge.cluster.spares import Room, Spares
from edge.cluster.standby import stand_by
from edge.demo import MODEL_PATH
from edge.parallel.mirror import Mirror
from edge.slices.local import rank_recipe
from partition.errors import PlanError
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan
from partition.slices.gguf_slice import limits
from quant.gguf.file import GgufFile
from tests.support import planning
from tests.support.deployments import Heard

WORKERS = ("a:1", "b:1", "c:1")
FILE = GgufFile.open(MODEL_PATH)
NOBODY = Fleet.__new__(Fleet)  # nothing is asked of it
MIB, DIGEST = 1 << 20, 64 * "0"
SLICES = ModelSlices(FILE, DIGEST, ())


def over(workers: Sequence[str]) -> tuple[Plan, str]:
    """A stage of each of these and of this device."""
    return make_plan(planning.work(8).limits, "made up", "", [LOCAL, *workers], "pipeline"), ""


@pytest.mark.parametrize("losses", [1, 2, 3])
def test_each_loss_has_a_plan_of_those_that_are_left(losses: int) -> None:
    plans, missing = Spares(over(WORKERS)[0], WORKERS, over, SLICES)._after_losses(losses)
    lost = {frozenset(some) for n in range(1, losses + 1) for some in combinations(WORKERS, n)}
    assert set(plans) == lost
    for some, plan in plans.items():
        assert set(plan.devices) == {LOCAL, *WORKERS} - some
    assert missing == []


def test_a_loss_that_nothing_is_left_for_is_named() -> None:
    def without_a_nothing(workers: Sequence[str]) -> tuple[Plan, str]:
        if "a:1" not in workers:
            raise PlanError("no room")
        return over(workers)

    plans, missing = Spares(over(WORKERS)[0], WORKERS, without_a_nothing, SLICES)._after_losses(1)
    assert missing == ["nothing is prepared for the loss of a:1: no room"]
    assert set(plans) == {frozenset({"b:1"}), frozenset({"c:1"})}


def test_there_are_no_more_cases_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "MOST_CASES", 6)
    of_two = Spares(over(WORKERS)[0], WORKERS, over, SLICES)
    of_two._after_losses(2)
    monkeypatch.setattr(spares, "MOST_CASES", 5)
    with pytest.raises(PlanError, match="takes more than 5 plans of 3 workers; ask for fewer"):
        of_two._after_losses(2)


def cut(workers: Sequence[str]) -> tuple[Plan, str]:
    """A stage of the bundled model each."""
    return make_plan(limits(FILE), "", "", [LOCAL, *workers], "pipeline"), ""


def most(memory: Callable[[Plan], int] = lambda plan: MIB, disk: Mapping[str, int] | None = None) -> tuple[int, str]:
    """The losses that there is room for, and why no more."""
    built = Spares(cut(WORKERS)[0], WORKERS, cut, SLICES)
    spare, why = built.most(Room(memory, disk or {}), MIB)
    return spare.losses, why


def test_as_many_losses_as_can_be_are_prepared_for() -> None:
    assert most() == (3, "")


def test_no_more_than_the_plan_has_devices_to_lose() -> None:
    built = Spares(cut(())[0], WORKERS, cut, SLICES)
    assert built.most(Room(lambda plan: MIB, {}), MIB)[0].losses == 0


def test_memory_that_plans_take_is_not_lent() -> None:
    losses, why = most(lambda plan: MIB - 1)
    assert losses == 0
    assert why.startswith(
        "a copy of keys and values takes 1.00 MiB of this device's memory, and its plans leave 1.00 MiB"
    )
    assert most(lambda plan: MIB if plan.world_size > 2 else 0)[0] == 1  # two that are left have no room for it
    assert most(lambda plan: MIB if plan.world_size > 1 else 0)[0] == 3  # the last one has nobody to lose


def test_disks_keep_so_many_slices() -> None:
    first = Spares(cut(WORKERS)[0], WORKERS, cut, SLICES).after(1)
    [running] = [rank for rank, address in enumerate(cut(WORKERS)[0].devices) if address == "b:1"]
    baseline = sum(spare.part.recipe.n_bytes for spare in first.standby if spare.address == "b:1")
    need = baseline + rank_recipe(FILE, DIGEST, cut(WORKERS)[0].slice(running)).n_bytes
    assert most(disk={"b:1": need - 1})[0] == 0
    assert "on b:1, which keeps" in most(disk={"b:1": need - 1})[1]
    assert most(disk={"b:1": need})[0] >= 1


def test_what_is_in_place_is_not_sent_again() -> None:
    """A slice that runs is also the one that is needed after a loss, and takes its room once."""
    plan = cut(WORKERS)[0]

    def as_before(workers: Sequence[str]) -> tuple[Plan, str]:
        return plan, ""

    spare = Spares(plan, WORKERS, as_before, SLICES).after(1)
    assert len(spare.plans) == len(WORKERS)
    assert spare.standby == ()


def test_a_loss_that_nothing_is_left_for_is_the_end() -> None:
    def two_at_least(workers: Sequence[str]) -> tuple[Plan, str]:
        if len(workers) < 2:
            raise PlanError("no room")
        return cut(workers)

    spare, why = Spares(cut(WORKERS)[0], WORKERS, two_at_least, SLICES).most(Room(lambda plan: MIB, {}), MIB)
    assert (spare.losses, why) == (1, "nothing is prepared for the loss of a:1 and b:1: no room")


def test_where_there_is_no_room_for_a_spare_it_is_said() -> None:
    built, heard = Spares(cut(WORKERS)[0], WORKERS, cut, SLICES), Heard()
    mirror = Mirror(4096, MIB)
    with pytest.raises(PlanError, match="spare is 'all'; needed is a number of devices, or 'auto'"):
        stand_by("all", built, mirror, Room(lambda plan: 0, {}), NOBODY, heard)
    assert stand_by("auto", built, mirror, Room(lambda plan: 0, {}), NOBODY, heard) is None
    [line] = heard.lines
    assert line.startswith("ready for no loss: a copy of keys and values takes 1.00 MiB")
