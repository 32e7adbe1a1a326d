"""Test pairs of placements for prompts and for generation: they equal an enumeration, and when they are chosen."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from partition.errors import PlanError
from partition.plan.plan import LOCAL, Plan
from partition.predict.drafts import Draft
from partition.predict.hysteresis import PREFILL
from partition.predict.predict import predict
from partition.predict.prediction import Prediction
from partition.predict.speeds import Curve, LinkSpeed
from partition.search.explain import best
from partition.search.pair_search import Pair, PairSearch
from partition.search.phases import Phases, paired, prefill_reason
from partition.search.planner import Placed, Planner
from partition.search.stage_group import StageGroup
from quant.front import non_dominated
from tests.support.planning import MIB, MS, device, linked, model, work
from tests.support.random_plans import Case, objectives
from tests.support.thorough import some

BOTH = ("latency", "ttft")
FAR = LinkSpeed(5 * MS, 12.5e6)  # a home's Wi-Fi


class PairCase(Case):
    """A small random instance whose memory has room for some pairs and not for others."""

    def __init__(self, rng: np.random.Generator, layers: int, devices: int, tensor: bool) -> None:
        super().__init__(rng, layers, devices, tensor)
        shape = self.work.shape
        whole = sum(shape.layer_bytes) + shape.head_bytes + self.work.kv_before[-1]
        if rng.random() < 0.7:
            self.speeds = [
                replace(speed, memory_bytes=round(whole * float(rng.uniform(0.5, 2.5)))) for speed in self.speeds
            ]
        self.work = replace(self.work, prompt=int(rng.choice([8, 300, 2000])), concurrency=1)

    def decodes(self) -> Iterator[tuple[Plan, Prediction]]:
        """Every placement that is possible."""
        for plan in self.plans():
            try:
                yield plan, self.predict(plan, 1)
            except PlanError:
                continue

    def pairs_of(self, decode: Plan, current: dict[str, int]) -> Iterator[tuple[Plan, Prediction]]:
        """Every pair with this placement, on the memory that it leaves, where the other one does not page."""
        other = object.__new__(Case)
        other.work, other.tensor, other.links = self.work, self.tensor, self.links
        other.speeds = [
            replace(speed, memory_bytes=speed.memory_bytes - current.get(speed.device, 0), disk_bytes_per_s=None)
            for speed in self.speeds
        ]
        for prefill in other.plans(for_prompts=True):
            pair = replace(decode, prefill=prefill)
            try:
                other.predict(prefill, 1)
                yield pair, self.predict(pair, 1)
            except PlanError:
                continue


def rounded(vectors: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """The non-dominated ones, up to rounding."""
    placed = [
        Placed(None, 1, tuple(float(f"{x:.9g}") for x in vector))  # type: ignore[arg-type]
        for vector in vectors
    ]
    return [item.objectives for item in non_dominated(placed, lambda item: item.objectives)]


@pytest.mark.parametrize(
    ("seed", "cases", "layers", "devices"),
    [(36, some(40, 3000), (1, 3), (2, 2)), (37, some(2, 60), (2, 3), (3, 3))],
)
def test_pairs_are_those_that_trying_everything_finds(
    seed: int, cases: int, layers: tuple[int, int], devices: tuple[int, int]
) -> None:
    """All of them by latency and time to first token; and the best beside each placement."""
    rng = np.random.default_rng(seed)
    several = none = better = 0
    for i in range(cases):
        n_layers, n_devices = (int(rng.integers(*ends, endpoint=True)) for ends in (layers, devices))
        case = PairCase(rng, n_layers, n_devices, i % 3 > 0)
        phases = Phases(case.planner())
        every: list[tuple[float, ...]] = []
        for decode, predicted in case.decodes():
            pairs = [objectives(both) for _, both in case.pairs_of(decode, predicted.memory_bytes)]
            every += [(said["latency"], said["ttft"]) for said in pairs]
            least = min((said["ttft"] for said in pairs), default=math.inf)
            assert predicted.ttft_s is not None
            result = phases.with_prefill(Placed(decode, 1, ()))
            if abs(PREFILL * least - predicted.ttft_s) < 1e-9 * predicted.ttft_s:
                continue
            assert (result is not None) == (PREFILL * least < predicted.ttft_s)
            if result is not None:
                assert case.predict(result.plan, 1).ttft_s == pytest.approx(least, rel=1e-9)
                better += 1
        front = phases.pairs(BOTH)
        assert phases.exact
        assert rounded([item.objectives for item in front]) == [
            pytest.approx(item, rel=1e-8) for item in rounded(every)
        ]
        for item in front:
            said = objectives(case.predict(item.plan, 1))
            assert item.objectives == pytest.approx((said["latency"], said["ttft"]), rel=1e-9)
        several += len(front) > 1
        none += not every
    assert several > cases / 20
    assert better > cases / 20
    assert 0 < none < cases / 2 or cases < 50


def test_bytes_count_on_devices_where_pairs_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is ample one search of P and one of D find all pairs; where it is short, bytes there count. With
    more such devices than are searched, some pairs are given what has room, and the gap to their bounds is known."""
    counted: list[list[int]] = []
    begin = PairSearch.__init__

    def init(self: PairSearch, *args: Any) -> None:
        counted.append(list(args[3]))
        begin(self, *args)

    monkeypatch.setattr(PairSearch, "__init__", init)
    names = (LOCAL, "b", "c")

    def phases(rooms: tuple[int, ...]) -> Phases:
        speeds = [
            replace(device(name, (1 + i) * MS, by_row=True), memory_bytes=room)
            for i, (name, room) in enumerate(zip(names, rooms, strict=True))
        ]
        counted.clear()
        return Phases(Planner(work(4, prompt=1000), speeds, linked(list(names), FAR), "m", ""))

    ample = phases((1 << 30,) * 3)
    best = ample.pairs(BOTH)
    assert counted == [[]]
    assert ample.exact
    assert ample.gap == 0
    some = phases((1 << 30, 20 * MIB, 1 << 30))
    assert some.pairs(BOTH)
    assert counted == [[1]]
    all_short = (45 * MIB, 45 * MIB, 45 * MIB)
    exact = phases(all_short)
    pairs = exact.pairs(BOTH)
    assert exact.exact
    assert counted[-1]
    monkeypatch.setattr("partition.search.phases.MANY_SHORT", 0)
    rough = phases(all_short)
    near = rough.pairs(BOTH)
    assert counted == [[]]
    assert not rough.exact
    assert 0 < rough.gap < 1
    for pair in pairs:  # as good as this one, but for the gap
        assert any(
            other.objectives[0] <= pair.objectives[0] * (1 + 1e-9)
            and other.objectives[1] <= pair.objectives[1] * (1 + rough.gap + 1e-9)
            for other in near
        )
    for pair in near:
        predicted(rough._planner, pair.plan)  # has room
    assert min(pair.objectives[1] for pair in best) < min(pair.objectives[1] for pair in pairs)


