"""Test a rank that fails to measure a link."""

from types import SimpleNamespace
from typing import Any

import pytest

from edge.worker import rank
from tests.support import memory_link
from tests.support.links import PATIENT
from transport import edge_pb2 as pb
from transport.errors import Refused
from transport.measure import answer


def test_a_measurement_that_fails_fails_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the rank that answers would wait for the next message as long as a step may take."""
    here, there = memory_link.pair(deadlines=PATIENT)

    def fail(*_: object) -> None:
        raise MemoryError("no memory for a block")

    monkeypatch.setattr(rank, "measure", fail)
    measuring: Any = SimpleNamespace(_link=lambda _: here)
    with pytest.raises(MemoryError):
        rank.Rank._measure(measuring, pb.Measure(rank=1, seconds=1.0))
    here.close()  # it has said why before
    with pytest.raises(Refused, match="no memory for a block"):
        answer(there)
