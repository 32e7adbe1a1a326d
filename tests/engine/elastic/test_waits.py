"""Test how long a change delays a pass: hardly on the way up, and by the time to stop it on the way down."""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.errors import Interrupted, WeightsError
from edge.llama.address_space import AddressSpace
from edge.llama.hooks import Hook
from edge.llm.engine import Engine
from edge.weights.arena import ElasticArena
from edge.weights.direct_file import DirectFile
from edge.weights.elastic.governor import GROW_AFTER_S
from edge.weights.elastic.weights import next_size
from edge.weights.window import Piece
from tests.engine.elastic.conftest import Elastic, ElasticEngine, Memory, engine_in
from tests.engine.elastic.test_changes import WAIT_S, budgets
from tests.support.helpers import until
from tests.support.paging import MIB, OPTIONS, PROMPT


class Gate:
    """Reads of files wait where this says, until it opens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opens, self.closed_for = threading.Event(), list[range]()
        read = DirectFile.read

        def waits(file: DirectFile, offset: int, n_bytes: int, into: memoryview) -> int:
            if any(offset in part for part in self.closed_for) and not self.opens.wait(WAIT_S):
                raise WeightsError("the gate stayed closed")
            return read(file, offset, n_bytes, into)

        monkeypatch.setattr(DirectFile, "read", waits)

    def closes_for(self, pieces: Sequence[Piece]) -> None:
        self.closed_for = [range(p.offset, p.offset + p.n_bytes) for p in pieces]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    monkeypatch.setattr("edge.weights.elastic.weights._LITTLE", 0)
    return Gate(monkeypatch)


def grows(memory: Memory, model: ElasticEngine, gate: Gate, budget: int) -> NDArray[np.float32]:
    """Compute the prompt in a budget; then let all memory be free for long enough, and reads ahead wait. Return the
    logits of the prompt."""
    engine, weights = model
    memory.is_now(weights, budget)
    logits = engine.decode(PROMPT, 0).copy()
    engine.decode([7], len(PROMPT))
    largest = weights.sizes.choose(1 << 30).plan.resident
    now = {piece.offset for piece in (*weights.plan.resident, *weights.plan.streamed)}
    gate.closes_for([piece for piece in largest if piece.offset not in now])
    memory.is_now(weights, 1 << 30, GROW_AFTER_S)
    return logits


def test_passes_go_on_with_fewer_bits_while_more_are_read(elastic: Callable[[str], Elastic], gate: Gate) -> None:
    memory, files = Memory(1 << 30), elastic("llama")
    with engine_in(memory, files.path, grow_wait_s=0.0) as model, ExitStack() as stack:
        stack.callback(gate.opens.set)
        engine, weights = model
        logits = grows(memory, model, gate, budgets(weights.sizes)[2])
        engine.kv_remove(0, 0)
        assert np.array_equal(engine.decode(PROMPT, 0), logits)
        assert (weights.choice.number, next_size(weights)) == (2, 2)
        assert weights._ahead.left
        weights.follow()  # nor is it changed while nothing is computed: the next pass would wait
        assert weights.choice.number == 2
        gate.opens.set()
        until(lambda: not weights._ahead.left, "what is read ahead")
        assert next_size(weights) == 0
        engine.kv_remove(0, 0)
        largest = engine.decode(PROMPT, 0)
        assert weights.choice.number == 0
        with Engine(files.static[0], OPTIONS) as other:
            assert np.array_equal(largest, other.decode(PROMPT, 0))


def test_a_paged_pass_does_not_wait_for_what_is_read_ahead(elastic: Callable[[str], Elastic], gate: Gate) -> None:
    memory = Memory(1 << 30)
    with engine_in(memory, elastic("llama").path, grow_wait_s=0.0) as model, ExitStack() as stack:
        stack.callback(gate.opens.set)
        engine, weights = model
        logits = grows(memory, model, gate, weights.sizes.least)
        weights.follow()
        assert weights._ahead.left
        engine.kv_remove(0, 0)
        assert np.array_equal(engine.decode(PROMPT, 0), logits)
        assert weights.plan.pages


def test_a_change_to_more_is_given_up_where_its_room_goes(elastic: Callable[[str], Elastic], gate: Gate) -> None:
    memory = Memory(1 << 30)
    with engine_in(memory, elastic("llama").path, grow_wait_s=0.0) as model, ExitStack() as stack:
        stack.callback(gate.opens.set)
        engine, weights = model
        budget = budgets(weights.sizes)[2]
        grows(memory, model, gate, budget)
        engine.decode([8], len(PROMPT) + 1)
        assert weights._ahead.left
        gate.opens.set()
        memory.free = budget
        memory.now_s += 0.1
        weights.follow()
        assert (weights._ahead.n_bytes, weights.planned_bytes) == (0, weights.choice.n_bytes)
        engine.decode([9], len(PROMPT) + 2)
        assert weights.choice.number == 2
        assert not weights.due


def test_a_read_ahead_that_fails_is_tried_by_the_change_which_tells(
    elastic: Callable[[str], Elastic], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(1 << 30)
    with engine_in(memory, elastic("llama").path, grow_wait_s=0.0) as model:
        engine, weights = model
        grows(memory, model, gate, budgets(weights.sizes)[2])
        with monkeypatch.context() as patch:

            def fails(file: DirectFile, offset: int, n_bytes: int, into: memoryview) -> int:
                raise WeightsError("the disk is gone")

            patch.setattr(DirectFile, "read", fails)
            weights.follow()
            until(lambda: not weights._ahead.left, "the reads to fail")
            with pytest.raises(WeightsError, match="the disk is gone"):
                engine.decode([8], len(PROMPT) + 1)
        gate.opens.set()
        engine.decode([8], len(PROMPT) + 1)
        assert weights.choice.number == 0


def test_what_is_populated_is_not_given_back_meanwhile(
    elastic: Callable[[str], Elastic], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where room goes while the system is slow to give memory, that is waited for; no more is asked for."""
    memory, begun, goes_on, order = Memory(1 << 30), threading.Event(), threading.Event(), list[str]()
    populate, keep_only = AddressSpace.populate, ElasticArena.keep_only

    def slow(space: AddressSpace, start: int, n_bytes: int) -> None:
        begun.set()
        assert goes_on.wait(WAIT_S)
        populate(space, start, n_bytes)
        order.append("populated")

    def keeps(arena: ElasticArena, pieces: Sequence[Piece]) -> None:
        keep_only(arena, pieces)
        order.append("given back")

    with engine_in(memory, elastic("llama").path, grow_wait_s=0.0) as model:
        engine, weights = model
        budget = budgets(weights.sizes)[2]
        monkeypatch.setattr(AddressSpace, "populate", slow)
        grows(memory, model, gate, budget)
        engine.decode([8], len(PROMPT) + 1)
        assert begun.wait(WAIT_S)
        monkeypatch.setattr(ElasticArena, "keep_only", keeps)
        memory.free = budget
        memory.now_s += 0.1
        gate.opens.set()
        populates = weights._ahead._populates
        assert populates is not None
        join = populates.join

        def joins() -> None:
            goes_on.set()
            join()

        monkeypatch.setattr(populates, "join", joins)
        try:
            weights.follow()
        finally:
            goes_on.set()
        assert order[:2] == ["populated", "given back"]
        assert "populated" not in order[1:]


