"""Compare a page's results with this machine's on a small model, before others rely on the page.

Some browsers compute wrong numbers, and a wrong number in one layer makes nonsense of every answer. The bridge runs
this module in a process of its own when a browser joins.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge.browser.engine import PageEngine
from edge.browser.profile import PAGE_VARIABLE, PageProfile
from edge.errors import EdgeError
from edge.llm.engine import ModelRunner
from edge.llm.options import EngineOptions
from edge.models.demo import MODEL_PATH
from partition.model.file import ModelFile

ROWS = 12
_OPTIONS = EngineOptions(context=64, sequences=1, outputs=ROWS, batch=ROWS, threads=1)


def deviation(folder: Path, profile: PageProfile) -> float:
    """Return how far the page's logits are from this machine's: the root mean square, in standard deviations.

    folder: folder of the page. Raises EngineError if the page does not compute.
    """
    file = ModelFile.open(MODEL_PATH)
    with ModelRunner(file, _OPTIONS) as here:
        expected = _logits(here)
    with PageEngine(file, _OPTIONS, folder, profile.memory_bytes, (), None, embeddings=False) as page:
        computed = _logits(page)
    difference = float(np.sqrt(np.square(computed - expected).mean()) / expected.std())
    return difference if np.isfinite(difference) else float("inf")


def _logits(engine: ModelRunner) -> NDArray[np.float32]:
    """Return the logits [rows, n_vocab] of a prompt and of a token decoded after it."""
    rows, n = engine.rows, ROWS - 1
    tokens = np.random.default_rng(5).integers(300, engine.model.n_vocab, ROWS, np.int32)
    rows.tokens[:ROWS], rows.positions[:ROWS], rows.sequences[:ROWS], rows.outputs[:ROWS] = tokens, range(ROWS), 0, 1
    engine.decode_rows(rows, n)
    prompt = np.array([engine.logits(row) for row in range(n)])
    rows.tokens[0], rows.positions[0] = tokens[n], n
    engine.decode_rows(rows, 1)
    return np.vstack([prompt, engine.logits(0)])


def main() -> None:
    """Print the deviation, or the error, as JSON."""
    folder = Path(os.environ[PAGE_VARIABLE])
    try:
        print(json.dumps({"deviation": deviation(folder, PageProfile.load(folder))}))
    except EdgeError as error:
        print(json.dumps({"error": str(error)}))


if __name__ == "__main__":
    main()