def test_pairs_that_have_room_stay_where_no_other_is_given_it(monkeypatch: pytest.MonkeyPatch) -> None:
    phases = Phases(PairCase(np.random.default_rng(26), 3, 3, True).planner())
    bounds: list[Pair] = []
    run = PairSearch.run

    def all_pairs(self: PairSearch) -> list[Pair]:
        bounds[:] = run(self)
        return list(bounds)

    monkeypatch.setattr(PairSearch, "run", all_pairs)
    monkeypatch.setattr("partition.search.phases.MANY_SHORT", 0)
    monkeypatch.setattr("partition.search.phases.MOST_REPAIRED", 0)
    pairs = phases.pairs(BOTH)
    roomy = [pair.values for pair in bounds if not phases._lacking(pair)]
    assert 0 < len(roomy) < len(bounds)
    assert [pair.objectives for pair in pairs] == [pytest.approx(values) for values in rounded(roomy)]


def test_no_gap_is_known_of_a_beam_nor_beside_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [LOCAL, "b", "c"]
    speeds = [device(name, (1 + i) * MS, by_row=True) for i, name in enumerate(names)]
    planner = Planner(work(4, prompt=1000), speeds, linked(names, FAR), "m", "")
    for these, axes, is_exact in (
        (planner, BOTH, True),
        (planner, (*BOTH, "memory"), False),
        (planner.only_own(), (*BOTH, "memory"), True),  # where a pair has no other placement for prompts
    ):
        phases = Phases(these)
        assert phases.pairs(axes)
        assert (phases.exact, phases.gap) == (is_exact, 0.0 if is_exact else math.inf)
    monkeypatch.setattr("partition.search.planner.MOST_EXACT", 2)
    monkeypatch.setattr("partition.search.planner.BEAM", 1)
    beam = Phases(planner)
    assert beam.pairs(BOTH)
    assert (beam.exact, beam.gap) == (False, math.inf)


