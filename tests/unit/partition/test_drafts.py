"""Test the gain of drafts for a plan: by hand, by enumeration, and against an upper limit."""

from dataclasses import replace

import numpy as np
import pytest

from edge.planning.drafted import with_draft_held, with_drafts
from partition.errors import PlanError
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL
from partition.predict.drafts import ROWS, Draft, tokens_a_pass
from partition.predict.measures import Measures
from partition.predict.predict import predict
from partition.predict.prediction import Prediction
from partition.predict.speeds import Curve, DeviceSpeed, LinkSpeed
from partition.search.planner import Planner
from partition.simulate.arrivals import closed
from partition.simulate.simulate import simulate
from tests.support.planning import MIB, MS, device, linked, work
from tests.support.random_plans import Case, objectives
from tests.support.thorough import some

PASSES = {1: 1.0, 2: 1.9, 4: 2.8, 8: 6.0}  # of a layer in memory, in passes of one row


def slower_with_rows(name: str = LOCAL, **more: int | float) -> DeviceSpeed:
    """A device that takes 1 ms for a layer of one row."""
    layer = Curve(tuple((rows, times * MS) for rows, times in PASSES.items()))
    return replace(device(name, **more), layer_s=layer, half_layer_s=layer.times(0.5))


def drafted(speeds: list[DeviceSpeed], draft: Draft | None, *cuts: int, link: LinkSpeed | None = None) -> Prediction:
    """Ten layers on these devices, in stages or, without cuts, shared."""
    to_do = replace(work(10), draft=draft)
    names = [speed.device for speed in speeds]
    stages = [1] * len(speeds) if cuts else [len(speeds)]
    plan = make_plan(to_do.limits, "m", "", names, stages_of=stages)
    links = linked(names, link or LinkSpeed(0.0, 5e10))
    return predict(plan, to_do, {speed.device: speed for speed in speeds}, links)


@pytest.mark.parametrize(
    ("acceptance", "rows", "tokens"),
    [
        (0.0, 8, 1.0),
        (0.5, 1, 1.0),
        (0.5, 2, 1.5),
        (0.5, 4, 1.875),
        (0.75, 4, 2.734375),
        (0.8, 8, 4.1611392),
        (1.0, 8, 8),
    ],
)
def test_tokens_of_a_pass(acceptance: float, rows: int, tokens: float) -> None:
    assert tokens_a_pass(acceptance, rows) == pytest.approx(tokens)
    if acceptance < 1:
        assert tokens_a_pass(acceptance, rows) == pytest.approx((1 - acceptance**rows) / (1 - acceptance))


def test_a_device_alone_by_hand() -> None:
    """Ten layers of 2.8 ms for four rows, three drafts of 2 ms, and 2.734375 tokens of it all."""
    result = drafted([slower_with_rows()], Draft("small", 0.75, 4, 2 * MS))
    assert result.plain_s == pytest.approx(10 * MS, rel=1e-5)
    assert result.latency_s == pytest.approx((28 * MS + 6 * MS) / 2.734375, rel=1e-5)
    assert result.throughput_per_s == pytest.approx(1 / result.latency_s)  # of one request


def test_stages_pay_their_links_once_for_all_windows() -> None:
    """Two stages of 5 ms, 10 ms apart, and as far back. Hidden states of 8 rows take no time on such a link. Four
    windows go there and back as fast as one; those behind the oldest follow 5 ms apart."""
    speeds = [device(), device("b")]
    link = LinkSpeed(10 * MS, 5e10)
    plain, with_drafts = (drafted(speeds, draft, 5, link=link) for draft in (None, Draft("ngram", 0.75, 8)))
    assert plain.latency_s == pytest.approx(30 * MS, rel=1e-3)
    assert with_drafts.draft is not None
    assert with_drafts.draft.windows == 4
    q = 0.75**8
    behind = 5 * MS * (1 - q) * (q + 2 * q**2 + 3 * q**3)
    assert with_drafts.latency_s == pytest.approx((30 * MS + behind) / tokens_a_pass(0.75, 32), rel=1e-3)


