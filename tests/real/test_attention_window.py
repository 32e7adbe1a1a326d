"""Perplexity of trained weights with an attention window: near that of full attention, with the first tokens alone."""

import math
from pathlib import Path

import numpy as np

from edge.llm.engine import Engine
from edge.llm.options import SINKS, EngineOptions
from edge.llm.slot import Slot
from tests.support import ROOT

TEXT = (ROOT / "edge" / "quantization" / "calibration.txt").read_text()
TOKENS, FIRST = 1100, 300  # of the text; from FIRST on they count, when every window here has been passed


def perplexity(engine: Engine, tokens: list[int], window: int | None, sinks: int = SINKS) -> float:
    """Perplexity of the tokens from FIRST on. window: None: each attends to all before it."""
    slot, losses = Slot(engine), []
    slot.cut(0)
    for i, token in enumerate(tokens[:-1]):
        if window is not None and len(slot.tokens) == sinks + window:
            slot.drop(sinks, window // 8)
        logits = slot.decode([token]).astype(np.float64)
        if i + 1 >= FIRST:
            losses.append(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[tokens[i + 1]])
    return math.exp(np.mean(losses))


def test_a_window_with_sinks_costs_little_and_one_without_costs_much(smollm2: Path) -> None:
    with Engine(smollm2, EngineOptions(threads=1, context=TOKENS)) as engine:
        tokens = engine.model.tokenize(TEXT, add_special=True, parse_special=False)[:TOKENS]
        full = perplexity(engine, tokens, None)
        wide, narrow = (perplexity(engine, tokens, window) for window in (256, 128))
        without = perplexity(engine, tokens, 256, sinks=0)
        print(
            f"perplexity {full:.1f}; windows of 256 {wide:.1f}, of 128 {narrow:.1f}, of 256 without sinks {without:.1f}"
        )
        assert full < wide < narrow < 1.6 * full
        assert wide < 1.3 * full
        assert without > 1.5 * wide