@pytest.mark.parametrize("rows", [1, len(PROMPT)])
def test_a_pass_is_stopped_and_computed_again_where_memory_shrinks(
    elastic: Callable[[str], Elastic], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of its graph, while rows before it stay."""
    files, memory, stops = elastic("llama"), Memory(1 << 30), list[bool]()
    monkeypatch.setattr("edge.weights.elastic.weights.PASS_WAIT_S", 0.0)
    due = threading.Event()

    def shrinks(_: object) -> None:
        if due.is_set():
            due.clear()
            memory.free = small
            weights.follow()
            stops.append(engine._context.stopping.flag.value == b"x")

    hook = Hook(lambda node: node.name == "l_out-1", shrinks)
    monkeypatch.setattr("edge.weights.elastic.weights._NO_HOOK", hook)
    options = replace(OPTIONS, batch=rows)
    with engine_in(memory, files.path, options) as (engine, weights), Engine(files.static[2], options) as other:
        small = budgets(weights.sizes)[2]
        tokens = [*PROMPT, *PROMPT][: 2 * rows]
        engine.decode(tokens[:rows], 0)
        other.states.write(0, engine.states.read(0, range(rows)))
        due.set()
        logits = engine.decode(tokens[rows:], rows).copy()
        assert stops == [True]
        assert weights.choice.number == 2  # since this very pass
        assert np.array_equal(logits, other.decode(tokens[rows:], rows))
        assert engine.kv_last(0) == 2 * rows - 1
        assert np.array_equal(engine.decode([7], 2 * rows), other.decode([7], 2 * rows))


def test_stopping_a_pass_for_memory_does_not_lose_a_stop_of_somebody_else(
    elastic: Callable[[str], Elastic], monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_in(Memory(1 << 30), elastic("llama").path) as (engine, weights):
        assert weights.stop_pass is not None
        weights.stop_pass()
        engine.stop()
        begin, begun = weights.begin, list[int]()
        with monkeypatch.context() as patch:
            patch.setattr(weights, "begin", lambda rows, n: (begun.append(n), begin(rows, n)))
            with pytest.raises(Interrupted):
                engine.decode(PROMPT, 0)
        assert len(begun) == 1  # it is not begun again, which may load weights, to be stopped then
        engine.resume()
        assert np.isfinite(engine.decode(PROMPT, 0)).all()


def test_a_pass_goes_on_where_less_memory_changes_nothing(
    elastic: Callable[[str], Elastic], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the least that it can run in, the room changes at every look."""
    memory, stops = Memory(42 * MIB), list[bool]()
    monkeypatch.setattr("edge.weights.elastic.weights.PASS_WAIT_S", 0.0)

    def shrinks(_: object) -> None:
        memory.free //= 2
        weights.follow()
        stops.append(engine._context.stopping.flag.value == b"x")

    monkeypatch.setattr("edge.weights.elastic.weights._NO_HOOK", Hook(lambda node: node.name == "l_out-1", shrinks))
    with engine_in(memory, elastic("llama").path) as (engine, weights):
        memory.is_now(weights, weights.sizes.least)
        weights.follow()
        weights.choice = replace(weights.choice, n_bytes=weights.choice.n_bytes + 1)  # chosen in a little more
        engine.decode(PROMPT, 0)
        assert stops == [False]
        assert weights.due


def test_a_pass_is_stopped_only_once(elastic: Callable[[str], Elastic], monkeypatch: pytest.MonkeyPatch) -> None:
    """The next attempt is computed to its end, however often memory shrinks."""
    memory, stops = Memory(1 << 30), list[bool]()
    monkeypatch.setattr("edge.weights.elastic.weights.PASS_WAIT_S", 0.0)

    def shrinks(_: object) -> None:
        memory.free = smaller[min(len(stops), 1)]
        weights.follow()
        stops.append(engine._context.stopping.flag.value == b"x")

    monkeypatch.setattr("edge.weights.elastic.weights._NO_HOOK", Hook(lambda node: node.name == "l_out-1", shrinks))
    with engine_in(memory, elastic("llama").path) as (engine, weights):
        smaller = [budgets(weights.sizes)[2], weights.sizes.least]
        engine.decode(PROMPT, 0)
        assert stops == [True, False]
