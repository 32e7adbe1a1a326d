"""Test the deadlines that an owner sets for a worker."""

import math

import pytest

from edge.errors import EdgeError
from edge.worker.messages import deadlines_of
from transport import edge_pb2 as pb
from transport.link import Deadlines

NAMES = ("connect_timeout_s", "step_timeout_s", "send_timeout_s")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 86_400.5])
def test_a_deadline_that_never_passes_is_refused(name: str, seconds: float) -> None:
    with pytest.raises(EdgeError, match=f"{name} is"):
        deadlines_of(pb.Open(**{name: seconds}))  # type: ignore[arg-type]


def test_deadlines_are_those_of_the_owner_or_the_usual_ones() -> None:
    assert deadlines_of(pb.Open()) == Deadlines()
    assert deadlines_of(pb.Open(connect_timeout_s=86_400.0, step_timeout_s=0.1)) == Deadlines(86_400.0, 0.1)
