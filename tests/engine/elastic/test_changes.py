"""Test weights that change while a model runs: the results are those of the static file of the same size."""

import errno
import os
import shutil
import subprocess
import sys
import threading
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from edge.api.config import EngineConfig
from edge.errors import EngineError, Interrupted, NotEnoughMemory, WeightsError
from edge.llama import ggml
from edge.llama.buffers import Weight
from edge.llm.engine import Engine
from edge.llm.sampler import SamplingParams
from edge.quantization.gguf import quantize
from edge.serve.engine.loop import ServingLoop
from edge.speculate.factory import model_with
from edge.weights.arena import ElasticArena, key_of
from edge.weights.elastic.governor import GROW_AFTER_S, Governor
from edge.weights.elastic.share import MemoryShare, MemoryUse
from edge.weights.elastic.sizes import Preference, Sizes
from edge.weights.load import load_stub
from edge.weights.window import Piece
from partition.model.file import ModelFile
from quant.gguf.elastic import elastic_sizes
from quant.mixes import mix_by_name
from quant.text import bytes_text
from tests.engine.elastic.conftest import Elastic, Memory, engine_in
from tests.serve.test_serving_loop import Replies, begin, run
from tests.support import ROOT
from tests.support.helpers import until
from tests.support.paging import MIB, OPTIONS, PROMPT

ARCHITECTURES = ["llama", "gemma", "qwen3moe"]
WAIT_S = 60.0


def budgets(sizes: Sizes) -> dict[int, int]:
    """Return the largest budget in which each size is in memory whole, by its number, and the least of all by -1."""
    tried = range(1 << 30, sizes.least, -(1 << 18))

    def size_of(budget: int) -> int:
        """Number of the size that is in memory whole; -1 if it is paged."""
        choice = sizes.choose(budget, "speed")
        return -1 if choice.plan.pages else choice.number

    whole: dict[int, int] = {}
    at = 0
    while at < len(tried) and (number := size_of(tried[at])) >= 0:
        whole[number] = tried[at]
        at = bisect(tried, False, at, key=lambda budget: size_of(budget) != number)
    return {**whole, -1: sizes.least}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_after_a_change_logits_are_those_of_the_static_file_on_the_same_keys_and_values(
    elastic: Callable[[str], Elastic], arch: str
) -> None:
    files, memory, n = elastic(arch), Memory(1 << 30), len(PROMPT)
    with engine_in(memory, files.path) as (engine, weights), ExitStack() as stack:
        at = budgets(weights.sizes)
        assert at.keys() == {-1, 0, 1, 2}
        for start in range(0, n, engine.batch):
            engine.decode(PROMPT[start : start + engine.batch], start)
        history = engine.states.read(0, range(n))
        static = [stack.enter_context(Engine(path, OPTIONS)) for path in files.static]
        expected = []
        for other in static:
            other.states.write(0, history)
            expected.append(other.decode([7], n).copy())
        assert not np.array_equal(expected[0], expected[1])
        for target in (1, 2, -1, 0, 2, 1, -1):
            memory.is_now(weights, at[target], WAIT_S)
            logits = engine.decode([7], n).copy()
            assert weights.choice.number == target % 3
            assert weights.plan.pages == (target == -1)
            assert np.array_equal(logits, expected[target])
            engine.kv_remove(0, n)


