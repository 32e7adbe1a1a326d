"""Test experts under a budget: the experts that the router chose are in memory, never more than fit, and they are
counted.
"""

import errno
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge.errors import EngineError, WeightsError
from edge.llama import llama
from edge.llama.address_space import PAGE
from edge.llama.buffers import CallerBuffer
from edge.llama.hooks import Hook
from edge.llm.engine import Engine
from edge.weights import node_hooks
from edge.weights import reader as reader_module
from edge.weights.direct_file import DirectFile
from edge.weights.experts import Experts
from edge.weights.load import load_stub
from edge.weights.reader import Reader
from edge.weights.roles import Roles, sort_weights
from quant.gguf.file import GgufFile
from tests.engine.paging.conftest import MakeModel
from tests.engine.paging.test_paging_ring import Bytes, bytes_at
from tests.support import paging
from tests.support.helpers import TIMEOUT_S, until
from tests.support.paging import EXPERTS, OPTIONS, PROMPT, answer, least, paged

USED = 2
N_EXPERTS, N_LAYERS = 16, 4


# The store of experts.


@dataclass
class Stored:
    """The experts of a model, none of them in memory."""

    model: llama.Model
    own: CallerBuffer
    file: DirectFile
    data: GgufFile
    roles: Roles

    def experts(self, slots: int, reader: Reader) -> Experts:
        """A store with room for so many."""
        size = Experts.expert_bytes(self.roles.experts[0])
        experts = Experts(self.roles.experts, slots * size + 100, reader)
        assert experts.n_slots == slots
        return experts

    def right(self, layer: int, number: int, slot: int) -> Iterator[tuple[Bytes, Bytes]]:
        """(bytes where graphs look for an expert, bytes of the file) of all its weights."""
        for piece in self.roles.experts[layer]:
            tensor = piece.weight._tensor
            n_bytes = piece.weight.n_bytes // N_EXPERTS
            plain = np.frombuffer(self.data.data(piece.weight.name), np.uint8)
            yield bytes_at(tensor.data + slot * tensor.nb[2], n_bytes), plain[number * n_bytes :][:n_bytes]


def chosen_there(stored: Stored, experts: Experts, layer: int, numbers: set[int]) -> None:
    """Choose experts, and see that each of their weights has the file's bytes where its slot is."""
    slots = experts.choose(layer, sorted(numbers))
    assert set(slots) == numbers
    assert len(set(slots.values())) == len(numbers)
    for bank in range(3):
        experts.wait(bank)
        assert experts.arrived(bank)
    for number, slot in slots.items():
        for result, plain in stored.right(layer, number, slot):
            np.testing.assert_array_equal(result, plain)


@pytest.fixture
def stored(make_model: MakeModel) -> Iterator[Stored]:
    path = make_model("qwen3moe")
    file = GgufFile.open(path)
    model, own = load_stub(file)
    opened = DirectFile(path, path.stat().st_size)
    sources = {name: (opened, tensor.offset) for name, tensor in file.tensors.items()}
    yield Stored(model, own, opened, file, sort_weights(own.weights, sources, repack=False, tokens=True))
    model.close()
    own.close()
    opened.close()


numbers = st.sets(st.integers(0, N_EXPERTS - 1), min_size=1)
steps = st.lists(st.tuples(st.integers(0, N_LAYERS - 1), numbers))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps, slots=st.integers(1, 24), threads=st.integers(1, 3))
def test_what_is_chosen_is_there_and_no_more_than_fits(
    stored: Stored, steps: list[tuple[int, set[int]]], slots: int, threads: int
) -> None:
    reader = Reader(paging.MIB, threads, 64 << 10)
    experts = stored.experts(slots, reader)
    chosen = 0
    try:
        for layer, some in steps:
            target = set(sorted(some)[:slots])  # more than fit are never asked for
            chosen_there(stored, experts, layer, target)
            chosen += len(target)
            used = sorted([*experts._free, *(cached.slot for cached in experts._cached.values())])
            assert used == list(range(slots))  # each slot has one expert or none
        counts = experts.counts
        assert counts.chosen == chosen
        assert counts.hits <= counts.chosen
    finally:
        reader.close()
        experts.close()


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(choices=st.lists(st.tuples(st.integers(0, N_LAYERS - 1), numbers), max_size=12), slots=st.integers(1, 20))
def test_those_used_longest_ago_go_first(stored: Stored, choices: list[tuple[int, set[int]]], slots: int) -> None:
    reader = Reader(paging.MIB, 2, 64 << 10)
    experts = stored.experts(slots, reader)
    current: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = 0
    try:
        for layer, some in choices:
            expected = [(layer, number) for number in sorted(some)[:slots]]
            hits += sum(item in current for item in expected)
            for item in (
                *(item for item in expected if item in current),
                *(item for item in expected if item not in current),
            ):
                current[item] = None
                current.move_to_end(item)
            while len(current) > slots:
                current.popitem(last=False)
            chosen_there(stored, experts, layer, {number for _, number in expected})
            assert set(experts._cached) == set(current)
        assert experts.counts.hits == hits
    finally:
        reader.close()
        experts.close()


