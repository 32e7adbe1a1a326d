"""Steps of long prompts are timed on a slice that computes all of their rows, as stages before the last do."""

from __future__ import annotations

from edge.models.demo import MODEL_PATH
from edge.profiling.layer_times import Probes, cuts_to_time
from edge.tasks import CancelScope
from partition.model.file import ModelFile


def test_a_long_prompt_is_timed_on_a_slice_that_computes_all_rows() -> None:
    """The last layer of a slice with the head computes the FFN of the rows that give logits alone: one, of a prompt."""
    with CancelScope() as scope:
        file = ModelFile.open(MODEL_PATH)
        slices = dict(Probes(file, "0" * 64, cuts_to_time(file)[0], scope))
    chunk, head = slices["chunk"], slices["head"]
    assert (chunk.layers, chunk.last) == (head.layers, False)
    assert chunk.recipe.n_bytes < head.recipe.n_bytes  # of the same layers without the head
    assert chunk.depth > 0
