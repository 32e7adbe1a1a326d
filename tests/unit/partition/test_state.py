"""Test keys and values in llama.cpp's format: cut and joined unchanged, and refused if any part is wrong."""

import random
import struct
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partition.errors import CannotSlice, StateError
from partition.plan.plan import Range, Slice
from partition.plan.tensor import kv_heads
from partition.state import shape as state_shape
from partition.state.parts import cut, join
from partition.state.sequence import KVBlock, LayerRows, check_encoded, decode, encode, encoded_bytes
from partition.state.shape import LayerShape, StateShape
from quant.types import TYPES, cache_type
from tests.support.thorough import some

_CELL = 12  # bytes of a cell's position, number of sequences, and sequence
Span = tuple[int, int]


@st.composite
def shapes(draw: st.DrawFn, most_layers: int = 4) -> StateShape:
    """The shape of a whole model: one cache or two, any number of heads, any type; layers differ in their heads."""
    kv = TYPES[draw(st.sampled_from(["f16", "f32", "q8_0"]))]
    caches = draw(st.integers(1, 2))
    head_k, head_v = (kv.block_bytes * draw(st.integers(1, 3)) for _ in "kv")
    layers = []
    for layer in range(draw(st.integers(1, most_layers))):
        heads = draw(st.integers(1, 4))
        windowed = caches == 2 and draw(st.booleans())
        layers.append(LayerShape(layer, tuple(range(heads)), heads * head_k, heads * head_v, windowed))
    return StateShape(tuple(layers), kv.id, kv.id, kv.block_bytes if kv.block == 1 else 0, caches)


def block_of(shape: StateShape, positions: Range, seed: int = 0) -> KVBlock:
    """A block of random bytes."""
    rng = np.random.default_rng(seed)
    n = len(positions)
    return KVBlock(
        positions,
        tuple(
            LayerRows(
                rng.integers(0, 256, (n, layer.key_bytes), np.uint8),
                rng.integers(0, 256, (n, layer.value_bytes), np.uint8),
            )
            for layer in shape.layers
        ),
    )


@st.composite
def blocks(draw: st.DrawFn) -> tuple[StateShape, KVBlock]:
    """A shape and a block of it."""
    start = draw(st.integers(0, 100))
    positions = Range(start, start + draw(st.integers(1, 6)))
    return (shape := draw(shapes())), block_of(shape, positions, draw(st.integers(0, 99)))


def between(draw: st.DrawFn, total: int) -> list[Range]:
    """A random cut of `total` things into ranges that have at least one each."""
    ends = sorted(draw(st.sets(st.integers(1, total - 1), max_size=2))) if total > 1 else []
    return [Range(a, b) for a, b in pairwise([0, *ends, total])]


@st.composite
def parts_of(draw: st.DrawFn, whole: StateShape) -> list[StateShape]:
    """The shapes of uneven stages of uneven shards, which hold KV heads several times where they cut their groups."""
    parts = []
    for layers in between(draw, len(whole.layers)):
        of_stage = whole.layers[layers.start : layers.stop]
        windows = any(layer.windowed for layer in of_stage)
        # llama.cpp makes both caches for some architectures, also where no layer is in the first.
        both = whole.caches == 2 and (windows or draw(st.booleans()))
        groups = draw(st.integers(1, 3))
        n_kv = len(of_stage[0].kv_heads)
        is_even = all(len(layer.kv_heads) == n_kv for layer in of_stage)
        for heads in between(draw, groups * n_kv) if is_even else [Range(0, groups * n_kv)]:
            is_all = len(heads) == groups * n_kv
            saved = kv_heads(heads, groups * n_kv, n_kv)
            parts.append(
                StateShape(
                    tuple(
                        replace(
                            layer,
                            kv_heads=layer.kv_heads if is_all else saved,
                            key_bytes=layer.key_bytes if is_all else layer.key_head_bytes * len(saved),
                            value_bytes=layer.value_bytes if is_all else layer.value_head_bytes * len(saved),
                            windowed=both and (layer.windowed or not windows),
                        )
                        for layer in of_stage
                    ),
                    whole.key_type,
                    whole.value_type,
                    whole.value_size,
                    2 if both else 1,
                )
            )
    return draw(st.permutations(parts))


