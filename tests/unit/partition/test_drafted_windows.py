"""Test the gain of several draft windows over stages: by hand, by a simulation with the rules of `edge.llm.in_flight`,
and by trying every shape.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest

from edge.planning.drafted import with_draft_held, with_drafts
from partition.errors import PlanError
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL
from partition.predict.drafts import ROLLBACK_ROWS, ROWS, WINDOWS, Draft, most_windows
from partition.predict.hosts import Host
from partition.predict.predict import predict
from partition.predict.prediction import Prediction
from partition.predict.speeds import Curve, DeviceSpeed, LinkSpeed
from partition.search.planner import Planner
from partition.simulate.arrivals import Arrivals, Request, closed
from partition.simulate.simulate import simulate
from tests.support.planning import MS, device, linked, work
from tests.support.random_plans import Case
from tests.support.thorough import some

STEEP = {1: 1.0, 2: 1.3, 4: 2.0, 8: 4.0, 16: 8.0}  # of a layer, in passes of one row


def counted_s(draft: Draft, stages: Sequence[float], ways: Sequence[float], n_tokens: int, seed: int) -> float:
    """Seconds of a token by discrete events. This device drafts, computes its stage and looks at what came back, one
    after the other; it looks when all windows are submitted. Stages compute what reaches them in order, cancelled or
    not. ways: of each stage's results, the last one back. The assumed part of all drafts is right, in random places.
    """
    is_right = [i < round(draft.acceptance * n_tokens) for i in range(n_tokens)]
    random.Random(seed).shuffle(is_right)
    looked_at = cycle(is_right)
    now, tokens = 0.0, 0
    free = [0.0] * len(stages)
    under_way: list[float] = []  # when each comes back
    while tokens < n_tokens:
        while len(under_way) < draft.windows:
            now += (draft.rows - (not under_way)) * draft.guess_s + stages[0]
            done = now
            for stage, seconds in enumerate(stages[1:], 1):
                free[stage] = done = max(done + ways[stage - 1], free[stage]) + seconds
            under_way.append(done + ways[-1])
        now = max(now, under_way.pop(0))
        drafts = draft.rows if under_way else draft.rows - 1  # behind its rows
        right = next((i for i in range(drafts) if not next(looked_at)), drafts)
        tokens += min(right + 1, draft.rows)
        if right < drafts:
            under_way.clear()
    return now / tokens


def several(draft: Draft | None, speeds: Sequence[DeviceSpeed], delay_s: float) -> Prediction:
    """A layer on each of these devices."""
    to_do = replace(work(len(speeds)), draft=draft)
    names = [speed.device for speed in speeds]
    plan = make_plan(to_do.limits, "m", "", names, stages_of=[1] * len(speeds))
    links = linked(names, LinkSpeed(delay_s, 5e10))
    return predict(plan, to_do, {speed.device: speed for speed in speeds}, links)


def stage(name: str, seconds: float, **more: object) -> DeviceSpeed:
    layer = Curve(tuple((rows, times * seconds) for rows, times in STEEP.items()))
    return replace(device(name), layer_s=layer, half_layer_s=layer.times(0.5), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("acceptance", "rows", "windows", "seconds"),
    [
        (0.0, 1, 2, 4 * MS),  # nothing comes of the second one
        (1.0, 1, 1, 4 * MS),
        (1.0, 1, 2, 2 * MS),
        (1.0, 2, 4, 0.5 * MS),
        (0.5, 1, 2, (4 + 0.5 * 0.5) / 1.5 * MS),
        (0.5, 2, 2, (4 + 0.75 * 0.25) / 1.875 * MS),
        (1.0, 1, 8, MS),  # eight keep a stage busy for longer than a pass takes
    ],
)
def test_a_token_by_hand(acceptance: float, rows: int, windows: int, seconds: float) -> None:
    """A pass of 4 ms that keeps no stage busy for more than 1 ms."""
    draft = Draft("ngram", acceptance, rows, windows=windows)
    assert draft.token_s(4 * MS, MS) == pytest.approx(seconds)


def test_each_window_behind_another_has_one_draft_more() -> None:
    assert Draft("small", 0.7, 4, MS).pass_s == pytest.approx(3 * MS)
    assert Draft("small", 0.7, 4, MS, windows=2).pass_s == pytest.approx(4 * MS)


def test_a_worker_that_drafts_is_waited_for() -> None:
    """A draft takes it 0.2 ms, and 1 ms the ways there and back; where it holds a stage, that waits for its drafts."""
    draft = Draft("small", 0.9, 2, 0.2 * MS, 1000, worker="b", ask_s=MS)
    assert draft.waiting_s(0) == 0
    assert draft.waiting_s(3) == pytest.approx(1.6 * MS)
    to_do = replace(work(4), draft=draft)
    stages = ((LOCAL,), ("b",), ("c",), (LOCAL, "b"))
    drafting = [to_do.drafting_s(devices, LOCAL) for devices in stages]
    assert drafting == pytest.approx([1.4 * MS, 0.4 * MS, 0.0, 1.4 * MS])
    current = with_draft_held([device(), device("b"), device("c")], draft)
    assert [speed.runtime_bytes for speed in current] == [0, 1000, 0]
    assert draft.describe({"b": "pi"}) == "2 rows a pass, drafted by small on pi, 0.9 of the drafts right"
    assert Draft.from_json(draft.to_json(), "draft") == draft
    for name, value in (("worker", "a\n"), ("worker", 1), ("ask_s", -1), ("ask_s", True)):
        with pytest.raises(PlanError, match=rf"draft\.{name}"):
            Draft.from_json({**draft.to_json(), name: value}, "draft")


def test_a_simulated_request_waits_for_the_worker_that_drafts() -> None:
    """One window of two rows: 1.2 ms for its draft, 1.3 for its layer, and always two tokens."""
    draft = Draft("small", 1.0, 2, 0.2 * MS, worker="b", ask_s=MS)
    result = several(draft, [stage(LOCAL, MS)], 0.0)
    assert result.latency_s == pytest.approx(2.5 / 2 * MS, rel=1e-3)
    tpot_s = simulate(result, closed(1, 1, 1, 201)).tpot_s
    assert tpot_s is not None
    assert tpot_s.mean == pytest.approx(result.latency_s, rel=1e-3)


def test_windows_are_those_that_stages_may_have() -> None:
    assert [most_windows(stages) for stages in (1, 2, 3, 8)] == [1, 4, 6, 16]
    for stages in (1, 2, 4):
        speeds = [stage(LOCAL if i == 0 else f"d{i}", MS) for i in range(stages)]
        result = several(Draft("ngram", 0.99, 1), speeds, 100 * MS).draft
        assert (result.windows if result else 1) == max(n for n in WINDOWS if n <= most_windows(stages))


def test_stages_of_one_machine_compute_one_after_the_other() -> None:
    """One core: two windows keep it as busy as one that has no other behind it, and none is won."""
    own, other = (stage(name, MS, host=Host("x", 1, 1)) for name in (LOCAL, "b"))
    assert several(Draft("ngram", 0.9, 1), [own, other], 0.0).draft is None
    apart = several(Draft("ngram", 0.9, 1), [own, replace(other, host=None)], 0.0)
    assert apart.draft is not None
    assert apart.draft.windows == 2
    assert apart.latency_s == pytest.approx((2 * MS + MS * 0.1 * 0.9) / 1.9, rel=1e-3)


def test_it_is_what_counting_events_gives() -> None:
    """Any stages, links, acceptance and shape agree; and the shape that is chosen is no worse than any other."""
    chosen, shapes = random.Random(5), set()
    for seed in range(some(20, 150)):
        seconds = [chosen.uniform(0.2, 1) * MS for _ in range(chosen.randint(2, 4))]
        delay_s = chosen.choice([0.0, 0.1, 1.0, 5.0]) * MS
        guess_s = chosen.choice([0.0, 0.0, 0.05]) * MS
        acceptance = chosen.choice([0.0, 0.3, 0.5, 0.8, 0.95, 1.0])
        speeds = [stage(LOCAL if i == 0 else f"d{i}", second) for i, second in enumerate(seconds)]
        counted: dict[tuple[int, int], float] = {}
        predicted: dict[tuple[int, int], float] = {}
        for rows in ROWS:
            result = several(Draft("small", acceptance, rows, guess_s), speeds, delay_s)
            fastest = result.draft or Draft("small", acceptance, 1, guess_s)
            predicted[rows, fastest.windows] = result.latency_s
            for windows in [n for n in WINDOWS if n <= most_windows(len(seconds))]:
                draft = replace(fastest, rows=rows, windows=windows)
                stages = [STEEP[rows] * second for second in seconds]
                ways = [delay_s] * len(seconds)
                counted[rows, windows] = counted_s(draft, stages, ways, 1000, seed)
                busy_s = max(stages[0] + rows * guess_s, *stages[1:])
                by_formula = draft.token_s(sum(stages) + sum(ways), busy_s)
                # What chance leaves of 1000 tokens, and the draft that the first window has less.
                assert by_formula == pytest.approx(counted[rows, windows], rel=0.06), (seed, rows, windows)
        best = min(predicted, key=predicted.__getitem__)
        shapes.add(best)
        assert counted[best] <= 1.03 * min(counted.values()), (seed, best)
    assert {windows for _, windows in shapes} >= {1, 2, 4}
    assert len({rows for rows, _ in shapes}) > 1


def test_the_planner_finds_what_trying_everything_finds() -> None:
    """Where no device has room for the whole model: of all stages, rows and windows the fastest."""
    rng, found_windows = np.random.default_rng(3), set()
    for i in range(some(15, 100)):
        case = Case(rng, int(rng.integers(2, 5)), int(rng.integers(2, 5)), tensor=False)
        whole = sum(case.work.shape.layer_bytes) + case.work.shape.head_bytes
        room = {"memory_bytes": round(0.8 * whole), "runtime_bytes": 0, "disk_bytes_per_s": None}
        case.speeds = [replace(speed, **room) for speed in case.speeds]
        if i % 3 == 0:
            case.links = linked([speed.device for speed in case.speeds], LinkSpeed(10 * MS, 1e9))
        draft = Draft("small", float(rng.uniform(0.3, 1)), int(rng.choice(ROWS)), float(rng.choice([0, 0.1])) * MS)
        if i % 2:
            draft = replace(draft, worker="b", ask_s=float(rng.uniform(0, 2)) * MS)
        case.work = replace(case.work, context=64, draft=draft)
        [result, *_], exact = case.planner().front(("latency",))
        assert exact
        assert result.objectives[0] == pytest.approx(min(item["latency"] for item in case.all()))
        predicted = case.predict(result.plan, result.microbatches)
        assert result.objectives[0] == pytest.approx(predicted.latency_s)
        found_windows.add(predicted.draft.windows if predicted.draft else 1)
    assert found_windows >= {1, 2, 4}


def test_a_simulated_request_has_windows() -> None:
    for acceptance, rel in ((0.5, 0.05), (0.9, 0.05), (1.0, 0.01)):
        for delay_s in (0.0, 10 * MS):
            outcome = several(Draft("small", acceptance, 2, 0.02 * MS), [stage(LOCAL, MS), stage("b", MS)], delay_s)
            assert outcome.draft is not None
            assert outcome.draft.windows > 1
            result = simulate(outcome, closed(1, 4, 1, 1001), seed=3)
            assert result.tpot_s is not None
            assert result.tpot_s.mean == pytest.approx(outcome.latency_s, rel=rel)
            assert result.completed / result.seconds == pytest.approx(result.capacity_per_s, rel=0.05)


def test_requests_that_wait_while_one_drafts_alone_are_completed() -> None:
    """No later arrival admits them."""
    outcome = several(Draft("ngram", 0.7, 2), [stage(LOCAL, MS), stage("b", MS)], 5 * MS)
    assert outcome.draft is not None
    assert outcome.draft.windows > 1
    arrivals = Arrivals(tuple(Request(0.001 * i, 4, 20) for i in range(4)), "made up")
    assert simulate(replace(outcome, in_flight=1), arrivals).completed == 4


def test_who_comes_beside_it_gets_all_that_is_asked_for() -> None:
    """Windows stop when another request is there, begin again behind it, and what was cancelled is no token."""
    to_do = replace(work(2, concurrency=2), draft=Draft("ngram", 0.7, 2))
    plan = make_plan(to_do.limits, "m", "", [LOCAL, "b"], stages_of=[1, 1])
    speeds = {name: stage(name, MS) for name in (LOCAL, "b")}
    outcome = predict(plan, to_do, speeds, linked([LOCAL, "b"], LinkSpeed(5 * MS, 5e10)))
    assert outcome.draft is not None
    assert outcome.draft.windows > 1
    requests = tuple(Request(0.05 * i * (1 + i % 3), 4, 20 + i) for i in range(30))
    arrivals = Arrivals(tuple(sorted(requests, key=lambda item: item.arrival_s)), "made up")
    drafted, plain = (simulate(item, arrivals, seed=1) for item in (outcome, replace(outcome, draft=None)))
    for result in (drafted, plain):
        assert result.completed == 30
        assert result.throughput_per_s * result.seconds == pytest.approx(sum(request.tokens for request in requests))
    assert simulate(outcome, arrivals, seed=1) == drafted
    assert drafted.latency_s is not None
    assert plain.latency_s is not None
    assert drafted.latency_s.mean < plain.latency_s.mean


def test_windows_are_kept_with_a_plan() -> None:
    built = Draft("ngram", 0.4, 4, MS, 12, windows=2)
    assert Draft.from_json(built.to_json(), "draft") == built
    assert built.describe({}) == "4 rows a pass, drafted by ngram, 0.4 of the drafts right, 2 windows at once"
    since = ("windows", "worker", "ask_s")
    before = {name: value for name, value in built.to_json().items() if name not in since}
    assert Draft.from_json(before, "draft") == replace(built, windows=1)  # as plans were saved before
    for windows in (0, 17, True, 1.5):
        with pytest.raises(PlanError, match=r"draft\.windows"):
            Draft.from_json({**built.to_json(), "windows": windows}, "draft")


def test_one_row_is_tried_where_there_can_be_stages() -> None:
    draft = Draft("ngram", 0.4, 1)
    rows = [
        [with_draft.draft.rows for with_draft in with_drafts(work(4), draft, devices) if with_draft.draft]
        for devices in (1, 2)
    ]
    assert rows == [[2, 4, 8, 16], [1, 2, 4, 8, 16]]


def test_recurrent_layers_have_one_window_of_eight_rows_at_most() -> None:
    """As the engine makes them; windows, or 16 rows, would be faster here."""
    draft = Draft("ngram", 0.99, 1, rollback=ROLLBACK_ROWS)
    works = [drafted_work.draft for drafted_work in with_drafts(work(4), draft, 4) if drafted_work.draft]
    assert [possible.rows for possible in works] == [2, 4, 8]
    speeds = [stage(LOCAL if i == 0 else f"d{i}", MS) for i in range(4)]
    recurrent, free = (several(replace(draft, rows=2, rollback=most), speeds, MS).draft for most in (7, None))
    assert recurrent is not None
    assert free is not None
    assert (recurrent.windows, free.windows) == (1, 8)
    assert Draft.from_json(recurrent.to_json(), "draft") == recurrent


def test_a_thin_owner_has_no_drafts_that_recurrent_layers_are_to_forget() -> None:
    """A laptop ten times as fast as its owner's phone has all layers, or the ones behind the phone's."""
    for rollback, is_thin in ((ROLLBACK_ROWS, False), (None, True)):
        to_do = replace(work(4), draft=Draft("ngram", 0.9, 4, rollback=rollback))
        speeds = [stage(LOCAL, 100 * MS), stage("b", MS)]
        planner = Planner(to_do, speeds, linked([LOCAL, "b"]), "m", "", tensor=False)
        [placed], _ = planner.front(("latency",))
        assert placed.plan.thin_owner == is_thin
        thin = make_plan(to_do.limits, "m", "", [LOCAL, "b"], "pipeline", [0, 1])
        predicted = predict(thin, to_do, {speed.device: speed for speed in speeds}, planner.links)
        assert (predicted.draft is not None) == is_thin
        assert (predicted.latency_s < predicted.plain_s) == is_thin
