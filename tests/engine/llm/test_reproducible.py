"""Reproducible answers from run to run: options, the steps of a history, and the devices of a plan."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.deployment.reproducible import check_reproducible, placed_again, reproducible_plan
from edge.errors import EngineError
from edge.llama.llama import Batch
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions, PrefixOptions, reproducible
from edge.llm.scheduler import Scheduler
from edge.llm.slot import Former, Slot
from edge.models.demo import MODEL_PATH
from edge.speculate.factory import reproducible_options
from partition.errors import PlanError
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan
from partition.slices.gguf_slice import limits
from quant.gguf.file import GgufFile
from tests.support.replaceable import replaceable
from tests.support.thorough import some

OPTIONS = EngineOptions(context=512, threads=1)
TOKENS = [1 + i * 7 % 1000 for i in range(300)]
CELLS = 256  # behind so many, llama.cpp has 512 cells, and shares the keys of one row out to threads


def logits(options: EngineOptions) -> NDArray[np.float32]:
    """Return logits of single rows behind CELLS."""
    with Engine(MODEL_PATH, options) as engine:
        engine.decode(TOKENS[:CELLS], 0)
        return np.array([engine.decode([TOKENS[at]], at).copy() for at in range(CELLS, CELLS + 4)])


def test_flash_attention_depends_on_threads_and_reproducible_options_do_not() -> None:
    first, two = (replace(OPTIONS, threads=threads) for threads in (1, 2))
    assert not np.array_equal(logits(first), logits(two))
    assert np.array_equal(logits(reproducible(first)), logits(reproducible(two)))


def test_nothing_is_left_to_measurements() -> None:
    result = reproducible(EngineOptions())
    assert (result.flash_attention, result.repack, result.gpu_layers, result.batch) == ("off", True, 0, 512)
    saved = reproducible(EngineOptions(repack=False, gpu_layers=3, batch=64))
    assert (saved.repack, saved.gpu_layers, saved.batch) == (False, 3, 64)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (EngineOptions(sequences=2), "need one sequence"),
        (EngineOptions(flash_attention="on"), "number of threads"),
        (EngineOptions(kv_type="q8_0"), "f16, f32, bf16"),
        (EngineOptions(prefixes=PrefixOptions()), "prefix_cache=0"),
    ],
)
def test_options_that_cannot_be_are_refused(options: EngineOptions, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        reproducible(options)


def test_drafts_are_refused() -> None:
    with pytest.raises(EngineError, match='draft="off"'):
        reproducible_options(OPTIONS, "ngram")


class Noted:
    """An engine that notes what it computes."""

    states = SimpleNamespace(snapshots=None)
    paging = None

    def __init__(self) -> None:
        self.steps: list[tuple[int, list[int]]] = []
        self.removed: list[int] = []

    def decode(self, tokens: Sequence[int], start: int, **_: object) -> None:
        self.steps.append((start, list(tokens)))

    def kv_remove(self, sequence: int, start: int, end: int) -> bool:
        self.removed.append(start)
        return True


# A prompt in steps of 4 and 3 tokens, then two tokens.
FORMER = Former([*range(50, 58), 99], [0, 4, 7, 8], "")


@pytest.mark.parametrize(
    ("n_restored", "steps", "removed"),
    [
        (0, [(0, [50, 51, 52, 53]), (4, [54, 55, 56]), (7, [57]), (8, [99])], []),
        (4, [(4, [54, 55, 56]), (7, [57]), (8, [99])], []),
        (6, [(4, [54, 55, 56]), (7, [57]), (8, [99])], [4]),
        (9, [], []),
    ],
)
def test_what_is_lost_is_computed_again_in_its_own_steps(
    n_restored: int, steps: list[tuple[int, list[int]]], removed: list[int]
) -> None:
    engine = Noted()
    slot = Slot(engine)  # type: ignore[arg-type]
    slot.submitted(FORMER.tokens[:n_restored])
    slot.compute_again(FORMER, 9)
    assert (engine.steps, engine.removed) == (steps, removed)
    assert slot.former() == FORMER


def test_a_step_is_computed_as_a_whole_also_where_a_part_is_of_use() -> None:
    engine = Noted()
    slot = Slot(engine)  # type: ignore[arg-type]
    slot.compute_again(FORMER, 5)
    assert engine.steps == [(0, [50, 51, 52, 53]), (4, [54, 55, 56])]
    assert (engine.removed, slot.tokens, slot.steps) == ([5], FORMER.tokens[:5], [0, 4])


def test_what_was_copied_or_shifted_keeps_its_steps() -> None:
    with Engine(MODEL_PATH, replace(OPTIONS, sequences=2)) as engine:
        first, other = Slot(engine, 0), Slot(engine, 1)
        for step in ([50, 51, 52, 53], [54, 55, 56], [57], [99]):
            first.decode(step)
        other.copy_from(first)
        other.cut(5)
        assert other.steps == [0, 4]
        first.drop(2, 3)
        assert (first.tokens, first.steps) == ([50, 51, 55, 56, 57, 99], [0, 2, 4, 5])
        first.lost()
        assert first.steps == []


def test_prompts_come_in_the_steps_of_the_first_engine() -> None:
    with Engine(MODEL_PATH, OPTIONS) as first:
        first.stages = 3
        survivor = replaceable(first, lambda error: first)
        first.stages = 1  # as where this device goes on alone
        assert survivor.chunk(400) == first.batch
        survivor.replacements.exact = True
        assert survivor.chunk(400) == 64


class Steps(Engine):
    """An engine that notes its steps, and is lost after so many."""

    def __init__(self, options: EngineOptions, lives: int = 1 << 30) -> None:
        super().__init__(MODEL_PATH, options)
        self.lives = lives
        self.steps: list[tuple[list[int], list[int]]] = []

    @property
    def failed(self) -> Exception | None:
        return EngineError("lost") if self.lives < 0 else None

    def collect(self) -> NDArray[np.float32]:
        self._live()
        return super().collect()

    def _live(self) -> None:
        self.lives -= 1
        if self.failed is not None:
            raise self.failed

    def decode_rows(self, rows: Batch, n: int) -> None:
        self._live()
        self.steps.append((rows.positions[:n].tolist(), rows.tokens[:n].tolist()))
        super().decode_rows(rows, n)


@pytest.mark.parametrize("lives", range(0, 23, some(2, 1)))
def test_after_a_loss_all_steps_are_those_of_before(lives: int) -> None:
    """Steps of a prompt, of an answer, and of the turn after it: also the step that gives logits."""
    options = reproducible(replace(OPTIONS, batch=8))

    def turns(engine: TextEngine) -> list[list[int]]:
        scheduler, prompt, results = Scheduler(engine, slots=1, keep=True), TOKENS[:20], []
        for more in (TOKENS[100:109], []):
            scheduler.add(Request(prompt, 5, ends=False))
            answer = []
            while scheduler.busy:
                answer += [event.token_id for event in scheduler.step() if event.token_id is not None]
            results.append(answer)
            prompt = [*prompt, *answer, *more]
        return results

    whole, first, second = Steps(options), Steps(options, lives), Steps(options)
    with whole, first, second:
        expected = turns(whole)
        engine = replaceable(first, lambda error: second)
        engine.replacements.exact = True
        assert turns(engine) == expected
        assert engine.replacements.recoveries == 1
        assert second.steps == whole.steps


def plan_of(kind: str, *devices: str) -> Plan:
    return make_plan(limits(GgufFile.open(MODEL_PATH)), "demo", "", [LOCAL, *devices], kind, [1.0] * (1 + len(devices)))


def test_ranks_of_lost_devices_go_to_those_that_are_left() -> None:
    plan = plan_of("tensor", "one:7070", "two:7070")
    again = placed_again(plan, ["two:7070"])
    assert again.devices == (LOCAL, "two:7070", "two:7070")
    assert [again.slice(rank) for rank in range(3)] == [plan.slice(rank) for rank in range(3)]
    assert placed_again(plan, ["two:7070", "one:7070"]).devices == plan.devices


def test_a_plan_says_what_is_on_a_gpu() -> None:
    plan = reproducible_plan(plan_of("pipeline", "one:7070"))
    assert [plan.shard(rank).gpu_layers for rank in range(2)] == [0, 0]


def test_measured_shares_are_refused() -> None:
    check_reproducible(None, "tensor", (1, 1))
    check_reproducible(plan_of("tensor", "one:7070"), "auto", None)
    for parallel, shares in (("auto", (1.0, 1.0)), ("tensor", None)):
        with pytest.raises(PlanError, match="--shares"):
            check_reproducible(None, parallel, shares)
