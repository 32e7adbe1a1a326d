"""Test the scales of adapters: after an interrupted change they are unknown, so the next request sets them again."""

from itertools import product
from pathlib import Path

import pytest

from edge.models.demo import MODEL_PATH
from edge.weights.adapter import Scales
from edge.weights.adapter_file import AdapterFile
from edge.weights.loaded_adapters import EngineAdapters, LoadedAdapters
from partition.model.file import ModelFile
from tests.support.adapters import write_adapter


@pytest.mark.parametrize("then", ["old", "new"])
def test_interrupted_change_of_scales_is_made_again_whichever_scales_follow(then: str) -> None:
    before, after = (1.0,), (0.5,)
    used: list[Scales] = []
    interrupts = [False]

    def use(scales: Scales) -> None:
        if interrupts[0]:
            raise KeyboardInterrupt
        used.append(scales)

    adapters = EngineAdapters((), use)
    adapters.use(before)
    adapters.use(before)
    assert used == [before]
    interrupts[0] = True
    with pytest.raises(KeyboardInterrupt):
        adapters.use(after)
    interrupts[0] = False
    scales = before if then == "old" else after
    adapters.use(scales)
    assert used == [before, scales]
    assert adapters.scales == scales


@pytest.mark.parametrize("scales", list(product((0.0, 0.5), repeat=2)))
def test_adapters_that_change_a_weight_are_those_of_the_scales_of_now(
    scales: tuple[float, float], tmp_path: Path
) -> None:
    model = ModelFile.open(MODEL_PATH)
    weights = (["attn_q.weight"], ["attn_q.weight", "attn_k.weight"])
    paths = [write_adapter(tmp_path / f"{i}.gguf", MODEL_PATH, own) for i, own in enumerate(weights)]
    files = [AdapterFile(path, model) for path in paths]
    loaded = LoadedAdapters((), files)
    loaded._use = lambda scales: None  # no model is loaded
    assert loaded.n_of("blk.0.attn_q.weight") == 0
    loaded.use(scales)
    assert loaded.n_of("blk.0.attn_q.weight") == sum(map(bool, scales))
    assert loaded.n_of("blk.0.attn_k.weight") == bool(scales[1])
    assert loaded.n_of("blk.0.attn_v.weight") == 0
    loaded.use(())
    assert loaded.n_of("blk.0.attn_q.weight") == 0