def test_thin_owners_of_both_placements_have_room() -> None:
    """This device has no room for a layer, and its process takes 2 MiB for each placement."""
    for room, has_pairs in ((3 * MIB, False), (4 * MIB, True)):
        own = replace(device(LOCAL, MS, by_row=True), memory_bytes=room, runtime_bytes=2 * MIB)
        speeds = [own, device("b", MS, by_row=True), device("c", MS, by_row=True)]
        planner = Planner(work(4, prompt=1000), speeds, linked([LOCAL, "b", "c"], FAR), "m", "")
        assert bool(Phases(planner).pairs(BOTH)) == has_pairs


# ------------------------------------------------------------------------------------------------------- a phone


def phone_and_laptop(prompt: int = 1000, way: LinkSpeed = FAR, **phone: object) -> Planner:
    """A phone that generates nearly as fast as its laptop, over Wi-Fi, and computes prompts a tenth as fast: rows of a
    step are free up to one, and then take their time."""
    own = device(layer_s=10 * MS, **{"by_row": True, **phone})  # type: ignore[arg-type]
    laptop = device("laptop", 1 * MS, by_row=True)
    laptop = replace(laptop, layer_s=replace(laptop.layer_s, points=((1, 8 * MS), (2, 8 * MS), (512, 512 * MS))))
    to_do = work(4, prompt=prompt)
    return Planner(to_do, [own, laptop], linked([LOCAL, "laptop"], way), "m", "", tensor=False)


def predicted(planner: Planner, plan: Plan) -> Prediction:
    return predict(plan, planner.work, {speed.device: speed for speed in planner.speeds}, planner.links)


def own(planner: Planner) -> Placed:
    [placed], _ = planner.only_own().front(("latency",))
    return placed


def test_several_stages_hand_a_prompt_over_in_smaller_chunks() -> None:
    """512 tokens on "b" alone: 2.05 s and then 4 s on the way, as one chunk. With a layer of four on "c" both take
    longer, 2.24 s and 4.1 s, and go in 8 chunks: an eighth of the former comes before the latter."""
    slow, slower = LinkSpeed(0.0, 512 * 4 * 256 / 4.0), LinkSpeed(0.0, 512 * 256 / 4.1)
    speeds = [device(layer_s=100 * MS, by_row=True), *(device(n, t * MS, by_row=True) for n, t in (("b", 1), ("c", 4)))]
    links = linked([LOCAL, "b", "c"], LinkSpeed(0.0, 1e10), {("b", LOCAL): slow, ("c", LOCAL): slower})
    planner = Planner(work(4, prompt=512), speeds, links, "m", "", tensor=False)
    pair = Phases(planner).with_prefill(own(planner))
    assert pair is not None
    assert pair.plan.prefill is not None
    assert {stage.shards[0].device: len(stage.layers) for stage in pair.plan.prefill.computing} == {"b": 3, "c": 1}
    both = predicted(planner, pair.plan)
    assert both.ttft_s is not None
    assert both.ttft_s - both.plain_s == pytest.approx(4.1 + (2.048 + 1.536 / 8) / 8, rel=0.01)


