"""Test inputs and labels from files: the model's input names decide how an argument with an equals sign is read."""

from pathlib import Path

import numpy as np
import pytest

from edge.errors import TextError
from edge.onnx import outputs
from edge.onnx.inputs import path_of, read
from edge.onnx.outputs import read_labels
from edge.onnx.samples import Input, SamplesError

X, SCALED, OTHER = (Input(name, "tensor(float)", (2,)) for name in ("x", "x=scaled", "other"))


def test_longest_name_before_an_equals_sign_is_the_input(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones(2, np.float32))
    np.save(tmp_path / "b=c.npy", np.zeros(2, np.float32))
    files = [f"x={tmp_path}/a.npy", f"x=scaled={tmp_path}/b=c.npy"]
    feeds = read((X, SCALED), files, None).feeds
    assert (feeds["x"].tolist(), feeds["x=scaled"].tolist()) == ([1, 1], [0, 0])
    assert [path_of(file) for file in files] == [tmp_path / "a.npy", tmp_path / "b=c.npy"]


def test_file_with_an_equals_sign_needs_no_name(tmp_path: Path) -> None:
    np.save(tmp_path / "b=c.npy", np.zeros(2, np.float32))
    assert read((X,), [f"{tmp_path}/b=c.npy"], None).feeds["x"].tolist() == [0, 0]
    assert path_of(f"{tmp_path}/b=c.npy") == tmp_path / "b=c.npy"


def test_name_that_no_input_has_is_refused_with_the_names_there_are(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(2, np.float32))
    with pytest.raises(SamplesError, match=r"no input 'y'; it takes 'x', 'other'"):
        read((X, OTHER), [f"y={tmp_path}/a.npy"], None)


@pytest.mark.parametrize(
    ("content", "labels"),
    [
        (b"cat\ndog\n", ["cat", "dog"]),
        (b"\xef\xbb\xbfcat\r\ndog\r\n", ["cat", "dog"]),  # as Windows writes it
        (b"  cat \n\ndog\n\n \n", ["cat", "", "dog"]),  # a line within is a class without a name
        ("\u732b".encode(), ["\u732b"]),
    ],
)
def test_labels_are_lines_without_marks_of_their_file(tmp_path: Path, content: bytes, labels: list[str]) -> None:
    path = tmp_path / "labels.txt"
    path.write_bytes(content)
    assert read_labels(path) == labels


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "holds no labels"),
        (b"\xef\xbb\xbf\n", "holds no labels"),
        (b"\xff\xfec\0", "is not UTF-8"),
        (b"12345678\n", "9 bytes"),
    ],
)
def test_files_without_labels_are_refused(
    tmp_path: Path, content: bytes, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, "_MOST_LABELS", 8)
    path = tmp_path / "labels.txt"
    path.write_bytes(b"1234567\n")
    assert read_labels(path) == ["1234567"]  # the limit
    path.write_bytes(content)
    with pytest.raises(TextError, match=words):
        read_labels(path)
