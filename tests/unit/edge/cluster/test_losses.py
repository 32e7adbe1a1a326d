"""Test lost devices: the error that states the reason, the devices that are not tried again, and the message."""

import pytest

from edge.cluster.failures import LostLately, failure_reason, is_cause, is_loss, loss_reason
from edge.errors import WorkerError
from transport.errors import LinkClosed, LinkTimeout, Refused


def test_a_device_is_left_alone_only_for_what_it_failed_at() -> None:
    """One that was lost hours ago, over something else, is tried as any other."""
    lost = LostLately()
    assert lost.again(["pi"], 1) == set()
    assert lost.again(["pi", "nas"], 2) == {"pi"}
    assert lost.again(["nas"], 3) == {"nas"}
    assert lost.again(["pi"], 1) == set()
    assert lost.again(["pi"], 2) == {"pi"}


@pytest.mark.parametrize(
    ("error", "loss"),
    [
        (WorkerError("pi: its engine process was killed by signal 9"), True),
        (WorkerError("pi: rank 2 went away", "LinkClosed"), True),
        (WorkerError("pi: needs 2 GiB, has 1", "NotEnoughMemory"), False),
        (LinkTimeout("pi said nothing for 2 s"), True),
        (ValueError("context is too small"), False),
    ],
)
def test_what_is_a_loss(error: Exception, loss: bool) -> None:
    assert is_loss(error) == loss


def test_the_error_that_says_most_is_the_reason() -> None:
    closed, died = WorkerError("a link broke", "LinkClosed"), WorkerError("killed by signal 9")
    refused = WorkerError("rank 1 refused rank 2: the secret is not this group's", "Refused")
    assert failure_reason([closed, died], LinkClosed("gone")) is died
    assert failure_reason([closed]) is closed
    assert failure_reason([closed, refused], Refused("nothing listens")) is refused
    unreachable = Refused("nothing listens at pi:7070")
    assert failure_reason([closed], unreachable) is unreachable
    assert [is_cause(error) for error in (closed, died, refused)] == [False, True, False]


def test_what_a_person_is_told() -> None:
    assert loss_reason(["pi"], LinkClosed("pi: went away")) == "pi was lost (went away)"
    assert loss_reason(["pi", "nas"], LinkClosed("no power")) == "pi and nas were lost (no power)"
    assert loss_reason([], LinkClosed("went away")) == "a device was lost (went away)"