def test_the_laptop_computes_prompts_and_the_phone_generates() -> None:
    planner = phone_and_laptop()
    plain = own(planner)
    pair = paired(planner, plain, "latency", {})
    assert pair is not None
    assert pair.plan.prefill is not None
    assert pair.plan.placements[0] == plain.plan
    assert pair.plan.prefill.thin_owner
    assert [stage.shards[0].device for stage in pair.plan.prefill.computing] == ["laptop"]
    both, alone = predicted(planner, pair.plan), predicted(planner, plain.plan)
    assert both.latency_s == alone.latency_s
    assert both.ttft_s is not None
    assert alone.ttft_s == pytest.approx(40.0)
    assert both.ttft_s < alone.ttft_s / 5
    assert both.prefill is not None
    assert both.ttft_s == pytest.approx((both.prefill.ttft_s or 0) + both.hand_over_s + both.plain_s)
    assert both.memory_bytes == {
        device: both.prefill.memory_bytes.get(device, 0) + alone.memory_bytes.get(device, 0)
        for device in (LOCAL, "laptop")
    }


def test_a_line_says_where_prompts_are_computed_and_what_that_gives() -> None:
    planner = phone_and_laptop()
    pair = paired(planner, own(planner), "latency", {})
    assert pair is not None
    both = predicted(planner, pair.plan)
    assert prefill_reason(planner, pair) == (
        f"prompts of {pair.plan.prefill_from} tokens or more on laptop: {both.ttft_s:.2f} s to the first token instead"
        " of 40.0 s"
    )


def test_below_the_break_even_length_nothing_moves() -> None:
    planner = phone_and_laptop()
    pair = paired(planner, own(planner), "latency", {})
    assert pair is not None
    breaks_even = pair.plan.prefill_from
    assert 1 < breaks_even < 100

    def gain_s(tokens: int) -> float:
        other = Planner(replace(planner.work, prompt=tokens), planner.speeds, planner.links, "m", "", tensor=False)
        both, alone = (predicted(other, plan).ttft_s for plan in (pair.plan, pair.plan.placements[0]))
        assert both is not None
        assert alone is not None
        return alone - both

    assert gain_s(breaks_even) > 0 >= gain_s(breaks_even - 1)


def test_ranks_share_layers_of_a_prompt_by_its_own_attention() -> None:
    """Chunks of 32 rows have 64 tokens behind them on average: that doubles what a layer takes on one of the two, and
    what a decoding row takes for them does not matter."""
    pair = [device(token_s=1e-6, prompt_token_s=0.0), device("b", token_s=0.0, prompt_token_s=MS / (32 * 64))]
    group = StageGroup(work(4, prompt=128), pair, linked([LOCAL, "b"]), (0, 1), for_prompts=True)
    assert group.parts() == pytest.approx([2 / 3, 1 / 3])


def test_a_pair_is_taken_only_where_it_is_clearly_better() -> None:
    """One layer, so that both cannot share a prompt."""
    for seconds, is_taken in ((1 * MS, True), (0.75 * 20 * MS, True), (0.95 * 20 * MS, False)):
        fast = device("laptop", by_row=True)
        fast = replace(fast, layer_s=replace(fast.layer_s, points=((1, 40 * MS), (512, 512 * seconds))))
        slow = device(layer_s=20 * MS, by_row=True)
        planner = Planner(work(1, prompt=2000), [slow, fast], linked([LOCAL, "laptop"]), "m", "", tensor=False)
        assert (paired(planner, own(planner), "latency", {}) is not None) == is_taken
    assert paired(planner.only_own(), own(planner), "latency", {}) is None
    busy = phone_and_laptop()
    for seconds, is_taken in ((0.6, False), (0.4, True)):  # of a step of 512 rows, which takes the phone 5.12 a layer
        laptop = replace(busy.speeds[1], busy=True, layer_s=Curve(((1, 8 * MS), (512, seconds * 5.12))))
        tall = Planner(work(1, prompt=4096), [busy.speeds[0], laptop], busy.links, "m", "", tensor=False)
        assert (paired(tall, own(tall), "latency", {}) is not None) == is_taken
    assert paired(phone_and_laptop(), own(phone_and_laptop()), "memory", {}) is None


