"""Test the goodput of simulated requests: the fraction that meets both targets, and the rate of arrivals at which 90 %
do.
"""

from dataclasses import replace

import pytest

from partition.predict.prediction import Prediction, StagePrediction
from partition.predict.speeds import Curve
from partition.simulate import servers as simulate_servers
from partition.simulate.arrivals import Arrivals, Request
from partition.simulate.result import Targets
from partition.simulate.servers import Slow
from partition.simulate.simulate import Conditions, most_arrivals_per_s, simulate
from partition.simulate.times import capacity_per_s

PROMPT, TOKENS = 8, 5


def one_at_a_time() -> Prediction:
    """A device that takes 1 s for a prompt of 8 tokens and 0.5 s for any other token, of one request at a time."""
    curve = Curve(((1, 0.5), (PROMPT, 1.0)))
    stage = StagePrediction(("local",), "layers 0-3", 0.5, 0.5, 0.0, 0.0, {"local": 1}, curve)
    return Prediction(
        latency_s=0.5, throughput_per_s=2.0, ttft_s=1.0, prompt=PROMPT, energy_j=None, enter_s=0.0, stages=(stage,),
        in_flight=1, microbatches=1,
    )  # fmt: skip


def coming(*times_s: float) -> Arrivals:
    return Arrivals(tuple(Request(time_s, PROMPT, TOKENS) for time_s in times_s), "by hand")


@pytest.mark.parametrize(
    ("targets", "met"),
    [
        (Targets(), 4),
        (Targets(ttft_s=1.1), 2),  # the second waits until 3, so its first token comes after 4; so does the fourth
        (Targets(ttft_s=3.5), 3),
        (Targets(ttft_s=4.1), 4),
        (Targets(itl_s=0.49), 0),
        (Targets(itl_s=0.51), 4),
        (Targets(ttft_s=1.1, itl_s=0.51), 2),
        (Targets(ttft_s=1.1, itl_s=0.49), 0),
    ],
)
def test_a_request_counts_where_it_meets_both_targets(targets: Targets, met: int) -> None:
    """A request takes 3 s, and comes at 0, 0, 10 and 11: first tokens after 1, 4, 1 and 3 s."""
    simulated = simulate(one_at_a_time(), coming(0, 0, 10, 11), targets=targets)
    assert simulated.ttft_s is not None
    assert simulated.seconds == pytest.approx(16)
    assert simulated.goodput is not None
    assert simulated.goodput.within == met / 4
    assert simulated.goodput.requests_per_s == pytest.approx(met / 16)
    limits = simulated.to_json()["goodput"]["targets"]
    assert limits == {name: None if limit == float("inf") else limit for name, limit in
                      (("ttft_s", targets.ttft_s), ("itl_s", targets.itl_s))}  # fmt: skip


def test_requests_that_fail_are_not_within_the_targets() -> None:
    lost = Conditions(leave=(("local", 5.0),))
    simulated = simulate(one_at_a_time(), coming(0, 0, 10, 11), lost, targets=Targets())
    assert simulated.failed == 3
    assert simulated.goodput is not None
    assert simulated.goodput.within == 1 / 4


def test_without_targets_there_is_no_goodput() -> None:
    simulated = simulate(one_at_a_time(), coming(0))
    assert simulated.goodput is None
    assert simulated.to_json()["goodput"] is None


def test_the_highest_rate_is_where_nine_of_ten_meet_the_targets() -> None:
    """Goodput is 0 at targets that are never met, below capacity where a queue breaks one, and more for looser ones."""
    predicted, requests = one_at_a_time(), coming(*[0.0] * 300)
    capacity = capacity_per_s(predicted, PROMPT, TOKENS)
    assert capacity == pytest.approx(1 / 3)

    def most(targets: Targets) -> float:
        rate = most_arrivals_per_s(predicted, requests, targets, seed=1)
        assert rate is not None
        return rate

    assert most(Targets(ttft_s=0.9)) == 0.0
    strict, loose = most(Targets(ttft_s=2.0, itl_s=0.6)), most(Targets(ttft_s=10.0, itl_s=0.6))
    assert 0 < strict < 0.5 * capacity < loose < 1.1 * capacity
    # An arrival has to find the queue nearly empty: M/D/1 at a load of 0.15 has a wait of 1 s or less for 90 %.
    assert strict * 3 == pytest.approx(0.15, abs=0.05)
    assert most(Targets(ttft_s=2.0, itl_s=0.4)) == 0.0
    slow = replace(predicted, in_flight=1, stages=(replace(predicted.stages[0], crowding=2.0),))
    slower = most_arrivals_per_s(slow, requests, Targets(ttft_s=10.0, itl_s=1.1), seed=1)
    assert slower is not None
    assert slower < 0.7 * loose


def test_the_highest_rate_is_unknown_where_it_cannot_be_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation that is asked for has been done by then."""
    predicted, requests, targets = one_at_a_time(), coming(*[0.0] * 20), Targets(ttft_s=2.0)
    for conditions in (Conditions(leave=(("local", 60.0),)), Conditions(slow=(Slow("local", 2.0, 30.0),))):
        assert most_arrivals_per_s(predicted, requests, targets, conditions) is None
    assert most_arrivals_per_s(predicted, requests, targets, Conditions(jitter=0.1)) is not None
    monkeypatch.setattr(simulate_servers, "MOST_EVENTS", 10)
    assert most_arrivals_per_s(predicted, requests, targets) is None
