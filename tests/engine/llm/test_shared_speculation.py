"""Test drafts in shared steps: requests have the same answers with any number of drafts from any source."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from edge.errors import SamplingError
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine, VerifyResult
from edge.llm.requests import Event
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.speculate.choice import MOST_ROWS
from edge.speculate.ngrams import NgramDrafts
from edge.speculate.speculation import FEW, Speculation
from tests.conftest import Synthetic
from tests.engine.llm.test_scheduler import MIXED, random_requests
from tests.engine.llm.test_speculation import Known
from tests.support.deployments import EXACT, pipeline, stages, tensor
from tests.support.drafting import always
from tests.support.ranks_here import ranks_here
from tests.support.replaceable import Mortal, replaceable
from tests.support.thorough import thorough

GREEDY = SamplingParams(temperature=0)
ROOM = replace(EXACT, context=256, sequences=4)
# What one request may ask for, and what must hold beside drafts.
KINDS = [
    *MIXED[:5],
    SamplingParams(temperature=0, frequency_penalty=0.8, presence_penalty=0.3),
    SamplingParams(temperature=0, logit_bias={7: 4.0}),
]


def several_requests(n: int, seed: int, sampling: Sequence[SamplingParams] = (GREEDY,)) -> list[Request]:
    """Requests whose answers are long enough to be drafted, with probabilities of some."""
    rng = np.random.default_rng(seed)
    return [
        replace(random_request, max_tokens=int(rng.integers(6, 24)), logprobs=2 if i % 3 == 0 else None, ends=i % 2 > 0)
        for i, random_request in enumerate(random_requests(n, 30, seed, sampling))
    ]


def answered(engine: TextEngine, requests: Sequence[Request], drafter: Speculation | None) -> list[list[Event]]:
    """All events of each request. The second half come one by one while others run."""
    reported: dict[int, list[Event]] = {}
    with Scheduler(engine, keep=True, drafter=drafter) as scheduler:
        numbers = [scheduler.add(request) for request in requests[: len(requests) // 2]]
        while scheduler.busy or len(numbers) < len(requests):
            if len(numbers) < len(requests) and len(scheduler.queues.running) < 2:
                numbers.append(scheduler.add(requests[len(numbers)]))
            for event in scheduler.step():
                reported.setdefault(event.request, []).append(replace(event, request=0, cached_tokens=0))
    assert drafter is None or not drafter._drafts  # nothing is kept of what has ended
    return [reported[number] for number in numbers]


def tokens(events: Sequence[Event]) -> list[int]:
    return [event.token_id for event in events if event.token_id is not None]


def known(requests: Sequence[Request], plain: Sequence[Sequence[Event]], wrong: int) -> Speculation:
    """Drafts of what is answered, each `wrong`th another token; checked in every step."""
    answers = {tuple(request.prompt): tokens(reported) for request, reported in zip(requests, plain, strict=True)}
    return Speculation(lambda: Known(answers, wrong), "known", choice=always())


def near(a: Sequence[Event], b: Sequence[Event]) -> bool:
    """The same, but for rounding of probabilities."""
    for item, other in zip(a, b, strict=True):
        if replace(item, logprobs=None) != replace(other, logprobs=None):
            return False
        if (item.logprobs is None) != (other.logprobs is None):
            return False
        if item.logprobs is not None and other.logprobs is not None:
            mine, theirs = (
                [each.chosen, *(p for _, p in each.alternatives)] for each in (item.logprobs, other.logprobs)
            )
            if not np.allclose(mine, theirs, atol=1e-3):
                return False
    return True


@pytest.mark.parametrize(
    "how",
    [None, *thorough(tensor(1, 1), pipeline(1, 1), stages(2, 1))],
    ids=lambda how: "one device" if how is None else str(how),
)
def test_answers_are_the_same_with_drafts(
    synthetic: Synthetic, how: dict[str, object] | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """All kinds of requests come while others run; drafts right, partly right, never right, and n-grams."""
    path = synthetic("llama", "f32")
    requests = several_requests(21, 3, KINDS)
    with Engine(path, ROOM) if how is None else ranks_here(path, how, ROOM, tmp_path_factory.mktemp("r")) as engine:
        plain = answered(engine, requests, None)
        for wrong in (0, 1, 3):
            drafter = known(requests, plain, wrong)
            result = answered(engine, requests, drafter)
            assert [tokens(item) for item in result] == [tokens(item) for item in plain]
            assert all(near(*pair) for pair in zip(result, plain, strict=True))
            stats = drafter.stats
            assert stats.drafted > (30 if engine.stages == 1 else 0)  # stages have others' tokens to work on
            assert stats.accepted == {0: stats.drafted, 1: 0}.get(wrong, stats.accepted)
        ngrams = Speculation(NgramDrafts, "ngram", choice=always())
        assert [tokens(item) for item in answered(engine, requests, ngrams)] == [tokens(item) for item in plain]
        assert ngrams.stats.drafted > 0 or engine.stages > 1


def test_many_requests_have_no_drafts(synthetic: Synthetic) -> None:
    """Until few are left. All of them together have no more rows than one may have alone."""
    requests = [
        replace(item, ends=False, max_tokens=12 + 10 * i) for i, item in enumerate(several_requests(FEW + 2, 5))
    ]

    class Watched(Engine):
        def submit(self, tokens, positions, sequences, outputs, **how):  # type: ignore[no-untyped-def]
            rows.append((len(set(sequences.tolist())), int(outputs.sum())))
            super().submit(tokens, positions, sequences, outputs, **how)

    rows: list[tuple[int, int]] = []
    with Watched(synthetic("llama", "f32"), replace(ROOM, sequences=FEW + 2)) as engine:
        plain = answered(engine, requests, None)
        rows.clear()
        drafter = known(requests, plain, 0)
        assert [tokens(item) for item in answered(engine, requests, drafter)] == [tokens(item) for item in plain]
    assert all(n_rows <= MOST_ROWS for _, n_rows in rows)
    assert all(n_rows == n for n, n_rows in rows if n > FEW)
    assert {n for n, n_rows in rows if n_rows > n} >= {1, 2}


def test_drafts_make_nobody_wait(synthetic: Synthetic) -> None:
    """A context that is just large enough for the answers has no room for drafts at its end."""
    requests = [Request([3 + i, 4, 5], 29, GREEDY, ends=False) for i in range(2)]
    with Engine(synthetic("llama", "f32"), replace(EXACT, context=64, batch=16, outputs=16, sequences=2)) as engine:
        plain = answered(engine, requests, None)
        drafter = known(requests, plain, 1)
        with Scheduler(engine, drafter=drafter) as scheduler:
            assert scheduler.run(requests) == [tokens(item) for item in plain]
            assert scheduler.queues.preemptions["foreground"] == 0
    assert drafter.stats.drafted > 20


def test_a_request_that_is_cancelled_or_fails_leaves_the_others_in_order(
    synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [Request([3 + i, 4, 5], 20, GREEDY, ends=False) for i in range(3)]
    with Engine(synthetic("llama", "f32"), ROOM) as engine:
        plain = [tokens(answered(engine, [request, request], None)[0]) for request in requests]
        answers = {tuple(request.prompt): reported for request, reported in zip(requests, plain, strict=True)}
        drafter = Speculation(lambda: Known(answers), "known", choice=always())
        with Scheduler(engine, keep=True, drafter=drafter) as scheduler:
            first, second, third = (scheduler.prepare(request) for request in requests)
            for item in (first, second, third):
                scheduler.enqueue(item)
            results: dict[int, list[int]] = {}
            reasons = {}
            while scheduler.busy:
                for event in scheduler.step():
                    if event.token_id is not None:
                        results.setdefault(event.request, []).append(event.token_id)
                    if event.finish_reason:
                        reasons[event.request] = event.finish_reason
                if len(results.get(first.number, [])) >= 4 and not second.ended:
                    scheduler.cancel(second.number)

                    def fails(logits: object) -> str:
                        raise SamplingError("no token is left")

                    monkeypatch.setattr(third.continuation, "choose", fails)
            assert reasons == {first.number: "length", second.number: "cancelled", third.number: "error"}
            assert results[first.number] == plain[0]
        assert not drafter._drafts
        assert tokens(answered(engine, [requests[1]] * 2, drafter)[0]) == plain[1]


@pytest.mark.parametrize("wrong", [0, 2])
def test_a_lost_engine_costs_no_token(synthetic: Synthetic, wrong: int) -> None:
    """The engine that takes over knows nothing of drafts that were wrong."""
    path, requests = synthetic("llama", "f32"), several_requests(6, 9)
    with Engine(path, ROOM) as engine:
        plain = answered(engine, requests, None)
    with Mortal(path, ROOM) as first, Engine(path, ROOM) as second:
        first.lives = 9  # type: ignore[attr-defined]
        survivor = replaceable(first, lambda _: second)
        drafter = known(requests, plain, wrong)
        result = answered(survivor, requests, drafter)
        assert survivor.replacements.recoveries == 1
    assert [tokens(item) for item in result] == [tokens(item) for item in plain]
    assert drafter.stats.drafted > 20


def test_figures_of_steps() -> None:
    """Two requests; a pass of one row each takes 1 s, of more 1.25 s, and of what is beside something else nothing is
    learned."""
    now = 0.0

    class One:
        prompt, left, tokens, sequence = [1, 2], 100, [1, 2], 0

        def __init__(self) -> None:
            self.answer: list[int] = []

    answers = [One(), One()]
    drafter = Speculation(lambda: Known({(1, 2): [9] * 999}), "known", clock=lambda: now)
    for i in range(80):
        most, _ = drafter.shape(answers, 8)
        rows = [len(drafter.draft(answer, [0], most)) for answer in answers]
        assert sum(rows) <= MOST_ROWS
        if i % 5 == 4:
            drafter.disturbed()
            now += 100
        now += 1.25 if max(rows) > 1 else 1.0
        drafter.verified([VerifyResult(n, n, right=n - 1, looked_at=n - 1) for n in rows])
        for answer, n in zip(answers, rows, strict=True):
            answer.answer += [0] * n
    result = drafter.to_json()
    assert result["draft"] == "known"
    assert result["drafted"] == result["accepted"] > 200
    assert result["passes"] == 80
    assert 8 < result["rows_per_pass"] <= MOST_ROWS
    assert 4 < result["gain"] < 8 / 1.25
    for answer in answers:
        drafter.ended(answer)
    assert not drafter._drafts
    assert drafter.shape([One() for _ in range(FEW + 1)], 99) == (1, 1)
