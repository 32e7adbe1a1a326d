"""What makes answers the same from run to run: options, the steps of a history, and the devices of a plan."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.demo import MODEL_PATH
from edge.deployment.reproducible import check_settled, placed_again, settled
from edge.errors import EngineError
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions, PrefixOptions, reproducible
from edge.parallel.catching_up import compute
from edge.parallel.history import History, Rows
from edge.parallel.surviving import SurvivingEngine
from edge.speculate.factory import settled as settled_with
from partition.errors import PlanError
from partition.plan.arrange import make_plan
from partition.plan.plan import LOCAL, Plan
from partition.slices.gguf_slice import limits
from quant.gguf.file import GgufFile

OPTIONS = EngineOptions(context=512, threads=1)
TOKENS = [1 + i * 7 % 1000 for i in range(300)]
CELLS = 256  # behind so many, llama.cpp has 512 cells, and shares the keys of one row out to threads


def logits(options: EngineOptions) -> NDArray[np.float32]:
    """Of single rows behind CELLS."""
    with Engine(MODEL_PATH, options) as engine:
        engine.decode(TOKENS[:CELLS], 0)
        return np.array([engine.decode([TOKENS[at]], at).copy() for at in range(CELLS, CELLS + 4)])


def test_flash_attention_depends_on_threads_and_reproducible_options_do_not() -> None:
    one, two = (replace(OPTIONS, threads=threads) for threads in (1, 2))
    assert not np.array_equal(logits(one), logits(two))
    assert np.array_equal(logits(reproducible(one)), logits(reproducible(two)))


def test_nothing_is_left_to_measurements() -> None:
    found = reproducible(EngineOptions())
    assert (found.flash_attention, found.repack, found.gpu_layers, found.batch) == ("off", True, 0, 512)
    kept = reproducible(EngineOptions(repack=False, gpu_layers=3, batch=64))
    assert (kept.repack, kept.gpu_layers, kept.batch) == (False, 3, 64)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (EngineOptions(sequences=2), "one at a time"),
        (EngineOptions(flash_attention="on"), "number of threads"),
        (EngineOptions(kv_type="q8_0"), "f16, f32, bf16"),
        (EngineOptions(prefixes=PrefixOptions()), "prefix_cache=0"),
    ],
)
def test_options_that_cannot_be_are_refused(options: EngineOptions, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        reproducible(options)


def test_guesses_are_refused() -> None:
    with pytest.raises(EngineError, match='draft="off"'):
        settled_with(OPTIONS, "ngram")


class Noted:
    """An engine that notes what it computes."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, list[int]]] = []
        self.removed: list[int] = []

    def decode(self, tokens: Sequence[int], start: int, **_: object) -> None:
        self.steps.append((start, list(tokens)))

    def kv_remove(self, sequence: int, start: int, end: int) -> None:
        self.removed.append(start)


class Restores(History):
    """Gives the first tokens of a sequence to another engine."""

    n_tokens = 0

    def restore(self, engine: object, sequence: int, tokens: Sequence[int], start: int) -> int:
        return self.n_tokens


def history(n_restored: int) -> Restores:
    """A prompt in steps of 4 and 3 tokens, then two tokens, one of which took the place of another."""
    found = Restores()
    found.n_tokens = n_restored
    for positions in ([0, 1, 2, 3], [4, 5, 6], [7], [8]):
        at = np.array(positions)
        Rows(at.astype(np.int32) + 50, at, np.zeros_like(at), np.zeros(len(at), np.int8), 0).into(found)
    found.remove(0, 8)
    found.add(0, 8, [99])
    return found


@pytest.mark.parametrize(
    ("n_restored", "steps", "removed"),
    [
        (0, [(0, [50, 51, 52, 53]), (4, [54, 55, 56]), (7, [57]), (8, [99])], []),
        (4, [(4, [54, 55, 56]), (7, [57]), (8, [99])], []),
        (6, [(4, [54, 55, 56]), (7, [57]), (8, [99])], [4]),
        (9, [], []),
    ],
)
def test_a_history_is_computed_again_in_its_own_steps(
    n_restored: int, steps: list[tuple[int, list[int]]], removed: list[int]
) -> None:
    engine, past = Noted(), history(n_restored)
    computed = compute(engine, past.sequences(), lambda: None, past, exact=True)  # type: ignore[arg-type]
    assert (engine.steps, engine.removed) == (steps, removed)
    assert computed == sum(len(tokens) for _, tokens in steps)


def test_rows_of_two_sequences_are_a_step_of_each() -> None:
    found = History()
    at = np.array([3, 4, 0, 1, 5])
    Rows(at.astype(np.int32), at, np.array([0, 0, 1, 1, 0]), np.zeros(5, np.int8), 0).into(found)
    assert [found.step_at(0, 3), found.step_at(0, 5), found.step_at(1, 1)] == [(3, 5), (5, None), (0, None)]


def test_what_was_copied_or_shifted_keeps_its_steps() -> None:
    found = history(0)
    found.copy(0, 1, 0, 5)
    assert found.copied().step_at(1, 4) == (4, None)
    found.shift(0, 4, -1, -4)
    assert found.step_at(0, 1) == (0, 3)
    found.clear()
    assert found.step_at(0, 1) == (0, None)


def test_prompts_come_in_the_steps_of_the_first_engine() -> None:
    with Engine(MODEL_PATH, OPTIONS) as one:
        one.stages = 3
        survivor = SurvivingEngine(one, one.model, lambda error: one)
        one.stages = 1  # as where this device goes on alone
        assert survivor.chunk(400) == one.batch
        survivor.exact = True
        assert survivor.chunk(400) == 64


def made(kind: str, *devices: str) -> Plan:
    return make_plan(limits(GgufFile.open(MODEL_PATH)), "demo", "", [LOCAL, *devices], kind, [1.0] * (1 + len(devices)))


def test_ranks_of_lost_devices_go_to_those_that_are_left() -> None:
    plan = made("tensor", "one:7070", "two:7070")
    again = placed_again(plan, ["two:7070"])
    assert again.devices == (LOCAL, "two:7070", "two:7070")
    assert [again.slice(rank) for rank in range(3)] == [plan.slice(rank) for rank in range(3)]
    assert placed_again(plan, ["two:7070", "one:7070"]).devices == plan.devices


def test_a_plan_says_what_is_on_a_gpu() -> None:
    plan = settled(made("pipeline", "one:7070"))
    assert [plan.shard(rank).gpu_layers for rank in range(2)] == [0, 0]


def test_measured_shares_are_refused() -> None:
    check_settled(None, "tensor", (1, 1))
    check_settled(made("tensor", "one:7070"), "auto", None)
    for parallel, shares in (("auto", (1.0, 1.0)), ("tensor", None)):
        with pytest.raises(PlanError, match="--shares"):
            check_settled(None, parallel, shares)
