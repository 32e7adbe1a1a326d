"""Test `edge run`: pictures and arrays, every option, its text and JSON, and bad input."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from apps import cli
from edge.onnx.images import MEAN, STD
from tests.support.commands import Run, assert_refused, runner, said
from tests.support.helpers import until
from tests.support.onnx_files import samples, saved
from tests.support.onnx_graphs import light, run, with_random_weights
from tests.support.onnx_tiny import counting

WIDE, HIGH = 20, 10  # of pictures here


@pytest.fixture(name="edge_run")
def runs_it(capsys: pytest.CaptureFixture[str]) -> Run:
    command = runner(capsys, "run")
    return lambda *args: command(*args, "--repeats", "0") if "--repeats" not in args else command(*args)


def echo(folder: Path, *inputs: tuple[str, int, tuple[str | int, ...]]) -> Path:
    """A model that gives each of its inputs again, as out_NAME."""
    values = [helper.make_tensor_value_info(*item) for item in inputs]
    outputs = [helper.make_tensor_value_info(f"out_{name}", *rest) for name, *rest in inputs]
    nodes = [helper.make_node("Identity", [name], [f"out_{name}"]) for name, *_ in inputs]
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(helper.make_graph(nodes, "g", values, outputs), opset_imports=opset, ir_version=8)
    return saved(model, folder / "echo.onnx")


def pixels() -> Any:
    return np.random.default_rng(1).integers(0, 256, (HIGH, WIDE, 3), dtype=np.uint8)


@pytest.fixture(name="photo")
def small_picture(tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    Image.fromarray(pixels()).save(path)
    return path


def outputs(edge_run: Run, model: Path, *args: str | Path) -> dict[str, Any]:
    """Return the arrays that the command writes."""
    target = model.parent / "out.npz"
    code, _, error = edge_run(model, "--output", target, "--force", *args)
    assert code == 0, error
    with np.load(target) as current:
        return dict(current)


F32, U8, I64 = TensorProto.FLOAT, TensorProto.UINT8, TensorProto.INT64


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), (pixels() / 255 - MEAN) / STD),
        (("--scale", "255"), pixels() / 255),
        (("--scale", "1"), pixels()),
        (("--mean", "0.1,0.2,0.3", "--std", "0.5"), (pixels() / 255 - (0.1, 0.2, 0.3)) / 0.5),
    ],
)
@pytest.mark.parametrize("first", [True, False], ids=["NCHW", "NHWC"])
def test_a_picture(
    tmp_path: Path, photo: Path, edge_run: Run, options: tuple[str, ...], expected: Any, first: bool
) -> None:
    shape: tuple[str | int, ...] = ("n", 3, HIGH, WIDE) if first else ("n", HIGH, WIDE, 3)
    result = outputs(edge_run, echo(tmp_path, ("x", F32, shape)), "--input", photo, *options)["out_x"]
    assert result.dtype == np.float32
    assert np.allclose(result, (expected.transpose(2, 0, 1) if first else expected)[None], atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "shape", "dims"),
    [
        (U8, ("n", 3, 5, 7), ()),
        (U8, (5, 7, 3), ()),
        (U8, (2, 1, 5, 7), ()),
        (U8, ("n", 3, "h", 7), ("h=5", "n=2")),
        (U8, ("?", 3, "?", "?"), ("x[2]=5", "x[3]=7")),
        (U8, ("n", "h", "?", 3), ("x[1]=5", "x[2]=7")),
    ],
)
def test_pictures_are_resized_to_the_model(
    tmp_path: Path, photo: Path, edge_run: Run, kind: int, shape: tuple[str | int, ...], dims: tuple[str, ...]
) -> None:
    options = [word for dim in dims for word in ("--dim", dim)]
    result = outputs(edge_run, echo(tmp_path, ("x", kind, shape)), "--input", photo, *options)["out_x"]
    sizes = {"n": "1", "x[0]": "1"} | dict(dim.split("=") for dim in dims)
    keyed = [sizes.get(dim, sizes.get(f"x[{i}]")) if isinstance(dim, str) else dim for i, dim in enumerate(shape)]
    assert result.shape == tuple(int(dim or 0) for dim in keyed)
    gray = 1 in result.shape[1:]
    with Image.open(photo) as image:
        expected = np.asarray(image.convert("L" if gray else "RGB").resize((7, 5), Image.Resampling.BILINEAR))
    planes = expected[..., None] if gray else expected
    for item in result if result.ndim == 4 else [result]:
        assert np.array_equal(item if shape[-1] == 3 else item.transpose(1, 2, 0), planes)


@pytest.mark.parametrize(
    ("shape", "dims", "size"),
    [
        (("n", 3, "h", "w"), (), (HIGH, WIDE)),
        (("?", 3, "?", "?"), (), (HIGH, WIDE)),
        (("h", "w", 3), (), (HIGH, WIDE)),
        (("n", 3, 2 * HIGH, "w"), (), (2 * HIGH, 2 * WIDE)),
        (("n", 3, "?", "?"), ("x[3]=" + str(3 * WIDE),), (3 * HIGH, 3 * WIDE)),
        (("n", 3, 1, "w"), (), (1, max(1, round(WIDE / HIGH)))),
    ],
)
def test_a_picture_has_a_size_of_its_own(
    tmp_path: Path,
    photo: Path,
    edge_run: Run,
    shape: tuple[str | int, ...],
    dims: tuple[str, ...],
    size: tuple[int, int],
) -> None:
    options = [word for dim in dims for word in ("--dim", dim)]
    model = echo(tmp_path, ("x", U8, shape))
    result = outputs(edge_run, model, "--input", photo, *options)["out_x"]
    result = result if result.ndim == 3 else result[0].transpose(1, 2, 0)
    assert result.shape == (*size, 3)
    with Image.open(photo) as image:
        resized = np.asarray(image.convert("RGB").resize(size[::-1], Image.Resampling.BILINEAR))
    assert np.array_equal(result, resized)
    remaining = size == (HIGH, WIDE)
    _, note, _ = edge_run(model, "--input", photo, *options)
    assert ("pixels, kept its size" if remaining else f"became {size[1]} x {size[0]}") in note


def test_pictures_of_other_kinds(tmp_path: Path, edge_run: Run) -> None:
    model = echo(tmp_path, ("x", U8, (1, HIGH, WIDE, 3)))
    deep = Image.fromarray(pixels()[..., 0].astype(np.uint16) * 257)
    for name in ("deep.png", "deep.tiff", "deep.pgm"):
        deep.save(tmp_path / name)
        result = outputs(edge_run, model, "--input", tmp_path / name)["out_x"]
        assert np.array_equal(result[0, ..., 2], pixels()[..., 0]), name
    clear = np.concatenate([pixels(), np.full((HIGH, WIDE, 1), 255, np.uint8)], axis=2)
    clear[0, :, 3] = 0
    Image.fromarray(clear).save(tmp_path / "clear.png")
    result = outputs(edge_run, model, "--input", tmp_path / "clear.png")["out_x"]
    assert (result[0, 0] == 255).all()
    assert np.array_equal(result[0, 1:], pixels()[1:])
    inks = Image.fromarray(pixels()).convert("CMYK")
    inks.save(tmp_path / "inks.tiff")
    result = outputs(edge_run, model, "--input", tmp_path / "inks.tiff")["out_x"]
    assert np.array_equal(result[0], pixels())
    Image.fromarray(pixels()[..., 0].astype(np.int32)).save(tmp_path / "wide.tiff")  # of 32 bits, as masks have
    result = outputs(edge_run, model, "--input", tmp_path / "wide.tiff")["out_x"]
    assert np.array_equal(result[0, ..., 2], pixels()[..., 0])
    turned = Image.fromarray(pixels())
    exif = Image.Exif()
    exif[0x0112] = 3  # lies on its head
    turned.save(tmp_path / "turned.webp", exif=exif, lossless=True)
    result = outputs(edge_run, model, "--input", f"x={tmp_path / 'turned.webp'}")["out_x"]
    assert np.array_equal(result[0], pixels()[::-1, ::-1])
    deep.save(tmp_path / "turned.png", exif=exif)
    result = outputs(edge_run, model, "--input", tmp_path / "turned.png")["out_x"]
    assert np.array_equal(result[0, ..., 2], pixels()[::-1, ::-1, 0])


def detector(path: Path) -> Path:
    """A network whose input becomes its first output. The second output always has the same two boxes."""
    boxes = np.array([[[8, 8, 24, 24, 0.9, 1], [0, 0, 4, 4, 0.5, 0]]], np.float32)
    nodes = [
        helper.make_node("Identity", ["x"], ["pixels"]),
        helper.make_node("Constant", [], ["detections"], value=numpy_helper.from_array(boxes)),
    ]
    values = [helper.make_tensor_value_info(name, F32, (1, 3, "h", "w")) for name in ("x", "pixels")]
    given_boxes = helper.make_tensor_value_info("detections", F32, (1, 2, 6))
    graph = helper.make_graph(nodes, "g", values[:1], [values[1], given_boxes])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(model, {"names": "{0: 'cat', 1: 'dog'}", "stride": "8", "imgsz": "[32, 32]"})
    return saved(model, path)


def test_boxes_are_drawn_into_a_picture(tmp_path: Path, edge_run: Run) -> None:
    model, photo = detector(tmp_path / "detector.onnx"), tmp_path / "photo.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    Image.new("RGB", (4 * WIDE, 4 * HIGH), "white").save(photo, exif=exif)
    drawn = tmp_path / "drawn.webp"
    result = said(edge_run, model, "--input", photo, "--picture", drawn, "--repeats", "2")
    assert result["inputs"][0]["shape"] == [1, 3, 32, 32]
    assert result["scaling"]["x"]["pad"]
    assert result["predictions"]["kind"] == "boxes"
    # The turned picture has 40 x 80 pixels, so it takes 16 x 32 pixels of the input, from x = 8.
    [box] = result["predictions"]["predictions"]
    assert (box["label"], box["class"]) == ("dog", 1)
    assert box["box"] == [0, 20, 40, 60]
    assert set(result["preparing_ms"]) == {"decode", "resize", "scale"}
    assert all(value > 0 for value in result["preparing_ms"].values())
    with Image.open(drawn) as image:
        assert image.size == (4 * HIGH, 4 * WIDE)
        assert np.asarray(image.convert("L"))[40, 0] < 200
    code, out, _ = edge_run(model, "--input", photo, "--picture", drawn, "--force")
    assert code == 0
    assert "dog    0.900  0 20 40 60" in out
    assert "ms (decode " in out


def test_large_jpeg_is_decoded_in_a_smaller_size(tmp_path: Path, edge_run: Run) -> None:
    model = echo(tmp_path, ("x", U8, (1, 8, 16, 3)))
    smooth = Image.fromarray(pixels()).resize((640, 320), Image.Resampling.BICUBIC)
    smooth.save(tmp_path / "large.jpg", quality=95)
    smooth.save(tmp_path / "large.png")
    results = [outputs(edge_run, model, "--input", tmp_path / f"large.{kind}")["out_x"] for kind in ("jpg", "png")]
    assert np.abs(results[0].astype(int) - results[1]).max() <= 6


def test_a_classifier(tmp_path: Path, edge_run: Run) -> None:
    model = saved(with_random_weights(light("squeezenet")), tmp_path / "squeezenet.onnx")
    labels = tmp_path / "labels.txt"
    labels.write_text("\n".join(f"thing {i}" for i in range(1000)) + "\n")
    shots = []
    for size in ((300, 200), (100, 400)):
        path = tmp_path / f"{size[0]}.jpg"
        Image.fromarray(np.random.default_rng(size[0]).integers(0, 256, (*size, 3), dtype=np.uint8)).save(path)
        shots.append(said(edge_run, model, "--input", path, "--labels", labels, "--top", "3", "--repeats", "2"))
    first, other = shots
    [row] = first["top"]["rows"]
    assert first["top"]["output"] == first["outputs"][0]["name"]
    assert len(row) == 3
    assert row[0]["value"] == pytest.approx(first["outputs"][0]["max"])
    assert [entry["label"] for entry in row] == [f"thing {entry['class']}" for entry in row]
    assert row[0]["value"] > row[1]["value"] > row[2]["value"]
    assert [entry["value"] for entry in other["top"]["rows"][0]] != [entry["value"] for entry in row]
    assert 0 < first["latency_ms_median"] <= first["latency_ms_p90"]
    assert first["throughput_per_s"] > 0
    assert (first["in_flight"], first["repeats"], first["threads"], first["provider"]) == (1, 2, 1, "cpu")
    assert first["scaling"] == {"data_0": {"scale": 255, "mean": list(MEAN), "std": list(STD), "pad": False}}
    assert first["inputs"] == [{"name": "data_0", "type": "float32", "shape": [1, 3, 224, 224]}]
    assert "200 x 300 pixels, became 224 x 224; RGB" in first["notes"][0]
    code, out, error = edge_run(model, "--input", tmp_path / "300.jpg", "--labels", labels, "--repeats", "1")
    assert (code, error) == (0, "")
    assert f"{row[0]['class']:<5}  {row[0]['label']}" in out
    assert out.count("thing ") == 5
    assert "latency" in out
    assert "1 in flight" in out
    assert "mean 0.485, 0.456, 0.406 and std 0.229, 0.224, 0.225" in out


def test_arrays(tmp_path: Path, edge_run: Run) -> None:
    model = echo(tmp_path, ("a", F32, ("n", 2)), ("file", I64, (1,)))
    a, b = np.array([[1.5, np.nan], [np.inf, -2]]), np.array([7], np.int32)
    both = samples(tmp_path / "both.npz", a=a, more=b, fil=b)
    np.save(tmp_path / "b.npy", b)
    provided = ("--input", both, "--input", f"file={tmp_path / 'b.npy'}")
    result = outputs(edge_run, model, *provided)
    assert set(result) == {"out_a", "out_file"}
    assert np.array_equal(result["out_a"], a.astype(np.float32), equal_nan=True)
    assert result["out_file"].tolist() == [7]
    assert np.array_equal(
        outputs(edge_run, model, *provided, "--provider", "CPU")["out_a"], result["out_a"], equal_nan=True
    )
    values = said(edge_run, model, *provided, "--repeats", "0")
    assert values["outputs"] == [
        {"name": "out_a", "shape": [2, 2], "type": "float32", "min": -2, "max": 1.5, "mean": -0.25, "not_finite": 2},
        {"name": "out_file", "shape": [1], "type": "int64", "min": 7, "max": 7, "mean": 7, "not_finite": 0},
    ]
    assert [values[name] for name in ("latency_ms_median", "throughput_per_s", "top", "output", "repeats")] == [
        None, None, None, None, 0,
    ]  # fmt: skip
    assert "2 values of out_a are infinite or not a number." in edge_run(model, *provided)[1]
    assert "throughput" not in edge_run(model, *provided)[1]


def test_outputs_of_any_name(tmp_path: Path, edge_run: Run) -> None:
    model = onnx.load(echo(tmp_path, ("file", F32, (1,))))
    model.graph.node[0].output[0] = model.graph.output[0].name = "file"
    model.graph.node[0].input[0] = model.graph.input[0].name = "in/x=1"
    path = saved(model, tmp_path / "m.onnx")
    x = samples(tmp_path / "x.npz", **{"in/x=1": np.float32([3])})
    assert outputs(edge_run, path, "--input", x)["file"].tolist() == [3]


def test_what_is_read_is_never_written_over(tmp_path: Path, photo: Path, edge_run: Run) -> None:
    model = echo(tmp_path, ("x", U8, ("n", HIGH, WIDE, 3)))
    current = onnx.load(model)
    current.graph.initializer.append(numpy_helper.from_array(np.float32([1, 2]), "w"))
    current.graph.node.append(helper.make_node("Identity", ["w"], ["v"]))
    current.graph.output.append(helper.make_tensor_value_info("v", F32, (2,)))
    saved(current, model, save_as_external_data=True, location="weights", size_threshold=0)
    labels = tmp_path / "labels"
    labels.write_text("a\nb\n")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    run = ("--input", f"x={photo}", "--labels", labels)
    for target in (model, photo, labels, tmp_path / "weights"):
        assert_refused(
            edge_run(model, *run, "--output", target, "--force"), 2, "is read by this command and cannot be overwritten"
        )
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    target = tmp_path / "out.npz"
    assert edge_run(model, *run, "--output", target)[0] == 0
    assert_refused(edge_run(model, *run, "--output", target), 2, "out.npz exists; --force overwrites it")
    assert_refused(edge_run(model, *run, "--output", tmp_path / "no" / "out"), 2, "there is no folder")
    assert sorted(tmp_path.iterdir()) == sorted([*before, target])


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        ((), 3, "the model takes 'x'; nothing is given for 'x'"),
        (("--input", "no.png"), 3, "no.png: No such file"),
        (("--input", "text", "--dim", "h=5"), 3, "text is neither a picture (PNG, JPEG, "),
        (("--input", "cut.png", "--dim", "h=5"), 3, "cut.png is a damaged picture, or is cut off"),
        (("--input", "y=photo.png"), 3, "the model has no input 'y'; it takes 'x'"),
        (
            ("--input", "photo.png", "--input", "x=x.npz", "--dim", "h=4"),
            3,
            "input 'x' is given twice, the second time by x.npz",
        ),
        (("--input", "photo.png", "--dim", "q=5"), 3, "a size is given for 'q', which no input has; open are n, h"),
        (("--input", "photo.png", "--dim", "x[3]=5"), 3, "a size is given for 'x[3]', which no input has; open are"),
        (("--input", "photo.png", "--dim", "h=5", "--dim", "x[2]=6"), 3, "one size for all inputs; 5 and 6 are given"),
        (("--input", "photo.png", "--dim", "x[2]=50000000"), 3, "would have 7 x 50000000 pixels"),
        (("--input", "photo.png", "--dim", "h=5", "--dim", "h=6"), 2, "--dim names the same dimension twice"),
        (("--input", "photo.png", "--mean", "1"), 2, "--mean and --std go together"),
        (("--input", "photo.png", "--mean", "1", "--std", "1", "--scale", "2"), 2, "leave --mean out"),
        (("--input", "photo.png", "--dim", "h=5", "--mean", "1,2", "--std", "1"), 3, "mean needs 3 values"),
        (("--input", "x.npz", "--scale", "1"), 2, "--scale is for pictures"),
        (("--input", "x.npz", "--picture", "p.png"), 2, "draws on the picture of --input, and there are 0"),
        (("--input", "photo.png", "--picture", "p.bmp"), 3, "p.bmp needs a name that ends in .png, .jpg, .jpeg, .webp"),
        (("--input", "photo.png", "--picture", "photo.png", "--force"), 2, "is read by this command"),
        (("--input", "photo.png", "--dim", "h=5", "--picture", "p.png"), 3, "the outputs do not say whether"),
        (("--input", "bits.tiff", "--dim", "h=5"), 3, "bits.tiff has values of 32 bits that are not from 0 to 255"),
        (("--input", "x.npz", "--labels", "text"), 3, "2 labels, and no output has so many classes: 'out_x' has the"),
        (("--input", "x.npz", "--labels", "photo.png"), 3, "photo.png is not UTF-8"),
        (("--input", "x.npz", "--labels", "empty"), 3, "empty holds no labels"),
        (("--input", "x.npz", "--provider", "abacus"), 5, "there is no provider 'abacus' in this build"),
        (("--input", "x=wrong.npz"), 3, "takes the shape (n, 3, h, 7), got (2, 3)"),
        (("--input", "wrong.npz"), 3, "wrong.npz needs an array for 'x'; it holds 'y'"),
        (("--input", "two.npz"), 3, "input 'x' takes values of type float32, got complex64"),
        (("--input", "large.npz"), 3, "got float64, and some values are too large for float32"),
        (("--input", "cut.npz"), 3, "cut.npz is not a .npz file of numbers, or is cut off"),
        (("--input", "objects.npz"), 3, "objects.npz is not a .npz file of numbers"),
    ],
)
def test_bad_input(
    tmp_path: Path, photo: Path, edge_run: Run, monkeypatch: pytest.MonkeyPatch, args: Any, code: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    x = np.zeros((1, 3, 4, 7), np.float32)
    samples(tmp_path / "x.npz", x=x)
    samples(tmp_path / "wrong.npz", y=np.zeros((2, 3), np.float32))
    samples(tmp_path / "two.npz", x=x * 1j, y=x)
    samples(tmp_path / "large.npz", x=np.full(x.shape, 1e300))
    samples(tmp_path / "objects.npz", x=np.array([None]))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "x.npz").read_bytes()[:-40])
    (tmp_path / "cut.png").write_bytes(photo.read_bytes()[:-200])
    Image.fromarray(np.full((4, 4), 70_000, np.int32)).save(tmp_path / "bits.tiff")
    (tmp_path / "text").write_text("one\ntwo\n")
    (tmp_path / "empty").write_text("\n")
    model = echo(tmp_path, ("x", F32, ("n", 3, "h", 7)))
    assert_refused(edge_run(model, *args), code, words)
    assert not (tmp_path / "p.png").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--dim", "h"), "needs NAME=N or INPUT[AXIS]=N, got 'h'"),
        (("--dim", "h=0"), "--dim: needs a whole number, 1 or more"),
        (("--mean", "1,a", "--std", "1"), "--mean: needs a number, got 'a'"),
        (("--mean", "1", "--std", "1,0,1"), "--std: needs numbers other than 0"),
        (("--scale", "0"), "--scale: needs a number above 0"),
    ],
)
def test_values_that_cannot_be(capsys: pytest.CaptureFixture[str], args: tuple[str, ...], words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "m.onnx", *args])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_more_bad_input(tmp_path: Path, photo: Path, edge_run: Run) -> None:
    assert_refused(edge_run(photo, "--input", photo), 3, "photo.png is not an ONNX model")
    language = tmp_path / "llm.onnx"
    language.write_bytes(b"GGUF\x03\x00\x00\x00")
    assert_refused(edge_run(language), 3, "llm.onnx is not an ONNX model: it is GGUF, for edge chat")
    model = echo(tmp_path, ("x", U8, (1, 3, 4, 4)))
    assert_refused(edge_run(model, "--input", photo, "--scale", "1"), 3, "takes bytes: pixels go in as they are")
    model = echo(tmp_path, ("x", I64, (1, 3, 4, 4)))
    assert_refused(edge_run(model, "--input", photo), 3, "takes int64; pictures go into floats or uint8")
    model = echo(tmp_path, ("x", F32, (1, 4, 4, 4)))
    assert_refused(edge_run(model, "--input", photo), 3, "(1, 4, 4, 4), not that of a picture of 3 or 1 channels")
    model = echo(tmp_path, ("x", F32, (1, 3, 4, 4)), ("y", F32, (1,)))
    assert_refused(edge_run(model, "--input", photo), 3, "the model takes 'x', 'y'; say which with NAME=")
    assert_refused(edge_run(model, "--input", f"x={photo}"), 3, "nothing is given for 'y'; give --input y=FILE")
    huge = tmp_path / "huge.ppm"
    huge.write_bytes(b"P5 20000 10000 255\n")
    assert_refused(edge_run(model, "--input", f"x={huge}"), 3, "has too many pixels")


def test_an_interrupt_ends_a_long_run(tmp_path: Path, edge_run: Run) -> None:
    model = tmp_path / "m.onnx"
    model.write_bytes(counting())
    provided = samples(tmp_path / "n.npz", n=np.array(1 << 50))

    def interrupt() -> None:
        until(lambda: signal.getsignal(signal.SIGINT) is not signal.default_int_handler, "the start")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
    thread.start()
    answer = edge_run(model, "--input", provided, "--output", tmp_path / "out.npz")
    thread.join()
    signal.signal(signal.SIGINT, before)
    assert answer == (130, "", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "n.npz"]


def test_what_it_computes_is_the_model(tmp_path: Path, edge_run: Run) -> None:
    model = with_random_weights(light("squeezenet"))
    path = saved(model, tmp_path / "m.onnx")
    x = np.random.default_rng(0).standard_normal((1, 3, 224, 224)).astype(np.float32)
    provided = samples(tmp_path / "x.npz", data_0=x)
    [result] = outputs(edge_run, path, "--input", provided).values()
    assert np.array_equal(result, run(model, x)[0])
