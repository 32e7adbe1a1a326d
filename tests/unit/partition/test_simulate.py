"""Test the simulator against the cost formulas where they are exact, against queueing theory, and by hand."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.llm.continuation import Request as ArrivingRequest
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.models.demo import MODEL_PATH
from partition.errors import PlanError
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL
from partition.predict.predict import predict
from partition.predict.prediction import NO_LAYERS, Prediction, StagePrediction
from partition.predict.speeds import Curve, LinkSpeed
from partition.simulate import servers as simulate_servers
from partition.simulate.arrivals import Arrivals, Request, TraceError, closed, poisson, trace
from partition.simulate.requests import Dispatcher, Texts
from partition.simulate.result import Spread
from partition.simulate.servers import Clock, Jitter, Server, SimulatedStep, Slow
from partition.simulate.simulate import Conditions, simulate
from partition.simulate.times import capacity_per_s, parts
from tests.support.planning import MS, device, linked, work
from tests.support.thorough import THOROUGH, some

NAMES = (LOCAL, "b", "c", "d")


def of_text(
    stages_of: Sequence[int] = (1,),
    *,
    link: LinkSpeed | None = None,
    prompt: int = 1,
    concurrency: int = 1,
    microbatches: int | None = None,
    layers: int = 12,
) -> Prediction:
    """A language model on unequal devices, which take longer for more rows."""
    names = NAMES[: sum(stages_of)]
    to_do = work(layers, prompt=prompt, concurrency=concurrency)
    speeds = {}
    for i, name in enumerate(names):
        first = device(name, step_s=MS / 5, head_s=MS)
        layer = Curve(((1, (1 + i / 4) * MS), (64, (1 + i / 4) * 9 * MS)))
        speeds[name] = type(first)(**{**first.__dict__, "layer_s": layer, "half_layer_s": layer.times(0.5)})
    plan = make_plan(to_do.limits, "m", "", names, stages_of=stages_of)
    return predict(plan, to_do, speeds, linked(names, link or LinkSpeed(0.0, 5e10)), microbatches)


def of_images(
    seconds: Sequence[float], in_flight: int, *, latency_s: float = 0.0, busy_s: float = 0.0, enter_busy_s: float = 0.0
) -> Prediction:
    """An ONNX model with such stages, and such links between them and to them."""
    stages = [
        StagePrediction(
            (f"d{i}",), f"up to {i}", second, second, latency_s + busy_s, busy_s, {f"d{i}": 1}, Curve(((1, second),))
        )
        for i, second in enumerate(seconds)
    ]
    enter_s = latency_s + enter_busy_s
    latency = enter_s + sum(stage.compute_s + stage.transfer_s for stage in stages)
    busiest = max(enter_busy_s, busy_s, *seconds)
    return Prediction(
        latency, 1 / max(busiest, latency / in_flight), None, None, None, enter_s, tuple(stages), in_flight, in_flight,
        enter_busy_s,
    )  # fmt: skip


@pytest.mark.parametrize("stages_of", [(1,), (1, 1), (1, 2), (3,), (1, 1, 1, 1)])
def test_one_request_alone_is_as_the_formula_says(stages_of: Sequence[int]) -> None:
    plan = of_text(stages_of, link=LinkSpeed(2 * MS, 1e6), prompt=32)  # one chunk
    result = simulate(plan, closed(1, 3, 32, 50))
    assert result.tpot_s is not None
    assert result.ttft_s is not None
    assert (result.tpot_s.p50, result.tpot_s.p99) == pytest.approx((plan.latency_s,) * 2, rel=1e-9)
    assert result.ttft_s.p99 == pytest.approx(plan.ttft_s, rel=1e-9)
    assert result.completed == 3
    assert result.waiting_max == 0


def test_a_thin_owner_is_no_stage_of_its_own() -> None:
    """One stage computes, so all requests are in one step, which takes as long for four rows as for one."""
    both = of_text((1, 1), concurrency=4, microbatches=4)
    own, other = both.stages
    owner = replace(own, what=NO_LAYERS, compute_s=0.0, busy_s=0.0, rows_s=Curve(((1, 0.0),)), transfer_s=5 * MS)
    thin = replace(
        both, stages=(owner, replace(other, compute_s=9 * MS, rows_s=Curve(((1, 9 * MS),)), transfer_s=5 * MS))
    )
    assert (both.n_stages, thin.n_stages) == (2, 1)
    result = simulate(thin, closed(4, 8, 1, 30))
    assert result.tpot_s is not None
    assert result.tpot_s.p50 == pytest.approx(19 * MS, rel=0.1)


@pytest.mark.parametrize("prompt", [64, 100, 256, 700])
@pytest.mark.parametrize("stages_of", [(1,), (1, 1), (1, 2, 1)])
def test_a_prompt_in_chunks_is_as_the_formula_says(stages_of: Sequence[int], prompt: int) -> None:
    result = simulate(plan := of_text(stages_of, link=LinkSpeed(3 * MS, 5e10), prompt=prompt), closed(1, 1, prompt, 1))
    assert result.ttft_s is not None
    assert result.ttft_s.p50 == pytest.approx(plan.ttft_s, rel=1e-4)
    assert result.tpot_s is None
    # On thin links, too: a chunk is on its way while stages compute others, also where ways take longer than stages.
    for bytes_per_s in (1e7, 1e5):
        thin = of_text(stages_of, link=LinkSpeed(3 * MS, bytes_per_s), prompt=prompt)
        result = simulate(thin, closed(1, 1, prompt, 1))
        assert result.ttft_s is not None
        assert result.ttft_s.p50 == pytest.approx(thin.ttft_s, rel=0.02)  # a way of a whole number of rows


@pytest.mark.parametrize(
    ("stages_of", "link", "concurrency", "microbatches"),
    [
        ((1,), LinkSpeed(0, 5e10), 6, 1),
        ((3,), LinkSpeed(MS, 1e7), 4, 1),
        ((1, 1), LinkSpeed(0, 5e10), 8, 2),  # the slowest stage bounds
        ((1, 1), LinkSpeed(100 * MS, 1e8), 8, 2),  # the pass does
        ((1, 1), LinkSpeed(100 * MS, 1e8), 8, 8),
        ((1, 1, 1), LinkSpeed(MS, 4e4), 6, 3),  # a link does
        ((1, 2, 1), LinkSpeed(2 * MS, 1e7), 12, 4),
    ],
)
def test_full_throughput_is_as_the_formula_says(
    stages_of: Sequence[int], link: LinkSpeed, concurrency: int, microbatches: int
) -> None:
    plan = of_text(stages_of, link=link, concurrency=concurrency, microbatches=microbatches)
    token_s = 1 / plan.throughput_per_s
    few, many = (simulate(plan, closed(concurrency, concurrency, 1, n)).seconds for n in (200, 500))
    # Beginning and end are the same for both, so what is between is exact.
    assert many - few == pytest.approx(300 * concurrency * token_s, rel=1e-9)


@pytest.mark.parametrize(
    ("stages_of", "link", "concurrency", "microbatches"),
    [
        ((1, 1), LinkSpeed(100 * MS, 1e8), 7, 3),  # the pass of the largest group bounds
        ((1, 1, 1), LinkSpeed(5 * MS, 1e9), 7, 3),
        ((1, 1), LinkSpeed(0, 5e10), 5, 3),  # the slowest stage does
    ],
)
def test_groups_of_unequal_size_are_as_the_formula_says(
    stages_of: Sequence[int], link: LinkSpeed, concurrency: int, microbatches: int
) -> None:
    plan = of_text(stages_of, link=link, prompt=96, concurrency=concurrency, microbatches=microbatches)
    few, many = (simulate(plan, closed(concurrency, concurrency, 1, n)).seconds for n in (200, 500))
    assert many - few == pytest.approx(300 * concurrency / plan.throughput_per_s, rel=1e-3)


@pytest.mark.parametrize("in_flight", [1, 2, 3, 64])
def test_inputs_in_a_window(in_flight: int) -> None:
    for plan in (
        of_images((4 * MS, 7 * MS, 2 * MS), in_flight, latency_s=MS, busy_s=MS),
        of_images((4 * MS, 2 * MS), in_flight, latency_s=30 * MS, busy_s=9 * MS),
        of_images((MS,), in_flight, enter_busy_s=5 * MS),
    ):
        few, many = (simulate(plan, closed(64, n, 1, 1)) for n in (200, 320))
        assert many.seconds - few.seconds == pytest.approx(120 / plan.throughput_per_s, rel=1e-9)
        alone = simulate(plan, closed(1, 5, 1, 1))
        assert alone.latency_s is not None
        assert alone.latency_s.p99 == pytest.approx(plan.latency_s, rel=1e-9)
        assert alone.ttft_s is None


@pytest.mark.parametrize(("load", "variation"), [(0.8, 0.0), (0.6, 0.5), *([(0.5, 0.0)] if THOROUGH else [])])
def test_waiting_is_as_pollaczek_and_khinchine_say(load: float, variation: float) -> None:
    """Mean wait of a queue with Poisson arrivals: load x D (1 + cv^2) / (2 (1 - load))."""
    waits = []
    for seed in range(some(2, 3)):
        plan = of_images((MS,), 64)
        arrivals = poisson(load / MS, 30_000, 1, 1, seed)
        result = simulate(plan, arrivals, Conditions(variation), seed=seed, owner="d0")
        assert result.latency_s is not None
        waits.append(result.latency_s.mean - MS)
        assert result.devices["d0"] == pytest.approx(load, rel=0.03)
        # Little's law, of all that is in the plan.
        assert result.in_flight_mean + result.waiting_mean == pytest.approx(
            30_000 / result.seconds * result.latency_s.mean, rel=1e-6
        )
    expected = load * MS * (1 + variation**2) / (2 * (1 - load))
    assert np.mean(waits) == pytest.approx(expected, rel=0.06)


def test_a_slow_device_is_slow_for_its_time() -> None:
    plan = of_images((1.0,), 1)
    assert simulate(plan, closed(1, 30, 1, 1), Conditions(slow=(Slow("d0", 2.0, 10.0, 20.0),))).seconds == 35.0
    assert simulate(plan, closed(1, 30, 1, 1), Conditions(slow=(Slow("d0", 3.0, 0.0),))).seconds == 90.0
    both = (Slow("d0", 2.0, 0.0, 4.0), Slow("d0", 0.5, 0.0, 4.0))
    assert simulate(plan, closed(1, 30, 1, 1), Conditions(slow=both)).seconds == 30.0


def test_the_deployment_ends_when_a_device_leaves() -> None:
    plan = of_images((1.0, 1.0), 2)
    arrivals = Arrivals(tuple(Request(float(i), 1, 1) for i in range(20)), "by hand", 1.0)
    result = simulate(plan, arrivals, Conditions(leave=(("d0", 99.0), ("d1", 10.5))))
    # Those of 0 to 8 s are done by 10 s; those of 9 and 10 s are in flight; nine more were to come.
    assert (result.completed, result.failed, result.failed_in_flight) == (9, 11, 2)
    assert (result.stalled_s, result.left, result.seconds) == (10.5, "d1", 10.5)
    assert result.devices == {"d0": 1.0, "d1": 9.5 / 10.5}
    assert "d1 left at 10.5 s" in result.notes[-1]
    late = simulate(plan, arrivals, Conditions(leave=(("d1", 50.0),)))
    assert (late.failed, late.stalled_s, late.left, late.notes) == (0, None, None, [])
    at_once = simulate(of_text(), closed(2, 5, 1, 9), Conditions(leave=((LOCAL, 0.0),)))
    assert (at_once.failed, at_once.seconds, at_once.latency_s, at_once.throughput_per_s) == (5, 0.0, None, 0.0)


def test_what_is_at_its_limit_is_told() -> None:
    plan = of_images((0.1, 0.25), 8, latency_s=0.01)
    over = simulate(plan, poisson(6.0, 400, 1, 1, 0))
    assert over.capacity_per_s == pytest.approx(4.0)
    assert over.notes == ["arrivals of 6.00/s are above what the plan can do, 4.00/s: the queue grows"]
    assert over.saturates is not None
    assert "computing on d1" in over.saturates
    assert over.waiting_max > 50
    easy = simulate(plan, poisson(1.0, 100, 1, 1, 0))
    assert (easy.notes, easy.saturates) == ([], None)
    links = simulate(of_images((0.1,), 8, busy_s=0.5), closed(8, 50, 1, 1))
    assert links.saturates is not None
    assert "the way from d0 to local" in links.saturates
    window = simulate(of_images((0.1,), 2, latency_s=5.0), closed(9, 50, 1, 1))
    assert window.saturates is not None
    assert "all 2 places" in window.saturates


def test_a_step_with_a_prompt_and_answers_reads_weights_once() -> None:
    """A step takes 12 ms and 1.5 ms a row: 16 rows of a prompt beside 4 answers take as 20 rows do, in one step."""
    plan = of_text((1,), link=LinkSpeed(MS, 1e7), prompt=64, concurrency=4)
    stage = parts(plan)[0]
    curve = plan.stages[0].rows_s
    prompt = ((64, 16.0),)
    together, prompt_s = stage.seconds(SimulatedStep((), 4, prompt)), stage.seconds(SimulatedStep((), 0, prompt))
    assert together == pytest.approx(prompt_s + curve.at(20) - curve.at(16))
    assert together < prompt_s + stage.seconds(SimulatedStep((), 4))
    two_s = stage.seconds(SimulatedStep((), 0, 2 * prompt))
    assert two_s == pytest.approx(prompt_s + min(prompt_s, curve.at(32) - curve.at(16)))


def test_no_plan_does_more_than_its_capacity() -> None:
    for stages_of in ((1,), (1, 1), (1, 1, 2)):
        plan = of_text(stages_of, link=LinkSpeed(MS, 1e7), prompt=128, concurrency=8)
        result = simulate(plan, closed(8, 80, 128, 20))
        assert 80 / result.seconds <= capacity_per_s(plan, 128, 20) * 1.001
        assert 80 / result.seconds >= capacity_per_s(plan, 128, 20) * 0.6


def test_the_seed_decides() -> None:
    plan = of_text((1, 1), prompt=64, concurrency=4)

    def run(seed: int, jitter: float = 0.3) -> object:
        return simulate(plan, poisson(9.0, 50, 64, 10, seed), Conditions(jitter), seed=seed).to_json()

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert run(1) != run(1, 0.0)
    draws = [Jitter(0.3, 1)() for _ in range(3)]
    assert draws[0] == draws[1]
    jitter = Jitter(0.5, 7)
    many = [jitter() for _ in range(40_000)]
    assert np.mean(many) == pytest.approx(1.0, rel=0.01)
    assert np.std(many) == pytest.approx(0.5, rel=0.03)


@settings(deadline=None, max_examples=some(20, 60))
@given(
    st.sampled_from([(1,), (1, 1), (2, 1), (1, 1, 1)]),
    st.integers(1, 6),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.4, 3.0]),
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, 200), st.integers(1, 12)), min_size=1, max_size=20),
    st.one_of(st.none(), st.integers(1, 8)),
    st.one_of(st.none(), st.floats(0, 2)),
    st.integers(0, 9),
)
def test_every_request_ends_once(
    stages_of: tuple[int, ...],
    concurrency: int,
    microbatches: int,
    jitter: float,
    drawn: list[tuple[float, int, int]],
    clients: int | None,
    leave: float | None,
    seed: int,
) -> None:
    link = LinkSpeed(2 * MS, 1e6)
    plan = of_text(stages_of, link=link, prompt=96, concurrency=concurrency, microbatches=microbatches)
    requests = tuple(Request(*item) for item in sorted(drawn))
    conditions = Conditions(jitter, (Slow(LOCAL, 3.0, 0.5, 1.0),), () if leave is None else ((LOCAL, leave),))
    result = simulate(plan, Arrivals(requests, "drawn", clients=clients), conditions, seed=seed)
    assert result.completed + result.failed == result.requests == len(requests)
    assert 0 <= result.failed_in_flight <= result.failed
    assert (result.failed > 0) == (result.stalled_s is not None)
    assert result.failed == 0 or leave is not None
    if not result.failed:
        assert result.throughput_per_s * result.seconds == pytest.approx(sum(request.tokens for request in requests))
    for use in (*result.stages, *result.links):
        assert 0 <= use.utilization <= 1
        assert 0 <= use.queue_mean <= use.queue_max
    assert 0 <= result.in_flight_mean <= concurrency + 1e-9
    if result.completed:
        assert result.ttft_s is not None
        assert result.latency_s is not None
        assert 0 < result.ttft_s.p50 <= result.latency_s.p50
        assert result.latency_s.p50 <= result.latency_s.p90 <= result.latency_s.p99


@pytest.mark.parametrize(("stages", "concurrency"), [(1, 3), (2, 4), (3, 5)])
def test_groups_are_those_of_the_scheduler(stages: int, concurrency: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same requests make the same steps, where results take longer than the first stage's work on all groups."""
    requests = [(5, 7), (3, 1), (9, 4), (2, 12), (4, 3), (6, 5), (1, 2), (8, 9)]
    sizes: list[int] = []
    with Engine(MODEL_PATH, EngineOptions(context=512, sequences=concurrency, threads=1)) as engine:
        submit = engine.submit

        def counted(tokens: Sequence[int], *how: object, **more: object) -> None:
            sizes.append(len(tokens))
            submit(tokens, *how, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(engine, "submit", counted)
        monkeypatch.setattr(engine, "stages", stages)
        monkeypatch.setattr(engine, "microbatches", stages)
        greedy = SamplingParams(temperature=0)
        Scheduler(engine).run([ArrivingRequest(list(range(3, 3 + p)), n, greedy, ends=False) for p, n in requests])
    plan = of_text((1,) * stages, link=LinkSpeed(9.0, 5e10), concurrency=concurrency)
    clock, built = Clock(), parts(plan)
    servers = [Server(clock, Jitter(0, 0), part.seconds, part.latency_s) for part in built]
    arrivals = Arrivals(tuple(Request(0.0, p, n) for p, n in requests), "at once")
    source, steps = Dispatcher(clock, arrivals), []
    Texts(clock, servers, plan, source)
    take = servers[0].take

    def noted(step: SimulatedStep) -> None:
        steps.append(step.rows)
        take(step)

    monkeypatch.setattr(servers[0], "take", noted)
    source.begin()
    clock.run(math.inf)
    assert all(state.done for state in source.states)
    assert steps == sizes


def test_too_many_events_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_servers, "MOST_EVENTS", 1000)
    with pytest.raises(PlanError, match=r"after 1,000 events.*fewer requests"):
        simulate(of_images((1.0,), 1), closed(1, 1000, 1, 1))


