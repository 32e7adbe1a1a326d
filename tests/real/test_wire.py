"""Sums that cross as 8-bit integers, of a trained model: what each loses is made up for by the next."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.llm.options import EngineOptions
from edge.parallel import shard
from quant.wire import WIRES
from tests.real.weights import SMOLLM2
from tests.support.deployments import tensor
from tests.support.ranks_here import ranks_here

TOKENS = list(range(1000, 1040))
OPTIONS = EngineOptions(threads=1, context=64, batch=64, outputs=64, flash_attention="off")


def logits(folder: Path, wire: str) -> NDArray[np.float32]:
    """Of a prompt, on two ranks."""
    with ranks_here(SMOLLM2.path(), tensor(1, 1), OPTIONS, folder, wire=WIRES[wire]) as engine:
        return engine.decode(TOKENS, 0, outputs="all").copy()


def test_q8_sums_with_error_feedback_are_nearer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact, fed = logits(tmp_path, "f32"), logits(tmp_path, "q8")
    monkeypatch.setattr(shard, "adds_sums", lambda tensors: False)
    plain = logits(tmp_path, "q8")
    lost, without = (float(np.sqrt(np.mean((one - exact) ** 2))) for one in (fed, plain))
    assert 0 < lost < 0.8 * without
