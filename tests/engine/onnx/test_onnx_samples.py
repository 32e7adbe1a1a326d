"""Test samples for calibration and comparison: the arrays that they give, and refused files."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edge.errors import NotEnoughMemory
from edge.onnx.samples import ANY_SHAPE, Input, Samples, SamplesError, declared_shape, random_feeds
from edge.quantization.onnx import quantize
from tests.support.onnx_files import quick, samples, small_model, vectors  # noqa: F401 (fixtures)
from tests.support.onnx_graphs import run


def test_ranges_follow_the_samples(tmp_path: Path, source: Path) -> None:
    x = vectors()
    wide = samples(tmp_path / "wide.npz", x=1000 * x)
    quantize(source, tmp_path / "fit.onnx", "int8", samples(tmp_path / "x.npz", x=x))
    quantize(source, tmp_path / "wide.onnx", "int8", wide)
    [expected], [fit], [coarse] = (run(path, x) for path in (source, tmp_path / "fit.onnx", tmp_path / "wide.onnx"))
    assert np.linalg.norm(coarse - expected) > 10 * np.linalg.norm(fit - expected)


def test_sizes_that_a_file_declares_are_fixed_also_where_they_are_0() -> None:
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [0, "n", None, 3, -1])
    assert declared_shape(value) == (0, "n", "?", 3, "?")
    assert declared_shape(onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, None)) == ANY_SHAPE


def test_a_folder_of_samples(tmp_path: Path, source: Path) -> None:
    folder = tmp_path / "samples"
    folder.mkdir()
    samples(folder / "a.npz", x=vectors(2), label=np.arange(2))
    samples(folder / "b.npz", x=vectors(3).reshape(3, 1, 64))  # each of them an input as it is
    samples(folder / "c.npz", x=vectors(8).reshape(2, 4, 64))
    built = quantize(source, tmp_path / "out.onnx", "int8", folder)
    assert built.comparison is not None
    assert built.comparison.samples == 2 + 3 + 2


def test_samples_of_a_fixed_batch(tmp_path: Path) -> None:
    path = samples(tmp_path / "x.npz", x=np.arange(14, dtype=np.float64).reshape(7, 2), flag=np.array([True] * 3))
    feeds = list(Samples(path, (Input("x", "tensor(float)", (2, 2)), Input("flag", "tensor(bool)", ()))))
    assert [feed["x"].tolist() for feed in feeds][1] == [[4.0, 5.0], [6.0, 7.0]]
    assert len(feeds) == 3
    assert feeds[0]["x"].dtype == np.float32
    assert feeds[0]["flag"].shape == ()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"y": vectors()}, "needs an array for each input; 'x' are missing; it has 'y'"),
        ({"x": vectors(0)}, "no whole sample"),
        ({"x": vectors(6, 63)}, r"samples of shape \(1, 63\); the model takes \(batch, 64\)"),
        ({"x": vectors().ravel()}, r"shape \(384,\); the model takes \(batch, 64\)"),
        ({"x": np.full((2, 64), np.nan, np.float32)}, "infinite or not a number"),
        ({"x": np.full((2, 64), "a")}, "values of type <U1; the model takes float32"),
        ({"x": np.array([[None] * 64])}, "is not a .npz file of numbers"),
    ],
)
def test_bad_samples_are_refused(tmp_path: Path, source: Path, arrays: dict[str, Any], message: str) -> None:
    path = samples(tmp_path / "bad.npz", **arrays)
    with pytest.raises(SamplesError, match=message):
        quantize(source, tmp_path / "out.onnx", "int8", path)
    assert sorted(tmp_path.iterdir()) == [path, source.parent]


def test_files_that_hold_no_samples_are_refused(tmp_path: Path, source: Path) -> None:
    good = samples(tmp_path / "good.npz", x=vectors()).read_bytes()
    np.savez_compressed(tmp_path / "good.npz", x=vectors())
    packed = bytearray((tmp_path / "good.npz").read_bytes())
    packed[60:300] = bytes(240)
    encrypted = bytearray(good)
    for header, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        encrypted[encrypted.index(header) + at] |= 1
    endless = io.BytesIO()
    np.lib.format.write_array_header_1_0(endless, {"descr": "<f4", "fortran_order": False, "shape": (10**30,)})
    for content in (b"", b"hello", good[: len(good) // 2], bytes(packed), bytes(encrypted), endless.getvalue()):
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(SamplesError, match=r"is not a .npz file"):
            quantize(source, tmp_path / "out.onnx", "int8", tmp_path / "bad.npz")
    np.save(tmp_path / "one.npy", vectors())
    with pytest.raises(SamplesError, match="one array without a name"):
        quantize(source, tmp_path / "out.onnx", "int8", tmp_path / "one.npy")
    with pytest.raises(SamplesError, match=r"holds no .npz file"):
        quantize(source, tmp_path / "out.onnx", "int8", source.parent)
    with pytest.raises(FileNotFoundError):
        quantize(source, tmp_path / "out.onnx", "int8", tmp_path / "nowhere")


def test_samples_beyond_the_memory_are_not_called_damaged(tmp_path: Path, source: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 50,)})
    with zipfile.ZipFile(tmp_path / "large.npz", "w") as archive:
        archive.writestr("x.npy", header.getvalue())
    with pytest.raises(NotEnoughMemory, match=r"large\.npz does not fit into memory; put fewer samples into each file"):
        quantize(source, tmp_path / "out.onnx", "int8", tmp_path / "large.npz")


def test_inputs_of_different_lengths_are_refused(tmp_path: Path) -> None:
    inputs = (Input("a", "tensor(float)", ("n", 2)), Input("b", "tensor(int64)", ("n",)))
    path = samples(tmp_path / "x.npz", a=np.zeros((3, 2)), b=np.zeros(4, np.int64))
    with pytest.raises(SamplesError, match="as many samples as the others"):
        list(Samples(path, inputs))


def test_made_up_inputs() -> None:
    inputs = (
        Input("x", "tensor(float16)", ("batch", 3)),
        Input("ids", "tensor(int64)", ("batch", "length", 40)),
        Input("pixels", "tensor(uint8)", (200,)),
    )
    first, second = random_feeds(inputs, 2)
    assert {name: (value.shape, value.dtype.name) for name, value in first.items()} == {
        "x": ((1, 3), "float16"),
        "ids": ((1, 1, 40), "int64"),
        "pixels": ((200,), "uint8"),
    }
    assert set(np.unique(first["ids"])) == {0, 1}
    assert first["pixels"].max() > 200
    assert (first["x"] != second["x"]).any()
    assert all((again[name] == first[name]).all() for again in random_feeds(inputs, 1) for name in first)
