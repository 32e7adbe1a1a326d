"""Two groups of requests over ranks that share every layer: answers are those of one device, and of one group."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.errors import EngineError, Interrupted
from edge.llama.llama import ContextSizes
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.options import MAX_GROUPS, EngineOptions, PrefixOptions
from edge.llm.scheduler import Scheduler
from edge.paging import memory
from edge.parallel.grouped import GroupedEngine
from edge.parallel.shard import Shard, load_shards
from edge.parallel.topology import place
from partition.plan.plan import Range
from quant.types import cache_type
from tests.conftest import Synthetic
from tests.engine.llm.test_scheduler import GREEDY, alone, random_requests
from tests.support import paging
from tests.support.deployments import EXACT, tensor
from tests.support.drafting import Known, always, ids, run, speculate
from tests.support.links import WAIT_S
from tests.support.ranks_here import ranks_here
from tests.support.slices import synthetic as model_of_arch
from transport.errors import TransportError

GROUPS = replace(EXACT, context=200, batch=16, outputs=4, sequences=4, groups=2)


@pytest.fixture(scope="module")
def two(synthetic: Synthetic, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GroupedEngine]:
    """Two ranks, two groups."""
    folder = tmp_path_factory.mktemp("two")
    with ranks_here(synthetic("llama", "f32"), tensor(1, 1), GROUPS, folder) as engine:
        assert isinstance(engine, GroupedEngine)
        yield engine


@pytest.mark.parametrize("shares", [(1, 1), (2, 1, 1)], ids=["two ranks", "three"])
def test_many_requests_are_answered_as_each_alone(
    shares: tuple[int, ...], synthetic: Synthetic, tmp_path: Path
) -> None:
    """More than there are sequences, prompts longer than a step, every way to choose tokens."""
    requests = random_requests(24, 70, seed=5)
    model = synthetic("llama", "f32")
    with ranks_here(model, tensor(*shares), GROUPS, tmp_path) as engine:
        assert (engine.contexts, engine.sequences, engine.context) == (2, 4, 200)
        answers = Scheduler(engine).run(requests)
        assert engine.uncollected == 0
        assert [engine.kv_last(sequence) for sequence in range(4)] == [-1] * 4
    with Engine(model, replace(EXACT, context=200)) as single:
        assert answers == alone(single, requests)


def test_keys_and_values_are_read_of_the_group_that_holds_them(two: GroupedEngine) -> None:
    """Sequence 1 is the first of the second group."""
    two.kv_clear()
    two.decode(np.arange(5, 13, dtype=np.int32), 0, sequence=1)
    [block], same = two.states.begin_read(1, Range(0, 8))(), two.states.read(1, Range(0, 8))
    assert block.positions == same.positions
    assert any(rows.keys.any() for rows in same.layers)
    for rows, others in zip(block.layers, same.layers, strict=True):
        np.testing.assert_array_equal(rows.keys, others.keys)
        np.testing.assert_array_equal(rows.values, others.values)
    two.kv_clear()


def test_both_groups_have_a_step_under_way(two: GroupedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """And requests are spread over them evenly; a step has rows of one."""
    steps: list[set[int]] = []
    under_way: list[int] = []
    submit = two.submit

    def watched(tokens: Any, positions: Any, sequences: Any, outputs: Any, **how: Any) -> None:
        submit(tokens, positions, sequences, outputs, **how)
        steps.append({sequence % 2 for sequence in sequences.tolist()})
        under_way.append(two.uncollected)

    monkeypatch.setattr(two, "submit", watched)
    with Scheduler(two) as scheduler:
        for i in range(4):
            scheduler.add(Request([5 + i, 6, 7], 12, GREEDY, ends=False))
        while scheduler.busy:
            scheduler.step()
            if len(scheduler.running) == 4:
                slots = [item.slot for item in scheduler.running if item.slot is not None]
                assert sorted(slot.group for slot in slots) == [0, 0, 1, 1]
    assert all(len(groups) == 1 for groups in steps)
    assert max(under_way) == 2
    assert under_way.count(2) > len(under_way) // 2


def test_one_group_computes_while_sums_of_the_other_travel(two: GroupedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole step, while the first sum of the other is on its way."""
    group = two.first.shard._group
    assert group is not None
    allreduce, is_waiting, arrives = group.allreduce, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        is_waiting.set()
        assert arrives.wait(WAIT_S)
        return allreduce(*arguments)

    monkeypatch.setattr(group, "allreduce", slow)
    for sequence in (0, 1):
        two.submit([3], np.array([0]), np.array([sequence]), np.array([1], np.int8))
        assert is_waiting.wait(WAIT_S)
    first, second = two._submitted
    try:
        assert second.result(WAIT_S).shape == (1, two.shape.n_vocab)
        assert not first.done()
    finally:
        arrives.set()
    assert np.abs(two.collect() - second.result(WAIT_S)).max() < 1e-4  # the same token, in either group
    two.collect()
    two.kv_clear()


