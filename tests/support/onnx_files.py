"""Files of models and samples for the tests of ONNX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto

from edge.quantization import onnx_compare
from edge.quantization.onnx import Quantized
from tests.support.onnx_graphs import mlp


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds are measured with one run each."""
    monkeypatch.setattr(onnx_compare, "_TIMING_S", 0.0)
    monkeypatch.setattr(onnx_compare, "_LEAST_ROUNDS", 1)


@pytest.fixture(name="source")
def small_model(tmp_path: Path) -> Path:
    """A small model of matrix products, alone in its folder."""
    (tmp_path / "in").mkdir()
    return saved(mlp(), tmp_path / "in" / "mlp.onnx")


def saved(model: ModelProto, path: Path, **how: Any) -> Path:
    """`path`, with the model in it."""
    onnx.save_model(model, str(path), **how)
    return path


def samples(path: Path, **arrays: Any) -> Path:
    """`path`, with the arrays in it."""
    np.savez(path, **arrays)
    return path


def vectors(n: int = 6, width: int = 64) -> Any:
    """Random inputs of `mlp`, always the same."""
    return np.random.default_rng(5).standard_normal((n, width)).astype(np.float32)


def cosine(built: Quantized) -> float:
    """Return the cosine of the only output."""
    assert built.comparison is not None
    [output] = built.comparison.outputs
    assert output.cosine is not None
    return output.cosine


def operators(path: Path) -> set[str]:
    """The types of a model's nodes."""
    return {node.op_type for node in onnx.load(path).graph.node}


def external(path: Path, gemm: bool = False) -> ModelProto:
    """A model with its weights in a file beside it; as it is in its file, without them."""
    saved(mlp(gemm=gemm), path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=0)
    return onnx.load(path, load_external_data=False)
