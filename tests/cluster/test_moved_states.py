"""Test moving a conversation from one plan to another: it continues as if it had never moved."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.options import PrefixOptions
from edge.llm.sampler import SamplingParams
from edge.llm.slot import Slot
from edge.models.demo import MODEL_PATH
from tests.support.deployments import OPTIONS, deployed, pipeline, stages, tensor
from tests.support.moved_slots import move
from tests.support.workers import Worker, worker

GREEDY = SamplingParams(temperature=0)
PROMPT = "Ada has a boat that is red. Ben has a kite that is blue. What is 12 + 30? Where does the river begin?"
PLANS: list[dict[str, Any]] = [
    pipeline(1, 1),
    pipeline(3, 1, 2),
    pipeline(0, 1),
    tensor(0, 2, 1),
    tensor(1, 1),
    tensor(3, 2, 1),
    stages(2, 2),
]


def greedy(slot: Slot, tokens: list[int], n: int) -> list[int]:
    """The `n` likeliest tokens behind what a slot holds and these. All but the last are in the slot then."""
    said = [int(slot.prefill([*slot.tokens, *tokens]).argmax())]
    while len(said) < n:
        said.append(int(slot.decode(said[-1:]).argmax()))
    return said


def prompt(engine: TextEngine) -> list[int]:
    return engine.model.tokenize(PROMPT, add_special=True, parse_special=False)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_moved_conversation_goes_on_with_the_same_tokens(one_worker: Worker, plan: dict[str, Any]) -> None:
    """From one device to several and back. Each holds the history that the others computed."""
    with ExitStack() as stack:
        single = stack.enter_context(Engine(MODEL_PATH, OPTIONS))
        other = stack.enter_context(Engine(MODEL_PATH, OPTIONS))
        spread = stack.enter_context(deployed(one_worker, MODEL_PATH, plan)).engine
        undisturbed = Slot(single)
        expected = greedy(undisturbed, prompt(single), 64)
        slot = Slot(other)
        result = greedy(slot, prompt(other), 21)
        moved = move(slot, spread)
        assert moved.tokens == slot.tokens
        result += greedy(moved, result[-1:], 22)
        assert moved.computed == 1
        back = move(moved, other)
        result += greedy(back, result[-1:], 21)
        assert back.computed == 1
        assert result == expected


@pytest.mark.parametrize("plan", [pipeline(1, 1), tensor(3, 2, 1)], ids=str)
def test_each_rank_keeps_its_part_and_finds_it_again(one_worker: Worker, tmp_path: Path, plan: dict[str, Any]) -> None:
    saved = PrefixOptions(folder=tmp_path / "kept", key_folder=tmp_path / "own")
    options = replace(OPTIONS, batch=1, prefixes=saved)  # other kernels compute several rows, to other last bits
    answers = []
    for removed in (False, False, True):
        if removed:  # this rank then has fewer than the others
            for file in saved.folder.glob("*.kv"):
                file.unlink()
        with deployed(one_worker, MODEL_PATH, plan, options) as deployment:
            slot = Slot(deployment.engine)
            result = greedy(slot, prompt(deployment.engine), 40)
            slot.keep()
            answers.append((result, slot.restored))
    (first, nothing), (second, all_), (third, fewer) = answers
    assert first == second == third
    assert nothing == 0
    assert all_ >= 16
    assert fewer == 0


def test_a_worker_keeps_nothing_where_it_is_told_so(tmp_path: Path) -> None:
    """And the others then have no use for what they keep."""
    saved = PrefixOptions(folder=tmp_path / "kept", key_folder=tmp_path / "own")
    options = replace(OPTIONS, prefixes=saved)
    with worker(tmp_path / "w", "--threads", "1", "--prefix-cache", "0") as forgetful:
        for _ in range(2):
            with deployed(forgetful, MODEL_PATH, pipeline(1, 1), options) as deployment:
                slot = Slot(deployment.engine)
                greedy(slot, prompt(deployment.engine), 40)
                slot.keep()
                assert slot.restored == 0
    assert any(saved.folder.glob("*.kv"))
