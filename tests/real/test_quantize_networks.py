"""int8 of trained networks: each one is quantized and runs, or is refused with the reason, and the damage is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from edge.errors import EngineError
from edge.onnx.engine import OnnxEngine
from edge.onnx.runtime import session
from edge.quantization.onnx import quantize
from edge.quantization.onnx_compare import compare
from tests.real import weights
from tests.real.weights import NETWORKS, Weights
from tests.support.helpers import run_edge

Feeds = dict[str, NDArray[Any]]

LINES = ("Quantized networks", "the quick brown fox", "Invoice 20931", "Friday, 12 June")
SOURCES = ("def f(x):\n    return x\n", "<html><body>", "# Heading\n\ntext\n", '{"a": 1}\n')
SOUND = 576  # values of sound that a step takes at 16 kHz: 64 before it, and 512 of its own
# The largest relative L2 error of an output. Measured with VNNI: dynamic 0.28, 0.56, 0.09, 0.87 (convolutions over the
# spectrum of sound, whose ranges change with every step) and 0.01; static 0.27, 0.26, 0.14, 0.44 and 0.02. Weights of 7
# bits, on processors without VNNI, double the error.
MOST = {"ch_PP-OCRv4_det_infer": 0.6, "ch_PP-OCRv4_rec_infer": 0.9, "ch_ppocr_mobile_v2.0_cls_infer": 0.4, "model": 0.1}
OF_SOUND = 1.3
IN_BRANCHES = ("silero_vad", "silero_vad_op18_ifless")  # all their weights lie in the branches of an If


def picture(text: str, width: int, height: int) -> NDArray[np.float32]:
    """A line of text, as the networks for reading take it: [1, 3, height, width] from -1 to 1."""
    image = Image.new("RGB", (width, height), "white")
    ImageDraw.Draw(image).text((8, 8), text, fill=(20, 20, 30), font=ImageFont.load_default(26))
    return np.asarray(image, np.float32).transpose(2, 0, 1)[None] / 127.5 - 1


def sound(steps: int) -> NDArray[np.float32]:
    """A voice-like tone with harmonics that swells and falls: [steps, 1, SOUND]."""
    t = np.arange(steps * SOUND) / 16_000
    phase = 2 * np.pi * np.cumsum(120 + 30 * np.sin(4 * np.pi * t)) / 16_000
    tone = sum(np.sin(k * phase) / k for k in range(1, 20)) * 0.15 * (1 + np.sin(6 * np.pi * t))
    noise = 0.003 * np.random.default_rng(0).standard_normal(len(t))
    return (tone + noise).reshape(steps, 1, SOUND).astype(np.float32)


def inputs(network: Weights) -> list[Feeds]:
    """A few inputs such as the network is made for."""
    names = {get_input.name for get_input in session(network.path(), 1, network.name).get_inputs()}
    if network is weights.MAGIKA:
        halves = [np.frombuffer((text * 200).encode()[:1024], np.uint8).astype(np.int32) for text in SOURCES]
        return [{"bytes": np.concatenate([half, half])[None]} for half in halves]
    if network in weights.SILERO:
        zeros = {"state": (2, 1, 128), "h": (1, 1, 128), "c": (1, 1, 128)}
        state = {name: np.zeros(shape, np.float32) for name, shape in zeros.items() if name in names}
        rate = {"sr": np.array(16_000, np.int64)} if "sr" in names else {}
        return [{"input": part, **state, **rate} for part in sound(6)]
    width, height = (256, 96) if network is weights.OCR_DETECTION else (192, 48)
    return [{"x": picture(line, width, height)} for line in LINES]


def calibration(path: Path, feeds: list[Feeds]) -> Path:
    """A file of samples."""
    np.savez(path, **{name: np.stack([feed[name] for feed in feeds]) for name in feeds[0]})
    return path


def errors(network: Weights, built: Path, feeds: list[Feeds]) -> dict[str, float | None]:
    """The relative error of each output, which is no worse than was measured, nor nothing."""
    before, after = session(network.path(), 1, "the float one"), session(built, 1, "the quantized one")
    results = {output.name: output.relative_l2 for output in compare(before, after, feeds).outputs}
    assert all(error and error < MOST.get(network.name, OF_SOUND) for error in results.values()), results
    return results


@pytest.mark.parametrize("network", NETWORKS, ids=lambda item: item.name)
def test_dynamic(network: Weights, tmp_path: Path) -> None:
    built = quantize(network.path(), tmp_path / "int8.onnx", "int8", threads=1)
    assert (built.method, built.weights_quantized > 0, built.not_compared) == ("dynamic", True, None)
    assert built.weights_left == (2 if network is weights.OCR_DETECTION else 0)  # of convolutions that widen
    # Some networks hold a weight once where the tool needs it for each of two branches. Some have 16 bits a weight.
    assert built.size_bytes < (0.8 if network.name.endswith("half") else 0.45) * built.source_bytes
    with OnnxEngine(tmp_path / "int8.onnx", 1) as engine:
        assert engine.outputs, "edge reads what it wrote"
    assert built.comparison is not None
    assert all(output.relative_l2 is not None for output in built.comparison.outputs)
    errors(network, tmp_path / "int8.onnx", inputs(network))


@pytest.mark.parametrize("network", NETWORKS, ids=lambda item: item.name)
def test_static(network: Weights, tmp_path: Path) -> None:
    feeds = inputs(network)
    samples, out = calibration(tmp_path / "samples.npz", feeds), tmp_path / "int8.onnx"
    if network.name in IN_BRANCHES:
        with pytest.raises(EngineError, match=r"weights in branches \(of an If or a Loop\).* leave out calibration"):
            quantize(network.path(), out, "int8", samples, threads=1)
        assert not out.exists()
        return
    built = quantize(network.path(), out, "int8", samples, threads=1)
    assert built.comparison is not None
    assert (built.method, built.samples_made_up) == ("static", False)
    left = {"silero_vad_16k_op15": 4, "silero_vad_half": 4, "silero_vad_16k_sequence": 2, "silero_vad_openvino_16k": 2}
    assert built.weights_left == left.get(network.name, 0)  # of an LSTM, which has no fixed ranges
    assert built.size_bytes < built.source_bytes
    shown, reported = (
        errors(network, out, feeds),
        {output.name: output.relative_l2 for output in built.comparison.outputs},
    )
    assert reported == {name: pytest.approx(error, rel=1e-3) for name, error in shown.items()}
    far = [
        f"{name!r} is off by {error:.0%}" for name, error in reported.items() if error == max(reported.values()) > 0.25
    ]
    assert [note.split(" of its size")[0] for note in built.notes if "is off by" in note] == [
        f"Output {f}" for f in far
    ]


def test_the_command_takes_samples_for_a_network_over_integers(tmp_path: Path) -> None:
    samples = calibration(tmp_path / "samples.npz", inputs(weights.MAGIKA))
    out = tmp_path / "int8.onnx"
    done = run_edge("quantize", weights.MAGIKA.path(), out, "--type", "int8", "--calibration", samples)
    assert done.returncode == 0, done.stderr
    assert "3 quantized, 0 left in floats" in done.stdout
    assert "on 4 given samples" in done.stdout
