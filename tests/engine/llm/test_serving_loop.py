"""Requests that share steps, prefixes and memory: each is answered as it would be alone."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.errors import SamplingError
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.options import PrefixOptions
from edge.llm.requests import Event, token_logprobs
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.llm.slot import Origin, Slot
from edge.llm.slots import Slots
from edge.llm.step_budget import STEP_S, TILE_ROWS, StepBudget, parts
from tests.conftest import Synthetic
from tests.engine.llm.test_scheduler import alone, random_requests
from tests.support.deployments import EXACT, deployed, pipeline, tensor
from tests.support.ranks_here import ranks_here
from tests.support.workers import Worker

GREEDY = SamplingParams(temperature=0)


def answered(scheduler: Scheduler) -> dict[int, list[int]]:
    """Run to the end: the tokens of each request."""
    tokens: dict[int, list[int]] = {}
    for event in events(scheduler):
        if event.token_id is not None:
            tokens.setdefault(event.request, []).append(event.token_id)
    return tokens


def events(scheduler: Scheduler) -> Iterator[Event]:
    while scheduler.busy:
        yield from scheduler.step()


def mixed(n: int, seed: int) -> list[Request]:
    """Greedy requests, of which half begin like another one."""
    rng = np.random.default_rng(seed)
    requests = random_requests(n, 60, seed, sampling=(GREEDY,))
    for i in range(1, n, 2):
        beginning = requests[int(rng.integers(0, i))].prompt
        prompt = [*beginning, *requests[i].prompt][:70]
        requests[i] = replace(requests[i], prompt=prompt)
    return requests


@pytest.mark.parametrize("how", [None, tensor(1, 1), pipeline(1, 1)], ids=["alone", "ranks", "stages"])
def test_greedy_tokens_do_not_depend_on_who_else_is_answered(
    one_worker: Worker,
    synthetic: Synthetic,
    how: dict[str, object] | None,
) -> None:
    """64 requests that come and go, more than there are sequences, in less context than they need."""
    path = synthetic("llama", "f32")
    options = replace(EXACT, context=256, sequences=8)
    requests = mixed(64, seed=21)
    with Engine(path, options) as single:
        expected = alone(single, requests)
        if how is None:
            check_together(Scheduler(single, keep=True), requests, expected)
    if how is not None:
        with deployed(one_worker, path, how, options) as deployment:
            check_together(Scheduler(deployment.engine, keep=True), requests, expected)


def check_together(scheduler: Scheduler, requests: Sequence[Request], expected: list[list[int]]) -> None:
    with scheduler:
        numbers = [scheduler.add(request) for request in requests[:20]]
        results: dict[int, list[int]] = {}
        cached = 0
        for event in events(scheduler):
            cached = max(cached, event.cached_tokens)
            if event.token_id is not None:
                results.setdefault(event.request, []).append(event.token_id)
            if len(numbers) < len(requests):
                numbers.append(scheduler.add(requests[len(numbers)]))
    assert [results.get(number, []) for number in numbers] == expected
    assert cached > 16


def test_requests_wait_again_where_the_context_is_short_and_go_on_with_the_same_tokens(synthetic: Synthetic) -> None:
    requests = [replace(r, max_tokens=100, ends=False) for r in random_requests(6, 30, 4, sampling=(GREEDY,))]
    drawn = [replace(r, sampling=SamplingParams(temperature=1.2, seed=i)) for i, r in enumerate(requests)]
    with Engine(synthetic("llama", "f32"), replace(EXACT, context=200, sequences=6)) as engine:
        for provided in (requests, drawn):
            scheduler = Scheduler(engine, keep=True)
            numbers = [scheduler.add(request) for request in provided]
            result = answered(scheduler)
            assert scheduler.queues.preemptions["foreground"] > 0
            expected = [Scheduler(engine).run([request])[0] for request in provided]
            assert [result[number] for number in numbers] == expected


def test_a_prompt_is_computed_once_while_it_is_held(synthetic: Synthetic) -> None:
    """By a request that is answered now, by one that has ended, and in part."""
    rng = np.random.default_rng(2)
    long = rng.integers(3, 512, 64).tolist()
    with Engine(synthetic("llama", "f32"), replace(EXACT, context=512, sequences=4)) as engine:
        scheduler = Scheduler(engine, keep=True)
        first = scheduler.add(Request(long, 20, ends=False))
        for event in events(scheduler):
            if event.request == first and event.token_id is not None:
                break
        second = scheduler.add(Request([*long, 9], 2, ends=False))
        reported = {event.request: event.cached_tokens for event in events(scheduler)}
        assert (reported[first], reported[second]) == (0, 64)
        third, fourth = (scheduler.add(Request(prompt, 2)) for prompt in (long, [*long[:40], 7, 8]))
        reported = {event.request: event.cached_tokens for event in events(scheduler)}
        assert (reported[third], reported[fourth]) == (63, 40)
        plain = Scheduler(engine)
        again = [plain.add(Request(long, 2)) for _ in range(2)]
        assert {event.cached_tokens for event in events(plain)} == {0}
        assert again


def test_prompts_are_kept_on_disk_for_the_next_engine(synthetic: Synthetic, tmp_path: Path) -> None:
    long = np.random.default_rng(3).integers(3, 512, 70).tolist()
    options = replace(
        EXACT, context=256, sequences=2, prefixes=PrefixOptions(1 << 20, tmp_path / "kept", tmp_path / "key")
    )
    (tmp_path / "key").mkdir()
    results = []
    for _ in range(2):
        with Engine(synthetic("llama", "f32"), options) as engine, Scheduler(engine, keep=True) as scheduler:
            scheduler.add(Request(long, 3, ends=False))
            reported = list(events(scheduler))
            results.append(([event.token_id for event in reported], reported[-1].cached_tokens))
    (first, computed), (again, restored) = results
    assert first == again
    assert (computed, restored) == (0, 64)


@pytest.mark.parametrize(("store_bytes", "cached_cells"), [(1 << 20, 0), (1000, 72), (0, 72)])
def test_cells_of_a_prompt_on_disk_are_free_once_another_is_computed(
    synthetic: Synthetic, tmp_path: Path, store_bytes: int, cached_cells: int
) -> None:
    """Cells whose content is nowhere else stay. The tokens are the same, and the prompt is not computed again either
    way."""
    rng = np.random.default_rng(3)
    long, other = (rng.integers(3, 512, 70).tolist() for _ in range(2))
    (tmp_path / "key").mkdir()
    saved = PrefixOptions(store_bytes, tmp_path / "kept", tmp_path / "key") if store_bytes else None
    with (
        Engine(synthetic("llama", "f32"), replace(EXACT, context=512, sequences=2, prefixes=saved)) as engine,
        Scheduler(engine, keep=True) as scheduler,
    ):
        results = []
        for prompt in (long, other, long):
            scheduler.add(Request(prompt, 3, ends=False))
            reported = list(events(scheduler))
            results.append(([event.token_id for event in reported], reported[-1].cached_tokens))
            if prompt is other:
                assert engine.kv_last(0) + 1 == cached_cells
    (first, _), _, (again, cached) = results
    assert first == again
    assert cached == (69 if cached_cells else 64)


@pytest.mark.parametrize(
    ("in_background", "exact", "stays"), [(False, None, False), (True, None, True), (False, 40, True)]
)
def test_what_was_left_while_steps_were_under_way_is_kept_when_the_next_request_is_admitted(
    in_background: bool, exact: int | None, stays: bool, synthetic: Synthetic, tmp_path: Path
) -> None:
    """It leaves memory then, but for a request in the background, and where only a part of it can be kept. exact:
    tokens before a change of the model's bits."""
    (tmp_path / "key").mkdir()
    options = replace(
        EXACT, context=512, batch=128, sequences=2, prefixes=PrefixOptions(1 << 20, tmp_path / "kept", tmp_path / "key")
    )
    prompt = [*range(3, 73)]
    with Engine(synthetic("llama", "f32"), options) as engine:
        slots = Slots(engine, keep=True)
        slot = slots.admit(slots.place(prompt, 1), adapters=())
        engine.decode(prompt, 0, sequence=slot.sequence)
        slot.tokens += prompt
        slot.origin = Origin(exact=exact)
        hashes = engine.states.block_hashes(prompt[:exact])
        slots.leave(slot, keep=False)
        assert engine.states.n_cached(hashes) == 0
        slots.admit(slots.place([5, 6, 7], 1), adapters=(), background=in_background)
        assert engine.states.n_cached(hashes) == len(hashes) == (8 if exact is None else 5)
        assert engine.kv_last(slot.sequence) == (len(prompt) - 1 if stays else -1)