def test_a_request_joins_where_fewest_run_and_its_beginning_is_held(two: GroupedEngine) -> None:
    """Cells are shared within a group only."""
    prompt = list(range(5, 45))
    with Scheduler(two, keep=True) as scheduler:
        scheduler.add(Request(prompt, 2, GREEDY, ends=False))
        while scheduler.busy:
            scheduler.step()
        current = next(slot for slot in scheduler.slots.all if slot.tokens)
        again = scheduler.slots.place([*prompt, 3], 1)
        assert again is not None
        assert again.slot is current  # nobody runs: where it is held
        current.busy = True
        other = scheduler.slots.place([*prompt, 3], 1)
        assert other is not None
        assert (other.slot.group, other.source) == (1 - current.group, None)
        next(slot for slot in scheduler.slots.all if slot.group != current.group).busy = True
        shared = scheduler.slots.place([*prompt, 3], 1)
        assert shared is not None
        assert (shared.slot.group, shared.source) == (current.group, current)
        for slot in scheduler.slots.all:
            slot.busy = False


def test_what_an_engine_of_groups_refuses_changes_nothing(two: GroupedEngine) -> None:
    step = np.array([3, 4]), np.array([0, 0]), np.array([0, 1]), np.array([1, 1], np.int8)
    with pytest.raises(EngineError, match=r"a step has sequences of one group, not of \[0, 1\]"):
        two.submit(*step)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="sequences 0 and 1 are of different groups, which share no cells"):
        two.kv_copy(0, 1)
    two.stop()
    with pytest.raises(Interrupted):
        two.decode([3], 0)
    with pytest.raises(Interrupted):
        two.submit([3], np.array([0]), np.array([0]), np.array([1], np.int8))
    two.resume()
    two.submit([3], np.array([0]), np.array([0]), np.array([1], np.int8))
    with pytest.raises(EngineError, match="still to be collected"):
        two.decode([3], 0, sequence=1)
    assert two.collect().shape == (1, two.shape.n_vocab)
    two.kv_clear()
    assert [two.kv_last(sequence) for sequence in range(4)] == [-1] * 4


def test_groups_hold_tokens_apart(two: GroupedEngine, synthetic: Synthetic) -> None:
    """The KV cache of each sequence, read and written through the whole."""
    with Engine(synthetic("llama", "f32"), replace(EXACT, context=200)) as single:
        for sequence in range(4):
            tokens = [10 + sequence, 11, 12, 13 + sequence]
            single.kv_clear()
            expected = single.decode(tokens, 0).copy()
            assert np.abs(two.decode(tokens, 0, sequence=sequence) - expected).max() < 1e-4
    block = two.states.read(1, Range(0, 4))
    two.kv_remove(2, 0, -1)
    two.states.write(2, block)
    assert two.kv_last(2) == 3
    logits = [two.decode([20], 4, sequence=sequence).copy() for sequence in (1, 2)]
    assert np.array_equal(*logits)
    two.kv_remove(2, 0, -1)
    two.kv_copy(0, 2, 0, 2)
    assert two.kv_last(2) == 1
    two.kv_clear()


def test_drafts_are_verified_while_a_request_is_alone(two: GroupedEngine) -> None:
    prompt = [7, 8, 9, 7, 8, 9]
    plain = ids(run(two, prompt, None))
    drafter = speculate(Known({tuple(prompt): plain}), choice=always(2))
    assert ids(run(two, prompt, drafter)) == plain
    assert drafter.stats.accepted > 0


def test_prompts_are_restored_from_disk_in_either_group(synthetic: Synthetic, tmp_path: Path) -> None:
    """Both groups restore after a restart what one group computed."""
    (tmp_path / "key").mkdir()
    options = replace(GROUPS, prefixes=PrefixOptions(1 << 22, tmp_path / "kept", tmp_path / "key"))
    prompts = [list(range(5 + 40 * i, 45 + 40 * i)) for i in range(4)]
    answers: list[list[list[int]]] = []
    for at_once in (1, 4):
        (tmp_path / str(at_once)).mkdir()
        with (
            ranks_here(synthetic("llama", "f32"), tensor(1, 1), options, tmp_path / str(at_once)) as engine,
            Scheduler(engine, keep=True) as scheduler,
        ):
            tokens: list[list[int]] = [[] for _ in prompts]
            restored, groups = list[int](), list[int]()
            for first in range(0, len(prompts), at_once):
                for prompt in prompts[first : first + at_once]:
                    scheduler.add(Request(prompt, 8, GREEDY, ends=False))
                requests = list(scheduler.waiting)
                while scheduler.busy:
                    for event in scheduler.step():
                        if event.token_id is not None:
                            tokens[event.request].append(event.token_id)
                restored += [request.restored_tokens for request in requests]
                groups += [request.slot.group for request in requests if request.slot is not None]
            answers.append(tokens)
    assert answers[0] == answers[1]
    assert restored == [32] * 4
    assert sorted(groups) == [0, 0, 1, 1]


