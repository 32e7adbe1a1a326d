"""Files of ONNX models: weights beside them, bad ones, and nothing half written or left behind."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

from edge.errors import EdgeError, EngineError
from edge.onnx import file
from edge.onnx.engine import OnnxEngine
from edge.onnx.file import load
from edge.onnx.runtime import quiet_tools
from edge.quantization import onnx
from edge.quantization.onnx import quantize
from quant.errors import ModelFileError
from tests.support.helpers import ROOT, until
from tests.support.onnx_files import external, quick, samples, saved, small_model, vectors  # noqa: F401 (fixtures)
from tests.support.onnx_graphs import mlp, run


@pytest.mark.parametrize("gemm", [False, True])
def test_weights_beside_the_model_stay_beside_it(tmp_path: Path, gemm: bool) -> None:
    source = tmp_path / "mlp.onnx"
    external(source, gemm)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    plain = saved(mlp(gemm=gemm), tmp_path / "plain.onnx")
    for type_name, calibration in (("int8", None), ("int8", samples(tmp_path / "x.npz", x=vectors())), ("int4", None)):
        folder = tmp_path / "out"
        folder.mkdir()
        built = quantize(source, folder / "a.onnx", type_name, calibration)
        assert sorted(path.name for path in folder.iterdir()) == ["a.onnx", "a.onnx.data"]
        assert built.data_file == folder / "a.onnx.data"
        assert built.size_bytes == sum(path.stat().st_size for path in folder.iterdir())
        assert built.source_bytes == sum(map(len, before.values()))
        modes = {path.stat().st_mode for path in folder.iterdir()}
        assert len(modes) == 1
        quantize(plain, tmp_path / "b.onnx", type_name, calibration)
        [a], [b] = run(folder / "a.onnx", vectors()), run(tmp_path / "b.onnx", vectors())
        assert (a == b).all()
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("type_name", ["int8", "int4"])
def test_weights_too_large_for_one_file_go_beside_it(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, type_name: str
) -> None:
    monkeypatch.setattr(file, "_INLINE_LIMIT", 10_000)  # instead of 2 GB
    built = quantize(source, tmp_path / "out.onnx", type_name)
    assert built.data_file == tmp_path / "out.onnx.data"
    assert run(tmp_path / "out.onnx", vectors())[0].shape == (6, 10)


def test_the_source_weights_are_never_written_over(tmp_path: Path) -> None:
    source = tmp_path / "mlp.onnx"
    model = external(source)
    (tmp_path / "mlp.onnx.data").rename(tmp_path / "other.onnx.data")
    for tensor in model.graph.initializer:
        tensor.external_data[0].value = "other.onnx.data"
    saved(model, source)
    with pytest.raises(ModelFileError, match=r"other.onnx.data holds weights of"):
        quantize(source, tmp_path / "other.onnx", "int8")
    assert not (tmp_path / "other.onnx").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"location": "../mlp.onnx.data"}, "'w0' has its data in '../mlp.onnx.data'; only files in the model's own"),
        ({"location": "/etc/passwd"}, "'w0' has its data in '/etc/passwd'; only files in"),
        ({"location": "a\\..\\..\\b"}, "only files in"),
        ({"location": "C:\\b"}, "only files in"),
        ({"location": ""}, "only files in"),
        ({"location": "gone"}, "'w0' has its data in 'gone', which does not exist"),
        ({"location": "."}, "which is not a file"),
        ({"location": "link"}, "which is a link"),
        ({"offset": "100000"}, r"'w0' ends at byte 124576 of 'mlp.onnx.data', which has \d+"),
        ({"offset": "-1"}, "needs 24576 bytes; 24576 at offset -1"),
        ({"length": "12"}, "needs 24576 bytes; 12 at offset 0"),
        ({"length": "many"}, "not a number"),
    ],
)
def test_bad_external_data_is_refused(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    source = tmp_path / "in" / "mlp.onnx"
    source.parent.mkdir()
    model = external(source)
    (source.parent / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "secret").write_bytes(bytes(100_000))
    for entry in model.graph.initializer[0].external_data:
        entry.value = changes.get(entry.key, entry.value)
    saved(model, source)
    with pytest.raises(ModelFileError, match=message):
        quantize(source, tmp_path / "out.onnx", "int8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "secret"]


def test_external_data_in_a_subgraph_is_checked(tmp_path: Path) -> None:
    source = tmp_path / "mlp.onnx"
    model = mlp()
    hidden = TensorProto(name="hidden", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    hidden.external_data.add(key="location", value="../secret")
    branch = helper.make_graph([helper.make_node("Constant", [], ["c"], value=hidden)], "branch", [], [])
    model.graph.node.append(helper.make_node("If", ["x"], ["z"], then_branch=branch, else_branch=branch))
    source.write_bytes(model.SerializeToString())
    with pytest.raises(ModelFileError, match=r"'hidden' has its data in '../secret'"):
        quantize(source, tmp_path / "out.onnx", "int8")


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ([1 << 62] * 65, "has 65 dimensions; at most 64"),
        ([1 << 40] * 64, "1099511627776 x 1099511627776 x .* values, more than any memory"),
        ([2] * 500_000, "has 500000 dimensions"),
        ([3, -1], "has a negative dimension, -1"),
        ([0, 1 << 62, 1 << 62], None),
    ],
    ids=["huge and too many", "huge", "too many", "negative", "empty"],
)
@pytest.mark.parametrize("outside", [True, False])
def test_tensor_of_impossible_dimensions_is_refused_at_once(
    tmp_path: Path, dims: list[int], message: str | None, outside: bool
) -> None:
    source = tmp_path / "mlp.onnx"
    model = external(source) if outside else mlp()
    (tensor,) = (tensor for tensor in model.graph.initializer if tensor.name == "w0")
    del tensor.dims[:]
    tensor.dims.extend(dims)
    source.write_bytes(model.SerializeToString())
    with pytest.raises(EdgeError, match=message) as caught:
        OnnxEngine(source)
    assert "'w0'" in str(caught.value) or message is None
    assert len(str(caught.value)) < 1000


def test_nodes_in_any_order_are_put_in_order(tmp_path: Path) -> None:
    model = mlp((64, 64, 64, 10))
    nodes = list(model.graph.node)
    [expected] = run(model, vectors())
    for seed in range(4):
        shuffled = ModelProto.FromString(model.SerializeToString())
        del shuffled.graph.node[:]
        shuffled.graph.node.extend(nodes[i] for i in np.random.default_rng(seed).permutation(len(nodes)))
        source = saved(shuffled, tmp_path / "shuffled.onnx")
        assert [node.name for node in file.load(source).model.graph.node] == [node.name for node in nodes]
        with OnnxEngine(source, 1) as engine:
            assert np.array_equal(engine.run({"x": vectors()})["y"], expected)


def test_nodes_in_a_circle_are_refused(tmp_path: Path) -> None:
    model = mlp()
    model.graph.node[0].input[0] = model.graph.node[-1].output[0]
    source = saved(model, tmp_path / "circle.onnx")
    with pytest.raises(ModelFileError, match="not a valid ONNX model"):
        OnnxEngine(source)


def _other(change: str) -> bytes:
    """A damaged model."""
    model = mlp()
    content: bytes = model.SerializeToString()
    if change == "truncated":
        return content[: len(content) // 2]
    if change == "noise":
        return np.random.default_rng(0).bytes(4000)
    if change == "empty":
        return b""
    first = model.graph.node[0]
    if change == "operator":
        first.op_type = "Nonsense"
    elif change == "domain":
        first.op_type, first.domain = "Nonsense", "own"
        model.opset_import.append(helper.make_opsetid("own", 1))
    elif change == "opset":
        model.opset_import[0].version = 99
    elif change == "ir":
        model.ir_version = 99
    elif change == "input":
        first.input[0] = "nowhere"
    elif change == "short":
        model.graph.initializer[0].raw_data = b"1234"
    elif change == "shape":
        model.graph.initializer[0].dims[:] = [32, 192]
    result: bytes = model.SerializeToString()
    return result


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ("truncated", ModelFileError, "is not an ONNX model, or is cut off"),
        ("noise", ModelFileError, "is not an ONNX model"),
        ("empty", ModelFileError, "is not an ONNX model"),
        ("operator", EngineError, "ONNX Runtime cannot load .*No Op registered for Nonsense"),
        ("domain", EngineError, r"ONNX Runtime cannot load .*bad.onnx: .*own:Nonsense.*not a registered"),
        ("opset", EngineError, "ONNX Runtime cannot load .*Opset 99"),
        ("ir", ModelFileError, "ir_version 99 is higher"),
        ("input", ModelFileError, "not a valid ONNX model.*'nowhere'"),
        ("short", ModelFileError, "not a valid ONNX model.*w0"),
        ("shape", EngineError, "ONNX Runtime cannot load .*Incompatible dimensions"),
    ],
)
def test_bad_models_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], change: str, error: type[Exception], message: str
) -> None:
    source = tmp_path / "bad.onnx"
    source.write_bytes(_other(change))
    with pytest.raises(error, match=message) as caught:
        quantize(source, tmp_path / "out.onnx", "int8")
    assert str(tmp_path / ".out") not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.onnx"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["prepared.onnx", "the-model.onnx", "made"])
def test_any_name_will_do(tmp_path: Path, source: Path, name: str) -> None:
    built = quantize(source, tmp_path / name, "int4")
    assert built.size_bytes == (tmp_path / name).stat().st_size < source.stat().st_size


def test_no_room_is_said_before_writing(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx, "_COPIES", 10**12)
    with pytest.raises(OSError, match=r"no room for .*out.onnx: .*B needed, .*B free"):
        quantize(source, tmp_path / "out.onnx", "int8")
    assert list(tmp_path.iterdir()) == [source.parent]


def test_nothing_is_printed_or_left_behind(tmp_path: Path) -> None:
    """In a process of its own, whose working folder and temporary folder stay empty."""
    source = saved(mlp(), tmp_path / "mlp.onnx")
    (tmp_path / "here").mkdir()
    (tmp_path / "tmp").mkdir()
    calibration = samples(tmp_path / "x.npz", x=vectors())
    code = f"""