def test_hits_and_misses_by_known_choices(stored: Stored) -> None:
    """Room for four: the fifth takes the place of the one used longest ago, in whatever layer that is."""
    reader = Reader(paging.MIB, 2, 64 << 10)
    experts = stored.experts(4, reader)
    hits = []
    for layer, numbers in ((0, {1, 2}), (1, {1, 2}), (0, {1, 3}), (1, {1}), (0, {2}), (0, {1, 3})):
        before = experts.counts.hits
        chosen_there(stored, experts, layer, numbers)
        hits.append(experts.counts.hits - before)
    assert hits == [0, 0, 1, 1, 0, 2]  # the third goes to the place of (0, 2), which comes back in that of (1, 2)
    assert experts.counts.chosen == 10
    reader.close()
    experts.close()


def test_reading_one_weight_of_an_expert_leaves_the_others(stored: Stored) -> None:
    """They lie behind each other in a slot, and reads are of whole pages."""
    reader = Reader(paging.MIB, 2, 64 << 10)
    experts = stored.experts(3, reader)
    try:
        chosen_there(stored, experts, 1, {4, 5, 6})
        for bank in (2, 1, 0):
            slot = experts._cached[1, 5].slot * experts._slot_bytes
            reader.wait(reader.submit(experts._banks[1][bank].read(5, slot, experts._arena)))
            for number in (4, 5, 6):
                for result, plain in stored.right(1, number, experts._cached[1, number].slot):
                    np.testing.assert_array_equal(result, plain)
    finally:
        reader.close()
        experts.close()


