"""Test failed changes of weights: they are tried again, no memory is released too early, and the weights become
complete again.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from edge.errors import WeightsError
from edge.llm.engine import Engine
from edge.weights.arena import ElasticArena, key_of
from edge.weights.direct_file import DirectFile
from edge.weights.elastic.governor import GROW_AFTER_S
from edge.weights.elastic.weights import RETRY_S, next_pass, next_size
from edge.weights.reader import Job, Reader
from edge.weights.window import Piece
from tests.engine.elastic.conftest import Elastic, Memory, engine_in
from tests.engine.elastic.test_changes import budgets
from tests.engine.elastic.test_waits import Gate
from tests.support.helpers import until
from tests.support.paging import OPTIONS, PROMPT


class FaultyDisk:
    """A disk that reads nothing until it `works`. Counts the tries."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.tries, self.works, self._lock = 0, False, threading.Lock()
        read = DirectFile.read

        def fails(file: DirectFile, offset: int, n_bytes: int, into: memoryview) -> int:
            if self.works:
                return read(file, offset, n_bytes, into)
            with self._lock:
                self.tries += 1
            raise WeightsError("the disk is gone")

        patch.setattr(DirectFile, "read", fails)


def test_a_change_that_could_not_begin_is_due_again(elastic: Callable[[str], Elastic]) -> None:
    memory, files = Memory(1 << 30), elastic("llama")
    with engine_in(memory, files.path) as (engine, weights), pytest.MonkeyPatch.context() as patch:
        logits = engine.decode(PROMPT, 0).copy()
        end = weights._ahead.end

        def fails(keep: Sequence[Piece]) -> None:
            patch.setattr(weights._ahead, "end", end)
            raise WeightsError("a read hangs")

        patch.setattr(weights._ahead, "end", fails)
        memory.is_now(weights, budgets(weights.sizes)[2])
        engine.kv_remove(0, 0)
        with pytest.raises(WeightsError, match="a read hangs"):
            engine.decode(PROMPT, 0)
        assert (weights.choice.number, weights._intact) == (0, True)
        smaller = engine.decode(PROMPT, 0)
        assert weights.choice.number == 2
        with Engine(files.static[2], OPTIONS) as other:
            assert np.array_equal(smaller, other.decode(PROMPT, 0))
        assert not np.array_equal(smaller, logits)


