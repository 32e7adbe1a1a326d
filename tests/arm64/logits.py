"""Logits of model files on this processor, as a .npz: logits.py OUT.npz MODEL...  Runs on both processors."""

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge.llm.engine import Engine
from edge.llm.options import EngineOptions

TOKENS = [5, 300, 17, 401, 88, 260, 33, 499, 120, 7, 250, 61]

HOW = ("mapped", "repacked")


def logits(path: Path, repack: bool) -> NDArray[np.float32]:
    """Return the logits of each of TOKENS, computed in one pass and then one by one: by both kinds of products."""
    exact = {"kv_type": "f32", "flash_attention": "off"} if path.stem.endswith("-f32") else {}
    options = EngineOptions(context=256, outputs=len(TOKENS), threads=1, repack=repack, gpu_layers=0, **exact)
    with Engine(path, options) as engine:
        together = engine.decode(TOKENS, 0, outputs="all").copy()
        alone = [engine.decode([token], len(TOKENS) + i).copy().reshape(1, -1) for i, token in enumerate(TOKENS)]
        return np.concatenate([together, *alone])


if __name__ == "__main__":
    out, *models = map(Path, sys.argv[1:])
    arrays = {f"{model.stem} {how}": logits(model, how == "repacked") for model in models for how in HOW}
    np.savez(out, **arrays)