import logging, pathlib
from edge.quantization.onnx import quantize
source, given = pathlib.Path({str(source)!r}), pathlib.Path({str(calibration)!r})
for name, type_name, samples in (("a", "int8", None), ("b", "int8", given), ("c", "int4", None)):
    quantize(source, source.with_name(name), type_name, samples)
assert logging.getLogger().handlers == []
assert logging.getLogger().manager.disable == 0
"""
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": f"{ROOT}:{os.getenv('PYTHONPATH', '')}"}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=tmp_path / "here", env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    names = sorted(path.name for path in tmp_path.rglob("*"))
    assert names == ["a", "b", "c", "here", "mlp.onnx", "tmp", "x.npz"], names


def test_a_kill_leaves_no_file_under_the_name(tmp_path: Path) -> None:
    source = saved(mlp((2048, 2048, 2048)), tmp_path / "big.onnx")
    before = source.read_bytes()
    target = tmp_path / "out.onnx"
    code = f"""
import pathlib
from edge.quantization.onnx import quantize
quantize(pathlib.Path({str(source)!r}), pathlib.Path({str(target)!r}), "int8")
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as process:
        until(lambda: bool(list(tmp_path.glob(".out.onnx.*.part/*.onnx"))), "some of it is written")
        assert process.poll() is None
        process.kill()
    assert not target.exists()
    assert source.read_bytes() == before


