"""Test a thin owner, which has tokens and sampler but no layer: the result is that of one device."""

import os
import re
import signal
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge
from edge.llama.vocabulary import TokenTable
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions, PrefixOptions
from edge.llm.scheduler import Scheduler
from edge.llm.slot import Slot
from edge.models.demo import MODEL_PATH
from partition.plan.plan import LOCAL, Plan
from tests.conftest import Synthetic
from tests.support import slices
from tests.support.deployments import (
    EXACT,
    OPTIONS,
    Grouped,
    Heard,
    deployed,
    greedy_answers,
    own_folders,
    pipeline,
    plan_for,
    questions,
    supervised,
    tensor,
    two_workers_to_end,
)
from tests.support.ranks_here import ranks_here
from tests.support.workers import Worker
from transport.link import Link

THIN = [pipeline(0, 1), pipeline(0, 1, 1), tensor(0, 1, 1)]
TOKENS = [5, 300, 17, 401, 88, 260, 33, 499]
QUESTIONS = ("My name is Ada.", "What is 12 + 30?", "Which is heavier, a phone or a tablet?", "What is my name?")


@pytest.mark.parametrize("how", THIN, ids=str)
def test_answers_at_once_are_those_of_one_device(one_worker: Worker, how: dict[str, Any], synthetic: Synthetic) -> None:
    """In float32, where no last bit of a sum decides."""
    path, options = synthetic("llama", "f32"), replace(EXACT, context=512, sequences=4)
    requests = [replace(request, prompt=[token % 500 for token in request.prompt]) for request in questions(8)]
    with deployed(one_worker, path, how, options) as deployment:
        assert deployment.engine.stages == (len(how["shares"]) - 1 if how["parallel"] == "pipeline" else 1)
        result = Scheduler(deployment.engine).run(requests)
        stages = deployment.engine.stages
    with Grouped(path, options, stages) as single:
        assert result == Scheduler(single).run(requests)


@pytest.mark.parametrize("arch", ["gemma3", "gpt2", "bloom", "llama4", "qwen3vl"])
def test_whatever_comes_before_the_first_layer_is_computed(arch: str, tmp_path: Path) -> None:
    """Scales, learned positions, norms: the others are sent rows of the token table, and do the rest."""
    model = slices.synthetic(tmp_path / f"{arch}.gguf", arch, vocab=512)
    with Engine(model, EXACT) as single:
        expected = [single.decode(TOKENS, 0).copy(), single.decode([7], 8).copy()]
    with ranks_here(model, pipeline(0, 1), EXACT, tmp_path) as engine:
        results = [engine.decode(TOKENS, 0).copy(), engine.decode([7], 8).copy()]
    assert all(logits.std() > 0 for logits in expected)
    np.testing.assert_array_equal(results, expected)


def test_a_removal_waits_for_logits_that_are_on_their_way(tmp_path: Path) -> None:
    """Ranks with windows say whether they could forget; what they say comes behind the logits of steps before."""
    model = slices.synthetic(tmp_path / "gemma2.gguf", "gemma2", window=16)
    options = replace(EXACT, sequences=2)
    with ranks_here(model, pipeline(0, 1, 1), options, tmp_path) as engine:
        expected = engine.decode(TOKENS, 0).copy()
        engine.decode(TOKENS, 0, sequence=1)
        assert engine.kv_remove(0, 0)
        engine.submit(TOKENS, np.arange(8), np.zeros(8, np.int64), np.eye(8, dtype=np.int8)[-1])
        assert engine.kv_remove(1, 4)
        np.testing.assert_array_equal(engine.collect()[0], expected)
        engine.decode(TOKENS[4:], 4, sequence=1)  # its positions are free


def test_a_program_deploys_it(one_worker: Worker) -> None:
    with edge.Cluster([one_worker.address]) as cluster:
        work = edge.PlanOptions(context=300)
        choice = edge.plan(None, cluster, parallel="pipeline", shares=[0, 1], options=work)
        with edge.deploy(choice, cluster) as model, Engine(MODEL_PATH, EngineOptions(context=300)) as single:
            assert isinstance(choice.plan, Plan)
            assert choice.plan.thin_owner
            assert model.engine.decode(TOKENS, 0).argmax() == single.decode(TOKENS, 0).argmax()


