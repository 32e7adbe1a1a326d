"""Test ranks that change their quantization with their own memory: slices hold every size, and the results equal static
files.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge
from edge.errors import EngineError, NotEnoughMemory
from edge.llama.vocabulary import TokenTable
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from edge.llm.slot import Origin, Slot
from edge.parallel.engine import DistributedEngine
from edge.parallel.shard import Shard
from edge.speculate.factory import Draft, model_with
from edge.weights.budget import MARGIN_SHARE
from edge.weights.elastic.sizes import Sizes
from edge.weights.elastic.weights import ElasticWeights, next_pass
from edge.worker.limits import ResourceLimits
from edge.worker.load import WholeModel, load
from partition.errors import CannotSlice
from partition.model.file import ModelFile
from partition.plan.arrange import make_plan
from partition.plan.plan import Range
from partition.slices.gguf_slice import elastic_recipe, limits
from quant.gguf.elastic import elastic_sizes
from tests.engine.elastic.conftest import Elastic, Memory, followed
from tests.engine.elastic.test_changes import WAIT_S
from tests.support.deployments import pipeline, tensor
from tests.support.paging import MIB, OPTIONS, PROMPT
from tests.support.ranks_here import ranks_here
from tests.support.slices import DIGEST, write
from tests.support.workers import worker
from transport import edge_pb2 as pb

BOTH = pytest.mark.parametrize("how", [pipeline(1, 2), tensor(1, 1)], ids=["stages", "shards"])
RANKS = replace(OPTIONS, batch=32)


def budgets(sizes: Sizes) -> dict[int, int]:
    """Return the least budget in which each size is in memory whole, by its number, and the least of all by -1."""
    whole = [(n_bytes + sizes._parts) * MARGIN_SHARE // (MARGIN_SHARE - 1) + 1 for n_bytes in sizes._whole]
    return {**dict(enumerate(whole)), -1: sizes.least}


@contextmanager
def ranks_in(
    memory: Memory, path: Path, how: dict[str, Any], folder: Path, options: EngineOptions = RANKS
) -> Iterator[tuple[DistributedEngine, list[ElasticWeights]]]:
    """Yield an engine over ranks that follow a memory, each when it is told to look, and the weights of each."""
    shards: list[Shard] = []
    options = replace(options, least_memory=42 * MIB)
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
    file = ModelFile.open(files.path)
    plan = make_plan(limits(file), "", "", ["local", "other"], **how)
    for rank in range(2):
        path = write(files.path, plan.slice(rank), tmp_path / f"{rank}.gguf", elastic=True)
        sizes = elastic_sizes(ModelFile.open(path))
        alone = [write(static, plan.slice(rank), tmp_path / f"{rank}-{static.name}") for static in files.static]
        assert path.stat().st_size < sum(slice_path.stat().st_size for slice_path in alone)
        for size, other, whole in zip(sizes, map(ModelFile.open, alone), elastic_sizes(file), strict=True):
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
    largest, smallest, both = (limits(ModelFile.open(path)) for path in (files.static[0], files.static[2], files.path))
    assert largest.ff_unit < smallest.ff_unit
    assert (both.head_unit, both.ff_unit) == (smallest.head_unit, smallest.ff_unit)
    plan = make_plan(largest, "", "", ["local", "other"], **tensor(3, 5))
    with pytest.raises(CannotSlice, match="multiples of"):
        elastic_recipe(ModelFile.open(files.path), DIGEST, plan.slice(0))


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


def test_ranks_paging_and_drafts_change_no_token(bundled: Elastic, tmp_path: Path) -> None:
    options, answers = replace(RANKS, context=256, prefer="quality", outputs=8), []

    def answer(engine: TextEngine, draft: Draft) -> list[int | None]:
        model = model_with(draft, engine, lambda: None)
        responses = model.generate("4 plus 4 is", SamplingParams(temperature=0.0), max_tokens=24)
        return [response.token_id for response in responses]

    with Engine(bundled.static[0], options) as engine:
        answers.append(answer(engine, "off"))
    for pages, draft in ((False, "ngram"), (True, "ngram"), (True, "off")):
        memory = Memory(1 << 30)
        with ranks_in(memory, bundled.path, pipeline(1, 1), tmp_path, options) as (ranks, weights):
            for own in weights if pages else ():
                memory.is_now(own, own.sizes.least + 2 * MIB)
            answers.append(answer(ranks, draft))
            assert [(own.choice.number, own.plan.pages) for own in weights] == [(0, pages)] * 2
    assert len(answers[0]) > 4
    assert all(tokens == answers[0] for tokens in answers)


@pytest.mark.usefixtures("measured_briefly")
def test_devices_with_ranges_answer_as_the_largest_size_while_there_is_room(bundled: Elastic, tmp_path: Path) -> None:
    options, prompt = edge.PlanOptions(context=256), "4 plus 4 is"
    sampling = SamplingParams(temperature=0.0)
    with worker(tmp_path, "--memory", "400MiB..1GiB", "--threads", "1") as other:
        with edge.Cluster([other.address]) as cluster:
            both = edge.plan(str(bundled.path), cluster, parallel="pipeline", shares=[1, 1], options=options)
            with edge.deploy(both, cluster, memory="1GiB..3GiB") as model:
                tokens = [response.token_id for response in model.generate(prompt, sampling, max_tokens=12)]
                with other.remote() as remote:
                    [state] = remote.describe()[1].sessions
                with edge.deploy(both, cluster, memory="1GiB..3GiB") as second:  # more than half of the worker is left
                    baseline = [response.token_id for response in second.generate(prompt, sampling, max_tokens=12)]
                    with other.remote() as remote:
                        both_bytes = [state.memory_bytes for state in remote.describe()[1].sessions]
        assert baseline == tokens
        assert 50 * MIB < state.memory_bytes < 400 * MIB  # as its largest size takes, which has a few
        assert len(both_bytes) == 2
        slices = [ModelFile.open(path) for path in other.slices.iterdir() if path.stat().st_size > MIB]
        assert [len(elastic_sizes(file)) for file in slices] == [3]
    with Engine(bundled.static[0], replace(OPTIONS, context=256)) as engine:
        responses = model_with("off", engine, lambda: None).generate(prompt, sampling, max_tokens=12)
        assert [response.token_id for response in responses] == tokens


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
                memory_bytes = part.describe().memory_bytes
                if isinstance(weights, ElasticWeights):  # it may take again what its largest size takes, and no more
                    whole = weights.sizes.most
                    assert whole < memory_bytes == weights._governor._most < 1.04 * whole < most / 4
                    assert [weights.sizes.choose(whole - less).number for less in (0, MIB)] == [0, 1]
                    assert not weights.sizes.choose(whole).plan.pages
        with closing(load(request, 1, limits_, lambda fraction: None)) as part:
            assert isinstance(part, WholeModel)
            weights = part._runner.paging
            assert isinstance(weights, ElasticWeights)
            memory.is_now(weights, weights.sizes.least)
            weights.follow()
            assert weights.choice.number == 2


@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
def test_a_worker_whose_other_sessions_have_more_than_its_least_loads_what_the_rest_has_room_for(
    elastic: Callable[[str], Elastic], arch: str
) -> None:
    request, memory = pb.Load(path=str(elastic(arch).path), options={"context": 64}), Memory(1 << 30)
    request.memory_limit_bytes = 512 * MIB
    with followed(memory):
        with closing(load(request, 1, ResourceLimits(1, gives_back=1 << 30), lambda fraction: None)) as part:
            assert isinstance(part, WholeModel)
            weights = part._runner.paging
            assert isinstance(weights, ElasticWeights)
            assert weights.choice.number == 0
            memory.is_now(weights, weights.sizes.least)
            weights.follow()
            assert (weights.choice.number, weights.plan.pages) == (2, True)
        request.memory_limit_bytes = 20 * MIB
        with pytest.raises(NotEnoughMemory, match=r"needs a budget of at least \d+ MiB .*; 20 MiB were given"):
            load(request, 1, ResourceLimits(1, gives_back=1 << 30), lambda fraction: None)


def test_a_change_that_comes_between_the_embeddings_and_the_pass_waits_for_the_next_pass(
    elastic: Callable[[str], Elastic], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, memory = elastic("llama"), Memory(1 << 30)
    with ExitStack() as stack:
        static = [stack.enter_context(ranks_here(path, pipeline(1, 2), RANKS, tmp_path)) for path in files.static]
        engine, ranks = stack.enter_context(ranks_in(memory, files.path, pipeline(1, 2), tmp_path))
        look_up = TokenTable.look_up

        def late(table: TokenTable, *how: Any) -> None:
            look_up(table, *how)
            for weights in ranks:
                memory.is_now(weights, budgets(weights.sizes)[2])

        monkeypatch.setattr(engine._tables[0], "look_up", partial(late, engine._tables[0]))
        engine.decode(PROMPT, 0)
        assert ranks[0].choice.number == ranks[0].pass_size == 0
        engine.kv_remove(0, 0)
        assert np.array_equal(engine.decode(PROMPT, 0), static[2].decode(PROMPT, 0))
        assert ranks[0].pass_size == 2
        memory.is_now(ranks[0], 1 << 30, WAIT_S)
        with pytest.raises(EngineError, match="lost"), next_pass(ranks[0]):
            raise EngineError("lost")
        memory.is_now(ranks[0], budgets(ranks[0].sizes)[2])
        ranks[0].follow()  # no pass is under way any more
        assert ranks[0].choice.number == 2


def test_tokens_after_a_change_of_rank_0_are_not_exact(bundled: Elastic, tmp_path: Path) -> None:
    memory, tokens = Memory(1 << 30), [10 + (7 * i * i + 3 * i) % 400 for i in range(80)]
    with ranks_in(memory, bundled.path, pipeline(1, 1), tmp_path, replace(RANKS, context=256)) as (engine, ranks):
        slot = Slot(engine)
        slot.prefill(tokens[:40])
        memory.is_now(ranks[0], budgets(ranks[0].sizes)[2])
        slot.prefill(tokens)
        assert slot.origin == Origin(exact=40)
