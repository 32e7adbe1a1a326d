"""Test that saved keys and values belong to one size of a model: another size computes them again."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge.llm.engine import Engine
from edge.llm.options import EngineOptions, PrefixOptions
from edge.llm.slot import Origin, Slot
from edge.llm.states import BLOCK_TOKENS
from tests.engine.elastic.conftest import Elastic, Memory, engine_in
from tests.engine.elastic.test_changes import WAIT_S, budgets
from tests.support.paging import OPTIONS

PROMPT = [10 + (7 * i * i + 3 * i) % 400 for i in range(100)]
WHOLE = (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.fixture
def options(tmp_path: Path) -> EngineOptions:
    """Options of engines that share one prefix cache. Rows of a larger batch would be computed to other last bits."""
    prefixes = PrefixOptions(folder=tmp_path / "kept", key_folder=tmp_path / "own")
    return replace(OPTIONS, context=256, batch=1, prefixes=prefixes)


def test_a_size_finds_what_it_computed_and_computes_again_what_others_did(
    bundled: Elastic, options: EngineOptions
) -> None:
    expected = []
    for path in bundled.static:
        with Engine(path, replace(options, prefixes=None)) as engine:
            expected.append(Slot(engine).prefill(PROMPT).copy())
    for number, restored in ((2, 0), (0, 0), (2, WHOLE), (1, 0), (0, WHOLE)):
        memory = Memory(1 << 30)
        with engine_in(memory, bundled.path, options) as (engine, weights):
            memory.is_now(weights, budgets(weights.sizes)[number])
            weights.follow()
            slot = Slot(engine)
            assert np.array_equal(slot.prefill(PROMPT), expected[number])
            assert (weights.choice.number, slot.restored) == (number, restored)
            slot.keep()


def test_a_paged_size_and_the_file_without_a_range_share_what_has_the_same_bits(
    bundled: Elastic, options: EngineOptions
) -> None:
    with engine_in(Memory(1 << 30), bundled.path, replace(options, prefer="quality")) as (engine, weights):
        slot = Slot(engine)
        slot.prefill(PROMPT)
        slot.keep()
        paged = weights.sizes.least + (1 << 20)
    memory = Memory(1 << 30)
    with engine_in(memory, bundled.path, replace(options, prefer="quality")) as (engine, weights):
        memory.is_now(weights, paged)
        weights.follow()
        slot = Slot(engine)
        slot.prefill(PROMPT)
        assert (weights.choice.number, weights.plan.pages, slot.restored) == (0, True, WHOLE)
    with Engine(bundled.path, options) as engine:
        slot = Slot(engine)
        slot.prefill(PROMPT)
        assert slot.restored == WHOLE


def test_of_a_conversation_with_a_change_what_came_before_it_is_kept(bundled: Elastic, options: EngineOptions) -> None:
    memory, n_before = Memory(1 << 30), 40
    with engine_in(memory, bundled.path, options) as (engine, weights):
        at = budgets(weights.sizes)
        slot = Slot(engine)
        slot.prefill(PROMPT[:n_before])
        memory.is_now(weights, at[2])
        slot.prefill(PROMPT[:70])
        memory.is_now(weights, at[0], WAIT_S)
        slot.prefill(PROMPT)
        assert (slot.computed, slot.exact) == (30, n_before)  # the conversation went on, and nothing was computed again
        slot.keep()
        slot.cut(20)
        slot.prefill([*PROMPT[:20], *reversed(PROMPT)])  # all of one size again
        assert slot.exact is None
    for number, restored in ((2, 0), (0, n_before)):
        memory = Memory(1 << 30)
        with engine_in(memory, bundled.path, options) as (engine, weights):
            memory.is_now(weights, at[number])
            weights.follow()
            slot = Slot(engine)
            slot.prefill(PROMPT)
            assert (weights.choice.number, slot.restored) == (number, restored)


def test_kept_keys_and_values_are_not_joined_to_those_of_another_size(bundled: Elastic, options: EngineOptions) -> None:
    with engine_in(Memory(1 << 30), bundled.path, options) as (engine, _):
        slot = Slot(engine)
        slot.prefill(PROMPT)
        slot.keep()
    memory = Memory(1 << 30)
    with engine_in(memory, bundled.path, options) as (engine, weights):
        at = budgets(weights.sizes)
        memory.is_now(weights, at[2])  # the first pass changes
        slot = Slot(engine)
        slot.prefill(PROMPT[:20])
        memory.is_now(weights, at[0], WAIT_S)
        slot.prefill(PROMPT)
        assert (weights.choice.number, slot.restored, slot.exact) == (0, 0, 20)


def test_a_copy_of_a_slot_is_of_the_size_that_computed_it(bundled: Elastic, options: EngineOptions) -> None:
    two, memory = replace(options, batch=2, sequences=2), Memory(1 << 30)
    for restored in (0, WHOLE):
        with engine_in(memory, bundled.path, two) as (engine, weights):
            memory.is_now(weights, budgets(weights.sizes)[2])
            weights.follow()
            source, copy = Slot(engine), Slot(engine, 1)
            source.prefill(PROMPT[:40])
            assert source.restored == min(restored, 39 // BLOCK_TOKENS * BLOCK_TOKENS)
            copy.copy_from(source)
            copy.prefill(PROMPT)
            assert copy.restored == max(0, restored - len(source.tokens))
            assert (copy.origin, copy.exact) == (Origin(size=2), None)
            copy.keep()
    with engine_in(Memory(1 << 30), bundled.path, two) as (engine, _):
        largest = Slot(engine)
        largest.prefill(PROMPT)
        assert largest.restored == 0
