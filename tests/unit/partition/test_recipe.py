"""Test recipes: their contents, and that arbitrary bytes are a valid recipe or raise RecipeError."""

import hashlib
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partition.fields import is_digest
from partition.slices.recipe import MAX_BYTES, Blocks, Copy, Literal, Recipe, RecipeError, Segment, Zeros, whole

DIGEST = hashlib.sha256(b"model").hexdigest()
HEAD = struct.Struct("<8s32sQI")


@st.composite
def copies(draw: st.DrawFn, model_bytes: int) -> Copy:
    """Any number of pieces of a model, also next to each other, also all of it."""
    offset = draw(st.integers(0, model_bytes - 1))
    length = draw(st.integers(1, model_bytes - offset))
    stride = draw(st.integers(length, model_bytes))
    count = draw(st.integers(1, 1 + (model_bytes - offset - length) // stride))
    return Copy(offset, length, stride, count)


def recipes(model: bytes) -> st.SearchStrategy[Recipe]:
    """Any recipe for a slice of these bytes."""
    literal = st.binary(min_size=1, max_size=40).map(Literal)
    zeros = st.integers(1, 40).map(Zeros)
    blocks = st.builds(Blocks, st.integers(1, 9), st.integers(10, 40), st.integers(0, 4), st.integers(1, 2))
    segments: st.SearchStrategy[Segment] = copies(len(model)) | literal | zeros | blocks
    digest = hashlib.sha256(model).hexdigest()
    return st.lists(segments, min_size=1, max_size=8).map(lambda result: Recipe(digest, len(model), tuple(result)))


def parse(data: bytes) -> Recipe | None:
    """The recipe, which must be written as it was read, or None where it is refused."""
    try:
        recipe = Recipe.from_bytes(data)
    except RecipeError:
        return None
    assert recipe.to_bytes() == data
    return recipe


@given(recipes(bytes(1000)))
def test_bytes_and_back(recipe: Recipe) -> None:
    again = parse(recipe.to_bytes())
    assert again == recipe
    assert again is not None
    assert again.key == recipe.key == hashlib.sha256(recipe.to_bytes()).hexdigest()
    assert again.n_bytes == sum(segment.n_bytes for segment in recipe.segments)


@given(recipes(bytes(1000)), st.data())
def test_damaged_bytes_are_a_valid_recipe_or_refused(recipe: Recipe, data: st.DataObject) -> None:
    good = recipe.to_bytes()
    damaged = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    parse(bytes(damaged))
    assert parse(good[: data.draw(st.integers(0, len(good) - 1))]) is None
    assert parse(good + data.draw(st.binary(min_size=1))) is None


@given(st.binary(max_size=200), st.integers(0, 12))
def test_any_bytes_are_refused_or_valid(tail: bytes, count: int) -> None:
    parse(tail)
    parse(HEAD.pack(b"EDGECUT\x01", bytes.fromhex(DIGEST), 1000, count) + tail)


def test_a_short_recipe_takes_little_memory() -> None:
    head = HEAD.pack(b"EDGECUT\x01", bytes.fromhex(DIGEST), MAX_BYTES, 1)
    many = HEAD.pack(b"EDGECUT\x01", bytes.fromhex(DIGEST), MAX_BYTES, 1_000_000)
    tracemalloc.start()
    try:
        assert parse(head + b"\x00" + struct.pack("<Q", MAX_BYTES)) is None
        assert parse(head + b"\x01" + struct.pack("<Q", MAX_BYTES)) is not None
        assert parse(many + b"\x01" + struct.pack("<Q", 1)) is None
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a recipe"),
        (b"GGUF" + bytes(60), "begins with"),
        (HEAD.pack(b"EDGECUT\x02", bytes(32), 1, 1), "version 2, known is 1"),
        (HEAD.pack(b"EDGECUT\x01", bytes(32), 1, 1), "1 segments, at most 0"),
        (HEAD.pack(b"EDGECUT\x01", bytes(32), 1, 0), "0 segments"),
        (HEAD.pack(b"EDGECUT\x01", bytes(32), 0, 1) + b"\x01" + struct.pack("<Q", 1), "model of 0 bytes"),
        (HEAD.pack(b"EDGECUT\x01", bytes(32), 9, 1) + b"\x07" + bytes(8), "kind 7"),
        (HEAD.pack(b"EDGECUT\x01", bytes(32), 9, 1) + b"\x02" + bytes(8), "cut off"),
        (HEAD.pack(b"EDGECUT\x01", bytes(32), 9, 1) + b"\x02" + struct.pack("<QQ", 5, 5), "byte 10 of a model of 9"),
        (HEAD.pack(b"EDGECUT\x01", bytes(32), 9, 1) + b"\x03" + struct.pack("<4Q", 0, 1, 1, 1), "one piece"),
    ],
)
def test_what_is_refused_says_why(data: bytes, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        Recipe.from_bytes(data)


@pytest.mark.parametrize(
    "numbers",
    [(-1, 1), (0, 0), (0, -1), (0, 2, 1, 2), (0, 1, 1, 0), (0, 1, 1, -3), (0, 1, MAX_BYTES, 3), (MAX_BYTES, 1)],
)
def test_copies_that_cannot_be(numbers: tuple[int, ...]) -> None:
    with pytest.raises(RecipeError, match="expected"):
        Copy(*numbers)


def test_scales_of_made_up_weights_are_in_place_and_differ() -> None:
    """As those of a trained model do: scales that are all the same are looked up too fast, and at random too slowly."""
    made_up = Blocks(100_000, 20, 4, 2)
    blocks = np.frombuffer(made_up.data(0, made_up.n_bytes), np.uint8).reshape(-1, 20)
    assert not blocks[:, :4].any()
    assert not blocks[:, 8:].any()
    low, high = blocks[:, 4:8].copy().view("<f2").astype(float).T
    for scales, least in ((low, 2**-8), (high, 2**-4)):
        assert (least <= scales).all()
        assert (scales < 8 * least).all()
        assert len(set(scales[:64])) > 48  # neighbours differ
        lines = scales.astype("<f2").view(np.uint16) // 16  # of a cache: 16 entries of llama.cpp's table
        shares = np.sort(np.bincount(lines))[::-1].cumsum() / len(scales)
        n_lines = [int(np.searchsorted(shares, share)) for share in (0.5, 0.9, 0.99)]
        assert n_lines == pytest.approx([43, 104, 155], abs=5)
    assert abs(np.corrcoef(low, high)[0, 1]) < 0.1


def test_scales_of_made_up_weights_are_computed_once_for_a_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """A survey cuts gigabytes of them, and each tensor begins with the same ones."""
    calls, arange = [0], np.arange

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return arange(*args, **kwargs)

    monkeypatch.setattr(np, "arange", counted)
    first = Blocks(200_000, 19, 3, 1)  # of no other test
    whole_pattern = first.data(0, first.n_bytes)
    for at, n in ((0, 1), (7, 19), (1_000_001, 1_000_000), (first.n_bytes - 5, 5)):
        assert first.data(at, n) == whole_pattern[at : at + n]
    assert Blocks(300, 19, 3, 1).data(0, 5700) == whole_pattern[:5700]
    assert calls == [1]


@pytest.mark.parametrize(
    "numbers",
    [
        (0, 20, 0, 1),
        (1, 20, 19, 1),
        (1, 2000, 0, 1),
        (1, 20, -2, 1),
        (1, 20, 0, 0),
        (1, 20, 0, 3),
        (MAX_BYTES + 1, 2, 0, 1),
    ],
)
def test_made_up_weights_that_cannot_be(numbers: tuple[int, int, int, int]) -> None:
    with pytest.raises(RecipeError, match="expected"):
        Blocks(*numbers)


def test_other_things_that_cannot_be() -> None:
    for make in (lambda: Literal(b""), lambda: Zeros(0), lambda: Zeros(MAX_BYTES + 1)):
        with pytest.raises(RecipeError):
            make()
    for digest in ("", DIGEST.upper(), DIGEST + "\n", "g" * 64, "../" + DIGEST[3:]):
        assert not is_digest(digest)
        with pytest.raises(RecipeError, match="not a SHA-256"):
            Recipe(digest, 1, (Zeros(1),))
    with pytest.raises(RecipeError, match="0 segments"):
        Recipe(DIGEST, 1, ())
    with pytest.raises(RecipeError, match="the most is"):
        Recipe(DIGEST, 1, (Zeros(MAX_BYTES), Zeros(1)))


def test_the_whole_model_and_equal_cuts() -> None:
    recipe = whole(DIGEST, 10)
    assert recipe.segments == (Copy(0, 10),)
    assert recipe.n_bytes == 10
    assert Copy(3, 4, 99, 1) == Copy(3, 4)
    assert Recipe(DIGEST, 10, (Copy(0, 10, 77),)).key == recipe.key
    assert Recipe(DIGEST, 11, (Copy(0, 10),)).key != recipe.key
