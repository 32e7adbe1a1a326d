"""Test plans with a placement for prompts on real workers: commands, programs and servers read it from a plan file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge.cluster import preflight
from edge.deployment import watch
from edge.deployment.deploy import Resilience, deploy
from edge.errors import NotEnoughMemory, WorkerError
from edge.llm.chat import Chat
from edge.llm.engine import Engine
from edge.llm.sampler import SamplingParams
from edge.models.demo import MODEL_PATH
from edge.parallel.prefiller import PrefillPlacement
from edge.planning.choice import PlanChoice, read_plan, save_plan
from edge.profiling.cluster import Cluster
from partition.plan.plan import Plan
from tests.support.deployments import (
    ONE_THREAD,
    OPTIONS,
    Heard,
    own_folders,
    pipeline,
    plan_for,
    supervised,
    tensor,
    two_workers_to_end,
)
from tests.support.helpers import until
from tests.support.slices import synthetic
from tests.support.workers import Worker, worker

QUESTIONS = ("My name is Ada. I have a red boat and a blue kite. What is 12 + 30?", "What is my name?")
GREEDY = SamplingParams(temperature=0)
ALONE = pipeline(1)


def with_prefill(
    workers: list[Worker], decode: dict[str, Any], prefill: dict[str, Any], least: int = 1, path: Path = MODEL_PATH
) -> Plan:
    return replace(plan_for(path, workers, decode), prefill=plan_for(path, workers, prefill), prefill_from=least)


def conversation(engine: Any) -> list[str]:
    chat = Chat(engine)
    return ["".join(piece.text for piece in chat.ask(text, GREEDY, max_tokens=16)) for text in QUESTIONS]


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    with Engine(MODEL_PATH, OPTIONS) as single:
        return conversation(single)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of the prompts that the placement of prompts took."""
    used: list[int] = []
    begin = PrefillPlacement.begin

    def noted(placement: PrefillPlacement, tokens: Any, n_held: int, *about: Any, keep: bool) -> Any:
        prompt = begin(placement, tokens, n_held, *about, keep=keep)
        if prompt is not None:
            used.append(len(tokens) - n_held)
        return prompt

    monkeypatch.setattr(PrefillPlacement, "begin", noted)
    return used


PAIRS = [
    (ALONE, pipeline(1, 1)),
    (ALONE, pipeline(0, 1)),
    (pipeline(1, 1), tensor(1, 1)),
    (tensor(1, 1, 1), pipeline(1, 1, 1)),
]


@pytest.mark.parametrize(("decode", "prefill"), PAIRS, ids=str)
def test_answers_are_those_of_one_device(
    two: list[Worker], decode: dict[str, Any], prefill: dict[str, Any], undisturbed: list[str], moved: list[int]
) -> None:
    heard = Heard()
    plan = with_prefill(two, decode, prefill, least=10)
    with supervised(two, plan, steps=heard) as model:
        assert conversation(model.engine) == undisturbed
        assert moved
        assert min(moved) >= 10
        assert "; prompts of 10 new tokens and more are computed on" in model.line()
        assert model.to_json(model.times())["plan"]["prefill"] == plan.to_json()["prefill"]
    assert heard.lines == []


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Worker]]:
    own_folders(monkeypatch, tmp_path / "own")
    with two_workers_to_end(tmp_path) as workers:
        yield workers


def test_a_placement_of_prompts_is_lost_and_is_there_again(
    both: list[Worker], tmp_path: Path, undisturbed: list[str], moved: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "OFFER_S", 0.2)
    monkeypatch.setattr(watch, "QUIET_S", 0.4)
    heard = Heard()
    with supervised(both[:1], with_prefill(both[:1], ALONE, pipeline(1, 1)), steps=heard) as model:
        assert conversation(model.engine) == undisturbed
        assert moved
        both[0].kill()
        assert conversation(model.engine) == undisturbed
        [lost] = heard.lines
        assert lost.startswith("one was lost (")
        assert lost.endswith("): prompts are computed by this device from now on")
        assert model.plan.prefill is None
        moved.clear()
        with worker(tmp_path / "again", "--name", "one", *ONE_THREAD, listen=both[0].address):
            until(lambda: model.plan.prefill is not None, "the plan that was given")
            assert heard.lines[1:] == ["one is there again: going on with this device"]
            assert conversation(model.engine) == undisturbed
            assert moved
        # It ended while it was in use, and did not wait for the end of that.
        assert conversation(model.engine) == undisturbed
        assert heard.lines[2:] == ["one was lost (is about to end): prompts are computed by this device from now on"]


