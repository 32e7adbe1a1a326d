"""Conversations of models with recurrent layers: in stages each turn has the bits of one device, in shards nearly so.

Their layers hold what all tokens so far made, and nothing of each. So what was held can be gone on with, and is
computed again where the prompt differs from it.
"""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.llm.slot import Slot
from partition.architectures.recurrent import RECURRENT_ARCHITECTURES
from tests.support.architectures import CLOSE
from tests.support.deployments import pipeline, tensor
from tests.support.ranks_here import ranks_here
from tests.support.slices import synthetic
from tests.support.thorough import thorough

OPTIONS = EngineOptions(threads=1, context=128, batch=16, kv_type="f32", flash_attention="off", repack=False)
USUALLY = ("qwen35", "qwen3next", "lfm2", "falcon-h1", "jamba", "mamba", "mamba2", "nemotron_h")
QUESTION = [270 + 3 * i % 40 for i in range(21)]  # more than a batch
NEXT = list(range(300, 311))


def turn(slot: Slot, prompt: list[int], answer: int = 7) -> list[NDArray[np.float32]]:
    """Logits after a prompt, and after each token of a greedy answer, all of which the slot holds then."""
    logits = [slot.prefill(prompt).copy()]
    for _ in range(answer):
        logits.append(slot.decode([int(logits[-1].argmax())]).copy())
    return logits


def conversation(engine: TextEngine) -> tuple[list[NDArray[np.float32]], list[int]]:
    """Logits of four turns: a question, one more, the last asked again in other words, and a new conversation. And how
    many tokens the prompt of each had to compute."""
    slot = Slot(engine)
    logits = turn(slot, QUESTION)
    computed = [slot.computed]
    first = list(slot.tokens)
    for prompt in ([*first, *NEXT], [*first, *NEXT[::-1]], NEXT):
        logits += turn(slot, prompt)
        computed.append(slot.computed)
    return logits, computed


@pytest.mark.parametrize("arch", [*USUALLY, *thorough(*(a for a in RECURRENT_ARCHITECTURES if a not in USUALLY))])
def test_turns_have_the_bits_of_one_device(arch: str, tmp_path: Path) -> None:
    model = synthetic(tmp_path / f"{arch}.gguf", arch, layers=9, vocab=320, embd=64, ff=64)
    with Engine(model, OPTIONS) as engine:
        expected, computed = conversation(engine)
    # What continues is not computed again. What differs is, from the first token on.
    assert computed == [len(QUESTION), len(NEXT), len(QUESTION) + 7 + len(NEXT), len(NEXT)]
    for how in (pipeline(5, 4), pipeline(0, 5, 4)):
        with ranks_here(model, how, OPTIONS, tmp_path) as stages:
            result, in_stages = conversation(stages)
        assert in_stages == computed
        assert all(np.isfinite(logits).all() for logits in result)
        assert all((f == e).all() for f, e in zip(result, expected, strict=True))


@pytest.mark.parametrize("arch", ["lfm2", *thorough("qwen35", "falcon-h1")])
def test_turns_in_shards(arch: str, tmp_path: Path) -> None:
    """Each rank has all of attention and of what recurrent layers hold, and a part of the rest."""
    model = synthetic(tmp_path / f"{arch}.gguf", arch, layers=9, vocab=320, embd=64, ff=96)
    with Engine(model, OPTIONS) as engine:
        expected, computed = conversation(engine)
    with ranks_here(model, tensor(2, 1), OPTIONS, tmp_path) as shards:
        result, in_shards = conversation(shards)
    assert in_shards == computed
    assert max(float(np.abs(f - e).max() / e.std()) for f, e in zip(result, expected, strict=True)) < CLOSE[arch]
