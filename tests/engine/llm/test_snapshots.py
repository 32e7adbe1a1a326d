"""Test models with recurrent layers: a shared prefix is not computed again, in memory, from disk and on several
devices; wrong drafts are undone. In F32, all results equal those of a single pass on one device.
"""

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from devices.sleeping import VARIABLE
from edge.cluster.preflight import shared_rollback
from edge.errors import EngineError, Interrupted
from edge.llm import engine as engine_module
from edge.llm import snapshots
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions, PrefixOptions
from edge.llm.scheduler import Scheduler
from edge.llm.slot import Slot
from edge.llm.snapshots import ANSWER_TOKENS, LAST_TOKENS, affordable
from edge.planning import measure
from edge.prefixes.keys import derived
from edge.speculate.bench import pass_ms
from edge.speculate.factory import speculation, with_room
from partition.architectures.recurrent import RECURRENT_ARCHITECTURES
from partition.model.file import ModelFile
from partition.plan.arrange import make_plan
from partition.predict.drafts import ROLLBACK_ROWS
from partition.slices.gguf_slice import limits
from tests.support.architectures import CLOSE, ROLLS_BACK
from tests.support.drafting import GREEDY, Known, always, ids, run, speculate
from tests.support.nine_layers import SPREAD, engine_of, model_of
from tests.support.paging import ALL_FITS, least, paged
from tests.support.ranks_here import ranks_here
from tests.support.replaceable import Mortal, replaceable
from tests.support.slices import synthetic
from tests.support.thorough import thorough

OPTIONS = EngineOptions(threads=1, context=400, batch=64, kv_type="f32", flash_attention="off", repack=False)
USUALLY = ("qwen35", "lfm2", "granitehybrid", "nemotron_h", "mamba2")
ARCHS = [*USUALLY, *thorough(*(arch for arch in RECURRENT_ARCHITECTURES if arch not in USUALLY))]
DRAFTING = ["qwen35", "lfm2", *thorough(*(arch for arch in ROLLS_BACK if arch not in ("qwen35", "lfm2")))]
FIRST = [270 + 3 * i % 40 for i in range(120)]
NEXT = [*FIRST[:90], *range(300, 311)]  # begins like it
BORDER = (len(FIRST) - LAST_TOKENS) // 8 * 8  # the last snapshot of the first prompt


def on_disk(options: EngineOptions, folder: Path) -> EngineOptions:
    return replace(options, prefixes=PrefixOptions(1 << 30, folder / "kept", folder / "key"))


def at_once(model: Path, prompt: list[int]) -> NDArray[np.float32]:
    """Logits of one device that knows nothing of an earlier prompt."""
    with Engine(model, OPTIONS) as engine:
        return Slot(engine).prefill(prompt).copy()