def same(a: KVBlock, b: KVBlock) -> bool:
    """Return whether all bits are alike."""
    return a.positions == b.positions and all(
        np.array_equal(x.keys, y.keys) and np.array_equal(x.values, y.values)
        for x, y in zip(a.layers, b.layers, strict=True)
    )


def forms(shape: StateShape) -> Sequence[bool]:
    """Return whether values are transposed: both, where the type can be."""
    return (False, True) if shape.value_size else (False,)


def fields(shape: StateShape, tokens: int, *, transposed: bool) -> tuple[dict[str, tuple[int, str]], list[Span]]:
    """Where each field of a state is, with its form, and the spans of keys and values. Written down independently."""
    where: dict[str, tuple[int, str]] = {}
    payload: list[Span] = []
    at = 0

    def field(name: str, form: str) -> None:
        nonlocal at
        where[name] = (at, form)
        at += struct.calcsize("<" + form)

    def rows(n_bytes: int) -> None:
        nonlocal at
        payload.append((at, at + n_bytes))
        at += n_bytes

    field("magic", "I")
    field("sequence", "i")
    for cache in range(shape.caches):
        layers = [layer for layer in shape.layers if shape.caches == 1 or layer.windowed == (cache == 1)]
        field(f"streams {cache}", "I")
        field(f"cells {cache}", "I")
        for token in range(tokens):
            for name, form in (("position", "i"), ("sequences", "I"), ("sequence", "i")):
                field(f"{name} {cache} {token}", form)
        field(f"transposed {cache}", "I")
        field(f"layers {cache}", "I")
        for layer in layers:
            field(f"key type {layer.layer}", "i")
            field(f"key bytes {layer.layer}", "Q")
            rows(tokens * layer.key_bytes)
        for layer in layers:
            field(f"value type {layer.layer}", "i")
            if transposed:
                field(f"value size {layer.layer}", "I")
                field(f"values {layer.layer}", "I")
            else:
                field(f"value bytes {layer.layer}", "Q")
            rows(tokens * layer.value_bytes)
    return where, payload


def refused(data: bytes, shape: StateShape, positions: Range) -> bool:
    """Return whether a state is refused as it should be: with StateError and nothing else."""
    try:
        decode(data, shape, positions)
    except StateError:
        with pytest.raises(StateError):
            check_encoded(data, shape, positions)
        return True
    return False


@given(st.data())
def test_what_is_cut_for_parts_is_the_whole_again(data: st.DataObject) -> None:
    whole, block = data.draw(blocks())
    parts = data.draw(parts_of(whole))
    pieces = [(cut(block, whole, part), part) for part in parts]
    assert same(join(pieces, whole), block)
    again = [(decode(encode(piece, part), part, block.positions), part) for piece, part in pieces]
    assert same(join(again, whole), block)


@given(st.data())
def test_a_part_that_is_missing_or_of_other_positions_is_named(data: st.DataObject) -> None:
    whole, block = data.draw(blocks())
    parts = data.draw(parts_of(whole))
    pieces = [(cut(block, whole, part), part) for part in parts]
    lost = {(layer.layer, head) for layer in parts[-1].layers for head in layer.kv_heads}
    lost -= {(layer.layer, head) for part in parts[:-1] for layer in part.layers for head in layer.kv_heads}
    if lost and len(parts) > 1:
        with pytest.raises(StateError, match="no rank has KV heads"):
            join(pieces[:-1], whole)
    if len(parts) > 1:
        later = Range(block.positions.start + 1, block.positions.stop + 1)
        pieces[-1] = (KVBlock(later, pieces[-1][0].layers), parts[-1])
        with pytest.raises(StateError, match="must have the same"):
            join(pieces, whole)


