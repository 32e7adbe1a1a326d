"""Test that all ranks shift a full context alike: the following tokens are those of one device."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.errors import EngineError
from edge.llm.chat import Chat
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.sampler import SamplingParams
from edge.llm.slot import Slot
from edge.models.demo import MODEL_PATH
from partition.plan.plan import Range
from tests.conftest import Synthetic
from tests.support.deployments import EXACT, deployed, deviations, pipeline, stages, tensor
from tests.support.workers import Worker

TOKENS = [10 + (7 * i * i + 3 * i) % 400 for i in range(200)]
BEGINNING = 8
CLOSE = 1e-4  # deviations of the logits: sums over ranks are rounded in another order


@pytest.mark.parametrize("how", [tensor(1, 1), pipeline(1, 1), pipeline(0, 1), stages(1, 2)], ids=str)
def test_tokens_after_shifts_are_those_of_one_device(
    one_worker: Worker, synthetic: Synthetic, how: dict[str, Any]
) -> None:
    path = synthetic("llama", "f32")
    with deployed(one_worker, path, how, EXACT) as deployment, Engine(path, EXACT) as single:
        assert deployment.engine.can_shift
        result, expected = through_shifts(deployment.engine), through_shifts(single)
    assert len(expected) > 100
    assert deviations(result, expected) <= (0 if how.get("parallel") == "pipeline" else CLOSE)
    top = np.sort(expected, axis=1)
    clear = top[:, -1] - top[:, -2] > 2 * CLOSE * expected.std()  # where the choice of a token hangs on no rounding
    assert np.count_nonzero(clear) > 0.9 * len(expected)
    np.testing.assert_array_equal(result[clear].argmax(1), expected[clear].argmax(1))


def through_shifts(engine: TextEngine) -> NDArray[np.float32]:
    """Logits of each token of a history that fills the context more than once, then of a prompt without its middle."""
    slot, logits = Slot(engine), []
    slot.prefill(TOKENS[:60])
    for token in TOKENS[60:]:
        if len(slot.tokens) >= engine.context:
            slot.drop(BEGINNING, (engine.context - BEGINNING) // 2)
        logits.append(slot.decode([token]).copy())
    prompt = [*slot.tokens[:20], *slot.tokens[40:], 5, 6]
    logits.append(slot.prefill(prompt, in_place=True).copy())
    assert (slot.dropped, slot.computed, slot.exact) == (20, 2, BEGINNING)
    return np.stack(logits)


@pytest.mark.parametrize("how", [tensor(1, 1), pipeline(1, 1), pipeline(0, 1)], ids=str)
def test_a_pending_shift_is_refused_and_harms_nothing(one_worker: Worker, how: dict[str, Any]) -> None:
    with deployed(one_worker, MODEL_PATH, how, EXACT) as deployment:
        engine = deployment.engine
        engine.decode(TOKENS[:16], 0)
        engine.kv_remove(0, 0, 8)
        engine.kv_shift(0, 8, -1, -8)
        with pytest.raises(EngineError, match="decode a token before they are read"):
            engine.states.read(0, Range(0, 8))
        engine.decode([7], 8)
        assert len(engine.states.read(0, Range(0, 9)).layers) == engine.shape.n_layers


def test_a_conversation_on_ranks_goes_on_beyond_the_context(one_worker: Worker) -> None:
    endless = SamplingParams(temperature=0, grammar="root ::= [a-z] root")
    with deployed(one_worker, MODEL_PATH, tensor(1, 1), replace(EXACT, context=96)) as deployment:
        chat = Chat(deployment.engine)
        for _ in range(3):
            last = list(chat.ask("What is 3 plus 4?", endless, max_tokens=70))[-1]
            assert last.usage.completion_tokens == 70
            assert last.usage.prompt_tokens - last.usage.cached_tokens <= 30
        assert last.usage.dropped_tokens > 0
