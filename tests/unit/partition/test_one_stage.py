"""Test a plan with a thin owner and one computing stage: it has one step at a time, whatever is requested."""

from dataclasses import replace

import pytest

from partition.plan.plan import LOCAL, Plan
from partition.predict.predict import predict
from partition.predict.speeds import LinkSpeed
from partition.search.planner import Planner
from partition.simulate.arrivals import closed
from partition.simulate.simulate import simulate
from tests.support.planning import MS, device, linked, work

FAR = LinkSpeed(10 * MS, 12.5e6)
REQUESTS = 4


def thin_planner() -> Planner:
    """A laptop ten times as fast as its owner's phone: all layers are there. Each row of a step takes as long."""
    speeds = [device(layer_s=100 * MS), device("laptop", 10 * MS, by_row=True)]
    return Planner(work(4, concurrency=REQUESTS), speeds, linked([LOCAL, "laptop"], FAR), "m", "", tensor=False)


def thin_plan(planner: Planner) -> Plan:
    [placed], exact = planner.front(("throughput",))
    assert exact
    assert placed.plan.thin_owner
    assert len(placed.plan.computing) == 1
    assert placed.microbatches == 1
    return placed.plan


@pytest.mark.parametrize("microbatches", [None, 1, 2, 4])
def test_its_throughput_is_that_of_all_rows_in_one_step(microbatches: int | None) -> None:
    """4 layers of 10 ms for each of 4 rows, and 10 ms there and back: 180 ms for 4 tokens, and the bytes."""
    planner = thin_planner()
    plan = replace(thin_plan(planner), microbatches=microbatches)
    by_device = {speed.device: speed for speed in planner.speeds}
    predicted = predict(plan, planner.work, by_device, planner.links)
    assert predicted.microbatches == 1
    assert predicted.throughput_per_s == pytest.approx(REQUESTS / 0.180, rel=0.01)
    simulated = simulate(predicted, closed(REQUESTS, 40, 1, 100))
    assert simulated.throughput_per_s == pytest.approx(predicted.throughput_per_s, rel=0.01)


def test_the_search_prices_it_as_it_is_predicted() -> None:
    planner = thin_planner()
    [placed], _ = planner.front(("throughput",))
    by_device = {speed.device: speed for speed in planner.speeds}
    predicted = predict(placed.plan, planner.work, by_device, planner.links, placed.microbatches)
    assert placed.objectives[0] == pytest.approx(1 / predicted.throughput_per_s, rel=1e-9)
    in_two, _ = planner.front(("latency", "throughput"), [2])
    assert in_two
    assert all(placed.microbatches == min(2, len(placed.plan.computing)) for placed in in_two)


@pytest.mark.parametrize(("prompt", "seconds"), [(8, 0.38608), (512, 23.12656), (1100, 45.90245)])
def test_a_prompt_goes_through_it_in_the_steps_of_one_stage(prompt: int, seconds: float) -> None:
    """Up to 512 tokens are one step, whose way nothing overlaps: at 0.1 MB/s 512 bytes a token and 40 ms of computing.

    Behind it come a chunk's way, and the latencies of 10 ms there and back.
    """
    speeds = [device(layer_s=100 * MS, by_row=True), device("laptop", 10 * MS, by_row=True)]
    to_do, links = work(4, prompt=prompt), linked([LOCAL, "laptop"], LinkSpeed(10 * MS, 1e5))
    planner = Planner(to_do, speeds, links, "m", "", tensor=False)
    [placed], exact = planner.front(("ttft",))
    assert exact
    assert placed.plan.thin_owner
    assert len(placed.plan.computing) == 1
    predicted = predict(placed.plan, to_do, {speed.device: speed for speed in speeds}, links)
    assert predicted.ttft_s == pytest.approx(seconds, rel=1e-3)
    assert placed.objectives[0] == pytest.approx(predicted.ttft_s, rel=1e-9)
    simulated = simulate(predicted, closed(1, 1, prompt, 1))
    assert simulated.ttft_s is not None
    assert simulated.ttft_s.p50 == pytest.approx(predicted.ttft_s, rel=0.01)


def test_one_stage_is_found_where_several_stages_would_be_better_in_one_step() -> None:
    """4 layers of 2 ms here, of 1 ms on the other device, for any rows: 8 ms for 4 tokens on one stage. Two stages
    take 5 ms where all rows are in one step, which is not asked for, and 3 ms for each row where it has its own."""
    speeds = [device(layer_s=2 * MS), device("laptop")]
    names = [LOCAL, "laptop"]
    planner = Planner(work(4, concurrency=4), speeds, linked(names), "m", "", tensor=False, thin=False)
    [any_number], _ = planner.front(("throughput",))
    assert len(any_number.plan.computing) == 2
    assert any_number.objectives[0] == pytest.approx(5 * MS / 4, rel=1e-3)
    [in_four], exact = planner.front(("throughput",), [4])
    assert exact
    assert len(in_four.plan.computing) == 1
    assert in_four.objectives[0] == pytest.approx(8 * MS / 4, rel=1e-3)
