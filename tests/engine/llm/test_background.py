"""Background requests run while no other one does, in short steps, and cost no answer a token."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.options import PrefixOptions
from edge.llm.scheduler import Scheduler
from edge.llm.step_budget import LEAST_ROWS, SHORT_STEP_S, TILE_ROWS, LatencyTargets, StepBudget
from tests.conftest import Synthetic
from tests.engine.llm.test_scheduler import alone, random_requests
from tests.support.deployments import EXACT

OPTIONS = replace(EXACT, context=200, batch=64, outputs=5, sequences=3)


def background(request: Request) -> Request:
    return replace(request, background=True)


def test_a_background_request_waits_until_all_others_have_ended(synthetic: Synthetic) -> None:
    admitted: list[int] = []
    with Engine(synthetic("llama", "f32"), OPTIONS) as engine, Scheduler(engine, admitted=admitted.append) as scheduler:
        behind = scheduler.add(background(Request([5, 6, 7], 4, ends=False)))
        requests = [scheduler.add(Request([n, 9, 8], 6, ends=False)) for n in (20, 21)]
        ended: list[int] = []
        while scheduler.busy:
            events = scheduler.step()
            ended += [event.request for event in events if event.finish_reason]
            if not set(requests) <= set(ended):
                assert behind not in admitted
    assert ended == [*requests, behind]
    assert scheduler.queues.preemptions == {"foreground": 0, "background": 0}


@pytest.mark.parametrize("answering", [False, True], ids=["prompt", "answer"])
def test_a_request_preempts_what_runs_in_the_background(synthetic: Synthetic, answering: bool) -> None:
    """In the next step; later the background request goes on, and both have the tokens that each gets alone."""
    behind, request = Request([*range(3, 123)], 8, ends=False), Request([50, 51, 52], 6, ends=False)
    with Engine(synthetic("llama", "f32"), OPTIONS) as engine:
        expected = alone(engine, [behind, request])
        with Scheduler(engine, keep=True) as scheduler:
            first = scheduler.add(background(behind))
            tokens: dict[int, list[int]] = {first: []}
            while len(tokens[first]) < 3 if answering else scheduler.passes < 2:
                tokens[first] += [event.token_id for event in scheduler.step() if event.token_id is not None]
            second = scheduler.add(request)
            tokens[second] = []
            while scheduler.busy:
                before = len(tokens[second])
                for event in scheduler.step():
                    assert event.token_id is not None
                    tokens[event.request].append(event.token_id)
                if before < len(expected[1]):  # nothing of the other one is computed meanwhile
                    assert [running.number for running in scheduler.queues.running] in ([second], [])
            assert [tokens[first], tokens[second]] == expected
            assert scheduler.queues.preemptions == {"foreground": 0, "background": 1}


def test_many_requests_are_answered_as_each_alone_beside_background_ones(synthetic: Synthetic, tmp_path: Path) -> None:
    """Which go to the disk and come back."""
    prefixes = PrefixOptions(folder=tmp_path / "kept", key_folder=tmp_path / "own")
    requests = random_requests(24, 70, seed=8)
    mixed = [background(request) if i % 3 else request for i, request in enumerate(requests)]
    with Engine(synthetic("llama", "f32"), replace(OPTIONS, prefixes=prefixes)) as engine:
        with Scheduler(engine, keep=True) as scheduler:
            tokens: dict[int, list[int]] = {}
            for request in mixed:
                tokens[scheduler.add(request)] = []
                for _ in range(3):
                    for event in scheduler.step():
                        tokens[event.request] += [] if event.token_id is None else [event.token_id]
            while scheduler.busy:
                for event in scheduler.step():
                    tokens[event.request] += [] if event.token_id is None else [event.token_id]
        assert list(tokens.values()) == alone(engine, requests)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_prompt_in_the_background_is_kept_while_it_is_computed(
    in_background: bool, synthetic: Synthetic, tmp_path: Path
) -> None:
    """File by file, so that whoever preempts it waits for the last part alone. Others are kept at their end."""
    prefixes = PrefixOptions(folder=tmp_path / "kept", key_folder=tmp_path / "own")
    request = Request([3 + i % 40 for i in range(350)], 1, ends=False, background=in_background)
    with (
        Engine(synthetic("llama", "f32"), replace(OPTIONS, context=512, prefixes=prefixes)) as engine,
        Scheduler(engine, keep=True) as scheduler,
    ):
        hashes = engine.states.block_hashes(request.prompt, "")
        scheduler.add(request)
        while scheduler.slots.n_cached < 192:
            scheduler.step()
        scheduler.step()
        assert bool(engine.states.n_cached(hashes)) is in_background


@pytest.mark.parametrize("in_background", [False, True])
def test_what_is_kept_stays_in_memory_beside_the_background(
    in_background: bool, synthetic: Synthetic, tmp_path: Path
) -> None:
    """Whoever comes then reads nothing from the disk."""
    prefixes = PrefixOptions(folder=tmp_path / "kept", key_folder=tmp_path / "own")
    chat, other = [*range(3, 67)], Request([*range(40, 90)], 1, ends=False, background=in_background)
    with (
        Engine(synthetic("llama", "f32"), replace(OPTIONS, prefixes=prefixes)) as engine,
        Scheduler(engine, keep=True) as scheduler,
    ):
        restored = []
        for request in (Request(chat, 1, ends=False), other, Request([*chat, 5, 6, 7], 1, ends=False)):
            running = scheduler.prepare(request)
            scheduler.enqueue(running)
            while scheduler.busy:
                scheduler.step()
            restored.append(running.restored_tokens)
        assert engine.states.n_cached(engine.states.block_hashes(chat, "")) == len(chat) // engine.states.block
        assert running.cached_tokens == len(chat)
        assert restored == [0, 0, 0 if in_background else len(chat)]


def test_a_prompt_in_the_background_has_short_steps(synthetic: Synthetic) -> None:
    """As many whole tiles as were computed in SHORT_STEP_S, LEAST_ROWS where none was; others have whole chunks."""
    budget = StepBudget(512, lambda: 0.0)
    prompt: Any = _Prompt()
    assert budget.choose([prompt], 0, lambda n: min(n, 512)) == [(prompt, 512)]
    assert budget.choose([prompt], 0, lambda n: min(n, 512), is_short=True) == [(prompt, LEAST_ROWS)]
    budget.took(TILE_ROWS, TILE_ROWS, SHORT_STEP_S / 0.9)
    assert budget.choose([prompt], 0, lambda n: min(n, 512), is_short=True) == [(prompt, LEAST_ROWS)]
    budget.took(TILE_ROWS, TILE_ROWS, SHORT_STEP_S / 4.5)
    assert budget.choose([prompt], 0, lambda n: min(n, 512), is_short=True) == [(prompt, 4 * TILE_ROWS)]
    assert budget.choose([prompt], 0, lambda n: min(n, 512)) == [(prompt, 512)]


class _Prompt:
    number, adapters, to_prefill, added_at, pending = 0, (), 1000, 0.0, 1000
    answer = ()


def test_targets_of_latency_do_not_count_what_nobody_waits_for(synthetic: Synthetic) -> None:
    targets = LatencyTargets(itl_s=1.0)
    with Engine(synthetic("llama", "f32"), OPTIONS) as engine, Scheduler(engine, targets=targets) as scheduler:
        scheduler.run([background(Request([5, 6, 7], 4, ends=False)), Request([8, 6, 7], 3, ends=False)])
    assert (targets.first_tokens, targets.gaps) == (1, 2)


def test_a_scheduler_that_takes_the_cache_has_steps_as_the_engine_takes_them(
    synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine may have taken over while somebody else had the cache."""
    followed: list[Scheduler] = []
    follow = Scheduler.follow_engine
    with Engine(synthetic("llama", "f32"), OPTIONS) as engine, Scheduler(engine) as first, Scheduler(engine) as second:
        monkeypatch.setattr(Scheduler, "follow_engine", lambda own: (followed.append(own), follow(own)))
        for scheduler in (first, second, second, first):
            scheduler.add(Request([5, 6, 7], 2, ends=False))
            while scheduler.busy:
                scheduler.step()
    assert followed == [first, second, first]
