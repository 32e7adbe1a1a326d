"""Plan of paging: what stays in memory and what passes through a window, for any matrices and any room."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from partition.errors import PlanError
from partition.predict import paging
from partition.predict.paging import Matrix, Pages, Speed, least_room, pass_seconds, plan_pages
from tests.support.helpers import calls

SPEED = Speed(read=1e9, compute=4e9)
PAGE = 4096


def matrices(sizes: list[int]) -> list[Matrix]:
    return [Matrix(f"m{i}", size) for i, size in enumerate(sizes)]


any_sizes = st.lists(st.integers(1, 1 << 30), min_size=1, max_size=60)
alike_sizes = st.lists(st.integers(100, 800), min_size=1, max_size=120)  # none is small beside the largest
speeds = st.builds(Speed, st.floats(1e6, 1e11), st.floats(1e6, 1e12))


@st.composite
def rooms(draw: st.DrawFn, sizes: st.SearchStrategy[list[int]] = any_sizes) -> tuple[list[Matrix], int]:
    """Matrices, and a room that at least the largest fits in."""
    drawn = matrices(draw(sizes))
    return drawn, draw(st.integers(least_room(drawn), sum(item.n_bytes for item in drawn) + 3))


def spread(drawn: list[Matrix], room: int, window: int) -> Pages:
    """The plan with a window, where any matrix may be streamed."""
    result = paging._spread(drawn, room - window, window, least_room(drawn))
    assert result is not None
    return result


def streamed_of(drawn: list[Matrix], plan: Pages) -> list[Matrix]:
    names = set(plan.streamed)
    return [item for item in drawn if item.name in names]


@given(rooms(), speeds, st.booleans())
def test_what_stays_and_the_window_fit_and_all_is_accounted_for(
    case: tuple[list[Matrix], int], speed: Speed, given_window: bool
) -> None:
    drawn, room = case
    window = (least_room(drawn) + room) // 2 if given_window else None
    plan = plan_pages(drawn, room, speed, window)
    total = sum(item.n_bytes for item in drawn)
    streamed = streamed_of(drawn, plan)
    assert plan.resident_bytes + plan.window_bytes <= room
    assert plan.resident_bytes + plan.streamed_bytes == total
    assert plan.streamed_bytes == sum(item.n_bytes for item in streamed)
    assert plan.streamed == tuple(item.name for item in streamed)  # each once, in the order of use
    assert bool(plan.streamed) == (total > room)
    if plan.streamed:
        assert plan.window_bytes >= max(item.n_bytes for item in streamed)
        assert window is None or plan.window_bytes == window


@given(any_sizes, st.integers(0, 1 << 40), st.none() | st.integers(1, 1 << 40))
def test_nothing_is_streamed_where_all_fits(sizes: list[int], more: int, window: int | None) -> None:
    total = sum(sizes)
    assert plan_pages(matrices(sizes), total + more, SPEED, window) == Pages((), total, 0, 0)


def test_no_matrices_need_nothing() -> None:
    assert least_room([]) == 0
    assert plan_pages([], 0, SPEED) == Pages((), 0, 0, 0)


@given(rooms(), speeds)
def test_no_more_is_streamed_than_the_room_and_one_matrix_ask_for(case: tuple[list[Matrix], int], speed: Speed) -> None:
    drawn, room = case
    plan = plan_pages(drawn, room, speed)
    if plan.streamed:
        needed = sum(item.n_bytes for item in drawn) - (room - plan.window_bytes)
        assert plan.streamed_bytes - needed <= least_room(drawn)


@given(rooms(alike_sizes))
@example((matrices([100] * 7), 500))
def test_what_is_streamed_lies_evenly_between_what_stays(case: tuple[list[Matrix], int]) -> None:
    drawn, room = case
    if sum(item.n_bytes for item in drawn) <= room:
        return
    plan = spread(drawn, room, least_room(drawn))
    share = plan.streamed_bytes / sum(item.n_bytes for item in drawn)
    names = set(plan.streamed)
    passed = streamed = 0
    for item in drawn:
        passed += item.n_bytes
        streamed += item.n_bytes if item.name in names else 0
        assert abs(streamed - share * passed) <= least_room(drawn) + 1


def test_small_matrices_stay_while_the_large_ones_are_enough() -> None:
    layers = [Matrix(f"{kind}{i}", size) for i in range(20) for kind, size in (("small", 10), ("large", 100))]
    plan = plan_pages(layers, 1000, SPEED, 200)
    assert not any(name.startswith("small") for name in plan.streamed)
    assert len(plan.streamed) == 14  # 2200 in all, 800 may stay, 200 of them are small
    squeezed = plan_pages(layers, 300, SPEED, 200)  # 100 may stay, the small ones are 200
    assert any(name.startswith("small") for name in squeezed.streamed)


def test_hundreds_of_matrices_take_few_steps() -> None:
    for room in (8 << 20, 9 << 20, 3 << 30, (5 << 30) - PAGE):
        drawn = matrices([(8 << 20) - PAGE * (i % 9) for i in range(700)])
        plans = []
        n_calls = calls(lambda: plans.append(plan_pages(drawn, room, SPEED)))  # noqa: B023
        assert n_calls < 400_000, n_calls
        assert plans[0].streamed
        assert plans[0].resident_bytes + plans[0].window_bytes <= room


@given(rooms(), speeds)
@example((matrices([100] * 6), 250), Speed(1e9, 1e12))
def test_a_pass_is_never_faster_than_its_reading_or_its_computing(case: tuple[list[Matrix], int], speed: Speed) -> None:
    drawn, room = case
    plan = plan_pages(drawn, room, speed)
    seconds = pass_seconds(drawn, plan, speed)
    computing = sum(item.n_bytes for item in drawn) / speed.compute + len(plan.streamed) * paging._STOP_S
    assert seconds >= plan.streamed_bytes / speed.read * (1 - 1e-9)
    assert seconds >= computing * (1 - 1e-9)
    assert seconds <= (plan.streamed_bytes / speed.read + computing) * (1 + 1e-9)  # not even worse than taking turns


@given(rooms())
def test_a_pass_takes_its_computing_where_the_disk_is_as_fast_as_memory(case: tuple[list[Matrix], int]) -> None:
    drawn, room = case
    speed = Speed(float("inf"), 1e9)
    plan = plan_pages(drawn, room, speed)
    assert pass_seconds(drawn, plan, speed) == pytest.approx(
        sum(item.n_bytes for item in drawn) / 1e9 + len(plan.streamed) * paging._STOP_S
    )


def test_a_window_of_one_matrix_lets_nothing_be_read_while_it_is_computed() -> None:
    drawn = matrices([100] * 4)
    speed = Speed(read=1000, compute=500)
    each = 0.2 + paging._STOP_S
    assert pass_seconds(drawn, spread(drawn, 100, 100), speed) == pytest.approx(4 * (0.1 + each))
    assert pass_seconds(drawn, spread(drawn, 200, 200), speed) == pytest.approx(4 * each)


@given(rooms(alike_sizes), speeds)
def test_the_window_chosen_has_the_shortest_pass_of_those_that_fit(
    case: tuple[list[Matrix], int], speed: Speed
) -> None:
    drawn, room = case
    plan = plan_pages(drawn, room, speed)
    if plan.streamed:
        others = [k * least_room(drawn) for k in (2, 3, 4, 6, 8) if k * least_room(drawn) <= room]
        for window in others:
            other = spread(drawn, room, window)
            assert pass_seconds(drawn, plan, speed) <= pass_seconds(drawn, other, speed)


@pytest.mark.parametrize(
    ("sizes", "room", "window"),
    [([100, 300, 50], 299, None), ([100, 300, 50], 400, 299), ([100, 300, 50], 400, 401), ([5], 0, None)],
)
def test_a_window_that_cannot_be_is_refused_with_need_and_have(sizes: list[int], room: int, window: int | None) -> None:
    mib = 1 << 20
    least = window or max(sizes)
    if least < max(sizes):
        words = rf"{least}\.0 MiB cannot hold the largest matrix, {max(sizes)}\.0 MiB; .* larger --window"
    else:
        words = rf"{least}\.0 MiB is more than the {room}\.0 MiB .*; use a smaller --window"
    with pytest.raises(PlanError, match=words):
        plan_pages(matrices([size * mib for size in sizes]), room * mib, SPEED, window and window * mib)