def test_expert_whose_read_failed_is_read_again(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    reader = Reader(paging.MIB, 2, 64 << 10)
    experts = stored.experts(8, reader)
    try:
        with monkeypatch.context() as bad:
            bad.setattr(os, "preadv", fail)
            experts.choose(0, {1, 2})
            until(lambda: all(job.error for c in experts._cached.values() for job in c.jobs), "all reads fail")
        chosen_there(stored, experts, 0, {1, 3})
        assert experts.counts.hits == 0
        chosen_there(stored, experts, 0, {2})
    finally:
        reader.close()
        experts.close()


def test_a_read_that_hangs_costs_no_slot(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, read = threading.Event(), os.preadv

    def stuck(descriptor: int, into: list[memoryview], offset: int) -> int:
        go_on.wait(TIMEOUT_S)
        return read(descriptor, into, offset)

    reader = Reader(paging.MIB, 2, 64 << 10)
    experts = stored.experts(2, reader)
    try:
        with monkeypatch.context() as bad:
            bad.setattr(os, "preadv", stuck)
            bad.setattr(reader_module, "READ_TIMEOUT_S", 0.05)
            experts.choose(0, {1, 2})
            until(lambda: reader._at_work == 2, "both threads read")
            for _ in range(2):
                with pytest.raises(WeightsError, match=r"arrived in 0\.05 s"):
                    experts.choose(0, {3, 4})
            go_on.set()
        for numbers in ({1, 2}, {3, 4}, {5, 6}):
            chosen_there(stored, experts, 0, numbers)
        assert len(experts._cached) + len(experts._free) == 2
    finally:
        go_on.set()
        reader.close()
        experts.close()


# In an engine.


@pytest.mark.parametrize("arch", EXPERTS)
def test_the_router_chooses_what_it_does_with_all_in_memory_and_choices_add_up(
    make_model: MakeModel, arch: str
) -> None:
    path = make_model(arch)
    seen: list[tuple[str, list[list[int]]]] = []
    hook = Hook(
        lambda node: node.name.startswith("ffn_moe_topk-"),
        lambda node: seen.append((node.name, node.integers().tolist())),
    )
    with Engine(path, paging.unpaged(), hooks=[hook]) as engine:
        answer(engine, chunk=1)
    expected, seen[:] = list(seen), []
    with paging.steady_runtime(), Engine(path, replace(OPTIONS, memory=least(path)), hooks=[hook]) as engine:
        assert engine.paging is not None
        engine.paging.clear_stats()
        answer(engine, chunk=1)
        assert seen == expected
        stats = engine.paging.stats().decode
        current = engine.paging._experts
        assert current is not None
        assert stats.tokens == len(PROMPT) + 11
        assert current.counts.chosen == sum(len({n for row in rows for n in row}) for _, rows in seen)
        assert 0 <= current.counts.hits < current.counts.chosen
        assert stats.hit_rate == current.counts.hits / current.counts.chosen
        assert current._arena.n_bytes <= engine.paging.plan.expert_room + PAGE
        # Each expert that was not in memory was read.
        size = current._slot_bytes
        missing = current.counts.chosen - current.counts.hits
        assert stats.bytes_per_token * stats.tokens >= missing * (size - 3 * 4096)


@pytest.mark.parametrize("arch", EXPERTS)
def test_more_room_means_more_hits_and_fewer_bytes(make_model: MakeModel, arch: str) -> None:
    path = make_model(arch)
    rates, n_bytes = [], []
    low = least(path)
    for memory in (low, low + 4 * paging.MIB, low + 12 * paging.MIB):
        with paged(path, memory) as engine:
            assert engine.paging is not None
            answer(engine, chunk=1)
            engine.paging.clear_stats()
            engine.kv_clear()
            answer(engine, chunk=1)
            stats = engine.paging.stats().decode
            rates.append(stats.hit_rate)
            n_bytes.append(stats.bytes_per_token)
    assert max(rates) == rates[-1] > 0.5
    assert rates[0] < rates[2]
    assert n_bytes == sorted(n_bytes, reverse=True)


@pytest.mark.parametrize("arch", EXPERTS)
def test_a_batch_is_no_longer_than_the_room_for_its_experts(make_model: MakeModel, arch: str) -> None:
    path = make_model(arch)
    batches = []
    for more in (0, 1, 3, 40):
        with paged(path, least(path) + more * paging.MIB) as engine:
            assert engine.paging is not None
            batches.append(engine.batch)
            plan = engine.paging.plan
            slots = engine.paging._experts.n_slots if plan.expert_room else N_EXPERTS
            assert slots >= N_EXPERTS or engine.batch * USED <= slots
            with pytest.raises(EngineError, match=f"1 to {engine.batch} tokens"):
                engine.decode([5] * (engine.batch + 1), 0)
    assert batches == sorted(batches)
    assert batches[0] < 16 <= batches[-1]


def test_sequences_of_a_model_with_little_room_for_experts(make_model: MakeModel) -> None:
    """A row of each sequence must fit into one decode; llama.cpp would end the process over less."""
    path = make_model("qwen3moe")
    options = replace(OPTIONS, sequences=8)
    with paged(path, least(path, options), options) as engine:
        assert engine.batch >= 8
        rows = engine.rows
        rows.tokens[:8], rows.positions[:8] = PROMPT[:8], 0
        rows.sequences[:8], rows.outputs[:8] = range(8), 1
        engine.decode_rows(rows, 8)
        result = np.stack([engine.logits(i) for i in range(8)])
    with paging.resident(path, options) as engine:
        engine.rows.tokens[:8], engine.rows.positions[:8] = PROMPT[:8], 0
        engine.rows.sequences[:8], engine.rows.outputs[:8] = range(8), 1
        engine.decode_rows(engine.rows, 8)
        np.testing.assert_array_equal(result, np.stack([engine.logits(i) for i in range(8)]))


def test_experts_that_nobody_has_chosen_are_refused(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their product has numbers of experts where it needs slots, over which ggml would end the process."""
    path = make_model("qwen3moe")
    monkeypatch.setattr(node_hooks, "_CHOSEN", re.compile("another name"))
    with paged(path, least(path)) as engine:
        for _ in range(2):
            engine.kv_clear()
            with pytest.raises(EngineError, match=r"blk\.0\.ffn_gate_exps\.weight in a way that cannot be paged"):
                answer(engine)


def test_reads_of_chosen_experts_that_fail_end_the_decode_only(make_model: MakeModel) -> None:
    """At each weight of the experts."""
    path = make_model("qwen3moe")
    with paged(path, least(path)) as engine:
        expected = answer(engine)
        assert engine.paging is not None
        experts = engine.paging._experts
        assert experts is not None
        assert experts.n_slots < N_EXPERTS  # numbers of experts are beyond the slots
        for bad in range(3):
            engine.kv_clear()
            with pytest.MonkeyPatch.context() as broken:
                wait = experts.wait

                def fail(bank: int, bad: int = bad, wait: Callable[[int], None] = wait) -> None:
                    if bank == bad:
                        raise WeightsError("Input/output error")
                    wait(bank)

                broken.setattr(experts, "wait", fail)
                with pytest.raises(WeightsError, match="Input/output error"):
                    answer(engine)
            engine.kv_clear()
            np.testing.assert_array_equal(answer(engine), expected)


def test_no_graph_is_changed_between_passes(make_model: MakeModel) -> None:
    """It may be freed with its context before the next pass, of another one."""
    path = make_model("qwen3moe")
    with paged(path, least(path)) as engine:
        assert engine.paging is not None
        hooks = engine.paging._at_nodes
        seen = []
        await_bank = hooks._experts.wait  # type: ignore[union-attr]

        def wait(bank: int) -> None:
            await_bank(bank)
            seen.append(len(hooks._restores))

        hooks._experts.wait = wait  # type: ignore[union-attr, method-assign]
        engine.decode([5], 0)
        assert max(seen) == 3 * N_LAYERS
        assert not hooks._restores
