"""Test picture embeddings that arrive over a link: those that no projector yields are refused."""

import json
from typing import Any

import numpy as np
import pytest

from edge.errors import MediaError
from edge.worker.media_queries import MOST_ANSWER_BYTES, RemoteEncoder
from tests.support.memory_link import pair
from transport.errors import ProtocolError
from transport.frame import Kind

WIDTH, N_VOCAB = 4, 100
ROWS = np.arange(2 * WIDTH, dtype=np.float32)
OFFSETS = np.arange(6, dtype=np.int32)
CHUNK = {"shape": [2, WIDTH], "sections": True, "positions": 2, "causal": True}
GOOD = {"digest": "ab" * 32, "chunks": [{"tokens": [5]}, CHUNK], "bytes": ROWS.nbytes + OFFSETS.nbytes}


def answered(answer: Any, rest: bytes = ROWS.tobytes() + OFFSETS.tobytes()) -> Any:
    """Return what the owner makes of an answer."""
    ours, theirs = pair()
    theirs.send(answer if isinstance(answer, bytes) else json.dumps(answer).encode(), Kind.CONTROL)
    theirs.send(rest)
    try:
        return RemoteEncoder(ours, WIDTH, N_VOCAB).encode(b"picture", 1.0)
    finally:
        if ours.broken is None:
            ours.close()


def test_an_answer_is_passed_on() -> None:
    answer, rest = answered(GOOD)
    assert answer == GOOD
    assert rest == ROWS.tobytes() + OFFSETS.tobytes()
    with pytest.raises(MediaError, match="no picture"):
        answered({"error": "no picture"})


def chunk(**changed: Any) -> dict[str, Any]:
    return {**GOOD, "chunks": [{**CHUNK, **changed}]}


@pytest.mark.parametrize(
    "answer",
    [
        b"no JSON",
        b"[]",
        b'"error"',
        {},
        {"error": None},
        {**GOOD, "bytes": -1},
        {**GOOD, "bytes": MOST_ANSWER_BYTES + 1},
        {**GOOD, "digest": "ab"},
        {**GOOD, "digest": 3},
        {**GOOD, "chunks": None},
        {**GOOD, "chunks": [7]},
        {**GOOD, "chunks": []},  # bytes of nothing
        {**GOOD, "chunks": [{"tokens": [N_VOCAB]}, CHUNK]},
        {**GOOD, "chunks": [{"tokens": [-1]}, CHUNK]},
        chunk(shape=[2, WIDTH + 1]),
        chunk(shape=[2, float(WIDTH)]),
        chunk(shape=[0, WIDTH]),
        chunk(shape=[3, WIDTH]),
        chunk(positions=-1),
        chunk(causal=None),
        chunk(sections=False),
    ],
)
def test_what_no_projector_gives_is_refused(answer: Any) -> None:
    with pytest.raises(ProtocolError, match="do not fit this model"):
        answered(answer)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_embeddings_are_numbers(bad: float) -> None:
    rows = ROWS.copy()
    rows[5] = bad
    with pytest.raises(ProtocolError, match="do not fit this model"):
        answered(GOOD, rows.tobytes() + OFFSETS.tobytes())


def test_offsets_are_not_before_the_picture() -> None:
    with pytest.raises(ProtocolError, match="do not fit this model"):
        answered(GOOD, ROWS.tobytes() + (OFFSETS - 1).tobytes())