def apart(logits: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float(np.abs(logits - expected).max() / expected.std())


@pytest.mark.parametrize("arch", ARCHS)
def test_a_prompt_goes_on_from_the_last_snapshot_of_what_it_shares(arch: str, tmp_path: Path) -> None:
    """Also after a restart, from disk, and where nothing is stored there."""
    model = model_of(arch, tmp_path)
    expected = at_once(model, NEXT)
    options = on_disk(OPTIONS, tmp_path)
    with Engine(model, options) as engine:
        slot = Slot(engine)
        slot.prefill(FIRST)
        assert slot.computed == len(FIRST)
        slot.keep()
        assert apart(slot.prefill(NEXT), expected) < 1e-5
        assert (slot.computed, slot.restored) == (len(NEXT) - BORDER, 0)
        is_kept = engine.states.keeps
    with Engine(model, options) as engine:
        slot = Slot(engine)
        assert apart(slot.prefill(NEXT), expected) < 1e-5
        restored = BORDER if is_kept else 0
        assert (slot.computed, slot.restored) == (len(NEXT) - restored, restored)


@pytest.mark.parametrize(
    ("arch", "how"),
    [("lfm2", "stages"), ("lfm2", "thin"), ("lfm2", "tensor"), ("qwen35", "stages"), ("mamba2", "thin")],
)
def test_ranks_go_on_from_snapshots_of_their_own(arch: str, how: str, tmp_path: Path) -> None:
    model = model_of(arch, tmp_path)
    expected, options = at_once(model, NEXT), on_disk(OPTIONS, tmp_path)
    for is_first in (True, False):
        with engine_of(model, how, options, tmp_path) as ranks:
            slot = Slot(ranks)
            if is_first:
                slot.prefill(FIRST)
                slot.keep()
            assert apart(slot.prefill(NEXT), expected) < CLOSE.get(arch, 1e-5)
            assert (slot.computed, slot.restored) == (len(NEXT) - BORDER, 0 if is_first else BORDER)


def test_sleeping_ranks_of_a_thin_owner_note_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text('{"preset": "pi4"}')
    monkeypatch.setenv(VARIABLE, str(profile))
    model, options, shards = model_of("lfm2", tmp_path), on_disk(OPTIONS, tmp_path), list[Any]()
    with ranks_here(model, SPREAD["thin"], options, tmp_path, shards) as ranks:
        slot = Slot(ranks)
        slot.prefill(FIRST)
        slot.keep()
        slot.prefill(NEXT)
        last = ranks.states.block_hashes(FIRST[:BORDER])[-1]
        assert [shard.engine.states.snapshots.has(last) for shard in shards] == [True, True, True]


@pytest.mark.parametrize(
    ("how", "there", "here", "rows"),
    [("stages", 1 << 30, 1 << 30, 4), ("stages", 64 << 20, 1 << 30, 0), ("stages", 1 << 30, 70 << 20, 0),
     ("thin", 1 << 30, 1 << 30, 0)],
)  # fmt: skip
def test_ranks_forget_as_many_rows_as_the_smallest_has_memory_for(
    how: str, there: int, here: int, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a plan that fits without drafts fits with them."""
    monkeypatch.setattr("edge.cluster.preflight.available_memory", lambda: here)
    path = synthetic(tmp_path / "m.gguf", "qwen35", layers=9, vocab=320, embd=64, ff=96)
    file = ModelFile.open(path)
    shares = SPREAD[how]["shares"]
    devices = ["local", *(f"rank-{i}" for i in range(1, len(shares)))]
    plan = make_plan(limits(file), "m", "", devices, **SPREAD[how])
    fleet: Any = SimpleNamespace(
        profiles={name: SimpleNamespace(memory_limit_bytes=there) for name in devices},
        memory_of=lambda address: there if address == devices[-1] else 1 << 30,
    )
    slices: Any = {rank: [SimpleNamespace(weight_bytes=6 << 20)] for rank in range(len(devices))}
    options = replace(OPTIONS, rollback=4)
    assert shared_rollback(fleet, plan, slices, file, options) == rows


def test_a_rank_that_lost_its_snapshot_is_asked_for_the_one_before(tmp_path: Path) -> None:
    """All ranks go on from the same one; where no rank has any, all is computed again."""
    model = model_of("lfm2", tmp_path)
    expected, shards = at_once(model, NEXT), list[Any]()
    with ranks_here(model, SPREAD["stages"], OPTIONS, tmp_path, shards) as ranks:
        slot = Slot(ranks)
        slot.prefill(FIRST)
        last = ranks.states.block_hashes(FIRST[:BORDER])[-1]
        current = shards[1].engine.states.snapshots._cache._snapshots
        del current[last]
        assert apart(slot.prefill(NEXT), expected) < 1e-5
        assert slot.computed == len(NEXT) - (len(FIRST) - 2 * LAST_TOKENS) // 8 * 8
        current.clear()
        slot.prefill(FIRST[:50])
        assert slot.computed == 50


def test_ranks_whose_files_are_of_other_snapshots_agree(tmp_path: Path) -> None:
    """On the last that each of them has."""
    model, options = model_of("lfm2", tmp_path), on_disk(OPTIONS, tmp_path)
    prompt = [*FIRST, *FIRST[:80]]  # snapshots behind 72, 136 and 168 tokens
    expected, shards = at_once(model, prompt), list[Any]()
    with ranks_here(model, SPREAD["stages"], options, tmp_path, shards) as ranks:
        slot = Slot(ranks)
        slot.prefill(prompt)
        slot.keep()
        for shard, length in zip(shards, (136, 168), strict=True):
            shard.engine.states.snapshots._cache._snapshots.clear()
            sealed = shard.engine.states.sealed
            assert sealed.flush(60)
            last = ranks.states.block_hashes(prompt[:length])[-1]
            sealed.store.remove(sealed._name(derived(last, b"snapshot")))
        slot.cut(0)
        assert apart(slot.prefill(prompt), expected) < 1e-5
        assert slot.restored == 72


@pytest.mark.parametrize(("how", "n_lost"), [("stages", 0), ("thin", 0), ("stages", 1), ("stages", 4)])
def test_what_takes_several_steps_to_restore_has_one_snapshot(
    how: str, n_lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots lie near the end of a prompt; where the last are lost, the one before counts, in whichever step."""
    monkeypatch.setattr("edge.parallel.states.MOST_HASHES", 16)
    model, options = model_of("lfm2", tmp_path), on_disk(OPTIONS, tmp_path)
    prompt = [*FIRST, *FIRST, *FIRST[:80]]  # snapshots behind 64, 192, 256 and 288 tokens, steps of 128
    expected, ends = at_once(model, prompt), [0, 64, 192, 256, 288]
    for is_first in (True, False):
        shards = list[Any]()
        with ranks_here(model, SPREAD[how], options, tmp_path, shards) as ranks:
            slot = Slot(ranks)
            if is_first:
                slot.prefill(prompt)
                slot.keep()
                sealed = shards[1].engine.states.sealed
                assert sealed.flush(60)
                for length in ends[len(ends) - n_lost :]:
                    last = ranks.states.block_hashes(prompt[:length])[-1]
                    sealed.store.remove(sealed._name(derived(last, b"snapshot")))
            else:
                assert apart(slot.prefill(prompt), expected) < 1e-5
                assert slot.restored == ends[-1 - n_lost]


def test_an_answer_gets_snapshots_too(tmp_path: Path) -> None:
    """So that a prompt that begins with most of it goes on from within it."""
    model = model_of("lfm2", tmp_path)
    answer = [300 + i % 17 for i in range(3 * ANSWER_TOKENS)]
    again = [*FIRST, *answer[: ANSWER_TOKENS + 30], 301, 302]
    with Engine(model, OPTIONS) as engine:
        slot = Slot(engine)
        slot.prefill(FIRST)
        for token in answer:
            slot.decode([token])
        assert apart(slot.prefill(again), at_once(model, again)) < 1e-5
        assert slot.computed == len(again) - (len(FIRST) + ANSWER_TOKENS)


def test_no_token_waits_until_snapshots_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are put on disk once the first token has left, and not before what is written already."""
    written = threading.Event()
    with Engine(model_of("lfm2", tmp_path), on_disk(OPTIONS, tmp_path)) as engine:
        states = engine.states
        assert states.sealed is not None
        write = states.sealed.store.write
        monkeypatch.setattr(states.sealed.store, "write", lambda *file: written.wait(60) and write(*file))
        scheduler, hashes = Scheduler(engine, keep=True), states.block_hashes(FIRST)
        scheduler.add(Request(FIRST, 40, GREEDY, ends=False))
        while not scheduler.step():
            pass
        assert not states.is_writing
        states.sealed.keep([bytes(32)], b"of another")
        scheduler.step()
        assert states.n_cached(hashes) == 0
        written.set()
        assert states.sealed.flush(60)
        scheduler.step()
        assert states.n_cached(hashes) == BORDER // states.block
        scheduler.drop_requests()


def test_what_is_too_large_for_memory_is_dropped_first(tmp_path: Path) -> None:
    """A budget bounds snapshots; the oldest go, and a prompt goes on from what is left."""
    model = model_of("lfm2", tmp_path)
    with Engine(model, OPTIONS) as engine:
        snapshots = engine.states.snapshots
        assert snapshots is not None
        cache = snapshots._cache
        cache.max_bytes = 2 * (snapshots._shape.n_bytes + 300)
        slot = Slot(engine)
        slot.prefill([*FIRST, *FIRST])
        assert cache.n_bytes <= cache.max_bytes
        saved = [at for at in range(8, 240, 8) if snapshots.has(engine.states.block_hashes((FIRST * 2)[:at])[-1])]
        assert saved == [(240 - 2 * LAST_TOKENS) // 8 * 8, (240 - LAST_TOKENS) // 8 * 8]


@pytest.mark.parametrize("arch", ["qwen3vl", *thorough("qwen2vl")])
def test_prompts_are_kept_where_positions_have_sections(arch: str, tmp_path: Path) -> None:
    model, options = model_of(arch, tmp_path), on_disk(OPTIONS, tmp_path)
    with Engine(model, options) as engine:
        slot = Slot(engine)
        slot.prefill(FIRST)
        slot.keep()
    with Engine(model, options) as engine:
        slot = Slot(engine)
        assert apart(slot.prefill(NEXT), at_once(model, NEXT)) < 1e-5
        assert slot.restored == len(FIRST[:90]) // 8 * 8


# --- rows that are forgotten ---


@pytest.mark.parametrize("arch", list(RECURRENT_ARCHITECTURES))
def test_the_table_says_which_can_forget_rows(arch: str, tmp_path: Path) -> None:
    with Engine(model_of(arch, tmp_path), replace(OPTIONS, context=64, rollback=2)) as engine:
        assert engine.rollback == (2 if arch in ROLLS_BACK else 0)


@pytest.mark.parametrize("arch", DRAFTING)
def test_only_rows_of_the_last_step_are_forgotten(arch: str, tmp_path: Path) -> None:
    """llama.cpp would also go back to rows of an earlier step, which it does not hold any more."""
    model = model_of(arch, tmp_path)
    with Engine(model, replace(OPTIONS, rollback=3, outputs=4)) as engine:
        slot = Slot(engine)
        slot.prefill(FIRST[:20])
        slot.decode([300])
        assert not engine.kv_remove(0, 20)  # its only row
        slot.decode([301, 302, 303, 304], "all")
        assert not engine.kv_remove(0, 21)  # the first row of the step
        slot.decode([305, 306, 307, 308], "all")
        assert engine.kv_remove(0, 26)  # three of its rows
        slot.cut(26)
        assert slot.tokens == [*FIRST[:20], 300, 301, 302, 303, 304, 305]
        assert not engine.kv_remove(0, 24)  # it is gone back already
        result = slot.decode([310]).copy()
        expected = at_once(model, [*FIRST[:20], 300, 301, 302, 303, 304, 305, 310])
        assert apart(result, expected) < 1e-4


def test_no_more_rows_than_memory_is_worth(tmp_path: Path) -> None:
    """For each, all that recurrent layers hold of a sequence is held twice more: here 9 layers' 128 x 16 values."""
    file = ModelFile.open(model_of("nemotron_h", tmp_path))
    for states, rows in ((8, 7), (9, 7), (7, 6), (2, 1), (1, 0)):
        assert affordable(7, file, 16 * 2 * states * 9 * 128 * 16 * 4) == rows
    assert affordable(7, ModelFile.open(model_of("lfm2", tmp_path)), 1 << 20) == 7  # they hold next to nothing
    assert affordable(0, file, 1 << 40) == 0


def test_a_copy_of_a_sequence_that_went_back_is_of_what_it_went_back_to(tmp_path: Path) -> None:
    model = model_of("qwen35", tmp_path)
    with Engine(model, replace(OPTIONS, rollback=3, outputs=4, sequences=2)) as engine:
        source, target = Slot(engine, 0), Slot(engine, 1)
        source.prefill(FIRST[:20])
        source.decode([300, 301, 302], "all")
        source.cut(21)
        target.copy_from(source)
        expected = at_once(model, [*FIRST[:20], 300, 310])
        assert apart(target.decode([310]), expected) < 1e-4
        assert apart(source.decode([310]), expected) < 1e-4


def test_after_an_interrupted_step_no_state_is_believed(tmp_path: Path) -> None:
    model = model_of("lfm2", tmp_path)
    with Engine(model, replace(OPTIONS, rollback=3)) as engine:
        slot = Slot(engine)
        slot.prefill(FIRST)
        context = engine._context
        decoding = context.decoding

        def stopped_within(sequences: NDArray[np.int32]) -> None:
            decoding(sequences)
            engine.stop()

        context.decoding = stopped_within  # type: ignore[method-assign]
        with pytest.raises(Interrupted):
            slot.decode([300])
        context.decoding = decoding  # type: ignore[method-assign]
        engine.resume()
        assert not engine.kv_remove(0, len(FIRST))
        assert apart(slot.prefill([*FIRST, 301]), at_once(model, [*FIRST, 301])) < 1e-5
        assert slot.computed == len(FIRST) + 1 - BORDER


@pytest.mark.parametrize(
    "where",
    [
        *("qwen35 alone", "lfm2 alone", "lfm2 stages", "qwen35 tensor"),
        *thorough(*(f"{arch} alone" for arch in ROLLS_BACK if arch not in ("qwen35", "lfm2"))),
    ],
)
@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_answers_with_drafts_are_those_without(where: str, wrong: int, tmp_path: Path) -> None:
    """However many of the drafts are wrong."""
    arch, how = where.split()
    model, prompt = model_of(arch, tmp_path), FIRST[:40]
    with Engine(model, OPTIONS) as engine:
        plain = ids(run(engine, prompt, None, max_tokens=40))
    options = with_room(OPTIONS, "ngram")
    assert options.rollback == ROLLBACK_ROWS
    with engine_of(model, how, options, tmp_path) as drafting:
        drafter = speculate(Known({tuple(prompt): plain}, wrong), choice=always(8))
        assert ids(run(drafting, prompt, drafter, max_tokens=40)) == plain
        assert drafter.stats.drafted > 20
        assert (drafter.stats.accepted > 20) == (wrong != 1)


@pytest.mark.parametrize("rows", [1, 8])
def test_a_plan_is_measured_that_cannot_go_back(tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its last step the text is read again, where the recurrent layers of others would go back."""
    with Engine(model_of("qwen35", tmp_path), with_room(OPTIONS, "ngram")) as engine:
        read: list[int] = []
        decode = engine.decode
        monkeypatch.setattr(engine, "decode", lambda *args, **how: read.append(args[1]) or decode(*args, **how))
        monkeypatch.setattr(measure, "_STEPS", 2 * rows)
        assert measure.token_s(engine, 40, rows).seconds > 0
        assert read.count(0) > 1


def test_an_answer_with_drafts_outlives_its_engine(tmp_path: Path) -> None:
    """An engine that takes over has no snapshot of what was lost."""
    model, prompt = model_of("qwen35", tmp_path), FIRST[:40]
    with Engine(model, OPTIONS) as engine:
        plain = ids(run(engine, prompt, None, max_tokens=40))
    with Mortal(model, with_room(OPTIONS, "ngram")) as first, Engine(model, with_room(OPTIONS, "ngram")) as second:
        first.lives = 6
        survivor = replaceable(first, lambda _: second)
        drafter = speculate(Known({tuple(prompt): plain}, 3), choice=always(8))
        assert ids(run(survivor, prompt, drafter, max_tokens=40)) == plain
        assert survivor.replacements.recoveries == 1
        assert drafter.stats.accepted > 10


@pytest.mark.parametrize(
    ("where", "sequences", "memory", "why"),
    [
        ("mamba2 alone", 1, 1 << 40, "with mamba2 models"),
        ("mamba2 alone", 2, 1 << 40, "with mamba2 models"),
        ("lfm2 alone", 2, 1 << 40, "with several requests at once"),
        ("qwen35 alone", 1, 1 << 20, "in the memory there is"),
        ("lfm2 thin", 1, 1 << 40, "on a device without layers"),
    ],
)
def test_drafts_where_rows_cannot_be_forgotten(
    where: str, sequences: int, memory: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` drafts nothing, and who asks for drafts is told why."""
    monkeypatch.setattr(snapshots, "available_memory", lambda: memory)
    arch, how = where.split()
    options = with_room(replace(OPTIONS, sequences=sequences), "ngram")
    assert (options.rollback == 0) == (sequences > 1)
    with engine_of(model_of(arch, tmp_path), how, options, tmp_path) as engine:
        assert engine.rollback == 0
        assert speculation("auto", engine, _no_engine) is None
        with pytest.raises(EngineError, match=f"roll back a wrong draft {why}; use --draft off"):
            speculation("ngram", engine, _no_engine)


def test_a_budget_without_memory_for_drafts_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "affordable", lambda *_: 0)
    model, options = model_of("qwen35", tmp_path), with_room(replace(OPTIONS, memory=ALL_FITS), "ngram")
    with (
        paged(model, least(model, options), options) as engine,
        pytest.raises(EngineError, match="cannot roll back a wrong draft in the memory there is"),
    ):
        speculation("ngram", engine, _no_engine)


def test_passes_are_timed_without_what_forgets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test, in which a row takes a second. None is larger than drafts may make it."""
    now, decode = [0.0], Slot.decode

    def timed(slot: Slot, tokens: Any, *args: Any, **how: Any) -> Any:
        now[0] += len(tokens)
        return decode(slot, tokens, *args, **how)

    monkeypatch.setattr(Slot, "decode", timed)
    with Engine(model_of("qwen35", tmp_path), with_room(OPTIONS, "ngram")) as engine:
        assert engine.outputs == 16
        passes = pass_ms(engine, FIRST[:40], lambda: now[0])
    assert passes == {1: 1e3, 2: 2e3, 4: 4e3, 8: 8e3}


def _no_engine(engine: Any) -> Any:
    raise AssertionError("no engine is needed")


# --- several requests ---


@pytest.mark.parametrize("how", ["stages", "tensor"])
def test_requests_that_share_steps_are_answered_as_each_alone(how: str, tmp_path: Path) -> None:
    """llama.cpp computes rows of sequences with other numbers of rows in graphs of their own, which ranks must not take
    for one."""
    model = model_of("lfm2", tmp_path)
    requests = [Request(FIRST[i : 20 + 7 * i], 6, GREEDY) for i in range(4)]
    with Engine(model, OPTIONS) as engine:
        alone = Scheduler(engine).run(requests)
    with engine_of(model, how, replace(OPTIONS, sequences=4), tmp_path) as ranks:
        assert Scheduler(ranks).run(requests) == alone


@pytest.mark.parametrize("how", ["alone", "tensor"])
def test_how_fast_steps_are_is_learned(how: str, tmp_path: Path) -> None:
    """Though prompts and answers are computed in graphs of their own."""
    now = iter(range(10_000))
    options = replace(OPTIONS, sequences=4)
    with engine_of(model_of("lfm2", tmp_path), how, options, tmp_path) as engine:
        scheduler = Scheduler(engine, clock=lambda: float(next(now)))
        scheduler.add(Request(FIRST[:9], 12, GREEDY))
        scheduler.step()
        scheduler.add(Request(FIRST, 2, GREEDY))
        assert scheduler.queues.running
        before = scheduler._budget.rows
        while scheduler.queues.running or scheduler.queues.waiting:
            scheduler.step()
        assert scheduler._budget.rows != before
