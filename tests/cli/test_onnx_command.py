"""Test `edge quantize` on ONNX models: its figures, its text, its JSON, and wrong usage."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apps.commands import quantize as command
from apps.errors import UsageError
from apps.show import progress as progress_module
from edge.quantization.onnx import quantize
from edge.quantization.onnx_compare import compare
from quant.errors import ModelFileError, UnknownTypeError
from tests.support.commands import assert_refused, runner
from tests.support.onnx_files import external, quick, samples, small_model, vectors  # noqa: F401 (fixtures)
from tests.support.onnx_graphs import run


class _Fixed:
    """A session that gives the same outputs for any input."""

    def __init__(self, *outputs: Any) -> None:
        self._outputs = [np.asarray(output) for output in outputs]

    def get_outputs(self) -> list[Any]:
        return [argparse.Namespace(name=f"o{i}") for i in range(len(self._outputs))]

    def run(self, names: object, feed: object) -> list[Any]:
        return self._outputs


def test_figures_of_the_comparison() -> None:
    reference = _Fixed([[3.0, 4.0], [1.0, 0.0]], [0.0, 0.0], [1.0, np.nan], np.arange(3), [1.0])
    quantized = _Fixed([[3.0, 4.0], [0.0, 1.0]], [0.0, 0.5], [1.0, np.nan], np.arange(3), [1.0, 2.0])
    classes, zero, nan, whole, other = compare(reference, quantized, [{}, {}]).outputs
    assert (classes.max_abs, classes.top1) == (1.0, 0.5)
    assert classes.relative_l2 == pytest.approx((2 / 26) ** 0.5)
    assert classes.cosine == pytest.approx(25 / 26)
    assert (zero.max_abs, zero.relative_l2, zero.cosine, zero.top1) == (0.5, None, None, None)
    assert (nan.max_abs, nan.cosine) == (None, None)
    assert (whole.max_abs, whole.relative_l2) == (0.0, 0.0)
    assert other.max_abs is None


def arguments(source: Path, target: Path, **changes: Any) -> argparse.Namespace:
    defaults = {"type": "int8", "calibration": None, "block_size": None, "force": False, "json": False, "threads": 1}
    return argparse.Namespace(model=str(source), output=target, **(defaults | changes))


def test_the_command_in_words(
    tmp_path: Path, source: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "PLAIN_INTERVAL_S", 1e9)  # how far it is, is said of what takes long
    assert command.run_onnx(arguments(source, tmp_path / "out.onnx", type="int4", block_size=16)) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "int4, weights, blocks of 16" in out
    assert "2 quantized, 0 left in floats" in out
    assert out.partition("Error against")[2].count("0.99") == 1  # the cosine; the speed above may be 0.99 as well
    assert "Dimensions that the model leaves open were 1 in them (x: batch)." in out


def test_the_command_in_json(tmp_path: Path, source: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.onnx"
    calibration = samples(tmp_path / "x.npz", x=vectors())
    assert command.run_onnx(arguments(source, target, calibration=calibration, json=True)) == 0
    out, err = capfd.readouterr()
    result = json.loads(out)
    assert err == ""
    assert (result["method"], result["block_size"], result["threads"]) == ("static", None, 1)
    assert (result["source_bytes"], result["size_bytes"]) == (source.stat().st_size, target.stat().st_size)
    assert (result["samples"], result["samples_made_up"]) == (6, False)
    [output] = result["outputs"]
    assert output["name"] == "y"
    assert output["max_abs_error"] > 0
    assert 0 < output["relative_l2_error"] < 0.05
    assert 0.999 < output["cosine"] < 1
    assert 0 <= output["top1_agreement"] <= 1
    assert result["speed_ratio"] == pytest.approx(result["float_ms"] / result["quantized_ms"])
    slower = any("slower than the float one" in note for note in result["notes"])
    assert slower is (result["quantized_ms"] > 1.05 * result["float_ms"])


def test_wrong_usage(tmp_path: Path, source: Path) -> None:
    there, weights = tmp_path / "there.onnx", tmp_path / "weights.onnx.data"
    for path in (there, weights):
        path.write_bytes(b"mine")
    cases: list[tuple[argparse.Namespace, str]] = [
        (arguments(source, there), "there.onnx exists; --force overwrites it"),
        (arguments(source, tmp_path / "weights.onnx"), "weights.onnx.data exists; --force overwrites it"),
        (arguments(source, tmp_path), "is a folder; name a file in it"),
        (arguments(source, tmp_path / "no" / "out.onnx"), "there is no folder"),
        (arguments(source, source, force=True), "mlp.onnx is read by this command and cannot be overwritten"),
        (arguments(source, tmp_path / "in" / ".." / "in" / "mlp.onnx", force=True), "mlp.onnx is read"),
        (arguments(source, tmp_path / "o.onnx", type="q4_0"), "int8 or int4, got q4_0"),
        (arguments(source, tmp_path / "o.onnx", block_size=32), "--block-size is for --type int4"),
        (arguments(source, tmp_path / "o.onnx", type="int4", block_size=48), "one of 16, 32, 64, 128, 256, got 48"),
    ]
    for args, message in cases:
        with pytest.raises(UsageError, match=message):
            command.run_onnx(args)
    assert there.read_bytes() == b"mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "there.onnx", "weights.onnx.data"]
    with pytest.raises(UnknownTypeError, match="int8, int4"):
        quantize(source, there, "int2")


def test_what_is_read_is_never_written_over(tmp_path: Path, source: Path) -> None:
    current = tmp_path / "held.onnx"
    external(current)
    folder = tmp_path / "samples"
    folder.mkdir()
    provided = samples(folder / "x.npz", x=vectors())
    baseline = tmp_path / "x.data"
    baseline.write_bytes(provided.read_bytes())
    (tmp_path / "plain.data").symlink_to(source)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    cases: list[tuple[argparse.Namespace, type[Exception], str]] = [
        (
            arguments(current, tmp_path / "held.onnx.data"),
            ModelFileError,
            "held.onnx.data holds weights of .*held.onnx;",
        ),
        (
            arguments(source, tmp_path / "plain"),
            UsageError,
            "plain.data is read by this command and cannot be overwritten",
        ),
        (arguments(source, provided, calibration=provided), UsageError, "x.npz is read"),
        (arguments(source, provided, calibration=folder), UsageError, "x.npz is read"),
        (arguments(source, tmp_path / "x", calibration=baseline), UsageError, "x.data is read"),
    ]
    for args, error, message in cases:
        args.force = True
        with pytest.raises(error, match=message):
            command.run_onnx(args)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("option", [("--context", "512"), ("--kv-type", "q8_0"), ("--report",), ("--minutes", "1")])
def test_options_of_language_models(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str], option: tuple[str, ...]
) -> None:
    answer = runner(capsys, "quantize")(source, tmp_path / "out.onnx", "--type", "int8", *option)
    assert_refused(answer, 2, f"{option[0]} is for GGUF models; an ONNX model takes")


def test_what_is_not_installed_is_named(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_NEEDED_INT4", ("no_such_package",))
    with pytest.raises(UsageError, match=r'no_such_package needed .*: pip install "edge-runtime\[onnx\]"'):
        command.run_onnx(arguments(source, tmp_path / "out.onnx", type="int4"))
    assert command.run_onnx(arguments(source, tmp_path / "out.onnx")) == 0


def test_force_replaces_only_once_it_is_done(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "out.onnx"
    target.write_bytes(b"old")
    before = source.read_bytes()

    def stop(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(source, target, "int8", progress=stop)
    assert target.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out.onnx"]
    assert command.run_onnx(arguments(source, target, force=True)) == 0
    assert run(target, vectors())[0].shape == (6, 10)
    assert source.read_bytes() == before
    assert target.stat().st_mode == source.stat().st_mode
