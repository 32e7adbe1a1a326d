"""Divergence of trained weights by the types of their keys and values: keys lose more by few bits than values do."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from tests.support import ROOT

TEXT = (ROOT / "edge" / "quantization" / "calibration.txt").read_text()
CHUNK, CHUNKS = 256, 2


def log_probabilities(path: Path, kv_type: str) -> NDArray[np.float64]:
    """Log probabilities [tokens, n_vocab] of the second half of each chunk of the text."""
    options = EngineOptions(threads=1, context=CHUNK, batch=CHUNK, outputs=CHUNK, kv_type=kv_type, flash_attention="on")
    results = []
    with Engine(path, options) as engine:
        tokens = engine.model.tokenize(TEXT, add_special=False, parse_special=False)
        for start in range(0, CHUNK * CHUNKS, CHUNK):
            engine.kv_clear()
            logits = engine.decode(tokens[start : start + CHUNK], 0, outputs="all")[CHUNK // 2 :].astype(np.float64)
            logits -= logits.max(axis=1, keepdims=True)
            results.append(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
    return np.concatenate(results)


def test_keys_need_more_bits_than_values(smollm2: Path) -> None:
    exact = log_probabilities(smollm2, "f16")
    divergence = {}
    for kv_type in ("q8_0", "q8_0/q5_1", "q8_0/q4_0", "q4_0/q8_0", "q4_0"):
        other = log_probabilities(smollm2, kv_type)
        divergence[kv_type] = float((np.exp(exact) * (exact - other)).sum(axis=1).mean())
    print(divergence)
    assert divergence["q8_0"] < divergence["q8_0/q5_1"] < divergence["q8_0/q4_0"]
    assert 2 * divergence["q8_0/q4_0"] < min(divergence["q4_0/q8_0"], divergence["q4_0"])