def test_weights_from_a_disk_are_read_once_a_pass() -> None:
    """80 MiB of layers, 4 of the head and 2.5 of KV cache, with room for 46.5: 40 come from the disk, in 400 ms."""
    first = slower_with_rows(memory_bytes=93 * MIB // 2, disk_bytes_per_s=100 * MIB)
    result = drafted([first], Draft("ngram", 0.75, 8))
    assert result.plain_s == pytest.approx(0.4, rel=1e-5)
    assert result.latency_s == pytest.approx(0.4 / tokens_a_pass(0.75, 8), rel=1e-5)


def test_where_passes_are_dear_drafts_bring_the_most() -> None:
    """On a disk, and over links, more than in memory; and nowhere more than 1 / (1 - a)."""
    a = 0.75

    def gain(speeds: list[DeviceSpeed], *cuts: int, link: LinkSpeed | None = None) -> float:
        plain = drafted(speeds, None, *cuts, link=link).latency_s
        tried = [drafted(speeds, Draft("ngram", a, rows), *cuts, link=link).latency_s for rows in ROWS]
        return plain / min(tried)

    in_memory = gain([slower_with_rows()])
    paged = gain([slower_with_rows(memory_bytes=44 * MIB, disk_bytes_per_s=100 * MIB)])
    far = gain([slower_with_rows(), slower_with_rows("b")], 5, link=LinkSpeed(50 * MS, 1e8))
    assert 1 <= in_memory < far < paged <= 1 / (1 - a)
    assert paged > 3


def test_drafts_that_are_never_right_bring_nothing() -> None:
    to_do = work(10)
    assert with_drafts(to_do, Draft("ngram", 0.0, 1)) == [to_do]
    assert with_drafts(to_do, None) == [to_do]
    assert (
        drafted([slower_with_rows()], Draft("ngram", 0.0, 1)).latency_s == drafted([slower_with_rows()], None).latency_s
    )
    for rows in ROWS[1:]:
        result = drafted([slower_with_rows()], Draft("ngram", 0.0, rows))
        assert result.latency_s > result.plain_s


def test_the_planner_finds_what_trying_everything_finds_with_drafts() -> None:
    """Each number of rows, and each plan of it, by `predict` alone."""
    rng = np.random.default_rng(7)
    feasible = 0
    for i in range(some(20, 300)):
        case = Case(rng, int(rng.integers(1, 4)), int(rng.integers(1, 4)), i % 3 > 0)
        plain, a = case.work, float(rng.uniform(0, 0.95))
        for rows in ROWS:
            draft = Draft("small", a, rows, float(rng.choice([0, 1])) * MS)
            case.work = replace(plain, draft=draft)
            expected = ("latency", "throughput") if i % 2 else ("latency",)
            result, exact = case.planner().front(expected)
            every = [tuple(item[name] for name in expected) for item in case.all()]
            assert exact
            assert bool(result) == bool(every)
            if result:
                feasible += 1
                assert result[0].objectives[0] == pytest.approx(min(item[0] for item in every))
                best = case.predict(result[0].plan, result[0].microbatches)
                assert result[0].objectives == pytest.approx(tuple(objectives(best)[name] for name in expected))
                assert best.latency_s >= best.plain_s * (1 - a) * (1 - 1e-9)
    assert feasible > some(30, 60)


def test_what_drafts_holds_memory_of_this_device() -> None:
    draft = Draft("small", 0.7, 4, MS, held_bytes=30 * MIB)
    speeds = [device(memory_bytes=100 * MIB), device("b", memory_bytes=100 * MIB)]
    to_do = replace(work(10), draft=draft)
    current = with_draft_held(speeds, draft)
    assert [speed.runtime_bytes for speed in current] == [30 * MIB, 0]
    plain, _ = Planner(work(10), speeds, linked([LOCAL, "b"]), "m", "").only_own().front(("latency",))
    with_drafts, _ = Planner(to_do, current, linked([LOCAL, "b"]), "m", "").only_own().front(("latency",))
    assert plain
    assert not with_drafts


def test_a_simulated_request_has_the_latency_that_is_predicted() -> None:
    """Up to the last steps, which have no more rows than the request may still get tokens."""
    for a, rel in ((0.0, 0.002), (0.75, 0.02), (1.0, 1e-9)):
        outcome = drafted([slower_with_rows()], Draft("small", a, 4, MS))
        result = simulate(outcome, closed(1, 20, 1, 1001), seed=3)
        assert result.tpot_s is not None
        assert result.tpot_s.mean == pytest.approx(outcome.latency_s, rel=rel)


def test_a_microbatch_of_one_row_is_no_pass_with_drafts() -> None:
    """Four requests in four microbatches: drafts are for a request that is alone."""
    several = replace(work(10, concurrency=4), draft=Draft("ngram", 0.9, 8))
    assert {"alone", "pass"} <= set(Measures(several, ("latency", "throughput"), 4).sums)


def test_the_way_back_carries_logits_of_each_row() -> None:
    """25 windows, of which the first takes 10 ms at its stages and 2.048 on each link; the others follow 5 ms apart."""
    result = drafted([device(), device("b")], Draft("ngram", 1.0, 4), 5, link=LinkSpeed(0.0, 1e6))
    tpot_s = simulate(result, closed(1, 1, 1, 101)).tpot_s
    assert tpot_s is not None
    assert result.latency_s == pytest.approx(5 / 4 * MS, rel=1e-6)
    assert tpot_s.mean == pytest.approx((10 + 2 * 2.048 + 24 * 5) / 100 * MS, rel=1e-6)


def test_no_more_tokens_are_drafted_than_are_wanted() -> None:
    """After the first token there are two."""
    two, four = (drafted([slower_with_rows()], Draft("small", 1.0, rows, MS)) for rows in (2, 4))
    assert simulate(four, closed(1, 1, 1, 3)).seconds == pytest.approx(simulate(two, closed(1, 1, 1, 3)).seconds)


def test_several_requests_are_simulated_without_drafts() -> None:
    def throughput(draft: Draft | None) -> float:
        to_do = replace(work(10, concurrency=4), draft=draft)
        plan = make_plan(to_do.limits, "m", "", [LOCAL], stages_of=[1])
        return simulate(predict(plan, to_do, {LOCAL: slower_with_rows()}, linked([LOCAL])), closed(4, 8, 1, 20)).seconds

    assert throughput(Draft("ngram", 0.9, 8)) == throughput(None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"acceptance": 1.5}, "draft.acceptance: 1.5; expected a number from 0 to 1"),
        ({"acceptance": True}, "draft.acceptance"),
        ({"rows": 0}, "draft.rows: 0; expected a whole number from 1 to 64"),
        ({"guess_s": -1}, "draft.guess_s: -1"),
        ({"held_bytes": 0.5}, "draft.held_bytes"),
        ({"name": "a\n"}, "draft.name"),
        ({"more": 1}, "unknown field 'more'"),
    ],
)
def test_a_damaged_draft_is_refused(change: dict[str, object], message: str) -> None:
    built = Draft("ngram", 0.4, 4, MS, 12)
    assert Draft.from_json(built.to_json(), "draft") == built
    with pytest.raises(PlanError, match=message):
        Draft.from_json({**built.to_json(), **change}, "draft")


def test_a_prediction_keeps_its_draft() -> None:
    result = drafted([slower_with_rows()], Draft("small", 0.75, 4, MS))
    assert Prediction.from_json(result.to_json()) == result
    with pytest.raises(PlanError, match="an acceptance of 2; expected a fraction from 0 to 1"):
        Draft("small", 2, 4)
