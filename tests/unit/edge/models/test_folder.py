"""Test models in a folder: which files are models, which are skipped with a warning, and the error for a folder without
models.
"""

import os
import shutil
from pathlib import Path

import pytest

from apps.commands import serve
from edge.models.demo import MODEL_PATH
from edge.models.file_kinds import kind_by_name, kind_of_file, model_name, models_among, parts
from edge.models.folder import models_in
from edge.models.paths import model_path
from quant.errors import ModelFileError
from tests.support.tiny_gguf import Gguf


def header(path: Path, **pairs: str) -> Path:
    return Gguf({f"general.{key}": ("str", value) for key, value in pairs.items()}).write(path)


def models_of(folder: Path) -> tuple[list[str], list[str]]:
    said: list[str] = []
    return [path.name for path in models_in(folder, said.append)], said


def test_one_bad_file_of_each_kind_is_a_warning(tmp_path: Path) -> None:
    shutil.copy(MODEL_PATH, tmp_path / "good.gguf")
    (tmp_path / "link.GGUF").symlink_to(MODEL_PATH)
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "page.gguf").write_bytes(b"<!DOCTYPE html>")
    (tmp_path / "dangling.gguf").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "pipe.gguf")
    header(tmp_path / "eyes.gguf", architecture="clip")
    header(tmp_path / "weights.gguf", type="imatrix")
    header(tmp_path / "tuned.gguf", architecture="llama", type="adapter")
    models, said = models_of(tmp_path)
    assert models == ["good.gguf", "link.GGUF"]
    for name in ("empty", "page", "dangling", "pipe", "eyes", "weights", "tuned"):
        assert sum(f"{name}.gguf" in line for line in said) == 1, said
    assert any("eyes.gguf is a projector" in line and "--mmproj" in line for line in said)


def test_files_that_are_no_models_by_their_name_or_place_are_passed_over(tmp_path: Path) -> None:
    shutil.copy(MODEL_PATH, tmp_path / "good.gguf")
    for name in (".hidden.gguf", "mmproj-good.gguf", "imatrix.gguf", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "folder.gguf").mkdir()
    assert models_of(tmp_path) == (["good.gguf"], [])


def test_parts_are_one_model_and_an_incomplete_one_is_left_out(tmp_path: Path) -> None:
    for i in (1, 2, 3):
        shutil.copy(MODEL_PATH, tmp_path / f"whole-{i:05d}-of-00003.gguf")
        if i != 2:
            shutil.copy(MODEL_PATH, tmp_path / f"torn-{i:05d}-of-00003.gguf")
    models, said = models_of(tmp_path)
    assert models == ["whole-00001-of-00003.gguf"]
    [line] = said
    assert "torn-00002-of-00003.gguf is missing" in line
    assert list(serve._models([str(tmp_path)], True)) == ["whole"]


def test_a_part_names_its_model_and_a_missing_first_one_is_told(tmp_path: Path) -> None:
    for i in (1, 2):
        (tmp_path / f"m-{i:05d}-of-00002.gguf").touch()
    first = tmp_path / "m-00001-of-00002.gguf"
    assert model_path(tmp_path / "m-00002-of-00002.gguf") == model_path(first) == first
    first.unlink()
    with pytest.raises(ModelFileError, match=r"m-00001-of-00002\.gguf is missing"):
        model_path(tmp_path / "m-00002-of-00002.gguf")


def test_a_folder_without_models_says_where_some_are(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"has no \.gguf files of models; name a folder"):
        models_of(tmp_path)
    (tmp_path / "mmproj-x.gguf").touch()
    with pytest.raises(ModelFileError, match=r"it has mmproj-x\.gguf"):
        models_of(tmp_path)
    (tmp_path / "inside").mkdir()
    shutil.copy(MODEL_PATH, tmp_path / "inside" / "m.gguf")
    with pytest.raises(ModelFileError, match=f"name that, {tmp_path}/inside"):
        models_of(tmp_path)


@pytest.mark.parametrize(
    ("n_bad", "last"), [(10, None), (11, "1 more files are left out"), (30, "20 more files are left out")]
)
def test_many_bad_files_are_counted(n_bad: int, last: str | None, tmp_path: Path) -> None:
    shutil.copy(MODEL_PATH, tmp_path / "good.gguf")
    for i in range(n_bad):
        (tmp_path / f"bad{i}.gguf").touch()
    models, said = models_of(tmp_path)
    assert models == ["good.gguf"]
    assert all("is left out" in line for line in said[:10])
    assert [line.partition(": ")[2] for line in said[10:]] == ([] if last is None else [last])


def test_two_models_of_one_name_in_a_folder_are_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("m.gguf", "m.GGUF"):
        shutil.copy(MODEL_PATH, tmp_path / name)
    assert len(serve._models([str(tmp_path)], True)) == 1
    assert "another model is called m" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mmproj-model-f16.gguf", "projector"),
        ("model-mmproj-BF16.gguf", "projector"),
        ("MODEL.MMPROJ-Q8_0.GGUF", "projector"),
        ("Q4/mmproj.gguf", "projector"),
        ("mmproj_of/model.gguf", ""),
        ("imatrix.gguf", "matrix"),
        ("Model-7B.imatrix.gguf", "matrix"),
        ("imatrix_unsloth.gguf", "matrix"),
        ("Model-Q4_K_M-imatrix.gguf", ""),
        ("Model.IQ3_XXS.imatrix.gguf", ""),
        ("Model-imatrix-F16.gguf", ""),
        ("model.gguf", ""),
    ],
)
def test_a_name_tells_what_a_file_is(name: str, kind: str) -> None:
    assert kind_by_name(name) == kind
    assert bool(models_among([name])) is not bool(kind)


def test_a_header_tells_what_a_file_is(tmp_path: Path) -> None:
    assert kind_of_file(MODEL_PATH) == ""
    assert kind_of_file(header(tmp_path / "a", type="mmproj")) == "projector"
    with pytest.raises(ModelFileError):
        kind_of_file(tmp_path)


def test_names_of_parts() -> None:
    assert parts("x/m-00002-of-00002.gguf") == ["x/m-00001-of-00002.gguf", "x/m-00002-of-00002.gguf"]
    for name in ("m-00003-of-00002.gguf", "m-00000-of-00002.gguf", "m-1-of-2.gguf", "m.gguf", "m-00000-of-00000.gguf"):
        assert parts(name) == [name]
    assert model_name(Path("x/m-00001-of-00002.gguf")) == "m"
    assert model_name(Path("x/m.v2.GGUF")) == "m.v2"
