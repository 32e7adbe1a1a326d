"""Test weights in files that have this CPU's layout: the logits are the same, also if the files change or disappear."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from edge.errors import WeightsError
from edge.llm.engine import Engine
from edge.weights import repacked_cache
from tests.engine.paging.conftest import MakeModel
from tests.support import paging
from tests.support.paging import answer, halfway, least, resident_answer, weight_threads
from tests.support.thorough import each_once


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of such files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "edge" / "laid-out"


def fast(path: Path, memory: int) -> Engine:
    """The model under a budget, with a disk that keeps up with the computing."""
    with mock.patch.dict(paging.speeds, read=1e12):
        return paging.paged(path, memory)


def right(engine: Engine, path: Path) -> None:
    """It answers as resident weights do."""
    engine.kv_clear()
    np.testing.assert_array_equal(answer(engine), resident_answer(path, True, min(16, engine.batch)))


def files(cache: Path) -> list[Path]:
    return sorted(cache.glob("*/*.weights"))


@pytest.mark.parametrize(
    ("arch", "which"),
    each_once(["llama", "gemma", "phi3", "gpt-oss"], [halfway, least], lambda value: getattr(value, "__name__", value)),
)
def test_logits_are_those_of_resident_weights(
    make_model: MakeModel, cache: Path, arch: str, which: Callable[[Path], int]
) -> None:
    path = make_model(arch)
    for _ in range(2):  # written, and found
        with fast(path, which(path)) as engine:
            assert engine.paging is not None
            streamed = engine.paging.plan.streamed
            assert [piece.is_laid_out for piece in streamed] == [piece.repacked for piece in streamed]
            assert len(files(cache)) == sum(piece.is_laid_out for piece in streamed)
            right(engine, path)
            right(engine, path)


def test_files_are_written_once_and_read_again(make_model: MakeModel, cache: Path) -> None:
    path = make_model()
    memory = halfway(path)
    fast(path, memory).close()
    times = {file: file.stat().st_mtime_ns for file in files(cache)}
    assert times
    with fast(path, memory) as engine:
        right(engine, path)
    assert {file: file.stat().st_mtime_ns for file in files(cache)} == times


@pytest.mark.parametrize("damage", ["a byte", "a digest", "shorter", "longer", "empty", "gone"])
def test_files_that_were_damaged_are_written_again(make_model: MakeModel, cache: Path, damage: str) -> None:
    path = make_model()
    memory = halfway(path)
    fast(path, memory).close()
    whole = {file: file.read_bytes() for file in files(cache)}
    for file, data in whole.items():
        if damage == "gone":
            file.unlink()
        else:
            file.write_bytes(
                {
                    "a byte": data[:1000] + bytes([data[1000] ^ 1]) + data[1001:],
                    "a digest": data[:-1] + bytes([data[-1] ^ 1]),
                    "shorter": data[:-1],
                    "longer": data + b"x",
                    "empty": b"",
                }[damage]
            )
    with fast(path, memory) as engine:
        right(engine, path)
    assert {file: file.read_bytes() for file in files(cache)} == whole


def test_files_that_change_while_they_are_read_are_not_trusted(make_model: MakeModel, cache: Path) -> None:
    path = make_model()
    with fast(path, halfway(path)) as engine:
        right(engine, path)
        paging.idle(engine)
        for file in files(cache):
            file.write_bytes(file.read_bytes())
        engine.kv_clear()
        with pytest.raises(WeightsError, match=r"\.weights: it was changed while in use"):
            answer(engine)


def test_files_that_are_deleted_while_they_are_read_are_read_on(make_model: MakeModel, cache: Path) -> None:
    path = make_model()
    with fast(path, halfway(path)) as engine:
        for file in files(cache):
            file.unlink()
        right(engine, path)


def test_another_model_of_the_same_sizes_has_files_of_its_own(
    make_model: MakeModel, cache: Path, tmp_path: Path
) -> None:
    path = make_model()
    memory = halfway(path)
    fast(path, memory).close()
    before = set(files(cache))
    other = make_model("llama", "q4_0", rms_eps=1e-6)  # the same shapes and the same seed
    fast(other, memory).close()
    assert len(files(cache)) == 2 * len(before)
    with fast(other, memory) as engine:
        right(engine, other)


def test_nothing_is_written_where_the_disk_has_no_room(
    make_model: MakeModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model()
    usage = repacked_cache.shutil.disk_usage(path)._replace(free=100_000)  # type: ignore[attr-defined]
    monkeypatch.setattr(repacked_cache.shutil, "disk_usage", lambda _: usage)  # type: ignore[attr-defined]
    with fast(path, halfway(path)) as engine:
        right(engine, path)
    assert not files(cache)


def test_a_cache_that_cannot_be_written_to_is_done_without(make_model: MakeModel, cache: Path) -> None:
    path = make_model()
    cache.parent.mkdir()
    cache.write_text("a file where a folder should be")
    with fast(path, halfway(path)) as engine:
        right(engine, path)


def test_what_other_models_left_goes_when_there_is_too_much(
    make_model: MakeModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model()
    memory = halfway(path)
    fast(path, memory).close()
    size = sum(file.stat().st_size for file in files(cache))
    old, (folder,) = set(files(cache)), cache.iterdir()
    os.utime(folder, (1, 1))
    monkeypatch.setattr(repacked_cache, "MOST_BYTES", size + size // 2)
    other = make_model("llama", "q4_0", rms_eps=1e-6)
    with fast(other, memory) as engine:
        right(engine, other)
    assert files(cache)
    assert not old & set(files(cache))


def test_files_of_the_model_that_was_not_used_for_longest_go_first(
    make_model: MakeModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [make_model("llama", "q4_0", rms_eps=eps) for eps in (1e-5, 1e-6, 1e-4)]
    folders: list[Path] = []
    for seconds, path in enumerate(paths[:2], 1):
        fast(path, halfway(path)).close()
        (folder,) = set(cache.iterdir()) - set(folders)
        folders.append(folder)
        os.utime(folder, (seconds, seconds))
    size = max(sum(file.stat().st_size for file in folder.iterdir()) for folder in folders)
    monkeypatch.setattr(repacked_cache, "MOST_BYTES", 2 * size + size // 2)
    for path in (paths[0], paths[2]):  # the first one is used again
        fast(path, halfway(path)).close()
    assert [folder.exists() for folder in folders] == [True, False]
    assert len(list(cache.iterdir())) == 2


def test_threads_and_descriptors_of_such_files_end_with_the_engine(make_model: MakeModel, cache: Path) -> None:
    path = make_model()
    engine = fast(path, halfway(path))
    assert paging.descriptors(*files(cache))
    engine.close()
    assert not paging.descriptors(*files(cache))


def test_a_load_that_is_interrupted_leaves_none_open(
    make_model: MakeModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, results, open_ = make_model(), list[bool](), repacked_cache._open
    memory = halfway(path)
    fast(path, memory).close()

    def interrupted(*args: Any) -> bool:
        if results:
            raise KeyboardInterrupt
        results.append(open_(*args))
        return results[-1]

    monkeypatch.setattr(repacked_cache, "_open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fast(path, memory)
    assert results == [True]
    assert not paging.descriptors(path, *files(cache))
    assert not weight_threads()
