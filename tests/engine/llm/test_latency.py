"""Test the size of steps under latency targets, with given times: the model of gaps alone, and through a scheduler."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.llm.step_budget import AIM, LONGEST_GAP_S, Came, LatencyTargets, StepBudget
from tests.conftest import Synthetic
from tests.support.adapters import write_adapter
from tests.support.deployments import EXACT


class Answer:
    """An answer whose gaps are told to targets."""

    def __init__(self, targets: LatencyTargets) -> None:
        self._targets, self._now, self._rows = targets, 100.0, 0
        self.state: Any = SimpleNamespace(token_at=None, prompt_rows_at=0, answer=[], added_at=100.0)
        self.token(0.0)

    def token(self, gap_s: float, prompt_rows: int = 0, *, n_tokens: int = 1, is_plain: bool = True) -> None:
        self._now += gap_s
        self._rows += prompt_rows
        self.state.answer += [0] * n_tokens
        self._targets.step([Came(self.state, n_tokens, is_plain)], self._now, self._rows)

    def tokens(self, n: int, gap_s: float, prompt_rows: int = 0) -> None:
        for _ in range(n):
            self.token(gap_s, prompt_rows)


def rows_within(target_s: float, base_s: float, cost_s: float) -> int:
    return int((AIM * target_s - base_s) / cost_s)


def test_known_gaps_give_known_rows() -> None:
    """A token alone takes 40 ms and a row of a prompt 2 ms: with a target of 201 ms, 70 rows fit into nine tenths."""
    targets = LatencyTargets(itl_s=0.201)
    answer = Answer(targets)
    assert targets.rows([]) == 16  # nothing was measured
    answer.tokens(3, 0.040)
    assert targets.rows([]) == 16
    answer.token(0.040 + 16 * 0.002, 16)
    assert targets.rows([]) == 48  # no more than three times what was measured
    answer.token(0.040 + 32 * 0.002, 32)
    answer.token(0.040 + 64 * 0.002, 64)
    assert targets.rows([]) == rows_within(0.201, 0.040, 0.002) == 70


def test_without_a_token_alone_all_of_a_gap_is_cost() -> None:
    targets = LatencyTargets(itl_s=0.201)
    Answer(targets).token(0.160, 16)
    assert targets.rows([]) == int(AIM * 0.201 / 0.010) == 18


def test_outliers_are_not_followed_and_a_change_of_speed_is() -> None:
    targets = LatencyTargets(itl_s=0.201)
    answer = Answer(targets)
    for _ in range(8):
        answer.token(0.040)
        answer.token(0.040 + 64 * 0.002, 64)
    assert targets.rows([]) == 70
    answer.token(9.0, 64)
    answer.token(9.0)
    answer.token(9.0, 64)
    answer.token(9.0)
    assert targets.rows([]) == 70
    answer.tokens(8, 0.040)
    answer.tokens(8, 0.040 + 64 * 0.004, 64)
    assert targets.rows([]) == 35  # half as fast
    answer.tokens(5, 0.040 + 32 * 0.001, 32)
    assert targets.rows([]) == 35
    answer.tokens(2, 0.040 + 32 * 0.001, 32)
    assert targets.rows([]) == rows_within(0.201, 0.040, 0.001) == 140  # faster again
    answer.tokens(8, 0.100)
    answer.tokens(8, 0.100 + 64 * 0.001, 64)
    assert targets.rows([]) == 80  # answers alone became slower


def test_prompts_go_on_where_even_answers_alone_miss_the_target() -> None:
    targets = LatencyTargets(itl_s=0.010)
    answer = Answer(targets)
    answer.token(0.040)
    answer.token(0.200, 16)
    assert targets.rows([]) == 8


def test_what_says_nothing_of_a_row_is_not_learned() -> None:
    targets = LatencyTargets(itl_s=0.201)
    answer = Answer(targets)
    answer.token(0.040)
    answer.token(0.040 + 32 * 0.002, 32)
    before = targets.rows([])
    answer.token(0.150, 7)  # hardly any prompt
    answer.token(0.500, 32, is_plain=False)  # it was computed again, or drafted
    answer.token(0.500, n_tokens=3, is_plain=False)
    assert targets.rows([]) == before == 70


def test_the_longest_gap_of_a_step_counts_once() -> None:
    targets = LatencyTargets(itl_s=0.201)
    answers = [Answer(targets) for _ in range(9)]
    for n, answer in enumerate(answers):
        answer.state.token_at = 100.0 + (0.1 if n else 0.0)
    targets.step([Came(answer.state, 1, True) for answer in answers], 100.2, 20)
    assert targets.rows([]) == 18  # 20 rows in 0.2 s
    answers[0]._now = 100.2
    for _ in range(3):
        answers[0]._rows = answers[0].state.prompt_rows_at
        answers[0].token(0.1, 20)
    assert targets.rows([]) == 36  # the step before was one of four


@pytest.mark.parametrize(
    ("ttft_s", "waits", "rows"),
    [
        (10.0, [(400, 0.0)], 16),  # a tile: 400 / 16 gaps of 40 ms, and 0.8 s for the rows
        (2.0, [(400, 0.0)], 16),  # 400 * 0.04 / (1.8 - 0.8) = 16
        (2.0, [(400, 0.5)], 32),  # 400 * 0.04 / (1.8 - 0.5 - 0.8) = 32
        (2.0, [(400, 0.5), (100, 0.0)], 66),  # the short one first: 500 * 0.04 / (1.3 - 1)
        (2.0, [(400, 1.5)], 192),  # too late: as many as LONGEST_GAP_S and what was measured allow
        (2.0, [], 16),  # all of them have answers already
    ],
)
def test_without_a_target_for_gaps_they_are_as_short_as_first_tokens_allow(
    ttft_s: float, waits: Sequence[tuple[int, float]], rows: int
) -> None:
    targets = LatencyTargets(ttft_s=ttft_s)
    answer = Answer(targets)
    answer.token(0.040)
    answer.token(0.040 + 64 * 0.002, 64)
    assert targets.rows(waits) == rows
    answer.tokens(8, 0.040 + 400 * 0.002, 400)
    assert targets.rows([(400, 99.0)]) == pytest.approx(rows_within(LONGEST_GAP_S, 0.040, 0.002), abs=1)
    both = LatencyTargets(0.2, ttft_s)
    Answer(both).token(0.160, 16)
    assert both.rows(waits) == 18  # gaps come first


def test_what_was_within_targets_is_counted() -> None:
    targets = LatencyTargets(0.2, 1.0)
    answer = Answer(targets)
    answer.token(0.19)
    answer.token(0.21)
    answer.token(0.5, n_tokens=3, is_plain=False)  # two of the three came with the first
    late: Any = SimpleNamespace(token_at=None, prompt_rows_at=0, answer=[0], added_at=98.9)
    resumed: Any = SimpleNamespace(token_at=None, prompt_rows_at=0, answer=[0, 0, 0], added_at=100.0)
    nothing: Any = SimpleNamespace(token_at=None, prompt_rows_at=0, answer=[], added_at=100.0)
    targets.step([Came(late, 1, False), Came(resumed, 1, True), Came(nothing, 0, True)], 100.0, 0)
    assert targets.to_json() == {
        "target_itl_ms": 200.0,
        "target_ttft_ms": 1000.0,
        "gaps": 5,
        "gaps_within": 3,
        "first_tokens": 2,
        "first_tokens_within": 1,
    }
    assert (nothing.token_at, resumed.token_at) == (None, 100.0)
    only = LatencyTargets(ttft_s=1.0)
    Answer(only).token(5.0)
    assert (only.to_json()["gaps"], only.to_json()["gaps_within"], only.to_json()["target_itl_ms"]) == (1, None, None)
    assert LatencyTargets(0.1).to_json()["first_tokens_within"] is None


@pytest.mark.parametrize(
    ("answers", "in_flight", "turns", "rows"),
    [
        (1, 0, 1, 79),  # 80 rows and an answer: five tiles
        (8, 0, 1, 72),
        (24, 0, 1, 72),  # six tiles
        (2, 0, 2, 31),  # 40 rows in each of two steps that lie between two tokens: two tiles with the answer
        (1, 0, 2, 79),  # one answer is in every step
        (0, 2, 2, 32),
    ],
)
def test_a_step_within_a_target_has_whole_tiles(answers: int, in_flight: int, turns: int, rows: int) -> None:
    targets = LatencyTargets(itl_s=1.0)
    answer = Answer(targets)
    answer.tokens(8, 0.499)
    answer.tokens(8, 0.499 + 80 * 0.005, 80)
    assert targets.rows([]) == 80
    budget = StepBudget(512, lambda: 0.0, targets)
    budget.microbatches = turns
    prompt: Any = SimpleNamespace(number=99, pending=400, to_prefill=400, added_at=0.0, answer=[])
    ready: list[Any] = [SimpleNamespace(number=n, pending=1, to_prefill=0) for n in range(answers)]
    chosen = budget.choose([*ready, prompt], in_flight, lambda longest: 512)
    assert chosen[-1] == (prompt, rows)


def test_less_than_a_tile_where_a_target_allows_no_more() -> None:
    targets = LatencyTargets(itl_s=0.1)
    answer = Answer(targets)
    answer.token(0.039)
    answer.token(0.039 + 16 * 0.005, 16)
    budget = StepBudget(512, lambda: 0.0, targets)
    prompt: Any = SimpleNamespace(number=9, pending=400, to_prefill=400, added_at=0.0, answer=[])
    first: Any = SimpleNamespace(number=1, pending=1, to_prefill=0)
    assert budget.choose([first, prompt], 0, lambda longest: 512)[-1] == (prompt, 10)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (None, [63, 95]),
        (LatencyTargets(itl_s=0.5), [15, 31, 79, 207, 68]),
        (LatencyTargets(itl_s=0.1), [15, 15, 15]),
        (LatencyTargets(ttft_s=1.2), [15, 31, 47]),
    ],
    ids=["none", "itl-500", "itl-100", "ttft-1200"],
)
def test_a_prompt_beside_an_answer_comes_in_parts_that_keep_to_the_target(
    synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch, targets: LatencyTargets | None, expected: list[int]
) -> None:
    """By the clock of the test a step takes 30 ms and 2 ms more for each row of a prompt."""
    now = [0.0]
    with Engine(synthetic("llama", "f32"), replace(EXACT, context=1024, batch=256, sequences=2)) as engine:
        scheduler = Scheduler(engine, targets=targets, clock=lambda: now[0])
        n_rows, submit = list[int](), engine.submit

        def timed(tokens: Sequence[int], *rest: Any, **more: Any) -> None:
            n_rows.append(len(tokens) - 1)
            now[0] += 0.030 + 0.002 * n_rows[-1]
            submit(tokens, *rest, **more)

        monkeypatch.setattr(engine, "submit", timed)
        with scheduler:
            scheduler.add(Request([5, 6, 7], 100, ends=False))
            for _ in range(6):
                scheduler.step()
            n_rows.clear()
            scheduler.add(Request(list(range(3, 403)), 2, ends=False))
            for _ in expected:
                scheduler.step()
    assert n_rows == expected
    if targets is not None and targets.itl_s is not None:
        assert targets.gaps_within == targets.gaps > 0


def test_an_end_without_a_token_is_no_gap(synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fifth token of an answer is made one that ends it."""
    with Engine(synthetic("llama", "f32"), replace(EXACT, context=64)) as engine:
        tokens: list[list[int]] = []
        for ends in (False, True):
            targets = LatencyTargets(itl_s=60.0)
            with Scheduler(engine, targets=targets) as scheduler:
                scheduler.add(Request([5, 6, 7], 12, SamplingParams(temperature=1.0, seed=1), ends=ends))
                events = []
                while scheduler.busy:
                    events += scheduler.step()
            tokens.append([event.token_id for event in events if event.token_id is not None])
            assert (targets.first_tokens, targets.gaps) == (1, len(tokens[-1]) - 1)
            monkeypatch.setattr(engine.model, "is_end", lambda token: token == tokens[0][4])
    assert tokens[1] == tokens[0][:4]


