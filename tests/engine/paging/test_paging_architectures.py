"""Models of every architecture whose layers are read again and again compute what resident ones do, bit for bit."""

from pathlib import Path

import numpy as np
import pytest

from partition.architectures.table import ARCHITECTURES
from tests.support import paging
from tests.support.architectures import NOT_PAGED
from tests.support.slices import synthetic
from tests.support.thorough import thorough

USUALLY = ("qwen35", "glm4moe", "deepseek2", "gpt2", "gemma4")
PROMPT = list(range(264, 284))


@pytest.mark.parametrize("arch", [*USUALLY, *thorough(*(arch for arch in ARCHITECTURES if arch not in USUALLY))])
def test_paged_weights_compute_the_bits_of_resident_ones(arch: str, tmp_path: Path) -> None:
    model = synthetic(tmp_path / f"{arch}.gguf", arch, "f16", layers=6, embd=256, ff=256, vocab=320)
    with paging.paged(model, paging.halfway(model), repack=False) as engine:
        assert paging.streams(engine) or arch in NOT_PAGED
        result, batch = paging.answer(engine, PROMPT, 4), engine.batch
    with paging.resident(model, repack=False) as engine:
        # Some processors compute other last bits for a row alone than for a row in a batch.
        expected = paging.answer(engine, PROMPT, 4, chunk=min(batch, 16))
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(result, expected)
