"""The weights that stay on a GPU: compared with all placements."""

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from partition.predict.residency import GpuPlacement, LayerBytes, fullest, place_on_gpu
from partition.predict.tiers import fullest_counts

LAYERS = st.builds(LayerBytes, st.integers(1, 20), st.integers(0, 60), st.integers(0, 9))


def all_placements(layers: Sequence[LayerBytes]) -> Iterator[GpuPlacement]:
    for first in range(len(layers) + 1):
        dense = range(first, len(layers))
        for chosen in product((False, True), repeat=len(dense)):
            yield GpuPlacement(tuple(dense), tuple(n for n, there in zip(dense, chosen, strict=True) if there))


@settings(max_examples=2000, deadline=None)
@given(st.lists(LAYERS, max_size=6), st.booleans(), st.floats(0, 1.1), st.floats(0, 1))
def test_no_placement_reads_more_from_the_gpu(
    layers: list[LayerBytes], equal: bool, share_of_all: float, expert_share: float
) -> None:
    layers = layers[:1] * len(layers) if equal else layers
    room = round(share_of_all * sum(layer.dense + layer.experts + layer.kv for layer in layers))
    placement = place_on_gpu(layers, room, expert_share)
    fitting = [other for other in all_placements(layers) if other.n_bytes(layers) <= room]
    best = max(other.token_bytes(layers, expert_share) for other in fitting)
    assert placement.n_bytes(layers) <= room
    assert abs(placement.token_bytes(layers, expert_share) - best) < 1e-9
    assert set(placement.experts) <= set(placement.dense)
    assert placement.dense == tuple(range(len(layers) - len(placement.dense), len(layers)))
    assert all(layers[n].experts for n in placement.experts)


def test_room_for_exactly_all_layers_holds_all_and_a_byte_less_does_not() -> None:
    layers = [LayerBytes(10, 100, 1) for _ in range(4)]
    assert place_on_gpu(layers, 4 * 111, 0.1) == GpuPlacement((0, 1, 2, 3), (0, 1, 2, 3))
    assert place_on_gpu(layers, 4 * 111 - 1, 0.1) == GpuPlacement((0, 1, 2, 3), (1, 2, 3))
    assert place_on_gpu(layers, 4 * 11 - 1, 0.1) == GpuPlacement((1, 2, 3), ())
    assert place_on_gpu(layers, 11, 0.1) == GpuPlacement((3,), ())
    assert place_on_gpu(layers, 10, 0.1) == GpuPlacement((), ())


def test_many_layers_of_different_sizes_nearly_fill_the_room() -> None:
    """The search ends early there."""
    layers = [LayerBytes(30 << 20, (200 << 20) + n * n * 12_345, 2 << 20) for n in range(94)]
    room = 12 << 30
    placement = place_on_gpu(layers, room, 0.06)
    assert len(placement.dense) == 94
    assert 0.97 * room < placement.n_bytes(layers) <= room


@given(st.lists(st.integers(0, 30), max_size=9), st.integers(0, 200))
def test_the_fullest_sum(sizes: list[int], room: int) -> None:
    sums = {
        sum(size for size, there in zip(sizes, chosen, strict=True) if there)
        for chosen in product((False, True), repeat=len(sizes))
    }
    chosen = fullest(sizes, room)
    assert chosen == sorted(set(chosen))
    assert sum(sizes[i] for i in chosen) == max(n for n in sums if n <= room)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=3, unique=True),
    st.lists(
        st.tuples(st.lists(st.integers(0, 4), min_size=3, max_size=3), st.integers(0, 200)), min_size=1, max_size=4
    ),
)
def test_counts_have_the_fullest_sum_in_each_room(sizes: list[int], rooms: list[tuple[list[int], int]]) -> None:
    counts = np.array([most[: len(sizes)] for most, _ in rooms]).T
    chosen = fullest_counts(sizes, counts, np.array([room for _, room in rooms]))
    assert ((chosen >= 0) & (chosen <= counts)).all()
    for i, (_, room) in enumerate(rooms):
        sums = {sum(map(int.__mul__, sizes, own)) for own in product(*(range(n + 1) for n in counts[:, i].tolist()))}
        assert sum(map(int.__mul__, sizes, chosen[:, i].tolist())) == max(n for n in sums if n <= room)