@pytest.mark.parametrize(("itl_s", "least", "most"), [(0.15, 0.93, 1.0), (0.3, 0.93, 1.0), (None, 0.0, 0.1)])
def test_gaps_that_scatter_keep_to_the_target(itl_s: float | None, least: float, most: float) -> None:
    """Four answers beside one long prompt after the other, on a machine whose tokens take 50 ms and 4 ms more for each
    row of a prompt, some percent more or less, and three times as long in one step of fifty. Without a target a step
    takes a quarter of a second: hardly any gap of 150 ms."""
    rng, now = random.Random(7), [0.0]
    targets = LatencyTargets(itl_s=itl_s or 0.15)
    budget = StepBudget(512, lambda: now[0], targets if itl_s else None)
    answers: list[Any] = [
        SimpleNamespace(number=n, pending=1, to_prefill=0, token_at=0.0, prompt_rows_at=0, answer=[0]) for n in range(4)
    ]
    submitted = 0
    for _ in range(40):
        prompt: Any = SimpleNamespace(number=9, pending=700, to_prefill=700, added_at=now[0], answer=[])
        while prompt.pending > 1:
            prompt_rows = budget.choose([*answers, prompt], 0, lambda n: n)[-1][1]
            burst = 3.0 if rng.random() < 0.02 else 1.0
            took_s = (0.050 + 0.004 * prompt_rows) * rng.gauss(1.0, 0.05) * burst
            now[0] += took_s
            budget.took(4 + prompt_rows, prompt_rows, took_s)
            submitted += prompt_rows
            prompt.pending -= prompt_rows
            targets.step([Came(answer, 1, True) for answer in answers], now[0], submitted)
        for _ in range(3):
            now[0] += 0.050 * rng.gauss(1.0, 0.05)
            targets.step([Came(answer, 1, True) for answer in answers], now[0], submitted)
    beside_prompts = targets.gaps - 4 * 40 * 3
    assert least <= (targets.gaps_within - 4 * 40 * 3) / beside_prompts <= most


