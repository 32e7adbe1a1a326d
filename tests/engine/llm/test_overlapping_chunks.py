"""Chunks of a prompt overlap: a stage computes the next one while the stage behind it computes this one."""

from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from edge.llm.continuation import Request
from edge.llm.options import EngineOptions
from edge.llm.scheduler import Scheduler
from edge.parallel.engine import DistributedEngine
from edge.parallel.prefiller import PrefillPlacement
from edge.parallel.shard import Shard
from tests.support.deployments import pipeline
from tests.support.helpers import TIMEOUT_S
from tests.support.ranks_here import ranks_here
from tests.support.slices import synthetic

OPTIONS = EngineOptions(threads=1, context=256, batch=64, kv_type="f32", flash_attention="off")
PROMPT = [3 + i % 400 for i in range(160)]  # in five chunks


def answer(engine: DistributedEngine) -> None:
    """By the placement that generates."""
    [tokens] = Scheduler(engine).run([Request(PROMPT, 1, ends=False)])
    assert len(tokens) == 1


def hand_over(engine: DistributedEngine) -> None:
    """By a placement of prompts, which also reads keys and values behind each chunk."""
    with PrefillPlacement(engine, 2) as placement:
        prompt = placement.begin(PROMPT, 0, "", (), keep=False)
        assert prompt is not None
        blocks, is_over = prompt.take()
        while not is_over:
            assert prompt.wait(TIMEOUT_S)
            more, is_over = prompt.take()
            blocks += more
    assert [i for block in blocks for i in range(block.positions.start, block.positions.stop)] == [*range(159)]


@pytest.mark.parametrize("compute", [answer, hand_over])
def test_stages_compute_different_chunks_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compute: Callable[[DistributedEngine], None]
) -> None:
    """The second stage does not begin a chunk before the first one has begun the next: it would wait forever if the
    first one waited for it."""
    shards: list[Shard] = []
    model = synthetic(tmp_path / "llama.gguf", "llama", layers=4)
    with ranks_here(model, pipeline(1, 1), OPTIONS, tmp_path, shards) as engine:
        began = [[Event() for _ in range(8)] for _ in shards]
        counts = [0, 0]
        n_chunks = -(-len(PROMPT) // engine.chunk(len(PROMPT)))

        def watched(rank: int, compute_rows: Callable[[int], None]) -> Callable[[int], None]:
            def compute(n: int) -> None:
                chunk, counts[rank] = counts[rank], counts[rank] + 1
                began[rank][chunk].set()
                if rank == 1 and chunk + 1 < n_chunks:
                    assert began[0][chunk + 1].wait(TIMEOUT_S)
                compute_rows(n)

            return compute

        for rank, shard in enumerate(shards):
            monkeypatch.setattr(shard, "compute", watched(rank, shard.compute))
        compute(engine)
        assert n_chunks == 5
        assert counts == [5, 5]
