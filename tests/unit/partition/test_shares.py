"""Test the division of heads, FFN columns, vocabulary rows and layers in proportion to shares."""

from dataclasses import replace
from itertools import combinations, pairwise
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partition.errors import PlanError
from partition.plan.apportion import apportion
from partition.plan.arrange import stages
from partition.plan.plan import Range, Shard, Sizes
from partition.plan.tensor import Limits, kv_heads, shards
from tests.support.thorough import some

some_shares = st.floats(0.01, 100) | st.sampled_from([1.0, 2.0, 3.0, 0.5])


def make_limits(
    heads: int, kv: int, ff: int = 5632, head_unit: int = 1, ff_unit: int = 32, layers: int = 4, vocab: int = 32000
) -> Limits:
    """Limits of a model with heads of 64, eight times as wide as it has KV groups of 8."""
    head, column = 2.0 * 2048 * 64, 3.0 * 2048
    layer = (heads + kv) * head + ff * column
    return Limits(
        Sizes(layers, heads, kv, ff, vocab), head_unit, ff_unit, head, head, column, 2048.0, (layer,) * layers
    )


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    """A model whose heads and columns are whole numbers of units."""
    kv, group = draw(st.integers(1, 8)), draw(st.integers(1, 9))
    heads = kv * group
    head_unit = draw(st.sampled_from([unit for unit in (1, 2, 3, 4, 8) if heads % unit == 0]))
    ff_unit = draw(st.sampled_from([1, 32, 256]))
    size = st.floats(0.5, 1e6)
    layers = draw(st.lists(size, min_size=1, max_size=6))
    sizes = Sizes(len(layers), heads, kv, ff_unit * draw(st.integers(1, 60)), draw(st.integers(1, 2000)))
    return Limits(sizes, head_unit, ff_unit, draw(size), draw(size), draw(size), draw(size), tuple(layers))


def cut(total: Limits, shares: list[float], last: bool = True) -> tuple[Shard, ...]:
    return shards(total, [f"device-{i}" for i in range(len(shares))], shares, last)


def lengths(built: tuple[Shard, ...], name: str) -> list[int]:
    return [len(getattr(shard, name)) for shard in built]


# ------------------------------------------------------------------------------------------------ things and shares


@given(st.data(), st.lists(some_shares, min_size=1, max_size=4))
def test_the_last_to_end_ends_as_early_as_can_be(data: st.DataObject, shares: list[float]) -> None:
    n = len(shares)
    count = data.draw(st.integers(n, 10))
    given_out = apportion(count, shares)
    assert sum(given_out) == count
    assert min(given_out) >= 1

    def slowest(counts: list[int]) -> float:
        return max(c / s for c, s in zip(counts, shares, strict=True))

    ways = ([b - a for a, b in pairwise((0, *edges, count))] for edges in combinations(range(1, count), n - 1))
    assert slowest(given_out) <= min(map(slowest, ways)) * (1 + 1e-6)


@given(st.data(), st.lists(some_shares, min_size=2, max_size=6), st.integers(6, 5000), st.floats(1, 10))
def test_a_larger_share_never_brings_less(data: st.DataObject, shares: list[float], count: int, times: float) -> None:
    rank = data.draw(st.integers(0, len(shares) - 1))
    more = [share * times if i == rank else share for i, share in enumerate(shares)]
    assert apportion(count, more)[rank] >= apportion(count, shares)[rank]


@given(st.lists(some_shares, min_size=1, max_size=8), st.integers(8, 100_000))
def test_each_gets_its_whole_part_at_least(shares: list[float], count: int) -> None:
    for part, share in zip(apportion(count, shares), shares, strict=True):
        assert part >= int(count * share / sum(shares) * (1 - 1e-7)) - len(shares)


def test_equal_ranks_the_lower_gets_more() -> None:
    assert apportion(8, [1.0] * 5) == [2, 2, 2, 1, 1]
    assert apportion(7, [1 / 3] * 3) == [3, 2, 2]