def test_a_request_that_waits_for_steps_in_flight_does_not_wait_for_answers(
    synthetic: Synthetic, tmp_path: Path
) -> None:
    """Over stages some step is always in flight, and disks are read between steps: so none follows for once."""
    (tmp_path / "key").mkdir()
    options = replace(
        EXACT, context=512, sequences=3, prefixes=PrefixOptions(1 << 20, tmp_path / "kept", tmp_path / "key")
    )
    with (
        ranks_here(synthetic("llama", "f32"), pipeline(1, 1), options, tmp_path) as engine,
        Scheduler(engine, keep=True) as scheduler,
    ):
        assert scheduler.slots.restores
        for i in range(2):
            scheduler.add(Request([5 + i, 6, 7], 100, ends=False))
        order: list[int] = []
        while len(order) < 20:
            order += [event.request for event in scheduler.step()]
        third = scheduler.add(Request([8, 9, 10], 2, ends=False))
        reported: list[int] = []
        while third not in reported:
            reported += [event.request for event in scheduler.step()]
        assert len(reported) < 20  # the others have 90 tokens each to go


def test_one_long_prompt_does_not_stall_the_others(synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is computed, each answer gets a token in every step, and steps have whole tiles. A later short prompt is
    not behind it."""
    rng = np.random.default_rng(5)
    with Engine(synthetic("llama", "f32"), replace(EXACT, context=512, batch=32, sequences=4)) as engine:
        scheduler = Scheduler(engine, keep=True, clock=lambda: 0.0)
        scheduler._budget.rows = 8  # twice as many while two wait for one
        running = scheduler.add(Request([5, 6, 7], 200, ends=False))
        while not any(event.token_id is not None for event in scheduler.step()):
            pass
        long = scheduler.add(Request(rng.integers(3, 512, 200).tolist(), 2, ends=False))
        short = scheduler.add(Request([8, 9, 10, 11], 2, ends=False))
        order, n_rows, submit = list[int](), list[int](), engine.submit

        def counted(tokens: Sequence[int], *rest: Any, **more: Any) -> None:
            n_rows.append(len(tokens))
            submit(tokens, *rest, **more)

        monkeypatch.setattr(engine, "submit", counted)
        while long not in order:
            order += [event.request for event in scheduler.step() if event.token_id is not None]
        assert order.index(short) <= 2
        assert set(n_rows[: n_rows.index(min(n_rows))]) == {TILE_ROWS}  # the last one of the prompt is smaller
        assert Counter(order)[running] >= 200 // 16  # a token for each chunk of the long prompt
        scheduler.close()


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (1, [48, 64]),  # three wait for one; 48 rows took a quarter of a second, so the batch is what limits
        (2, [16, 16]),  # three wait for two, each in a group of its own
    ],
)
def test_where_more_prompts_wait_than_there_are_answers_a_step_has_more_of_them(
    synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch, answers: int, expected: list[int]
) -> None:
    with Engine(synthetic("llama", "f32"), replace(EXACT, context=512, batch=64, sequences=5)) as engine:
        scheduler = Scheduler(engine, microbatches=answers, clock=partial(next, itertools.count(0.0, STEP_S)))
        for _ in range(answers):
            scheduler.add(Request([5, 6, 7], 20, ends=False))
        while any(item.pending > 1 for item in scheduler.queues.running) or not scheduler.queues.running:
            scheduler.step()
        scheduler._budget.rows = 16
        for _ in range(3):
            scheduler.add(Request(list(range(3, 63)), 2, ends=False))
        n_rows, submit = list[int](), engine.submit

        def counted(tokens: Sequence[int], *rest: Any, **more: Any) -> None:
            n_rows.append(len(tokens))
            submit(tokens, *rest, **more)

        monkeypatch.setattr(engine, "submit", counted)
        for _ in range(2):
            scheduler.step()
        scheduler.close()
    assert n_rows == expected


def test_an_answer_goes_on_behind_what_was_told_elsewhere(synthetic: Synthetic) -> None:
    schema = json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 4, "maxItems": 4})
    for sampling in (
        GREEDY,
        SamplingParams(temperature=0, repeat_penalty=1.4),
        SamplingParams(temperature=0, json_schema=schema),
    ):
        request = Request([5, 6, 7], 14, sampling)
        with Engine(synthetic("llama", "f32"), replace(EXACT, sequences=2)) as engine:
            [whole] = Scheduler(engine).run([request])
            [rest] = Scheduler(engine).run([replace(request, generated=whole[:5])])
        assert len(whole) > 6
        assert rest == whole[5:]


def test_it_is_told_how_likely_tokens_are_and_what_stopped_an_answer(synthetic: Synthetic) -> None:
    with Engine(synthetic("llama", "f32"), replace(EXACT, sequences=2)) as engine:
        prompt = [5, 6, 7]
        logits = engine.decode(prompt, 0).astype(np.float64)
        engine.kv_clear()
        probabilities = np.exp(logits) / np.exp(logits).sum()
        scheduler = Scheduler(engine)
        scheduler.add(Request(prompt, 3, logprobs=2, ends=False))
        scheduler.add(Request(prompt, 3, ends=False))
        first, second = [event for event in events(scheduler) if event.token_id is not None][:2]
        assert second.logprobs is None
        assert first.logprobs is not None
        order = np.argsort(-probabilities)[:2]
        assert [token for token, _ in first.logprobs.alternatives] == order.tolist()
        assert np.exp(first.logprobs.chosen) == pytest.approx(probabilities[first.token_id], rel=1e-4)
        for (_, logprob), token in zip(first.logprobs.alternatives, order, strict=True):
            assert np.exp(logprob) == pytest.approx(probabilities[token], rel=1e-4)
        text = engine.model.piece(first.token_id or 0).decode()
        scheduler.add(Request(prompt, 3, stop=("never", text), ends=False))
        *_, last = events(scheduler)
        assert (last.stop_string, last.finish_reason, last.text) == (text, "stop", "")


def test_logprobs_of_known_values() -> None:
    logits = np.log(np.array([0.5, 0.125, 0.25, 0.125], np.float32)) + 7
    result = token_logprobs(logits, 1, 2)
    assert np.exp(result.chosen) == pytest.approx(0.125)
    assert [(token, pytest.approx(np.exp(logprob))) for token, logprob in result.alternatives] == [(0, 0.5), (2, 0.25)]
    assert token_logprobs(logits, 0, 0).alternatives == ()
    assert len(token_logprobs(logits, 0, 20).alternatives) == 4


def test_one_request_whose_constraint_ends_ends_alone(synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(synthetic("llama", "f32"), replace(EXACT, sequences=2)) as engine:
        scheduler = Scheduler(engine)
        fine = scheduler.add(Request([5, 6], 6, ends=False))
        broken = scheduler.prepare(Request([7, 8], 6, SamplingParams(temperature=0, regex="[ab]{6}")))

        def refuse(logits: object) -> None:
            raise SamplingError("nothing can follow")

        monkeypatch.setattr(broken.continuation, "choose", refuse)
        scheduler.enqueue(broken)
        reported = list(events(scheduler))
        assert [str(event.error) for event in reported if event.request == broken.number] == ["nothing can follow"]
        assert sum(event.token_id is not None for event in reported if event.request == fine) == 6


def test_the_budget_follows_the_best_of_what_steps_took() -> None:
    budget = StepBudget(512, lambda: 0.0)

    def step(rows: int, prompt_rows: int, took_s: float) -> int:
        budget.took(rows, prompt_rows, took_s)
        return budget.rows

    assert budget.rows == 64
    assert step(64, 60, 64 / 2048) == 2048 * STEP_S
    assert step(256, 250, 10.0) == 512  # a burst is not believed
    for _ in range(8):
        rows = step(64, 32, 0.5)
    assert rows == 128 * STEP_S  # rows of answers take their part of the time
    assert step(512, 512, 0.01) == 32  # nobody waited
    assert step(64, 7, 0.01) == 32  # hardly any prompt
    assert StepBudget(4, lambda: 0.0).rows == 4


@pytest.mark.parametrize(
    ("answers", "rows"), [(1, 63), (8, 56), (15, 49), (16, 48), (24, 40), (64, 16)], ids=lambda n: f"{n}"
)
def test_a_step_with_prompts_has_whole_tiles(answers: int, rows: int) -> None:
    assert StepBudget(512, lambda: 0.0).prompt_rows(answers) == rows


def test_a_step_with_prompts_has_some_of_them_however_slow_they_are() -> None:
    slow = StepBudget(4, lambda: 0.0)
    assert [slow.prompt_rows(answers) for answers in (0, 1, 8, 9, 15, 16)] == [16, 15, 8, 23, 17, 16]


@pytest.mark.parametrize(
    ("answers", "waiting", "rows"),
    [(1, 0.5, 63), (8, 1, 56), (1, 2, 127), (2, 2.5, 158), (1, 15, 255), (8, 1.875, 104)],
)
def test_where_more_wait_than_are_answered_a_step_may_take_longer(answers: int, waiting: float, rows: int) -> None:
    assert StepBudget(512, lambda: 0.0).prompt_rows(answers, waiting) == rows


def test_short_prompts_come_first_and_the_oldest_comes_to_its_end(synthetic: Synthetic) -> None:
    with Engine(synthetic("llama", "f32"), replace(EXACT, context=512, sequences=6)) as engine:
        scheduler = Scheduler(engine)
        prompts = [100, 10, 30, 10]
        running = [scheduler.prepare(Request(list(range(3, 3 + n)), 4)) for n in prompts]
        for i, one_ in enumerate(running):
            one_.slot = Slot(i)
        first, *others = running
        assert parts(running, 40) == [(others[0], 10), (others[2], 10), (others[1], 10), (first, 10)]
        assert parts(running, 400) == [(others[0], 10), (others[2], 10), (others[1], 30), (first, 100)]
        assert parts(running, 4) == [(others[0], 3), (first, 1)]
        assert parts([others[1]], 16) == [(others[1], 16)]
        assert parts(running, 0) == parts([], 9) == []
        scheduler.close()