def test_heads_are_where_their_rank_expects_them() -> None:
    """Known bytes: a shard that needs head 1 twice, and head 2, of keys of two bytes and values of one."""
    layer = LayerShape(5, (0, 1, 2), 6, 3, windowed=False)
    whole = StateShape((layer,), 0, 0, 1, 1)
    keys, values = np.arange(12, dtype=np.uint8).reshape(2, 6), np.arange(20, 26, dtype=np.uint8).reshape(2, 3)
    part = StateShape((replace(layer, kv_heads=(1, 1, 2)),), 0, 0, 1, 1)
    rows = cut(KVBlock(Range(0, 2), (LayerRows(keys, values),)), whole, part).layers[0]
    assert rows.keys.tolist() == [[2, 3, 2, 3, 4, 5], [8, 9, 8, 9, 10, 11]]
    assert rows.values.tolist() == [[21, 21, 22], [24, 24, 25]]
    first = StateShape((replace(layer, kv_heads=(2, 0), key_bytes=4, value_bytes=2),), 0, 0, 1, 1)
    other = KVBlock(Range(0, 2), (LayerRows(keys[:, :4], values[:, :2]),))
    joined = join([(KVBlock(Range(0, 2), (rows,)), part), (other, first)], whole).layers[0]
    assert joined.keys.tolist() == [[2, 3, 2, 3, 4, 5], [8, 9, 8, 9, 10, 11]]
    assert joined.values.tolist() == [[21, 21, 22], [24, 24, 25]]
    with pytest.raises(StateError, match="layer 5 is not in the state"):
        cut(KVBlock(Range(0, 2), ()), StateShape((), 0, 0, 1, 1), part)


@given(blocks())
def test_what_is_encoded_is_decoded(pair: tuple[StateShape, KVBlock]) -> None:
    shape, block = pair
    for transposed in forms(shape):
        data = encode(block, shape, transposed=transposed)
        if not transposed:
            check_encoded(bytes(data), shape, block.positions)
        assert same(decode(data, shape, block.positions), block)
        where, payload = fields(shape, len(block.positions), transposed=transposed)
        ends = [at + struct.calcsize(form) for at, form in where.values()]
        assert len(data) == max(*ends, *(stop for _, stop in payload))
    assert encoded_bytes(shape, len(block.positions)) == len(encode(block, shape))


def test_known_bytes_of_a_state() -> None:
    layers = (LayerShape(0, (0,), 2, 4, windowed=True), LayerShape(1, (0,), 2, 4, windowed=False))
    shape = StateShape(layers, 1, 1, 2, 2)
    rows = [LayerRows(np.array([[a, a + 1]], np.uint8), np.arange(a, a + 4, dtype=np.uint8)[None]) for a in (10, 20)]
    state = encode(KVBlock(Range(7, 8), tuple(rows)), shape, transposed=True).tobytes()
    assert all(refused(state[:n], shape, Range(7, 8)) for n in range(len(state)))
    assert state == struct.pack(
        "<Ii IIiIiII iQ2B iII4B IIiIiII iQ2B iII4B",
        *(0xAF143CD8, 0),
        *(1, 1, 7, 1, 0, 1, 1),
        *(1, 2, 20, 21),
        *(1, 2, 2, 20, 21, 22, 23),
        *(1, 1, 7, 1, 0, 1, 1),
        *(1, 2, 10, 11),
        *(1, 2, 2, 10, 11, 12, 13),
    )


@pytest.mark.parametrize(("head_k", "head_v", "cut_by_heads"), [(64, 64, True), (48, 64, False), (64, 48, False)])
def test_heads_that_do_not_end_with_a_block_are_not_cut(
    head_k: int, head_v: int, cut_by_heads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_shape, "cached_windows", lambda *_: None)
    figures = SimpleNamespace(head_k=head_k, head_v=head_v, n_heads=[4], n_heads_kv=[4], n_layers=1)
    source: Any = SimpleNamespace(
        shape=figures, rules=SimpleNamespace(no_states=""), meta={}, heads=4, head_sizes=lambda _: (head_k, head_v),
        recurrent=(False,), file=SimpleNamespace(architecture="made up"),
    )  # fmt: skip
    half = Slice(Range(0, 1), Range(0, 2), Range(0, 8), Range(0, 0), first=True)
    if cut_by_heads:
        [layer] = StateShape.of_slice(source, half, cache_type("q8_0")).layers
        assert (layer.key_bytes, layer.value_bytes) == (2 * 2 * 34, 2 * 2 * 34)
    else:
        with pytest.raises(CannotSlice, match="cannot be cut by heads; use f16"):
            StateShape.of_slice(source, half, cache_type("q8_0"))


