"""Several ranks whose bits change, each by its own memory: slices hold every size, and distributed equals static."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.elastic.sizes import Sizes
from edge.elastic.weights import ElasticWeights
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.paging.budget import MARGIN_SHARE
from edge.parallel.engine import DistributedEngine
from edge.parallel.shard import Shard
from edge.worker.limits import ResourceLimits
from edge.worker.load import WholeModel, load
from partition.errors import CannotSlice
from partition.plan.arrange import make_plan
from partition.plan.plan import Range
from partition.slices.gguf_slice import elastic_recipe, limits
from quant.gguf.elastic import elastic_sizes
from quant.gguf.file import GgufFile
from tests.engine.elastic.conftest import Elastic, Memory, followed
from tests.engine.elastic.test_changes import WAIT_S
from tests.support.deployments import pipeline, tensor
from tests.support.paging import MIB, OPTIONS, PROMPT
from tests.support.ranks_here import ranks_here
from tests.support.slices import DIGEST, write
from transport import edge_pb2 as pb

BOTH = pytest.mark.parametrize("how", [pipeline(1, 2), tensor(1, 1)], ids=["stages", "shards"])
RANKS = replace(OPTIONS, batch=32)


def budgets(sizes: Sizes) -> dict[int, int]:
    """Return the least budget in which each size is in memory whole, by its number, and the least of all by -1."""
    whole = [(n_bytes + sizes._parts) * MARGIN_SHARE // (MARGIN_SHARE - 1) + 1 for n_bytes in sizes._whole]
    return {**dict(enumerate(whole)), -1: sizes.least}


@contextmanager
def ranks_in(
    memory: Memory, path: Path, how: dict[str, Any], folder: Path
) -> Iterator[tuple[DistributedEngine, list[ElasticWeights]]]:
    """Yield an engine over ranks that follow a memory, each when it is told to look, and the weights of each."""
    shards: list[Shard] = []
    options = replace(RANKS, least_memory=42 * MIB)
    with followed(memory), ranks_here(path, how, options, folder, shards) as engine:
        weights = [shard.engine.paging for shard in shards]
        assert all(isinstance(each, ElasticWeights) for each in weights)
        yield engine, weights  # type: ignore[misc]


def greedy(engine: TextEngine, n: int = 6) -> list[int]:
    """Return the likeliest tokens behind the prompt."""
    engine.kv_remove(0, 0)
    tokens = [int(engine.decode(PROMPT, 0).argmax())]
    for position in range(len(PROMPT), len(PROMPT) + n):
        tokens.append(int(engine.decode(tokens[-1:], position).argmax()))
    return tokens


@BOTH
def test_a_slice_of_several_sizes_holds_what_the_slices_of_each_hold(
    elastic: Callable[[str], Elastic], how: dict[str, Any], tmp_path: Path
) -> None:
    files = elastic("llama")
    file = GgufFile.open(files.path)
    plan = make_plan(limits(file), "", "", ["local", "other"], **how)
    for rank in range(2):
        path = write(files.path, plan.slice(rank), tmp_path / f"{rank}.gguf", elastic=True)
        sizes = elastic_sizes(GgufFile.open(path))
        alone = [write(static, plan.slice(rank), tmp_path / f"{rank}-{static.name}") for static in files.static]
        assert path.stat().st_size < sum(one.stat().st_size for one in alone)
        for size, other, whole in zip(sizes, map(GgufFile.open, alone), elastic_sizes(file), strict=True):
            assert (size.file_bytes, size.divergence) == (other.size_bytes, whole.divergence)
            assert {name: (t.type, t.shape) for name, t in size.tensors.items()} == {
                name: (t.type, t.shape) for name, t in other.tensors.items()
            }
            with path.open("rb") as data:
                for name, tensor_ in size.tensors.items():
                    data.seek(tensor_.offset)
                    assert data.read(tensor_.n_bytes) == bytes(other.data(name))


def test_shards_are_cut_at_the_blocks_of_every_size(elastic: Callable[[str], Elastic]) -> None:
    files = elastic("llama")
    largest, smallest, both = (limits(GgufFile.open(path)) for path in (files.static[0], files.static[2], files.path))
    assert largest.ff_unit < smallest.ff_unit
    assert (both.head_unit, both.ff_unit) == (smallest.head_unit, smallest.ff_unit)
    plan = make_plan(largest, "", "", ["local", "other"], **tensor(3, 5))
    with pytest.raises(CannotSlice, match="multiples of"):
        elastic_recipe(GgufFile.open(files.path), DIGEST, plan.slice(0))


@BOTH
def test_ranks_compute_what_those_of_the_static_file_do(
    elastic: Callable[[str], Elastic], how: dict[str, Any], tmp_path: Path
) -> None:
    files, memory, n = elastic("llama"), Memory(1 << 30), len(PROMPT)
    with ExitStack() as stack:
        static = [stack.enter_context(ranks_here(path, how, RANKS, tmp_path)) for path in files.static]
        alone = [stack.enter_context(Engine(path, RANKS)) for path in files.static]
        engine, ranks = stack.enter_context(ranks_in(memory, files.path, how, tmp_path))
        at = [budgets(weights.sizes) for weights in ranks]
        expected = [other.decode(PROMPT, 0).copy() for other in static]
        assert not np.array_equal(expected[0], expected[2])
        for number in (0, 2, -1, 1, 0):
            for weights, own in zip(ranks, at, strict=True):
                memory.is_now(weights, own[number], WAIT_S)
            engine.kv_remove(0, 0)
            logits = engine.decode(PROMPT, 0).copy()
            assert [weights.choice.number for weights in ranks] == [number % 3] * 2
            assert [weights.plan.pages for weights in ranks] == [number == -1] * 2
            assert np.array_equal(logits, expected[number])
            assert greedy(engine) == greedy(alone[number])
        engine.kv_remove(0, 0)
        engine.decode(PROMPT, 0)
        history = engine.states.begin_read(0, Range(0, n))()
        for weights, own in zip(ranks, at, strict=True):  # in the middle of an answer
            memory.is_now(weights, own[2])
        static[2].kv_remove(0, 0)
        for block in history:
            static[2].states.write(0, block)
        assert np.array_equal(engine.decode([7], n), static[2].decode([7], n))


@BOTH
def test_a_rank_gives_way_alone(elastic: Callable[[str], Elastic], how: dict[str, Any], tmp_path: Path) -> None:
    memory = Memory(1 << 30)
    with ranks_in(memory, elastic("llama").path, how, tmp_path) as (engine, ranks):
        before = engine.decode(PROMPT, 0).copy()
        memory.is_now(ranks[1], budgets(ranks[1].sizes)[2])
        engine.kv_remove(0, 0)
        after = engine.decode(PROMPT, 0).copy()
        assert [weights.choice.number for weights in ranks] == [0, 2]
        assert np.isfinite(after).all()
        assert not np.array_equal(after, before)
        memory.is_now(ranks[1], 1 << 30, WAIT_S)
        engine.kv_remove(0, 0)
        assert np.array_equal(engine.decode(PROMPT, 0), before)


def test_a_worker_gives_back_as_much_as_its_range_allows(bundled: Elastic) -> None:
    request, most, memory = pb.Load(path=str(bundled.path), options={"context": 64}), 1 << 30, Memory(1 << 30)
    request.memory_limit_bytes = most
    with followed(memory):
        for gives_back in (0, most - 42 * MIB):
            limits_ = ResourceLimits(1, gives_back=gives_back)
            with closing(load(request, 1, limits_, lambda fraction: None)) as part:
                assert isinstance(part, WholeModel)
                weights = part._runner.paging
                assert isinstance(weights, ElasticWeights) == bool(gives_back)
        with closing(load(request, 1, limits_, lambda fraction: None)) as part:
            assert isinstance(part, WholeModel)
            weights = part._runner.paging
            assert isinstance(weights, ElasticWeights)
            memory.is_now(weights, weights.sizes.least)
            weights.follow()
            assert weights.choice.number == 2