@pytest.mark.parametrize("shape", [(3, 3), (2, 3), (1, 1), (7,), (), (0, 4)], ids=str)
@pytest.mark.parametrize(
    "type_name", ["FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE", "INT8", "BOOL", "INT64", "INT4", "UINT4"]
)
def test_external_weights_of_any_type_and_size_are_read(tmp_path: Path, type_name: str, shape: tuple[int, ...]) -> None:
    """Two values of 4 bits share a byte, so an odd number of them fills its last byte by half."""
    n_values = math.prod(shape)
    bits = {"INT4": 4, "UINT4": 4, "INT8": 8, "BOOL": 8, "FLOAT16": 16, "BFLOAT16": 16, "FLOAT": 32}.get(type_name, 64)
    content = bytes(1 + i % 2 if bits > 4 else 0x21 for i in range((n_values * bits + 7) // 8))
    content = bytes(i % 2 for i in range(n_values)) if type_name == "BOOL" else content
    tensor = helper.make_tensor("w", getattr(TensorProto, type_name), shape, content, raw=True)
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [value], [
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    ], [tensor])  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    path = saved(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    assert (tmp_path / "m.data").stat().st_size == len(content)
    [read] = load(path).model.graph.initializer
    assert read.raw_data == content
    with (tmp_path / "m.data").open("r+b") as file:
        file.truncate(max(len(content) - 1, 0))
    if content:
        with pytest.raises(ModelFileError, match=f"ends at byte {len(content)} of 'm.data'"):
            load(path)


@pytest.mark.parametrize("fails", [False, True])
def test_tools_change_nothing_of_the_process_that_stays(tmp_path: Path, fails: bool) -> None:
    def settings() -> list[object]:
        root = logging.getLogger()
        streams = (sys.stdout, sys.stderr, tempfile.tempdir, tempfile.gettempdir())
        return [*streams, root.manager.disable, root.level, list(root.handlers), list(warnings.filters)]

    before, folder = settings(), tmp_path / "tools"
    folder.mkdir()
    with suppress(ValueError), quiet_tools(folder):
        assert Path(tempfile.mkdtemp()).parent == folder
        logging.basicConfig(level=logging.DEBUG)
        logging.getLogger().setLevel(logging.DEBUG)
        warnings.simplefilter("error")
        if fails:
            raise ValueError("a tool failed")
    folder.rename(tmp_path / "gone")
    assert settings() == before
    with tempfile.TemporaryFile() as file:
        file.write(b"!")