def test_what_cannot_be_simulated() -> None:
    plan = of_images((1.0, 1.0), 1)
    for conditions in (Conditions(leave=(("phone", 1.0),)), Conditions(slow=(Slow("phone", 2.0, 1.0),))):
        with pytest.raises(PlanError, match=r"phone is not in the plan; in it are d0, d1"):
            simulate(plan, closed(1, 1, 1, 1), conditions)
    twice = Prediction(2.0, 1.0, None, None, None, 0.0, (plan.stages[0], *plan.stages), 1, 1)
    with pytest.raises(PlanError, match="d0 appears twice"):
        simulate(twice, closed(1, 1, 1, 1))


def test_spreads() -> None:
    assert Spread.from_values([]) is None
    assert Spread.from_values([3.0]) == Spread(3.0, 3.0, 3.0, 3.0)
    values = [5.0, 1.0, 4.0, 2.0, 9.0, 3.0]
    result = Spread.from_values(values)
    assert result is not None
    assert (result.p50, result.p90, result.p99) == pytest.approx(tuple(np.percentile(values, [50, 90, 99])))


def test_random_arrivals() -> None:
    result = poisson(4.0, 20_000, 1, 1, 5)
    times = [request.arrival_s for request in result.requests]
    gaps = [b - a for a, b in pairwise([0.0, *times])]
    assert np.mean(gaps) == pytest.approx(0.25, rel=0.03)
    assert np.std(gaps) == pytest.approx(0.25, rel=0.03)
    assert poisson(4.0, 20_000, 1, 1, 5) == result