# --------------------------------------------------------------------------------------------------------- KV heads


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_every_query_head_meets_its_kv_head(kv: int, group: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, kv * group - 1))
    stop = data.draw(st.integers(start + 1, kv * group))
    current = kv_heads(Range(start, stop), kv * group, kv)
    expected = [head // group for head in range(start, stop)]
    assert len(expected) % len(current) == 0
    serves = len(expected) // len(current)
    assert [current[i // serves] for i in range(len(expected))] == expected
    # Nothing is repeated that need not be: with fewer KV heads some query head would meet a wrong one.
    for fewer in range(1, len(current)):
        if len(expected) % fewer == 0:
            step = len(expected) // fewer
            assert any(len(set(expected[i : i + step])) > 1 for i in range(0, len(expected), step))


def test_kv_heads_of_whole_and_of_cut_groups() -> None:
    assert kv_heads(Range(8, 32), 32, 4) == (1, 2, 3)
    assert kv_heads(Range(20, 32), 32, 4) == (2, 3, 3)
    assert kv_heads(Range(1, 3), 4, 2) == (0, 1)
    assert kv_heads(Range(2, 3), 8, 2) == (0,)
    assert kv_heads(Range(0, 0), 8, 2) == ()
    assert kv_heads(Range(0, 4), 4, 0) == ()


def test_kv_heads_of_what_is_not_in_the_model() -> None:
    with pytest.raises(PlanError, match="heads 2 to 9 of a model that has 8"):
        kv_heads(Range(2, 9), 8, 2)
    with pytest.raises(PlanError, match="7 query heads cannot share 2 KV heads"):
        kv_heads(Range(0, 7), 7, 2)


# ---------------------------------------------------------------------------------------------------------- shards


@settings(max_examples=some(75, 300))
@given(limits(), st.lists(some_shares, min_size=1, max_size=9), st.booleans())
def test_shards_tile_the_stage_on_units(whole: Limits, shares: list[float], last: bool) -> None:
    sizes, n = whole.sizes, len(shares)
    room = min(sizes.heads // whole.head_unit, sizes.ff // whole.ff_unit)
    if (n > 1 and n > room) or (last and n > sizes.vocab):
        with pytest.raises(PlanError, match=rf"{n} ranks share"):
            cut(whole, shares, last)
        return
    built = cut(whole, shares, last)
    for name, total, unit in (("heads", sizes.heads, whole.head_unit), ("ff", sizes.ff, whole.ff_unit)):
        current = [getattr(shard, name) for shard in built]
        assert (current[0].start, current[-1].stop) == (0, total)
        assert all(a.stop == b.start for a, b in pairwise(current))
        assert all(len(part) >= unit and len(part) % unit == 0 for part in current)
    if last:
        rows = [shard.vocab for shard in built]
        assert (rows[0].start, rows[-1].stop) == (0, sizes.vocab)
        assert all(a.stop == b.start for a, b in pairwise(rows))
        assert all(rows)
        if sizes.vocab >= 32 * n:
            assert all(row.start % 32 == 0 for row in rows)
    else:
        assert not any(shard.vocab for shard in built)
    assert built == cut(whole, shares, last)
    assert built == cut(whole, [share * 4 for share in shares], last)


@pytest.mark.parametrize(
    ("heads", "kv", "shares", "expected"),
    [
        (32, 4, [1, 1], [16, 16]),
        (32, 4, [3, 1], [24, 8]),
        (32, 4, [2, 1], [24, 8]),
        (32, 4, [5, 2, 1], [20, 8, 4]),
        (32, 8, [5, 2, 1], [20, 8, 4]),
        (32, 4, [1] * 5, [8, 8, 8, 4, 4]),
        (32, 4, [1] * 8, [4] * 8),
        (8, 4, [1] * 4, [2] * 4),
        (8, 4, [1] * 5, [2, 2, 2, 1, 1]),
        (8, 4, [1] * 8, [1] * 8),
        (8, 8, [1] * 3, [3, 3, 2]),
    ],
)
def test_heads_go_out_in_kv_groups_or_parts_of_them(
    heads: int, kv: int, shares: list[float], expected: list[int]
) -> None:
    total = make_limits(heads, kv, ff=heads * 176)
    built = cut(total, shares)
    assert lengths(built, "heads") == expected


def test_columns_do_not_make_up_for_heads() -> None:
    """All ranks wait for each other between the two."""
    total = make_limits(32, 4)
    first, second = cut(total, [2, 1])
    assert (len(first.heads), len(second.heads)) == (24, 8)
    assert (len(first.ff), len(second.ff)) == (3776, 1856)


def test_a_group_is_cut_for_a_rank_that_is_far_slower() -> None:
    """A whole group would be too much for it."""
    built = cut(make_limits(32, 4), [10, 1])
    assert lengths(built, "heads") == [30, 2]
    assert kv_heads(built[1].heads, 32, 4) == (3,)


def test_a_unit_that_does_not_divide_the_group() -> None:
    built = cut(make_limits(12, 4, ff=2048, head_unit=4), [1, 1, 1])
    assert lengths(built, "heads") == [4, 4, 4]
    assert [kv_heads(shard.heads, 12, 4) for shard in built] == [(0, 0, 0, 1), (1, 2), (2, 3, 3, 3)]


def test_the_head_is_cut_at_rows_that_kernels_like() -> None:
    built = shards(make_limits(8, 4), ["a", "b"], [1, 4])
    assert lengths(built, "vocab") == [6400, 25600]
    built = shards(make_limits(8, 4, vocab=100), ["a", "b"], [1, 1])
    assert lengths(built, "vocab") == [64, 36]
    built = shards(make_limits(8, 4, vocab=7), ["a", "b"], [1, 1])
    assert lengths(built, "vocab") == [4, 3]


def test_one_rank_holds_all_of_any_model() -> None:
    total = make_limits(0, 0, ff=0)
    assert cut(total, [1]) == (Shard("device-0", Range(0, 0), Range(0, 0), Range(0, 32000)),)
    with pytest.raises(PlanError, match="2 ranks share 0 attention heads; use one rank a stage, or --parallel pipe"):
        cut(total, [1, 1])


@pytest.mark.parametrize(
    ("whole", "ranks", "message"),
    [
        (make_limits(4, 2), 5, "5 ranks share 4 attention heads; use at most 4 ranks a stage, or --parallel pipeline"),
        (
            make_limits(12, 4, head_unit=4),
            4,
            "4 ranks share 12 attention heads, of which the quantization blocks of attn_output allow 3 pieces of 4; "
            "use at most 3 ranks a stage, a quantization with smaller blocks, or --parallel pipeline",
        ),
        (
            make_limits(8, 8, ff=512, ff_unit=256),
            3,
            "3 ranks share 512 FFN columns, of which the quantization blocks of ffn_down allow 2 pieces of 256; "
            "use at most 2 ranks a stage, a quantization with smaller blocks, or --parallel pipeline",
        ),
        (make_limits(8, 8, vocab=2), 3, "3 ranks share 2 rows of the head; use at most 2 ranks in the last stage"),
        (make_limits(8, 8), 65, "65 ranks; expected 1 to 64"),
    ],
)
def test_more_ranks_than_there_is_to_share(whole: Limits, ranks: int, message: str) -> None:
    with pytest.raises(PlanError) as raised:
        cut(whole, [1.0] * ranks)
    assert str(raised.value) == message


@pytest.mark.parametrize("bad", [0, -1, inf, nan])
def test_shares_that_are_none(bad: float) -> None:
    with pytest.raises(PlanError, match=r"the share of rank 1 is .*; expected a number above 0"):
        cut(make_limits(8, 4), [1, bad])
    with pytest.raises(PlanError, match="the share of rank 0"):
        shards(make_limits(8, 4), ["a"], [bad])
    with pytest.raises(PlanError, match="the share of rank 1"):
        stages(make_limits(8, 4), 2, [1, bad])


def test_as_many_shares_as_ranks() -> None:
    with pytest.raises(PlanError, match="1 shares for 2 ranks; give one for each"):
        shards(make_limits(8, 4), ["a", "b"], [1])
    with pytest.raises(PlanError, match="0 ranks"):
        shards(make_limits(8, 4), [], [])
    with pytest.raises(PlanError, match="2 shares for 3 ranks"):
        stages(make_limits(8, 4), 3, [1, 1])


def test_limits_that_cannot_be() -> None:
    with pytest.raises(PlanError, match="units of 0 heads"):
        Limits(Sizes(1, 1, 1, 1, 1), 0, 1, 1, 1, 1, 1, (1,))
    with pytest.raises(PlanError, match="bytes of 2 layers of a model that has 1"):
        Limits(Sizes(1, 1, 1, 1, 1), 1, 1, 1, 1, 1, 1, (1, 1))


# ---------------------------------------------------------------------------------------------------------- stages


def slowest_stage(total: Limits, edges: tuple[int, ...], shares: list[float]) -> float:
    loads = [sum(total.layer_bytes[a:b]) for a, b in pairwise(edges)]
    loads[-1] += total.vocab_bytes * total.sizes.vocab
    return max(load / share for load, share in zip(loads, shares, strict=True))


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=9), st.floats(0, 20), st.data())
def test_the_slowest_stage_is_as_fast_as_can_be(layers: list[float], head: float, data: st.DataObject) -> None:
    total = Limits(Sizes(len(layers), 8, 8, 64, 1), 1, 1, 1.0, 1.0, 1.0, head, tuple(layers))
    shares = data.draw(st.lists(some_shares, min_size=1, max_size=len(layers)))
    built = stages(total, len(shares), shares)
    edges = (0, *(stage.stop for stage in built))
    assert [stage.start for stage in built] == list(edges[:-1])
    assert edges[-1] == len(layers)
    assert all(built)
    ways = ((0, *inner, len(layers)) for inner in combinations(range(1, len(layers)), len(shares) - 1))
    assert slowest_stage(total, edges, shares) <= min(slowest_stage(total, way, shares) for way in ways) * (1 + 1e-9)
    assert built == stages(total, len(shares), shares)


def test_stages_in_proportion() -> None:
    def layers(shares: list[float], head: float = 0.0) -> list[int]:
        total = Limits(Sizes(24, 8, 8, 64, 1), 1, 1, 1.0, 1.0, 1.0, head, (1.0,) * 24)
        return [len(stage) for stage in stages(total, len(shares), shares)]

    assert layers([1, 1, 1]) == [8, 8, 8]
    assert layers([1, 2, 3]) == [4, 8, 12]
    assert layers([1, 1, 1], head=3) == [9, 9, 6]
    # Where the head alone is more than a share, the others still get theirs.
    assert layers([1, 2, 1], head=30) == [8, 15, 1]


def test_more_stages_than_layers() -> None:
    with pytest.raises(PlanError, match="5 stages share 4 layers; use at most 4 stages"):
        stages(make_limits(8, 4), 5, [1] * 5)


def test_all_heads_for_each_where_they_are_not_shared() -> None:
    """There can be more ranks than heads then."""
    built = cut(replace(make_limits(2, 1), shares_heads=False), [1.0, 2.0, 1.0])
    assert [shard.heads for shard in built] == [Range(0, 2)] * 3
    assert lengths(built, "ff") == [1408, 2816, 1408]
    with pytest.raises(PlanError, match=r"3 ranks share 64 FFN columns, of which .* allow 2 pieces of 32"):
        cut(replace(make_limits(2, 1, ff=64), shares_heads=False), [1.0] * 3)
