"""Test saved digests: they are valid while the file is unchanged, and a damaged record is not used."""

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from edge.errors import SliceError
from edge.models.digests import Digests
from edge.models.slice_cutting import digest_of
from partition.slices.recipe import Copy, Literal, Recipe, whole
from tests.support.helpers import until


class Reported:
    """A progress callback that counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, done: int, total: int) -> None:
        assert done <= total
        self.calls += 1


def write(path: Path, content: bytes) -> str:
    """Write a file and wait until a later change would show in its time; its SHA-256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    until(lambda: time.time_ns() - path.stat().st_ctime_ns > 60_000_000, "the file has settled")
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state folder that does not exist yet."""
    return tmp_path / "some" / "state"


def test_a_digest_is_remembered_until_the_file_changes(tmp_path: Path, state: Path) -> None:
    path, reported = tmp_path / "model.gguf", Reported()
    digest = write(path, b"first")
    assert Digests(state).model_digest(path, reported) == digest
    assert reported.calls == 1
    (tmp_path / "link").symlink_to(path)
    assert Digests(state).model_digest(tmp_path / "link", reported) == digest
    assert reported.calls == 1
    times = path.stat()
    other = write(path, b"other")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as some tools that copy files do
    assert Digests(state).model_digest(path, reported) == other
    assert reported.calls == 2


@pytest.mark.parametrize("is_set_back", [False, True])
def test_a_file_just_written_is_not_remembered(
    is_set_back: bool, tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a program has set its modification time back, as some that copy files do."""
    path, reported = tmp_path / "model.gguf", Reported()
    path.write_bytes(b"first")
    if is_set_back:
        os.utime(path, (1, 1))
    monkeypatch.setattr(time, "time_ns", lambda: path.stat().st_ctime_ns + 1000)
    digests = Digests(state)
    assert digests.model_digest(path, reported) == digests.model_digest(path, reported)
    assert reported.calls == 2


def test_a_file_that_changes_while_it_is_read(tmp_path: Path, state: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(3 << 20))

    def grow(done: int, total: int) -> None:
        with path.open("ab") as file:
            file.write(bytes(1 << 20))

    with pytest.raises(SliceError, match="was changed while"):
        Digests(state).model_digest(path, grow)

    def replace(done: int, total: int) -> None:
        (tmp_path / "new").write_bytes(bytes(path.stat().st_size))
        (tmp_path / "new").replace(path)

    with pytest.raises(SliceError, match="was changed while"):
        Digests(state).model_digest(path, replace)


def test_what_cannot_be_hashed(tmp_path: Path, state: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for name, words in (("missing", "No such file"), ("pipe.gguf", "not a regular file"), (".", "not a regular")):
        with pytest.raises(SliceError, match=words):
            Digests(state).model_digest(tmp_path / name)


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b"[" * 100_000,
        b"[]",
        b"null",
        b'{"files": 3, "slices": []}',
        b'{"files": {"PATH": 7}, "slices": {"KEY": 7}}',
        b'{"files": {"PATH": {"size": 5, "sha256": "00"}}, "slices": {"KEY": "../x"}}',
    ],
)
def test_a_damaged_memory_only_costs_time(tmp_path: Path, state: Path, damaged: bytes) -> None:
    path = tmp_path / "model.gguf"
    digest = write(path, b"model")
    recipe = Recipe(digest, 5, (Copy(1, 3),))
    state.mkdir(parents=True)
    damaged = damaged.replace(b"PATH", str(path).encode()).replace(b"KEY", recipe.key.encode())
    (state / "digests.json").write_bytes(damaged)
    assert Digests(state).model_digest(path) == digest
    assert Digests(state).digest(recipe, path) == hashlib.sha256(b"ode").hexdigest()
    result = json.loads((state / "digests.json").read_bytes())
    assert result["files"][str(path)]["sha256"] == digest
    assert recipe.key in result["slices"]


def test_a_wrong_entry_in_the_memory_is_not_taken(tmp_path: Path, state: Path) -> None:
    path = tmp_path / "model.gguf"
    digest = write(path, b"model")
    Digests(state).model_digest(path)
    memory = state / "digests.json"
    memory.write_text(memory.read_text().replace(digest, "0" * 63))
    assert Digests(state).model_digest(path) == digest


def test_a_memory_that_cannot_be_written(tmp_path: Path) -> None:
    digest = write(tmp_path / "model.gguf", b"model")
    (tmp_path / "file").touch()
    assert Digests(tmp_path / "file").model_digest(tmp_path / "model.gguf") == digest


def test_finding_a_model(tmp_path: Path, state: Path) -> None:
    models, reported = tmp_path / "models", Reported()
    write(models / "other.gguf", b"longer than the model")
    write(models / "same size.gguf", b"ledom")
    write(models / "not a model.txt", b"model")
    digests = Digests(state)
    digest = hashlib.sha256(b"model").hexdigest()
    assert digests.find_model(models, digest, 5, reported) is None
    assert reported.calls == 1
    write(models / "deep" / "down" / "it.gguf", b"model")
    assert digests.find_model(models, digest, 5, reported) == models / "deep" / "down" / "it.gguf"
    assert reported.calls == 2
    write(models / "a first one.gguf", b"modem")
    assert digests.find_model(models, digest, 5, reported) == models / "deep" / "down" / "it.gguf"
    assert reported.calls == 2  # remembered, so nothing else is hashed
    assert digests.find_model(tmp_path / "missing", digest, 5) is None
    assert digests.find_model(models, digest, 6) is None


def test_links_and_things_that_are_no_files(tmp_path: Path, state: Path) -> None:
    models = tmp_path / "models"
    digest = write(tmp_path / "elsewhere" / "blob", b"model")
    models.mkdir()
    (models / "up").symlink_to(models)
    (models / "nowhere.gguf").symlink_to(models / "missing")
    (models / "itself.gguf").symlink_to(models / "itself.gguf")
    (models / "folder.gguf").mkdir()
    os.mkfifo(models / "pipe.gguf")
    assert Digests(state).find_model(models, digest, 5) is None
    (tmp_path / "elsewhere" / "model.gguf").symlink_to("blob")
    (models / "there").symlink_to(tmp_path / "elsewhere")
    assert Digests(state).find_model(models, digest, 5) == tmp_path / "elsewhere" / "blob"


def test_a_slice_is_hashed_once(tmp_path: Path, state: Path) -> None:
    path, reported = tmp_path / "model.gguf", Reported()
    digest = write(path, b"model")
    recipe = Recipe(digest, 5, (Literal(b"header"), Copy(0, 2)))
    for _ in range(2):
        assert Digests(state).digest(recipe, path, reported) == digest_of(recipe, path)
    assert reported.calls == 1
    assert Digests(state).digest(whole(digest, 5), tmp_path / "not even read") == digest


def test_the_memory_does_not_grow_for_ever(tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.models.digests._REMEMBERED", 3)
    path = tmp_path / "model.gguf"
    digest = write(path, b"model")
    for i in range(5):
        Digests(state).digest(Recipe(digest, 5, (Literal(b"%d" % i),)), path)
    assert len(json.loads((state / "digests.json").read_bytes())["slices"]) == 3