def test_a_trace() -> None:
    lines = [
        "arrival_s, prompt_tokens, gen_tokens",
        "0, 5, 6",
        "",
        "0.5,,3",
        "0.5",
        '{"arrival_s": 2, "gen_tokens": 9}',
    ]
    result = trace(lines, 100, 200)
    assert result.requests == (Request(0, 5, 6), Request(0.5, 100, 3), Request(0.5, 100, 200), Request(2, 100, 9))
    assert result.rate_per_s == pytest.approx(1.5)
    assert trace(lines, 1, 1, 2).requests == (Request(0, 5, 6), Request(0.5, 1, 3))
    assert trace(["7"], 1, 1).rate_per_s is None


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "there are no arrivals"),
        (["arrival_s"], "there are no arrivals"),
        (["1", "0.5"], "line 2: 0.5 s is before 1 s"),
        (["1", "", "x"], "line 3: arrival_s is 'x'; expected a number of seconds"),
        (["1,2.5"], "line 1: prompt_tokens is '2.5'; expected a whole number"),
        (["1,0"], "line 1: prompt_tokens is 0"),
        (["1,1,-3"], "line 1: gen_tokens is -3"),
        (["1,1,1,1"], "line 1: 4 columns"),
        (["nan"], "line 1: arrival_s is nan"),
        (["-1"], "line 1: arrival_s is -1"),
        (["inf"], "line 1: arrival_s is inf"),
        ([",1"], "line 1: arrival_s is None"),
        (["1", '{"arrival_s": 2'], "line 2: this is not a JSON object"),
        (['{"time": 2}'], "line 1: unknown field 'time'"),
        (['{"arrival_s": true}'], "line 1: arrival_s is True"),
        (['{"arrival_s": 1, "gen_tokens": "9"}'], "line 1: gen_tokens is '9'"),
        (['{"a":' * 100_000], "line 1: this is not a JSON object"),
        (["1," + "9" * 5000], "line 1: prompt_tokens is '9999"),
    ],
)
def test_a_line_that_is_no_arrival(lines: list[str], message: str) -> None:
    with pytest.raises(TraceError) as error:
        trace(lines, 1, 1)
    assert str(error.value).startswith(message)
    assert len(str(error.value)) < 300