def test_weights_on_a_gpu_stay_while_those_in_memory_change(
    elastic: Callable[[str], Elastic], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor stands for the GPU."""
    monkeypatch.setattr("edge.weights.budgets.first_gpu", ggml.cpu_device)
    files, memory, n = elastic("llama"), Memory(1 << 30), len(PROMPT)
    with engine_in(memory, files.path, replace(OPTIONS, gpu_layers=2)) as (engine, weights):
        assert engine.gpu_layers is not None
        assert engine.gpu_layers.layers == 2
        at = budgets(weights.sizes)
        for start in range(0, n, engine.batch):
            engine.decode(PROMPT[start : start + engine.batch], start)
        results = {}
        for target in (0, 2, -1, 0, -1, 2, 0):
            memory.is_now(weights, at[target], WAIT_S)
            logits = engine.decode([7], n).copy()
            assert weights.plan.pages == (target == -1)
            assert not {piece.name for piece in weights._roles.pieces} & {"output.weight", "blk.2.ffn_up.weight"}
            np.testing.assert_array_equal(results.setdefault(target, logits), logits)
            engine.kv_remove(0, n)
        assert not np.array_equal(results[0], results[2])
        np.testing.assert_array_equal(results[2], results[-1])


def test_experts_that_are_paged_in_one_size_and_in_memory_in_another_give_the_bits_of_each(
    elastic: Callable[[str], Elastic],
) -> None:
    files, memory, n = elastic("qwen3moe"), Memory(1 << 30), len(PROMPT)
    with engine_in(memory, files.path, replace(OPTIONS, prefer="quality")) as (engine, weights), ExitStack() as stack:
        at = budgets(weights.sizes)
        budget = at[2]
        while weights.sizes.choose(budget - MIB).number == 0:
            budget -= MIB
        paged = {0: budget, 2: weights.sizes.least}
        for start in range(0, n, engine.batch):
            engine.decode(PROMPT[start : start + engine.batch], start)
        history = engine.states.read(0, range(n))
        expected = {}
        for number in paged:
            other = stack.enter_context(Engine(files.static[number], OPTIONS))
            other.states.write(0, history)
            expected[number] = other.decode([7], n).copy()
        for number, pages in ((0, True), (0, False), (2, True), (0, True), (2, True), (0, False)):
            memory.is_now(weights, paged[number] if pages else at[0], WAIT_S)
            logits = engine.decode([7], n).copy()
            assert (weights.choice.number, weights.plan.expert_room > 0) == (number, pages)
            assert np.array_equal(logits, expected[number])
            engine.kv_remove(0, n)
        memory.is_now(weights, weights.sizes.least)
        engine.decode([7], n)
        weights.sizes._prefer = "speed"
        memory.is_now(weights, at[2], WAIT_S)  # the same size, from slots to where all of it stays
        engine.kv_remove(0, n)
        assert np.array_equal(engine.decode([7], n), expected[2])
        assert (weights.choice.number, weights.plan.pages) == (2, False)


def test_a_weight_in_the_type_of_a_size_is_as_in_the_file_of_that_size(elastic: Callable[[str], Elastic]) -> None:
    files = elastic("llama")
    with ExitStack() as stack:

        def weights(path: Path) -> Mapping[str, Weight]:
            model, own = load_stub(ModelFile.open(path))
            stack.callback(own.close)
            stack.callback(model.close)
            return own.weights

        several = weights(files.path)
        for size, path in zip(elastic_sizes(ModelFile.open(files.path)), files.static, strict=True):
            for name, alone in weights(path).items():
                weight = several[name].in_type(size.tensors[name].type.id)
                assert (weight.n_bytes, weight.row_bytes) == (alone.n_bytes, alone.row_bytes)
                assert (weight._type, weight._strides, weight._traits) == (alone._type, alone._strides, alone._traits)


@pytest.mark.parametrize(("prefer", "number", "pages"), [("speed", 2, False), ("quality", 0, True)])
def test_the_preference_decides_between_fewer_bits_and_paging(
    elastic: Callable[[str], Elastic], prefer: Preference, number: int, pages: bool
) -> None:
    memory = Memory(1 << 30)
    with engine_in(memory, elastic("llama").path, replace(OPTIONS, prefer=prefer)) as (engine, weights):
        budget = budgets(weights.sizes)[2]
        memory.is_now(weights, budget)
        engine.decode(PROMPT, 0)
        assert (weights.choice.number, weights.plan.pages) == (number, pages)
        first, second = weights.news()
        assert f"size {bytes_text(weights.choice.size.file_bytes)}" in first
        assert f"{weights.choice.size.divergence:.4f} nats" in first
        assert f" {1e3 * weights.choice.token_s:.0f} ms a token" in first
        assert f"--prefer {'quality' if prefer == 'speed' else 'speed'} would have" in second
        assert weights.news() == []


def test_a_server_says_what_changed(bundled: Elastic) -> None:
    memory, replies = Memory(1 << 30), Replies()
    with engine_in(memory, bundled.path, replace(OPTIONS, context=256)) as (engine, weights):
        loop = ServingLoop(EngineConfig(str(bundled.path)), engine, None, replies.send)
        thread = run(loop)
        memory.is_now(weights, budgets(weights.sizes)[2])
        begin(loop, 1, prompt="Hello", max_tokens=2)
        replies.replies_to(1, "piece")
        loop.end()
        thread.join(WAIT_S)
        [line, _] = [message["say"] for message in replies.messages if "say" in message]
        assert line.startswith("memory: ")
        assert f"size {bytes_text(weights.choice.size.file_bytes)}" in line


def test_below_the_least_the_conversation_goes_on_paged_and_the_least_is_said(
    elastic: Callable[[str], Elastic],
) -> None:
    memory = Memory(1 << 30)
    with engine_in(memory, elastic("llama").path) as (engine, weights):
        engine.decode(PROMPT, 0)
        memory.is_now(weights, MIB)
        assert np.isfinite(engine.decode([7], len(PROMPT))).all()
        assert weights.plan.pages
        assert any(f"{bytes_text(weights.sizes.least)} is the least" in line for line in weights.news())


def test_too_little_to_open_names_the_least(elastic: Callable[[str], Elastic]) -> None:
    path = elastic("llama").path
    with pytest.raises(NotEnoughMemory, match=r"at least \d+ MiB in its smallest size"), engine_in(Memory(MIB), path):
        pass


def test_memory_that_others_take_in_the_middle_of_a_change_is_not_used(elastic: Callable[[str], Elastic]) -> None:
    memory = Memory(1 << 30)
    with engine_in(memory, elastic("llama").path) as (engine, weights):
        at = budgets(weights.sizes)
        memory.is_now(weights, at[2])
        engine.decode(PROMPT, 0)
        memory.is_now(weights, at[0], WAIT_S)
        memory.free = 0  # whatever the look saw
        memory.now_s += 1
        engine.decode([7], len(PROMPT))
        assert weights.plan.pages
        memory.is_now(weights, at[0], WAIT_S)
        engine.decode([8], len(PROMPT) + 1)
        assert (weights.choice.number, weights.plan.pages) == (0, False)


def test_nothing_is_concluded_from_memory_that_is_on_its_way(elastic: Callable[[str], Elastic]) -> None:
    memory = Memory(1 << 30)
    with engine_in(memory, elastic("llama").path) as (engine, weights):
        at = budgets(weights.sizes)
        engine.decode(PROMPT, 0)

        def set_memory(fraction: float) -> None:
            memory.free = MIB  # weights that were given back are not counted as free yet
            weights.look()
            memory.free = at[2]

        weights._shown = set_memory
        memory.is_now(weights, at[2])
        engine.decode([7], len(PROMPT))
        assert not weights.due
        assert (weights.choice.number, weights.plan.pages) == (2, False)


def test_memory_of_what_has_not_arrived_is_given_back(elastic: Callable[[str], Elastic]) -> None:
    with engine_in(Memory(1 << 30), elastic("llama").path) as (_, weights):
        there, coming = weights.plan.resident[:2]
        arena = ElasticArena()
        arena.make_places((there, coming), lambda key: key)
        before = [arena.place(piece)[0] for piece in (there, coming)]
        arena.arrived(there)
        arena.keep_only((there, coming))
        arena.make_places((there, coming), lambda key: key)
        after = [arena.place(piece)[0] for piece in (there, coming)]
        assert [a is b for a, b in zip(before, after, strict=True)] == [True, False]
        arena.close()


def test_what_is_likely_to_be_due_is_read_while_its_room_is_seen_to_stay(elastic: Callable[[str], Elastic]) -> None:
    memory = Memory(1 << 30)
    with engine_in(memory, elastic("llama").path) as (engine, weights):
        largest = engine.decode(PROMPT, 0).copy()
        memory.is_now(weights, budgets(weights.sizes)[2])
        engine.decode([7], len(PROMPT))
        memory.is_now(weights, 1 << 30)
        weights.follow()
        assert (weights.choice.number, weights._ahead.n_bytes) == (2, 0)
        memory.now_s += GROW_AFTER_S / 2
        weights.follow()
        assert weights.choice.number == 2
        assert weights.planned_bytes == weights.choice.n_bytes + weights._ahead.n_bytes
        jobs = weights._ahead._jobs
        until(lambda: all(job.done for job in jobs.values()), "what is read ahead")
        there = {key_of(piece) for piece in (*weights.plan.resident, *jobs)}
        assert 2 * weights._ahead.n_bytes > weights.sizes.most - weights.choice.n_bytes
        engine.decode([8], len(PROMPT) + 1)  # still with the smaller size
        before = weights.reader.counts().n_bytes
        memory.now_s += GROW_AFTER_S / 2
        weights.look()
        engine.kv_remove(0, 0)
        assert np.array_equal(engine.decode(PROMPT, 0), largest)
        assert (weights.choice.number, weights._ahead.n_bytes) == (0, 0)
        table = weights._roles.table
        assert table is not None
        rest = sum(piece.n_bytes for piece in weights.plan.resident if key_of(piece) not in there)
        assert 0 <= weights.reader.counts().n_bytes - before - rest <= len(PROMPT) * table.weight.row_bytes


def test_what_was_read_ahead_is_given_back_where_its_room_goes(elastic: Callable[[str], Elastic]) -> None:
    memory = Memory(1 << 30)
    with engine_in(memory, elastic("llama").path) as (engine, weights):
        smallest = budgets(weights.sizes)[2]
        memory.is_now(weights, smallest)
        logits = engine.decode(PROMPT, 0).copy()
        for seconds in (0.0, GROW_AFTER_S / 2):
            memory.now_s += seconds
            memory.free = 1 << 30
            weights.follow()
        assert weights._ahead.n_bytes
        memory.free = smallest
        memory.now_s += 0.1
        weights.follow()
        assert weights._ahead.n_bytes == 0
        assert weights._arena._places.keys() == {key_of(piece) for piece in weights.plan.resident}  # type: ignore[attr-defined]
        engine.kv_remove(0, 0)
        assert np.array_equal(engine.decode(PROMPT, 0), logits)


def test_a_budget_just_below_the_one_of_the_largest_size_grows_to_it(elastic: Callable[[str], Elastic]) -> None:
    with engine_in(Memory(1 << 30), elastic("llama").path) as (engine, weights):
        most, whole = engine.memory.budget, weights.sizes.most
    assert most is not None
    governor = Governor(most, whole - 1)
    for now_s in (0.0, GROW_AFTER_S):
        budget = governor.look(1 << 30, 0, 0.0, now_s)
    assert whole <= budget == most


def test_what_is_read_ahead_of_more_and_less_room_is_counted_and_has_room(elastic: Callable[[str], Elastic]) -> None:
    memory = Memory(1 << 30)
    with engine_in(memory, elastic("llama").path) as (engine, weights):
        memory.is_now(weights, budgets(weights.sizes)[2])
        weights.follow()
        weights.sizes._prefer = "quality"  # other weights of the largest size stay in each budget
        ahead, now = weights._ahead, weights.choice
        assert engine.memory.budget is not None
        room, most_read = engine.memory.budget - now.n_bytes, 0
        for less, more in product(range(7, 13), range(17, 25)):
            ahead.end(now.plan.resident)
            for part in (less, more, less):
                budget = now.n_bytes + room * part // 24
                ahead.follow(weights.sizes, budget, now)
                until(lambda: all(job.done for job in ahead._jobs.values()), "what is read ahead")
                there = {key_of(piece) for piece in (*now.plan.resident, *ahead._jobs)}
                assert weights._arena._places.keys() == there  # type: ignore[attr-defined]
                assert now.n_bytes + ahead.n_bytes <= budget
                most_read = max(most_read, ahead.n_bytes)
        assert most_read > room / 2


def test_what_is_read_ahead_takes_no_bits_away_where_its_room_goes(elastic: Callable[[str], Elastic]) -> None:
    memory = Memory(1 << 30)
    with engine_in(memory, elastic("llama").path) as (_, weights):
        budget = budgets(weights.sizes)[2]
        memory.is_now(weights, budget)
        weights.follow()
        for seconds in (0.0, GROW_AFTER_S / 2):
            memory.now_s += seconds
            memory.free = 1 << 30
            weights.follow()
        assert weights._ahead.n_bytes
        memory.free = weights.choice.n_bytes  # room for what is loaded, and for nothing else
        memory.now_s += 0.1
        weights.follow()
        assert (weights._governor.budget, weights._ahead.n_bytes) == (budget, 0)


def test_reading_ahead_without_addresses_ends_neither_the_watch_nor_a_change(
    elastic: Callable[[str], Elastic], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(1 << 30)
    with engine_in(memory, elastic("llama").path) as (engine, weights):
        at = budgets(weights.sizes)
        memory.is_now(weights, at[2])
        weights.follow()
        memory.is_now(weights, 1 << 30)
        memory.now_s += GROW_AFTER_S / 2
        with monkeypatch.context() as patch:
            patch.setattr("edge.weights.arena.AddressSpace", Mock(side_effect=OSError(errno.ENOMEM, "no addresses")))
            weights.follow()
            assert weights._ahead.n_bytes == 0
            memory.is_now(weights, weights.sizes.least)
            weights.follow()  # what was read is given back all the same
            assert weights.choice.plan.pages
        memory.is_now(weights, 1 << 30, WAIT_S)
        engine.decode(PROMPT, 0)
        assert weights.choice.number == 0


def test_weights_that_are_closed_read_nothing_ahead(elastic: Callable[[str], Elastic]) -> None:
    memory = Memory(1 << 30)
    with engine_in(memory, elastic("llama").path) as (_, weights):
        memory.is_now(weights, budgets(weights.sizes)[2])
        weights.follow()
        memory.is_now(weights, 1 << 30)
    memory.now_s += GROW_AFTER_S / 2
    weights.follow()
    assert (weights._ahead.n_bytes, weights._arena._places) == (0, {})  # type: ignore[attr-defined]


def test_what_a_change_gives_back_is_reported_when_it_is_free(
    elastic: Callable[[str], Elastic], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever divides a budget gives it to others at once."""
    memory, share, reported = Memory(1 << 30), MemoryShare(), list[MemoryUse]()
    share.join(lambda least, most: None, reported.append)
    with engine_in(memory, elastic("llama").path) as (_, weights):
        share.limit = 1 << 30
        weights._room, release = replace(memory.room, share=share), weights._release
        weights.follow()
        [before] = reported
        with monkeypatch.context() as patch:

            def releases() -> None:
                weights.follow()
                assert {use.resident for use in reported} == {before.resident}
                release()

            patch.setattr(weights, "_release", releases)
            share.limit = budgets(weights.sizes)[2]
            weights.follow()
        assert weights.choice.number == 2
        assert reported[-1].resident < before.resident


def test_a_share_that_nothing_has_to_change_for_is_followed(elastic: Callable[[str], Elastic]) -> None:
    """Others wait until it is reported."""
    memory, share, reported = Memory(1 << 30), MemoryShare(), list[MemoryUse]()
    share.join(lambda least, most: None, reported.append)
    with engine_in(memory, elastic("llama").path) as (_, weights):
        at = budgets(weights.sizes)
        weights._room = replace(memory.room, share=share)
        for share.limit in (at[1], (at[1] + at[2]) // 2):
            for _ in range(2):
                weights.follow()
            assert weights.choice.number == 1
            assert weights.choice.n_bytes < reported[-1].resident <= share.limit


def test_nothing_is_called_at_nodes_while_all_weights_stay(elastic: Callable[[str], Elastic]) -> None:
    memory = Memory(1 << 30)
    with engine_in(memory, elastic("llama").path) as (engine, weights):
        hooks = engine._loaded.hooks
        assert hooks is not None
        for room, pages in ((1 << 30, False), (weights.sizes.least, True), (1 << 30, False)):
            memory.is_now(weights, room, WAIT_S)
            weights.follow()
            assert (weights.plan.pages, bool(hooks._hooks)) == (pages, pages)


class Waited:
    """A lock that tells when somebody waits for it."""

    def __init__(self) -> None:
        self.waits, self._lock = threading.Event(), threading.Lock()

    def acquire(self, blocking: bool = True) -> bool:
        if blocking:
            self.waits.set()
        return self._lock.acquire(blocking)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def test_closing_waits_for_what_is_being_read_ahead(
    elastic: Callable[[str], Elastic], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, lock, order = Memory(1 << 30), Waited(), list[str]()
    keep_only = ElasticArena.keep_only
    with engine_in(memory, elastic("llama").path) as (engine, weights):
        memory.is_now(weights, budgets(weights.sizes)[2])
        weights.follow()
        memory.is_now(weights, 1 << 30)
        memory.now_s += GROW_AFTER_S / 2
        closing = threading.Thread(target=engine.close)

        def keeps(arena: ElasticArena, pieces: Sequence[Piece]) -> None:
            if threading.current_thread() is closing:
                order.append("closed")
                lock.waits.set()
            else:
                closing.start()
                assert lock.waits.wait(WAIT_S)
                order.append("read ahead")
            keep_only(arena, pieces)

        monkeypatch.setattr(weights, "_arena_lock", lock)
        monkeypatch.setattr(ElasticArena, "keep_only", keeps)
        weights.follow()
        closing.join(WAIT_S)
        assert not closing.is_alive()
        assert order == ["read ahead", "closed"]


def test_closing_does_not_wait_for_all_of_a_change(elastic: Callable[[str], Elastic]) -> None:
    memory, shown = Memory(1 << 30), list[float]()
    with engine_in(memory, elastic("llama").path) as (_, weights):
        watch = weights._watch
        assert watch is not None

        def closes(fraction: float) -> None:
            memory.now_s += 1
            shown.append(fraction)
            watch.close()

        weights._shown = closes
        memory.is_now(weights, budgets(weights.sizes)[2])
        with pytest.raises(Interrupted):
            weights.follow()
        assert len(shown) == 1
    assert weights._arena._places == {}  # type: ignore[attr-defined]


def test_weights_change_while_nothing_is_computed_also_after_an_interrupted_pass(
    elastic: Callable[[str], Elastic],
) -> None:
    memory = Memory(1 << 30)
    with engine_in(memory, elastic("llama").path) as (engine, weights):
        at = budgets(weights.sizes)
        engine.stop()
        with pytest.raises(Interrupted):
            engine.decode(PROMPT, 0)
        engine.resume()
        memory.is_now(weights, at[2])
        weights.follow()
        assert weights.choice.number == 2
        assert weights.planned_bytes == weights.choice.n_bytes < at[2]


def test_a_file_that_was_changed_in_place_ends_the_pass_and_not_the_process(
    elastic: Callable[[str], Elastic], tmp_path: Path
) -> None:
    path = shutil.copy(elastic("llama").path, tmp_path)
    call = f"from {__name__} import changed_in_place; changed_in_place({str(path)!r})"
    done = subprocess.run([sys.executable, "-c", call], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr


def changed_in_place(name: str) -> None:
    """Compute with a file before, while and after it is another one. In a process of its own: what reads weights that
    are gone ends it."""
    path, memory = Path(name), Memory(1 << 30)
    with engine_in(memory, path) as (engine, weights):
        engine.decode(PROMPT, 0)
        before = path.stat().st_mtime_ns
        os.utime(path, ns=(1, 1))
        memory.is_now(weights, budgets(weights.sizes)[1])
        for _ in range(2):  # the next pass does not compute with half of it
            with pytest.raises(WeightsError, match="changed while in use"):
                engine.decode([7], len(PROMPT))
        os.utime(path, ns=(before, before))
        assert np.isfinite(engine.decode([7], len(PROMPT))).all()


def test_without_a_range_it_is_the_largest_size_for_us_and_for_stock_llama_cpp(
    elastic: Callable[[str], Elastic],
) -> None:
    files, stock = elastic("llama"), replace(OPTIONS, memory=None, io_threads=None, io_chunk=None)
    for options in (OPTIONS, stock):
        with Engine(files.path, options) as engine, Engine(files.static[0], options) as other:
            assert np.array_equal(engine.decode(PROMPT, 0), other.decode(PROMPT, 0))


def test_a_file_of_several_sizes_is_not_quantized_again(elastic: Callable[[str], Elastic], tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="several sizes"):
        quantize(ModelFile.open(elastic("llama").path), tmp_path / "out.gguf", mix_by_name("q4_0"))


def test_drafts_and_paging_change_no_token(bundled: Elastic) -> None:
    """Bits that do not change give equal tokens, whatever else is in use."""
    answers = []
    for pages, draft in ((False, "off"), (False, "ngram"), (True, "ngram"), (True, "off")):
        memory, options = Memory(1 << 30), replace(OPTIONS, context=256, prefer="quality", outputs=8)
        with engine_in(memory, bundled.path, options) as (engine, weights):
            if pages:
                memory.is_now(weights, weights.sizes.least + 2 * MIB)
            sampling = SamplingParams(temperature=0.0)
            responses = model_with(draft, engine, engine.close).generate("4 plus 4 is", sampling, max_tokens=24)
            answers.append([response.token_id for response in responses])
            assert (weights.choice.number, weights.plan.pages) == (0, pages)
    assert len(answers[0]) > 4
    assert all(answer == answers[0] for answer in answers)