def test_tokens_stay_here(one_worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only steps with positions and rows of float32 cross of a prompt."""
    prompt = [401, 88, 260, 33, 499, 300]
    with deployed(one_worker, MODEL_PATH, pipeline(0, 1)) as deployment:
        engine, sent = deployment.engine, list[bytes]()
        (link,) = engine.group.links.values()
        usual = link.send

        def send(payload: Any, *kind: Any) -> None:
            sent.append(bytes(memoryview(payload).cast("B")))
            usual(payload, *kind)

        monkeypatch.setattr(link, "send", send)
        engine.decode(prompt, 0)
        rows = np.empty((len(prompt), engine.shape.n_embd), np.float32)
        TokenTable(engine.file).look_up(prompt, rows)
        step, states = sent
    assert states == rows.tobytes()
    assert len(step) == 20 + 9 * len(prompt)
    for kind in (np.int32, np.int64):
        assert np.array(prompt[:2], kind).tobytes() not in step


def test_a_token_takes_one_round_trip_and_little_memory(one_worker: Worker) -> None:
    with deployed(one_worker, MODEL_PATH, pipeline(0, 1)) as deployment:
        engine = deployment.engine
        assert engine.memory.parts["weights"] == engine.memory.parts["KV cache"] == 0
        engine.decode(TOKENS, 0)
        engine.times(clear=True)
        for at in range(8, 24):
            engine.decode([3], at, top=1)
        own, worker = (rank["decode"] for rank in engine.times())
    row = 4 * engine.shape.n_embd
    assert row < own.sent_bytes.median < row + 100
    assert worker.received_bytes.median == row
    assert own.received_bytes.median == worker.sent_bytes.median < 100
    assert own.compute_ms.median == 0 < worker.compute_ms.median


@pytest.mark.parametrize("how", [pipeline(0, 1), tensor(0, 1, 1)], ids=str)
def test_kept_prompts_are_found_again(tmp_path: Path, how: dict[str, Any]) -> None:
    """Each rank that computes has its part on its own disk; here is only the key of their names."""
    saved = PrefixOptions(folder=tmp_path / "kept", key_folder=tmp_path / "own")
    options = replace(OPTIONS, batch=1, prefixes=saved)  # other kernels compute several rows, to other last bits
    prompt = list(questions(8)[-1].prompt)
    results, restored, computed = [], [], []
    for _ in range(2):
        with ranks_here(MODEL_PATH, how, options, tmp_path) as engine:
            slot = Slot(engine)
            logits = slot.prefill(prompt)
            restored.append(slot.restored)
            computed.append(slot.computed)
            results.append(logits.copy())
            assert engine.states.keeps
            slot.keep()
    assert restored[0] == 0 < restored[1]
    assert computed == [len(prompt), len(prompt) - restored[1]]
    np.testing.assert_array_equal(*results)
    assert {path.parent.name for path in saved.folder.rglob("*.kv")} == {str(n) for n in range(1, len(how["shares"]))}


def answers(engine: Any, at: dict[int, Any]) -> list[str]:
    return greedy_answers(engine, QUESTIONS, 24, at)


def lose(victim: Worker) -> None:
    for child in victim.children():
        os.kill(child.pid, signal.SIGKILL)


@pytest.mark.usefixtures("measured_briefly")
def test_after_a_loss_it_stays_thin_and_at_last_loads_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_folders(monkeypatch, tmp_path / "own")
    with Engine(MODEL_PATH, OPTIONS) as single:
        undisturbed = answers(single, {})
    heard, plans = Heard(), list[Plan]()
    with ExitStack() as stack:
        two = stack.enter_context(two_workers_to_end(tmp_path))
        plan = plan_for(MODEL_PATH, two, pipeline(0, 1, 1))
        model = stack.enter_context(supervised(two, plan, steps=heard))
        assert re.match(r"this device no layer; one layers 0-\d; two layers \d-7 \(", model.line())

        def then(victim: Worker) -> None:
            plans.append(model.plan)
            victim.kill()

        assert answers(model.engine, {5: lambda: then(two[0]), 25: lambda: then(two[1])}) == undisturbed
        plans.append(model.plan)
    first, second, last = plans
    assert first.thin_owner
    assert second.thin_owner
    assert len(set(second.devices)) == 2
    assert last.devices == (LOCAL,)
    assert len([line for line in heard.lines if "going on with" in line]) == 2


def test_a_link_of_its_own_is_not_needed_within_a_group(one_worker: Worker) -> None:
    """The sums of a tensor group behind a thin owner are among its ranks alone."""
    with deployed(
        one_worker, MODEL_PATH, tensor(0, 1, 1), EngineOptions(threads=1, context=128, batch=32)
    ) as deployment:
        engine = deployment.engine
        engine.decode(TOKENS, 0)
        links: dict[int, Link] = engine.group.links
        before = {rank: link.received_bytes for rank, link in links.items()}
        engine.decode([3], 8, top=1)
        assert all(link.received_bytes - before[rank] < 100 for rank, link in links.items())
