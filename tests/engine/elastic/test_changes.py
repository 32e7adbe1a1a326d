"""Weights that change while a model runs: what is computed is what the file of that size alone gives."""

from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest

from edge.elastic.sizes import Sizes
from edge.llm.engine import Engine
from tests.engine.elastic.conftest import Elastic, Memory, engine_in
from tests.support.paging import OPTIONS, PROMPT

ARCHITECTURES = ["llama", "gemma", "qwen3moe"]
WAIT_S = 60.0


def budgets(sizes: Sizes) -> dict[int, int]:
    """Return the largest budget in which each size is in memory whole, by its number, and the least of all by -1."""
    whole = {}
    for budget in range(1 << 30, sizes.least, -(1 << 18)):
        choice = sizes.choose(budget)
        if not choice.plan.pages:
            whole.setdefault(choice.number, budget)
    return {**whole, -1: sizes.least}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_after_a_change_logits_are_those_of_the_static_file_on_the_same_keys_and_values(
    elastic: Callable[[str], Elastic], arch: str
) -> None:
    files, memory, n = elastic(arch), Memory(1 << 30), len(PROMPT)
    with engine_in(memory, files.path) as (engine, weights), ExitStack() as stack:
        at = budgets(weights.sizes)
        assert at.keys() == {-1, 0, 1, 2}
        for start in range(0, n, engine.batch):
            engine.decode(PROMPT[start : start + engine.batch], start)
        history = engine.states.read(0, range(n))
        static = [stack.enter_context(Engine(path, OPTIONS)) for path in files.static]
        expected = []
        for other in static:
            other.states.write(0, history)
            expected.append(other.decode([7], n).copy())
        assert not np.array_equal(expected[0], expected[1])
        for wanted in (1, 2, -1, 0, 2, 1, -1):
            memory.is_now(weights, at[wanted], WAIT_S)
            logits = engine.decode([7], n).copy()
            assert weights.choice.number == wanted % 3
            assert weights.plan.pages == (wanted == -1)
            assert np.array_equal(logits, expected[wanted])
            engine.kv_remove(0, n)
