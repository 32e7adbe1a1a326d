"""Test cutting a slice: it yields the bytes of the recipe, from any byte on, with little memory and few reads."""

import hashlib
import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.errors import SliceError
from edge.models import slice_cutting as cutting
from edge.models.slice_cutting import chunks, digest_of
from partition.slices.recipe import Blocks, Copy, Literal, Recipe, Zeros, whole
from tests.unit.partition.test_recipe import recipes

MODEL = bytes(i * 37 % 251 for i in range(1500))
MIB = 1 << 20


def sliced(recipe: Recipe, model: bytes) -> bytes:
    """The slice, in the most obvious way."""
    parts: list[bytes] = []
    for segment in recipe.segments:
        if isinstance(segment, Literal):
            parts.append(segment.data)
        elif isinstance(segment, Zeros):
            parts.append(b"\0" * segment.length)
        elif isinstance(segment, Blocks):
            parts.append(segment.data(0, segment.n_bytes))
        else:
            starts = (segment.offset + i * segment.stride for i in range(segment.count))
            parts += [model[start : start + segment.length] for start in starts]
    return b"".join(parts)


def recipe_of(model: bytes, *segments: Copy | Literal | Zeros) -> Recipe:
    """A recipe for these bytes."""
    return Recipe(hashlib.sha256(model).hexdigest(), len(model), segments)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model file of 1,500 bytes."""
    path = tmp_path_factory.mktemp("cutting") / "model.gguf"
    path.write_bytes(MODEL)
    return path


@given(recipes(MODEL), st.data())
def test_chunks_are_the_slice(model: Path, recipe: Recipe, data: st.DataObject) -> None:
    expected = sliced(recipe, MODEL)
    start = data.draw(st.integers(0, len(expected)))
    size = data.draw(st.integers(1, len(expected) + 10))
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans()):  # limits that pieces of this size are on both sides of
            patch.setattr(cutting, "_SMALL_PIECE_BYTES", 30)
            patch.setattr(cutting, "_NEAR_BYTES", 20)
            patch.setattr(cutting, "_REGION_BYTES", 60)
        result = list(chunks(recipe, model, start, size))
    assert b"".join(result) == expected[start:]
    assert all(len(chunk) == size for chunk in result[:-1])
    assert all(result)
    assert digest_of(recipe, model) == hashlib.sha256(expected).hexdigest()


@pytest.mark.parametrize("length", [1, 16, 5000, 65536, 70000])
@pytest.mark.parametrize("gap", [0, 1, 16384, 16385])
def test_pieces_of_any_size(tmp_path: Path, length: int, gap: int) -> None:
    content = os.urandom(200_000)
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    copy = Copy(77, length, length + gap, 1 + (len(content) - 77 - length) // (length + gap))
    recipe = recipe_of(content, Literal(b"header"), copy, Copy(0, len(content)))
    assert b"".join(chunks(recipe, path, 3, 10_000)) == sliced(recipe, content)[3:]


def test_little_memory_and_few_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    size = 32 * MIB
    with path.open("wb") as file:
        file.truncate(size)
    recipe = Recipe("0" * 64, size, (Zeros(5 * MIB), Copy(0, size), Copy(0, 16, 64, size // 64), Copy(0, 1, 1, size)))
    reads = 0
    pread = os.pread

    def counted(*args: int) -> bytes:
        nonlocal reads
        reads += 1
        return pread(*args)

    monkeypatch.setattr(os, "pread", counted)
    next(chunks(recipe, path, 5 * MIB + size))  # numpy is loaded
    tracemalloc.start()
    try:
        total = sum(len(chunk) for chunk in chunks(recipe, path))
        assert tracemalloc.get_traced_memory()[1] < 6 * MIB
    finally:
        tracemalloc.stop()
    assert total == recipe.n_bytes
    assert reads < 250  # 96 MiB are spanned, in regions of 1 MiB


def test_an_open_file_and_its_position(model: Path) -> None:
    with model.open("rb") as file:
        file.seek(7)
        assert b"".join(chunks(recipe_of(MODEL, Copy(5, 100)), file)) == MODEL[5:105]
        assert file.tell() == 7


def test_progress_ends_at_the_size_of_the_slice(model: Path) -> None:
    reported: list[tuple[int, int]] = []
    digest_of(recipe_of(MODEL, Zeros(3 * MIB)), model, lambda done, total: reported.append((done, total)))
    assert reported == [(MIB, 3 * MIB), (2 * MIB, 3 * MIB), (3 * MIB, 3 * MIB)]


def test_a_model_file_that_is_not_the_recipe_s(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    recipe = whole("0" * 64, 3000)
    with pytest.raises(SliceError, match=r"cannot read the model file .*model\.gguf: No such file"):
        next(chunks(recipe, path))
    path.write_bytes(bytes(2999))
    with pytest.raises(SliceError, match=r"model\.gguf has 2999 bytes, the recipe needs a model of 3000"):
        next(chunks(recipe, path))
    with pytest.raises(SliceError, match="has 3000 bytes, it cannot be continued at byte 3001"):
        chunks(recipe, path, 3001)


def test_a_model_file_that_changes_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(3000))
    cut = chunks(whole("0" * 64, 3000), path, chunk_bytes=1000)
    next(cut)
    os.truncate(path, 1500)
    with pytest.raises(SliceError, match=r"model\.gguf ends at byte 1500, 500 more are needed"):
        next(cut)
    path.write_bytes(bytes(3000))
    os.utime(path, ns=(1, 1))
    cut = chunks(whole("0" * 64, 3000), path, chunk_bytes=1000)
    next(cut)
    os.utime(path, ns=(2, 2))
    with pytest.raises(SliceError, match=r"model\.gguf was changed while"):
        next(cut)
