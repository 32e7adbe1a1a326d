"""A thin owner of a trained model: the tokens of one device, with drafts and without, and none of its memory."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge.llm.chat import Chat
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.speculate.choice import MOST_ROWS
from tests.support.deployments import pipeline
from tests.support.drafting import Known, always, ids, run, speculate
from tests.support.ranks_here import ranks_here

OPTIONS = EngineOptions(threads=1, context=256, batch=64, outputs=MOST_ROWS)
QUESTION = "Repeat this list twice: red, green, blue, red, green, blue, red, green."


@pytest.fixture(scope="module")
def prompt_and_answer(smollm2: Path) -> tuple[list[int], list[int]]:
    with Engine(smollm2, OPTIONS) as engine:
        chat = Chat(engine)
        chat.messages.append({"role": "user", "content": QUESTION})
        prompt = chat.prompt_tokens()
        return prompt, ids(run(engine, prompt, None))


@pytest.mark.parametrize("shares", [(0, 1), (0, 1, 1)], ids=str)
def test_the_answer_is_that_of_one_device(
    shares: tuple[int, ...], smollm2: Path, tmp_path: Path, prompt_and_answer: tuple[list[int], list[int]]
) -> None:
    """Also of drafts that are verified over the one round trip."""
    prompt, answer = prompt_and_answer
    assert len(answer) > 8  # a processor's rounding decides which answer it is
    with ranks_here(smollm2, pipeline(*shares), OPTIONS, tmp_path) as engine:
        assert ids(run(engine, prompt, None)) == answer
        drafter = speculate(Known({tuple(prompt): answer}), choice=always(MOST_ROWS))
        assert ids(run(engine, prompt, drafter)) == answer
        assert drafter.stats.accepted > 0
        parts = engine.memory.parts
    assert (parts["weights"], parts["KV cache"]) == (0, 0)


def test_logits_have_the_bits_of_one_device(smollm2: Path, tmp_path: Path) -> None:
    tokens = list(range(1000, 1040))
    with Engine(smollm2, replace(OPTIONS, outputs=64)) as single:
        expected = single.decode(tokens, 0, outputs="all").copy()
    with ranks_here(smollm2, pipeline(0, 2, 1), replace(OPTIONS, outputs=64), tmp_path) as engine:
        np.testing.assert_array_equal(engine.decode(tokens, 0, outputs="all"), expected)