def test_a_group_that_fails_ends_both(synthetic: Synthetic, tmp_path: Path) -> None:
    """With the reason of the rank that failed."""
    shards: list[Shard] = []
    noticed: list[Exception | None] = []

    def fail(rows: Any, n: int) -> None:
        raise EngineError("the roof fell in")

    def spread() -> None:
        with ranks_here(synthetic("llama", "f32"), tensor(1, 1), GROUPS, tmp_path, shards) as engine:
            shards[1].engine.decode_rows = fail  # type: ignore[method-assign]
            with pytest.raises(TransportError, match="the roof fell in"):
                engine.decode([3, 4], 0, sequence=0)
            with pytest.raises(TransportError, match="the roof fell in"):
                engine.submit([3], np.array([0]), np.array([1]), np.array([1], np.int8))
            noticed.append(engine.failed)

    with pytest.raises(AssertionError):  # the rank that followed has ended with an error, too
        spread()
    assert len(noticed) == 1


def test_memory_counts_each_context(synthetic: Synthetic) -> None:
    """And the weights once."""
    model = synthetic("llama", "f32")
    parts = []
    for groups in (1, 2):
        shards = load_shards(model, replace(EXACT, groups=groups), place(0, [2]))
        parts.append(shards[0].engine.memory.parts)
        assert len(shards) == groups
        assert len({id(shard.engine.model) for shard in shards}) == 1
        (turns,) = {shard._turns for shard in shards}  # of all, where there are several
        assert (turns is not None) == (groups > 1)
        for shard in reversed(shards):
            shard.close()
    sizes = [ContextSizes(128, cache_type("f16"), batch=32, contexts=groups) for groups in (1, 2)]
    need = [memory.need(model, each) for each in sizes]
    assert need[1].parts["weights"] == need[0].parts["weights"]
    for name in ("KV cache", "compute buffers"):
        assert need[1].parts[name] == 2 * need[0].parts[name] > 0
    assert parts[1]["KV cache"] == 2 * parts[0]["KV cache"]


def test_within_a_budget_both_contexts_are_counted_and_weights_may_not_be_paged(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model, parts = paging.model(tmp_path_factory), list[dict[str, int]]()
    with paging.steady_runtime():
        for groups in (1, 2):
            shards = load_shards(model, replace(paging.OPTIONS, groups=groups), place(0, [2]))
            parts.append(shards[0].engine.memory.parts)
            for shard in reversed(shards):
                shard.close()
        small = paging.least(model) + 3 * paging.MIB  # for the second context
        with pytest.raises(EngineError, match="two groups of requests need all weights in memory"):
            load_shards(model, replace(paging.OPTIONS, memory=small, groups=2), place(0, [2]))
    for name in ("KV cache", "compute buffers", "hidden states"):
        assert parts[1][name] == 2 * parts[0][name] > 0


@pytest.mark.parametrize("groups", [0, MAX_GROUPS + 1])
def test_so_many_groups_there_are_not(groups: int) -> None:
    with pytest.raises(EngineError, match=f"groups must be from 1 to {MAX_GROUPS}, it is {groups}"):
        EngineOptions(groups=groups)


def test_nothing_is_kept_of_recurrent_layers(tmp_path: Path) -> None:
    """Without snapshots nobody could go on from it. Answers are those of one device."""
    (tmp_path / "key").mkdir()
    model = model_of_arch(tmp_path / "lfm2.gguf", "lfm2", layers=4, vocab=320, embd=64, ff=96)
    options = replace(GROUPS, prefixes=PrefixOptions(1 << 22, tmp_path / "kept", tmp_path / "key"))
    requests = [Request(list(range(5 + i, 45 + i)), 4, GREEDY, ends=False) for i in range(2)]
    with Engine(model, replace(EXACT, context=200)) as single:
        expected = Scheduler(single).run(requests)
    with ranks_here(model, tensor(1, 1), options, tmp_path) as engine, Scheduler(engine, keep=True) as scheduler:
        assert isinstance(engine, GroupedEngine)
        assert engine.first.states.keeps
        assert not engine.states.keeps
        assert engine.states.describe() == "nothing on disk: groups of requests have no snapshots of recurrent layers"
        assert scheduler.run(requests) == expected
        assert not any(slot._n_stored for slot in scheduler.slots.all)