@pytest.mark.parametrize("targets", [None, LatencyTargets(itl_s=0.004)], ids=["none", "itl-4"])
def test_a_prompt_of_other_adapters_keeps_to_the_step_budget(
    synthetic: Synthetic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: LatencyTargets | None
) -> None:
    """Its steps have no answers, but answers wait for them."""
    path = synthetic("llama", "f32")
    adapter = write_adapter(tmp_path / "adapter.gguf", path)
    options = replace(EXACT, context=1024, batch=256, sequences=3, lora=(f"{adapter}:0",))
    now, n_rows = [0.0], list[int]()
    with Engine(path, options) as engine, Scheduler(engine, targets=targets, clock=lambda: now[0]) as scheduler:
        submit = engine.submit

        def noted(tokens: Sequence[int], *rest: Any, **more: Any) -> None:
            n_rows.append(len(tokens))
            now[0] += 0.030 + 0.002 * len(tokens)
            submit(tokens, *rest, **more)

        monkeypatch.setattr(engine, "submit", noted)
        for first in range(5, 7):
            scheduler.add(Request([first, 6, 7], 100, ends=False))
        for _ in range(6):
            scheduler.step()
        n_rows.clear()
        scheduler.add(Request(list(range(3, 403)), 2, ends=False, adapters=(1.0,)))
        for _ in range(6):
            scheduler.step()
    assert set(n_rows[0::2]) == {2}
    assert n_rows[1::2] == ([16, 8, 8] if targets else [64, 96, 96])
