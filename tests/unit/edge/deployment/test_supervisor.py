"""Test that a model continues on this device alone after a loss, even if this device cannot reach any other."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from devices.errors import TrustError
from devices.trust.credentials import DEVICE_FILE
from edge.cluster.fleet import Fleet
from edge.deployment import supervisor as module
from edge.deployment.kinds import Building, Deciding, OtherCopies, RunningPlan
from edge.deployment.supervisor import Supervisor
from edge.tasks import SILENT, Progress, Steps
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan
from tests.support import planning
from transport.errors import LinkClosed

PLAN = make_plan(planning.work(8).limits, "made up", "", (LOCAL,), "tensor")


class Alone(Deciding[Plan]):
    """Plans for this device alone, where no worker is there."""

    @property
    def addresses(self) -> list[str]:
        return ["127.0.0.1:1"]

    def over(self, fleet: Fleet | None, notes: list[str], steps: Steps, *, several: bool = False) -> tuple[Plan, str]:
        assert fleet is None
        return PLAN, "; ".join(notes)

    def pays(self, plan: Plan, current: Plan) -> bool:
        return False


class Engines(Building[Plan, str]):
    """Loads nothing."""

    def load(self, fleet: Fleet | None, plan: Plan, life: ExitStack, steps: Steps) -> tuple[str, None]:
        return "another engine", None

    def send_ahead(self, fleet: Fleet, plan: Plan, check: Progress) -> None: ...


def supervisor() -> Supervisor[Plan, str]:
    supervisor = Supervisor(Alone(), Engines(), SILENT, insecure=False)
    supervisor.running = RunningPlan("an engine", PLAN, "", ("this device",))
    return supervisor


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of this device's credentials."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "edge/credentials").mkdir(parents=True)
    return tmp_path / "edge/credentials" / DEVICE_FILE


def test_files_that_cannot_be_read_forbid_no_engine_of_this_device(credentials: Path) -> None:
    credentials.mkdir()  # it cannot be read
    supervised = supervisor()
    assert supervised.replace(LinkClosed("pi went away"), 1, lambda: None) == "another engine"
    assert "planned without 127.0.0.1:1: no worker can be reached, because this device's cluster credentials" in (
        supervised.running.why
    )
    reason = rf"cannot be used \(.*Is a directory.*\): let this user read and write {credentials.parent} and "
    with pytest.raises(TrustError, match=reason):  # a better plan is another matter
        supervised.offer("pi is there again", lambda plan: True, lambda done, total: None, lambda switched: None)


def test_damaged_credentials_forbid_no_engine_of_this_device(credentials: Path) -> None:
    credentials.write_text("damaged")
    supervised = supervisor()
    assert supervised.replace(LinkClosed("pi went away"), 1, lambda: None) == "another engine"
    with pytest.raises(TrustError, match="are damaged"):
        supervised.offer("pi is there again", lambda plan: True, lambda done, total: None, lambda switched: None)


def test_a_look_at_who_is_there_starts_no_worker_and_a_plan_may(monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> None:
        raise LinkClosed("a worker on this device")

    supervised = supervisor()
    monkeypatch.setattr(module, "local_worker", start)
    monkeypatch.setattr(Alone, "needs_worker", True)
    with supervised.reach(["127.0.0.1:1"]) as (fleet, notes):
        assert (fleet, len(notes)) == (None, 1)
    with pytest.raises(LinkClosed, match="a worker on this device"):
        supervised.offer("pi leaves", lambda plan: True, lambda done, total: None, lambda switched: None)


def test_what_waits_to_take_over_ends_also_where_what_runs_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    supervised, ended = supervisor(), list[Any]()

    def fail() -> None:
        raise LinkClosed("pi went away")

    supervised._life.callback(fail)
    supervised._offered.callback(ended.append, "offered")
    with pytest.raises(LinkClosed):
        supervised.close()
    assert ended == ["offered"]


def test_only_workers_that_are_new_are_to_blame_for_a_plan_that_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that ran before are needed where their plan takes over again."""
    supervised, deciding = supervisor(), Alone()
    deciding.shunned = set()

    @contextmanager
    def reach(*_: object) -> Iterator[tuple[Any, list[str]]]:
        yield SimpleNamespace(workers=dict.fromkeys(["old:1", "new:1"])), []

    def refuse(*_: object) -> tuple[str, None]:
        raise LinkClosed("new went away")

    monkeypatch.setattr(deciding, "over", lambda *_, **__: (PLAN, ""))
    monkeypatch.setattr(supervised, "deciding", deciding)
    monkeypatch.setattr(supervised, "reach", reach)
    monkeypatch.setattr(Engines, "load", refuse)
    supervised.running = RunningPlan("an engine", PLAN, "", ("this device",), frozenset(["old:1"]))
    with pytest.raises(LinkClosed, match="new went away"):
        supervised.offer(
            "new joined", lambda plan: True, lambda done, total: None, lambda switched: switched() and None
        )
    assert deciding.shunned == {"new:1"}