def test_transposed_values_are_one_value_after_another() -> None:
    shape = StateShape((LayerShape(0, (0,), 2, 4, windowed=False),), 1, 1, 2, 1)
    values = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]], np.uint8)
    block = KVBlock(Range(0, 3), (LayerRows(np.zeros((3, 2), np.uint8), values),))
    assert encode(block, shape, transposed=True)[-12:].tolist() == [1, 2, 5, 6, 9, 10, 3, 4, 7, 8, 11, 12]
    blocks_of_many = replace(shape, value_size=0)
    with pytest.raises(StateError, match="use flash attention"):
        encode(block, blocks_of_many, transposed=True)
    with pytest.raises(StateError, match="use flash attention"):
        decode(encode(block, shape, transposed=True), blocks_of_many, Range(0, 3))


@given(blocks(), st.randoms(use_true_random=False))
def test_positions_out_of_order_are_put_in_order(pair: tuple[StateShape, KVBlock], rng: random.Random) -> None:
    shape, block = pair
    n, start = len(block.positions), block.positions.start
    order = rng.sample(range(n), n)
    mixed = KVBlock(block.positions, tuple(LayerRows(r.keys[order], r.values[order]) for r in block.layers))
    for transposed in forms(shape):
        data = bytearray(encode(mixed, shape, transposed=transposed))
        where, _ = fields(shape, n, transposed=transposed)
        for cache in range(shape.caches):
            for token, position in enumerate(order):
                at, form = where[f"position {cache} {token}"]
                struct.pack_into("<" + form, data, at, start + position)
        assert same(decode(bytes(data), shape, block.positions), block)


@settings(max_examples=some(40, 400))
@given(blocks(), st.data())
def test_every_truncation_and_every_changed_field_is_refused(
    pair: tuple[StateShape, KVBlock], data: st.DataObject
) -> None:
    shape, block = pair
    for transposed in forms(shape):
        state = bytes(encode(block, shape, transposed=transposed))
        assert not refused(state, shape, block.positions)
        assert refused(state + b"\0", shape, block.positions)
        where, payload = fields(shape, len(block.positions), transposed=transposed)
        ends = {at for at, _ in where.values()} | {n for span in payload for n in span} - {len(state)}
        assert all(
            refused(state[:n], shape, block.positions) for end in ends for n in (end, end + 1, end - 1) if n >= 0
        )
        for at, form in where.values():
            size = struct.calcsize(form)
            field = int.from_bytes(state[at : at + size], "little")
            others = {field ^ 1, 0, 1, 2, (1 << 31) - 1, 1 << 31, (1 << 8 * size) - 1, field + 1, field << 8 & 0xFFFF}
            others.add(data.draw(st.integers(0, (1 << 8 * size) - 1)))
            for other in others - {field}:
                changed = state[:at] + (other % (1 << 8 * size)).to_bytes(size, "little") + state[at + size :]
                assert refused(changed, shape, block.positions)


@given(blocks())
def test_another_shape_or_range_is_refused(pair: tuple[StateShape, KVBlock]) -> None:
    shape, block = pair
    state, at = bytes(encode(block, shape)), block.positions
    for other in (Range(at.start + 1, at.stop + 1), Range(at.start, at.stop + 1), Range(at.start + 1, at.stop)):
        assert refused(state, shape, other)
    first, *rest = shape.layers
    wider = replace(first, key_bytes=first.key_bytes + 1), replace(first, value_bytes=first.value_bytes * 2)
    for layers in (*((layer, *rest) for layer in wider), tuple(rest), (*shape.layers, replace(first, layer=99))):
        assert refused(state, replace(shape, layers=tuple(layers)), at)
        with pytest.raises(StateError):
            encode(block, replace(shape, layers=tuple(layers)))
    assert refused(state, replace(shape, key_type=shape.key_type + 1), at)
    assert refused(state, replace(shape, value_type=shape.value_type + 1), at)
    assert refused(state, replace(shape, caches=3 - shape.caches), at)
    backwards = replace(shape, layers=shape.layers[::-1])
    sizes = [[[layer.key_bytes for layer in order.in_cache(n)] for n in range(2)] for order in (shape, backwards)]
    assert refused(state, backwards, at) == (sizes[0] != sizes[1])