def test_no_pair_without_memory_for_both_placements() -> None:
    for room, has_pair in ((60 * MIB, True), (20 * MIB, False)):
        planner = phone_and_laptop(memory_bytes=40 * MIB)
        speeds = [planner.speeds[0], replace(planner.speeds[1], memory_bytes=room)]
        planner = planner.like(speeds, planner.links)
        assert (paired(planner, own(planner), "latency", {}) is not None) == has_pair
    limited = paired(phone_and_laptop(), own(phone_and_laptop()), "latency", {"memory": 36.0 * MIB})
    assert limited is None
    pair = paired(phone_and_laptop(), own(phone_and_laptop()), "latency", {})
    assert pair is not None
    small = phone_and_laptop(memory_bytes=30 * MIB)
    with pytest.raises(PlanError, match=r"layers 0-3 on local need .* MiB there"):
        predicted(small, pair.plan)
    same = replace(pair.plan.placements[0], prefill=pair.plan.placements[0])
    with pytest.raises(PlanError, match="both placements on local need 74 MiB there, and 50 are free; leave out pre"):
        predicted(phone_and_laptop(memory_bytes=50 * MIB), same)


def test_a_thin_link_keeps_prompts_where_they_are() -> None:
    """1,000 tokens take the phone 40 s; 512 bytes of hidden states for each take 170 s there."""
    slow = phone_and_laptop(way=LinkSpeed(5 * MS, 3e3))
    assert paired(slow, own(slow), "latency", {}) is None


def test_the_first_token_within_a_limit_on_the_others() -> None:
    """The laptop alone is sooner with the first token, and slower with all others: a round trip each."""
    planner = phone_and_laptop(way=LinkSpeed(20 * MS, 12.5e6))
    cap = {"latency": 1.01 * own(planner).objectives[0]}
    plain = best(planner, "ttft", cap)
    pair = paired(planner, plain, "ttft", cap)
    assert pair is not None
    assert pair.plan.placements[0] == own(planner).plan
    assert PREFILL * pair.objectives[0] < plain.objectives[0]
    assert pair.objectives[0] == pytest.approx(predicted(planner, pair.plan).ttft_s)
    limited = paired(planner, None, "latency", {"ttft": 6.0})
    assert limited is not None
    assert limited.objectives[0] <= cap["latency"]
    assert limited.objectives[1] <= 6.0
    assert paired(planner, None, "latency", {"ttft": 0.1}) is None
    planner.work = replace(planner.work, draft=Draft("ngram", 0.4, 2))  # a pair's first token has a row of its own
    assert paired(planner, None, "latency", {"ttft": 6.0}) is None


def test_a_prediction_of_both_is_read_again() -> None:
    planner = phone_and_laptop()
    pair = paired(planner, own(planner), "latency", {})
    assert pair is not None
    both = predicted(planner, pair.plan)
    values = json.loads(json.dumps(both.to_json()))
    assert Prediction.from_json(values) == both
    assert both.prefill is not None
    assert values["prefill"]["memory_bytes"] == both.prefill.memory_bytes
    renamed = both.renamed({LOCAL: "phone", "laptop": "the laptop"}).to_json()
    for placement in (renamed, renamed["prefill"]):
        named = {name for stage in placement["stages"] for name in (*stage["devices"], *stage["memory_bytes"])}
        assert named <= {"phone", "the laptop"}
    assert Plan.from_json(json.loads(json.dumps(pair.plan.to_json()))) == pair.plan
    assert "prefill" not in predicted(planner, own(planner).plan).to_json()
    values["prefill"]["prefill"] = values["prefill"]
    with pytest.raises(PlanError, match=r"predicted\.prefill: it has a prefill of its own"):
        Prediction.from_json(values)


def test_two_laptops_prefill_as_a_pipeline_where_one_alone_generates() -> None:
    """5 ms and 100 Mbit/s apart, so a token over both takes longer; a prompt of 1,000 tokens takes little over half."""
    two = [device(layer_s=MS, by_row=True), device("b", MS, by_row=True)]
    planner = Planner(work(model(16), prompt=1000), two, linked([LOCAL, "b"], FAR), "m", "")
    pair = paired(planner, own(planner), "latency", {})
    assert pair is not None
    assert pair.plan.prefill is not None
    assert len(pair.plan.prefill.computing) == 2
    alone, both = (predicted(planner, plan).ttft_s for plan in (pair.plan.placements[0], pair.plan))
    assert alone is not None
    assert both is not None
    assert alone > 1.6 * both