def test_memory_is_that_of_both_placements(two: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory suffices for each placement alone."""
    needs: list[dict[str, int]] = []
    check = preflight.check_memory

    def checked(fleet: Any, request: Any, remedy: str) -> None:
        request = list(request)
        needs.append({})
        for address, parts in request:
            needs[-1][address] = needs[-1].get(address, 0) + sum(parts.values())
        check(fleet, request, remedy)

    monkeypatch.setattr(preflight, "check_memory", checked)
    address = two[0].address
    with supervised(two[:1], with_prefill(two[:1], pipeline(1, 1), tensor(1, 1))):
        together, first, second = (need[address] for need in needs)
    assert together == first + second
    with Cluster([address], needs_all=True) as cluster:
        assert cluster.fleet is not None
        profile = cluster.fleet.profiles[address]
        cluster.fleet.profiles[address] = replace(profile, memory_available_bytes=together - 1)
        plan = with_prefill(two[:1], pipeline(1, 1), tensor(1, 1))
        with pytest.raises(NotEnoughMemory, match="one needs"):
            deploy(PlanChoice(MODEL_PATH, plan, "as given"), cluster, OPTIONS)


def test_where_states_cannot_move_or_steps_are_to_be_the_same_there_are_no_phases(
    two: list[Worker], tmp_path: Path, moved: list[int]
) -> None:
    recurrent = synthetic(tmp_path / "mamba.gguf", "mamba", layers=4, vocab=320, embd=64, ff=64)
    cases = [
        (recurrent, Resilience(), "mamba models are recurrent"),
        (MODEL_PATH, Resilience(reproducible=True), "steps that are to be the same each time"),
    ]
    for path, resilience, why in cases:
        heard = Heard()
        plan = with_prefill(two[:1], pipeline(1, 1), ALONE, path=path)
        with Cluster([two[0].address], needs_all=True) as cluster:
            choice = PlanChoice(path, plan, "as given")
            with deploy(choice, cluster, OPTIONS, resilience=resilience, steps=heard) as model:
                assert model.plan.prefill is None
        [line] = heard.lines
        assert line.startswith(f"prompts are computed by the devices that generate: {why}")
    assert moved == []


def test_a_plan_of_a_device_that_is_not_connected_is_refused(two: list[Worker]) -> None:
    plan = with_prefill(two, pipeline(1, 1), pipeline(1, 1, 1))
    refused = pytest.raises(WorkerError, match=f"the plan needs {two[1].address}; connected are {two[0].address}")
    with Cluster([two[0].address], needs_all=True) as cluster, refused:
        deploy(PlanChoice(MODEL_PATH, plan, "as given"), cluster, OPTIONS)


def test_process_runs_first_copy_of_plan_with_replicas(two: list[Worker], tmp_path: Path) -> None:
    replica = plan_for(MODEL_PATH, two[:1], pipeline(0, 1))
    plan = replace(plan_for(MODEL_PATH, two[:1], ALONE), replicas=(replica,))
    save_plan(tmp_path / "plan.json", plan)
    assert read_plan(tmp_path / "plan.json", Plan) == plan
    heard = Heard()
    with Cluster() as cluster, deploy(PlanChoice(MODEL_PATH, plan, "as given"), cluster, OPTIONS, steps=heard) as model:
        assert model.plan == plan.copies[0]
    assert heard.lines == ["the plan has 2 copies of the model; this process runs the first copy"]


def test_own_options_hold_in_both_placements(two: list[Worker]) -> None:
    plan = with_prefill(two, pipeline(1, 1), tensor(1, 1))
    choice = PlanChoice(MODEL_PATH, plan, "as given").with_own(threads=3, memory=None)
    assert isinstance(choice.plan, Plan)
    results = [
        [shard.threads for stage in placement.stages for shard in stage.shards] for placement in choice.plan.placements
    ]
    assert results == [[3, None], [3, None]]
    assert json.loads(json.dumps(choice.plan.to_json())) == choice.plan.to_json()