LIMITS = planning.work(8).limits


def far(*devices: str) -> Plan:
    """A copy with a thin owner."""
    return make_plan(LIMITS, "made up", "", (LOCAL, *devices), "pipeline", [0, *[1] * len(devices)])


class Recorded(OtherCopies[Plan]):
    """Records what other processes run, and what this process has loaded by then."""

    def __init__(self, loaded: list[Plan]) -> None:
        self.calls, self._loaded = list[tuple[str, Sequence[Plan], int]](), loaded

    def run(self, plan: Plan, others: Sequence[Plan]) -> None:
        self.calls.append(("run", others, len(self._loaded)))

    def end_all_but(self, others: Sequence[Plan]) -> None:
        self.calls.append(("end all but", others, len(self._loaded)))


@pytest.mark.parametrize(
    ("copies", "loads", "calls"),
    [
        ([PLAN, far("a"), far("b")], 0, [("run", (far("a"), far("b")), 0)]),
        ([far("b"), PLAN, far("a")], 0, [("run", (far("b"), far("a")), 0)]),
        ([PLAN, far("a", "b")], 0, [("end all but", (), 0), ("run", (), 0), ("run", (far("a", "b"),), 0)]),
        ([far("a", "b")], 1, [("end all but", (), 0), ("run", (), 0), ("run", (), 1)]),
        ([far("b"), far("a")], 1, [("run", (far("a"),), 1)]),
    ],
)
def test_copies_end_before_another_plan_takes_their_devices_and_the_others_stay(
    monkeypatch: pytest.MonkeyPatch, copies: list[Plan], loads: int, calls: list[tuple[str, Sequence[Plan], int]]
) -> None:
    loaded = list[Plan]()
    others, deciding = Recorded(loaded), Alone()
    supervised = Supervisor(deciding, Engines(), SILENT, insecure=False, other_copies=others)
    supervised.on_change.append(lambda running: others.run(running.plan, running.others))
    supervised.running = RunningPlan("an engine", PLAN, "", ("this device",), others=(far("a"),))

    @contextmanager
    def reach(*_: object) -> Iterator[tuple[Any, list[str]]]:
        yield SimpleNamespace(workers={name: SimpleNamespace(label=name) for name in "ab"}), []

    def load(building: Engines, fleet: Fleet | None, plan: Plan, life: ExitStack, steps: Steps) -> tuple[str, None]:
        loaded.append(plan)
        return "another engine", None

    monkeypatch.setattr(deciding, "over", lambda *_, **__: (replace(copies[0], replicas=tuple(copies[1:])), ""))
    monkeypatch.setattr(deciding, "copies", lambda plan: plan.copies)
    monkeypatch.setattr(supervised, "reach", reach)
    monkeypatch.setattr(Engines, "load", load)
    assert supervised.offer(
        "b joined", lambda plan: True, lambda done, total: None, lambda switched: switched() and None
    )
    assert len(loaded) == loads
    assert others.calls == calls
    assert (supervised.running.plan, *supervised.running.others) == (
        (PLAN, *[copy for copy in copies if copy != PLAN]) if PLAN in copies else tuple(copies)
    )