def test_numbers_that_say_much_take_no_memory() -> None:
    shape = StateShape((LayerShape(0, (0,), 2, 2, windowed=False),), 1, 1, 2, 1)
    state = bytes(encode(block_of(shape, Range(0, 4)), shape))
    where, _ = fields(shape, 4, transposed=False)
    tracemalloc.start()
    try:
        for name, (at, form) in where.items():
            size = struct.calcsize(form)
            for huge in ((1 << 31) - 1, 1 << 31, (1 << 8 * size) - 1):
                changed = state[:at] + huge.to_bytes(size, "little") + state[at + size :]
                assert refused(changed, shape, Range(0, 4)), name
        # A shape of a real model, and so many positions asked for, where the state has four.
        large = StateShape((replace(shape.layers[0], key_bytes=1 << 20, value_bytes=1 << 20),), 1, 1, 2, 1)
        assert refused(state, large, Range(0, 1 << 31))
        cells = struct.pack("<IiIIiIi", 0xAF143CD8, 0, 1, 1 << 31, 0, 1, 0)
        assert refused(cells, large, Range(0, 1 << 31))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------------------------------------------------- fuzzing


def mutated(state: bytes, rng: random.Random) -> bytes:
    """A state with one to three random changes: bits, numbers, pieces that are gone, doubled, moved or exchanged."""
    data = bytearray(state)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at, n = rng.randrange(len(data)), rng.choice((1, 2, 4, 8, 12, 16, rng.randrange(1, len(data) + 1)))
        kind = rng.randrange(8)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.randrange(256)
        elif kind == 2:
            number = rng.choice((0, 1, 2, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, rng.randrange(1 << 32)))
            data[at : at + 4] = number.to_bytes(4, "little")[: len(data) - at]
        elif kind == 3:
            del data[at:]
        elif kind == 4:
            data += rng.randbytes(min(n, 64))
        elif kind == 5:
            del data[at : at + n]
        elif kind == 6:
            data[at:at] = data[at : at + n]
        else:
            to = rng.randrange(len(data))
            n = min(n, len(data) - at, len(data) - to)
            data[at : at + n], data[to : to + n] = data[to : to + n], data[at : at + n]
        if not data:
            return b""
    return bytes(data)


def header(data: bytes, shape: StateShape, tokens: int, *, transposed: bool) -> list[bytes]:
    """All that is no key and no value; cells in the order of their positions, as any order is the same state."""
    where, payload = fields(shape, tokens, transposed=transposed)
    cells = [where[f"position {cache} 0"][0] for cache in range(shape.caches)]
    pieces = [
        part for at in cells for part in sorted(data[at + i * _CELL : at + (i + 1) * _CELL] for i in range(tokens))
    ]
    used = sorted([*payload, *((at, at + tokens * _CELL) for at in cells)])
    ends = [0, *(stop for _, stop in used)]
    return [*pieces, *(data[a:b] for a, (b, _) in zip(ends, used, strict=False)), data[ends[-1] :]]


def test_what_is_accepted_of_random_changes_changed_keys_and_values_only() -> None:
    rng = random.Random(18)
    accepted = 0
    q8, f16 = TYPES["q8_0"], TYPES["f16"]
    cases = []
    for kv, caches, tokens, transposed in ((f16, 1, 3, False), (f16, 2, 2, True), (q8, 2, 4, False), (f16, 1, 1, True)):
        size = kv.block_bytes
        layers = tuple(LayerShape(i, (0, 1), 2 * size, (i + 1) * 2 * size, caches == 2 and i == 1) for i in range(3))
        shape = StateShape(layers, kv.id, kv.id, size if kv.block == 1 else 0, caches)
        block = block_of(shape, Range(5, 5 + tokens))
        state = bytes(encode(block, shape, transposed=transposed))
        cases.append((shape, block.positions, state, header(state, shape, tokens, transposed=transposed), transposed))
    for n in range(some(8_000, 1_000_000)):
        shape, positions, state, sound, transposed = cases[n % len(cases)]
        changed = mutated(state, rng)
        if not refused(changed, shape, positions):
            accepted += changed != state
            assert len(changed) == len(state)
            assert header(changed, shape, len(positions), transposed=transposed) == sound
    assert accepted > some(8_000, 1_000_000) // 100  # or the changes are none that tell anything
