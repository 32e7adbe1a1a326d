"""Test devices that join: how a rank uses its limits, and how often a device is tried."""

from typing import Any

import pytest

from devices.sleeping import VARIABLE
from edge.errors import EngineError
from edge.net import rendezvous
from edge.parallel.engine_kinds import own_kind
from edge.profiling.joining import TRIES, JoiningDevices
from edge.profiling.survey import Survey
from tests.support import planning
from transport.tcp_link import POLL_S


@pytest.mark.parametrize(
    ("quota", "threads", "polls"),
    [(None, 4, True), (4.0, 4, True), (1.0, 1, True), (0.5, 1, False), (1.5, 2, False)],
)
def test_a_rank_polls_unless_its_quota_is_for_computing(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, threads: int, polls: bool
) -> None:
    monkeypatch.setattr(rendezvous, "cpu_quota", lambda: quota)
    assert own_kind().polling_s(threads) == (POLL_S if polls else 0.0)
    monkeypatch.setenv(VARIABLE, "profile.json")  # a sleeping device shares its cores with others
    assert own_kind().polling_s(threads) == 0.0


def test_a_device_that_cannot_be_measured_is_tried_so_often_and_then_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[str] = []

    def fails(self: JoiningDevices, address: str, *_: Any) -> None:
        tried.append(address)
        raise EngineError("it went away")

    monkeypatch.setattr(JoiningDevices, "_measured", fails)
    no_file: Any = None
    joining = JoiningDevices(lambda: ["pi:7070"], no_file, "", "auto", insecure=True)
    known = Survey((planning.device("local", planning.MS),), planning.linked(("local",)))
    for _ in range(TRIES + 3):
        assert joining.measured(known, lambda done, total: None) is None
    assert tried == ["pi:7070"] * TRIES
