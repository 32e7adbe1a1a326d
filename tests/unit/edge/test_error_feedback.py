"""Test error feedback: the next sum compensates the rounding error of a lossy wire, while the rows are the same."""

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.models.demo import MODEL_PATH
from edge.parallel.error_feedback import ErrorFeedback, adds_sums
from quant.gguf.file import GgufFile
from quant.wire import WIRES

Floats = NDArray[np.float32]
ROWS, EMBD, SUMS = 6, 96, 40
ALL = np.ones(ROWS, np.int8)
Q8 = WIRES["q8"]


def crossed(part: Floats, lost: Floats | None = None) -> Floats:
    """As the other ranks read it. lost: is filled as a group does."""
    assert Q8 is not None
    data, out = np.empty(Q8.n_bytes(part.size), np.uint8), np.empty(part.size, np.float32)
    Q8.encode(part.reshape(-1), data)
    Q8.decode(data, out)
    if lost is not None:
        lost[...] = part - out.reshape(part.shape)
    return out.reshape(part.shape)


def parts(seed: int = 0) -> Floats:
    """A rank's parts of all sums of a step."""
    return np.random.default_rng(seed).normal(size=(SUMS, ROWS, EMBD)).astype(np.float32)


def lacking(feedback: ErrorFeedback | None) -> float:
    """Return how much hidden states lack in the end."""
    hidden, exact = np.zeros((ROWS, EMBD), np.float32), parts().sum(axis=0)
    for part in parts():
        hidden += crossed(part, None if feedback is None else feedback.add(part, ALL))
    return float(np.sqrt(np.mean((hidden - exact) ** 2)))


def test_hidden_states_lack_what_the_last_sum_lost_alone() -> None:
    feedback = ErrorFeedback()
    feedback.begin()
    first = float(np.sqrt(np.mean((crossed(parts()[-1]) - parts()[-1]) ** 2)))
    assert lacking(feedback) < 1.1 * first
    assert lacking(None) > 4 * first  # the square root of 40 of them


def test_a_step_begins_without_what_another_left() -> None:
    feedback = ErrorFeedback()
    first, part = parts()[:2]
    crossed(first, feedback.add(first, ALL))
    feedback.begin()
    feedback.add(part, ALL)
    np.testing.assert_array_equal(part, parts()[1])


def test_the_last_layer_goes_on_with_the_rows_that_give_logits() -> None:
    outputs = np.array([0, 1, 0, 0, 1, 1], np.int8)
    feedback, rows = ErrorFeedback(), np.flatnonzero(outputs)
    feedback.begin()
    first, part = parts()[0], parts()[1][rows]
    crossed(first, feedback.add(first, ALL))
    feedback.add(part, outputs)
    np.testing.assert_array_equal(part, parts()[1][rows] + (first - crossed(first))[rows])
    feedback.add(np.empty((0, EMBD), np.float32), np.zeros(len(rows), np.int8))  # of a prompt's part: none


@pytest.mark.parametrize("norm", ["blk.0.post_attention_norm.weight", "blk.3.post_ffw_norm.weight"])
def test_models_that_norm_their_sums_go_without(norm: str) -> None:
    assert adds_sums(GgufFile.open(MODEL_PATH).tensors)
    assert not adds_sums([*GgufFile.open(MODEL_PATH).tensors, norm])