def test_weights_that_nobody_uses_are_loaded_after_a_change_that_failed(
    elastic: Callable[[str], Elastic], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, files = Memory(1 << 30), elastic("llama")
    with engine_in(memory, files.path) as (engine, weights):
        disk = FaultyDisk(monkeypatch)
        memory.is_now(weights, budgets(weights.sizes)[2])
        weights.follow()
        assert (weights._intact, disk.tries > 0) == (False, True)
        before = disk.tries
        weights.follow()  # a disk that is gone is not asked ten times a second
        assert disk.tries == before
        memory.now_s += RETRY_S
        weights.follow()
        assert disk.tries > before
        disk.works = True
        memory.now_s += RETRY_S
        weights.follow()
        assert (weights.choice.number, weights._intact, weights.due) == (2, True, None)
        with Engine(files.static[2], OPTIONS) as other:
            assert np.array_equal(engine.decode(PROMPT, 0), other.decode(PROMPT, 0))


def test_a_pass_does_not_wait_for_the_next_try(
    elastic: Callable[[str], Elastic], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a change that is due later, once that pass has tried."""
    memory = Memory(1 << 30)
    with engine_in(memory, elastic("llama").path) as (engine, weights):
        disk = FaultyDisk(monkeypatch)
        memory.is_now(weights, budgets(weights.sizes)[1])
        weights.follow()
        disk.works = True
        engine.decode(PROMPT, 0)
        assert (weights.choice.number, weights._intact) == (1, True)
        memory.is_now(weights, budgets(weights.sizes)[2])
        weights.follow()
        assert (weights.choice.number, weights._intact) == (2, True)


def test_memory_that_reads_of_a_failed_change_still_write_to_is_not_given_back(
    elastic: Callable[[str], Elastic], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would write where nothing is any more, and the process would end."""
    memory, files, gate, hung = Memory(1 << 30), elastic("llama"), Gate(monkeypatch), threading.Event()
    keep_only, wait, too_early = ElasticArena.keep_only, Reader.wait, list[int]()

    with engine_in(memory, files.path) as (engine, weights), ExitStack() as stack:
        stack.callback(gate.opens.set)

        def waits(reader: Reader, job: Job) -> None:
            """Wait for reads that hang, until they do."""
            until(lambda: any(job.at_work for job in weights._jobs.values()), "a read to hang")
            hung.set()
            wait(reader, job)

        def keeps(arena: ElasticArena, pieces: Sequence[Piece]) -> None:
            too_early.append(sum(job.at_work for job in weights._jobs.values()))
            keep_only(arena, pieces)

        monkeypatch.setattr(ElasticArena, "keep_only", keeps)
        memory.is_now(weights, budgets(weights.sizes)[2])
        gate.closes_for(weights.sizes.choose(budgets(weights.sizes)[2]).plan.resident)
        with monkeypatch.context() as patch:
            patch.setattr(Reader, "wait", waits)
            patch.setattr("edge.weights.reader.READ_TIMEOUT_S", 0.0)
            for _ in range(2):
                with pytest.raises(WeightsError, match="check the disk"):
                    engine.decode(PROMPT, 0)
        assert hung.is_set()
        gate.opens.set()
        smaller = engine.decode(PROMPT, 0)
        assert (weights.choice.number, weights._intact) == (2, True)
        with Engine(files.static[2], OPTIONS) as other:
            assert np.array_equal(smaller, other.decode(PROMPT, 0))
    assert too_early
    assert not any(too_early)


def named(name: str) -> set[threading.Thread]:
    """Return the threads with this name."""
    return {thread for thread in threading.enumerate() if thread.name == name}


@pytest.mark.parametrize("name", ["memory ahead", "weights"])
def test_without_a_thread_to_read_ahead_with_all_goes_on(
    elastic: Callable[[str], Elastic], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, start = Memory(1 << 30), threading.Thread.start

    def starts(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with engine_in(memory, elastic("llama").path, grow_wait_s=0.0) as (engine, weights):
        memory.is_now(weights, budgets(weights.sizes)[2])
        engine.decode(PROMPT, 0)
        monkeypatch.setattr(threading.Thread, "start", starts)
        before = named(name)
        memory.is_now(weights, 1 << 30)
        memory.now_s += GROW_AFTER_S / 2
        weights.follow()
        assert (weights._ahead.n_bytes, weights._ahead.left) == (0, 0)
        assert named(name) <= before
        there = {key_of(piece) for piece in weights.plan.resident}
        assert weights._arena._places.keys() == there  # type: ignore[attr-defined]
        memory.now_s += GROW_AFTER_S
        weights.look()
        engine.decode([7], len(PROMPT))  # what is not there is read now
        assert weights.choice.number == 0


def test_what_is_due_is_all_that_counts_while_no_weights_are_there(
    elastic: Callable[[str], Elastic], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More is not read beside weights that are gone, and what is said of the next pass is true."""
    memory = Memory(1 << 30)
    monkeypatch.setattr("edge.weights.elastic.weights._LITTLE", 0)
    with engine_in(memory, elastic("llama").path, grow_wait_s=0.0) as (engine, weights):
        disk = FaultyDisk(monkeypatch)
        memory.is_now(weights, budgets(weights.sizes)[2])
        with pytest.raises(WeightsError, match="the disk is gone"):
            engine.decode(PROMPT, 0)
        memory.is_now(weights, 1 << 30, GROW_AFTER_S)
        due = next_size(weights)
        assert (weights._ahead.budget, due) == (0, 0)
        disk.works = True
        with next_pass(weights) as number:
            assert number == due
        weights.reset()


def test_weights_that_were_given_back_in_part_are_given_back_and_loaded_again(
    elastic: Callable[[str], Elastic],
) -> None:
    """A read of an expert hangs, when the window is free already."""
    memory, files, options = Memory(1 << 30), elastic("qwen3moe"), replace(OPTIONS, prefer="quality")
    with engine_in(memory, files.path, options) as (engine, weights):
        memory.is_now(weights, weights.sizes.least)
        engine.decode(PROMPT[:3], 0)
        experts = weights._experts
        assert experts is not None
        assert weights._pager is not None
        close = experts.close

        def fails() -> None:
            experts.close = close  # type: ignore[method-assign]
            raise WeightsError("a read hangs")

        experts.close = fails  # type: ignore[method-assign]
        memory.is_now(weights, 1 << 30, GROW_AFTER_S)
        engine.kv_remove(0, 0)
        with pytest.raises(WeightsError, match="a read hangs"):
            engine.decode(PROMPT[:3], 0)
        logits = engine.decode(PROMPT[:3], 0)
        assert (weights.choice.number, weights.plan.pages) == (0, False)
        with Engine(files.static[0], options) as other:
            assert np.array_equal(logits, other.decode(PROMPT[:3], 0))
