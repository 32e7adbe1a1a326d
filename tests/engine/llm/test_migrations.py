"""Requests that are answered by the placement of prompts, and move between it and the one that generates: answers are
those of one device, whatever is lost, cancelled or full on the way."""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.llm.requests import Event
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.llm.step_budget import TILE_ROWS
from edge.parallel.replacements import ReplaceableEngine, Replacements
from partition.predict.migration import LEAST_TOKENS, Pace
from tests.engine.llm.test_phases import folder
from tests.support.cases import Cases, clear_case, come_and_go, random_tokens
from tests.support.deployments import pipeline, stages, tensor
from tests.support.helpers import until
from tests.support.phases import Counting, Phases, moving_at_random, phases
from tests.support.ranks_here import ranks_here
from tests.support.slices import synthetic
from tests.support.thorough import some

OPTIONS = EngineOptions(threads=1, context=512, batch=16, sequences=3, outputs=8, kv_type="f32", flash_attention="off")
LONG = 3 * LEAST_TOKENS  # tokens of an answer
CLEAR = 1e-3  # by how much each best logit leads: sums in another order change less


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic(tmp_path_factory.mktemp("model") / "llama.gguf", "llama", layers=4)


@pytest.fixture(scope="module")
def cases(model: Path) -> Cases:
    rng = random.Random(7)
    with Engine(model, OPTIONS) as whole:
        lengths = (3, 20, 33, 40, 50)
        return [clear_case(whole, partial(random_tokens, rng, length), LONG, CLEAR) for length in lengths]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def counting(model: Path, stack: ExitStack) -> Any:
    """Makes engines that are closed at the end."""
    return lambda lives=1 << 30, options=OPTIONS: stack.enter_context(Counting(model, options, lives))


def request(prompt: Sequence[int], n: int = LONG, **how: Any) -> Request:
    return Request(list(prompt), n, ends=False, **how)


class FixedPace(Pace):
    """A pace that is known, whatever is measured."""

    token_s = 1.0

    def __init__(self, token_s: float) -> None:
        super().__init__()
        self.token_s = token_s


def with_paces(both: Phases, scheduler: Scheduler, here_s: float, there_s: float) -> None:
    """Tokens take so long where answers are generated, and on the placement of prompts."""
    scheduler._in_flight.pace = FixedPace(here_s)
    both.placement._answering.in_flight.pace = FixedPace(there_s)
    both.placement.copy_token_s = 1e-6


def events(scheduler: Scheduler) -> Iterator[Event]:
    while scheduler.busy:
        yield from scheduler.step()


def answers(scheduler: Scheduler, cases: Cases) -> dict[int, list[int]]:
    """Answer all at once; what is replies must be complete."""
    numbers = [scheduler.add(request(prompt)) for prompt, _ in cases]
    replies: dict[int, list[int]] = {number: [] for number in numbers}
    ends = []
    for event in events(scheduler):
        replies[event.request] += [event.token_id] if event.token_id is not None else []
        ends += [event.finish_reason] if event.finish_reason is not None else []
    assert ends == ["length"] * len(cases)
    return replies


def assert_nothing_is_left(both: Phases, scheduler: Scheduler) -> None:
    assert not scheduler.slots.away.requests
    assert not any(slot.busy for slot in scheduler.slots.all)
    both.placement.close()  # its thread lets go of what is over
    assert both.lost or not both.placement._open


# --- where requests are answered ---


def fill(scheduler: Scheduler, cases: Cases) -> list[int]:
    """Use all slots of the placement that generates, until nothing is computed elsewhere: the requests. Where one is
    complete before all have begun, as prompts came slowly, they begin again, with their keys and values here."""
    for _ in range(5):
        numbers = [scheduler.add(request(prompt)) for prompt, _ in cases[: OPTIONS.sequences]]
        n_left = len(numbers)
        while n_left == len(numbers):
            if len(scheduler.running) == n_left and all(running.answer for running in scheduler.running):
                return numbers
            n_left -= sum(event.finish_reason is not None for event in scheduler.step())
        scheduler.drop_requests()
    raise AssertionError("not all slots were used at once")


def test_who_has_no_room_is_answered_by_the_placement_of_prompts(counting: Any, cases: Cases) -> None:
    decode, prefill = counting(), counting()
    with phases(decode, prefill) as both, Scheduler(both.engine, keep=True) as scheduler:
        with_paces(both, scheduler, 1.0, 1.0)
        fill(scheduler, cases)
        prefill.computed.clear()
        prompt, answer = cases[4]
        number = scheduler.add(request(prompt))
        replies = [event.token_id for event in events(scheduler) if event.request == number]
        assert replies == answer
        assert sum(prefill.computed) == len(prompt) + LONG - 1
        assert scheduler.slots.away.migrations == 0  # its answer did not move
        assert_nothing_is_left(both, scheduler)


def test_who_is_slower_there_comes_back_once_there_is_room(counting: Any, cases: Cases) -> None:
    decode, prefill = counting(), counting()
    with phases(decode, prefill, least=500) as both, Scheduler(both.engine, keep=True) as scheduler:
        with_paces(both, scheduler, 0.01, 1.0)
        others = fill(scheduler, cases)
        prompt, answer = cases[4]
        number, replies = scheduler.add(request(prompt)), []
        while not any(running.answer for running in scheduler.slots.away.requests):
            replies += scheduler.step()
        decode.computed.clear()
        for other in others:
            scheduler.cancel(other)
        replies += events(scheduler)
        assert [event.token_id for event in replies if event.request == number] == answer
        assert scheduler.slots.away.migrations == 1
        assert decode.computed == [1] * len(decode.computed)  # its keys and values came along
        assert decode.computed
        assert_nothing_is_left(both, scheduler)


def test_who_is_slower_here_leaves_with_its_keys_and_values(counting: Any, cases: Cases) -> None:
    decode, prefill = counting(), counting()
    prompt, answer = cases[4]
    with phases(decode, prefill, least=500) as both, Scheduler(both.engine, keep=True) as scheduler:
        with_paces(both, scheduler, 1.0, 0.1)
        assert list(answers(scheduler, cases[4:]).values()) == [answer]
        assert scheduler.slots.away.migrations == 1
        assert prefill.computed == [1] * (LONG - 1)
        assert sum(decode.computed) == len(prompt)
        assert_nothing_is_left(both, scheduler)


def test_stages_send_keys_and_values_between_their_steps(
    model: Path, counting: Any, cases: Cases, tmp_path: Path
) -> None:
    prefill = counting()
    with (
        ranks_here(model, pipeline(1, 1), OPTIONS, tmp_path) as decode,
        phases(decode, prefill, least=500) as both,
        Scheduler(both.engine, keep=True) as scheduler,
    ):
        with_paces(both, scheduler, 1.0, 0.1)
        assert list(answers(scheduler, cases[3:]).values()) == [answer for _, answer in cases[3:]]
        assert scheduler.slots.away.migrations
        assert max(prefill.computed) <= 2  # the next token of each


def test_what_the_other_placement_holds_is_not_copied(counting: Any, cases: Cases, monkeypatch: Any) -> None:
    """Such as the prompt that it computed."""
    decode, prefill = counting(), counting()
    written: list[int] = []
    write = prefill.states.write

    def noted(sequence: int, block: Any) -> None:
        written.append(len(block.positions))
        write(sequence, block)

    monkeypatch.setattr(prefill.states, "write", noted)
    with phases(decode, prefill) as both, Scheduler(both.engine, keep=True) as scheduler:
        with_paces(both, scheduler, 1.0, 0.1)
        assert list(answers(scheduler, cases[4:]).values()) == [cases[4][1]]
        assert sum(written) == 1  # the prompt's last token


def test_who_moved_stays_for_a_while(counting: Any, cases: Cases) -> None:
    """Though both placements would send it back each time."""
    decode, prefill = counting(), counting()
    with phases(decode, prefill) as both, Scheduler(both.engine, keep=True) as scheduler:
        with_paces(both, scheduler, 1.0, 0.1)
        moved_at: list[int] = []
        running = scheduler.prepare(request(cases[4][0]))
        scheduler.enqueue(running)
        while scheduler.busy:
            scheduler.step()
            if running.moved_at not in (None, *moved_at):
                moved_at.append(running.moved_at or 0)
                here_s, there_s = (0.1, 1.0) if scheduler.slots.away.requests else (1.0, 0.1)
                with_paces(both, scheduler, here_s, there_s)
        assert list(running.answer) == cases[4][1]
        assert len(moved_at) == scheduler.slots.away.migrations > 1
        assert min(second - first for first, second in pairwise(moved_at)) >= LEAST_TOKENS


def test_nobody_moves_where_nothing_is_kept(counting: Any, cases: Cases) -> None:
    decode, prefill = counting(), counting()
    with phases(decode, prefill) as both, Scheduler(both.engine) as scheduler:
        with_paces(both, scheduler, 1.0, 0.1)
        assert list(answers(scheduler, cases).values()) == [answer for _, answer in cases]
        assert 1 not in prefill.computed[: len(cases)]
        assert not scheduler.slots.away.migrations


@pytest.mark.parametrize(
    "kind",
    [{"background": True}, {"sampling": SamplingParams(temperature=0, grammar='root ::= "a"+')}],
    ids=["background", "grammar"],
)
def test_who_stays(kind: dict[str, Any], counting: Any, cases: Cases) -> None:
    decode, prefill = counting(), counting()
    with phases(decode, prefill) as both, Scheduler(both.engine, keep=True) as scheduler:
        with_paces(both, scheduler, 1.0, 0.1)
        for prompt, _ in cases:
            scheduler.add(request(prompt, **kind))
        for _ in events(scheduler):
            assert not scheduler.slots.away.requests


def test_prompts_go_in_small_parts_beside_answers(counting: Any, cases: Cases) -> None:
    options = replace(OPTIONS, batch=64)
    decode, prefill = counting(options=options), counting(options=options)
    with phases(decode, prefill) as both, Scheduler(both.engine, keep=True) as scheduler:
        with_paces(both, scheduler, 1.0, 1.0)
        both.placement._answering._budget.rows = TILE_ROWS  # so many take as long as a step may
        others = fill(scheduler, cases)
        prefill.gate.clear()
        prefill.computed.clear()
        scheduler.add(request(cases[4][0]))
        while not scheduler.slots.away.requests:
            scheduler.step()
        scheduler.cancel(others[0])
        number, replies = scheduler.add(request(cases[3][0], namespace="other")), []
        while not scheduler.slots.remote.requests:
            replies += scheduler.step()
        prefill.gate.set()
        replies += events(scheduler)
        assert [event.token_id for event in replies if event.request == number] == cases[3][1]
        assert max(prefill.computed) < TILE_ROWS


# --- whatever happens ---


PAIRS = [(None, None), (pipeline(1, 1), None), (None, pipeline(2, 1)), (tensor(1, 1), stages(2, 1))]


@pytest.mark.parametrize("seed", range(some(4, 80)))
def test_requests_move_at_any_moment(
    seed: int, model: Path, counting: Any, cases: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    moving_at_random(monkeypatch, rng)
    with ExitStack() as stack:
        engines: list[TextEngine] = []
        for name, how in zip(("decode", "prefill"), PAIRS[seed % len(PAIRS)], strict=True):
            ranks = how and stack.enter_context(ranks_here(model, how, OPTIONS, folder(tmp_path, name)))
            engines.append(ranks or counting())
        both = stack.enter_context(phases(engines[0], engines[1], rng.choice((1, 30))))
        scheduler = stack.enter_context(Scheduler(both.engine, keep=True))
        come_and_go(scheduler, cases, request, rng, 0.01)
        assert not both.lost
        assert_nothing_is_left(both, scheduler)


@pytest.mark.parametrize("lives", range(5, 200, some(48, 3)))
@pytest.mark.parametrize("who", ["decode", "prefill"])
def test_nothing_is_lost_where_an_engine_is(
    who: str, lives: int, counting: Any, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    moving_at_random(monkeypatch, random.Random(lives))
    engines = {name: counting(lives if name == who else 1 << 30) for name in ("decode", "prefill")}
    with (
        phases(engines["decode"], engines["prefill"], recovered=lambda error: counting()) as both,
        Scheduler(both.engine, keep=True) as scheduler,
    ):
        assert list(answers(scheduler, cases).values()) == [answer for _, answer in cases]
        assert_nothing_is_left(both, scheduler)


def test_who_is_cancelled_there_leaves_nothing_behind(counting: Any, cases: Cases) -> None:
    decode, prefill = counting(), counting()
    with phases(decode, prefill) as both, Scheduler(both.engine, keep=True) as scheduler:
        with_paces(both, scheduler, 1.0, 0.1)
        number = scheduler.add(request(cases[4][0]))
        while not scheduler.slots.away.requests:
            scheduler.step()
        prefill.gate.clear()  # also while a token is computed
        scheduler.cancel(number)
        assert [event.finish_reason for event in scheduler.step() if event.finish_reason] == ["cancelled"]
        assert not scheduler.busy
        prefill.gate.set()
        assert list(answers(scheduler, cases[3:4]).values()) == [cases[3][1]]
        assert_nothing_is_left(both, scheduler)


def test_a_full_cache_sends_its_last_request_back(counting: Any, cases: Cases) -> None:
    tight = replace(OPTIONS, context=256)
    decode, prefill = counting(options=tight), counting(options=tight)
    with phases(decode, prefill) as both, Scheduler(both.engine, keep=True) as scheduler:
        with_paces(both, scheduler, 1.0, 1.0)
        assert list(answers(scheduler, cases).values()) == [answer for _, answer in cases]
        assert_nothing_is_left(both, scheduler)


# --- what is known of them ---


def test_who_begins_there_has_not_moved(counting: Any, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its first token may be chosen before the scheduler goes on."""
    decode, prefill = counting(), counting()
    with phases(decode, prefill) as both, Scheduler(both.engine, keep=True) as scheduler:
        with_paces(both, scheduler, 1.0, 1.0)
        fill(scheduler, cases)
        begin = both.placement.answer

        def chosen_at_once(answer: Any) -> bool:
            """Wait for the first token, unless nobody may choose it now."""

            def may_grow() -> bool:
                is_free: bool = answer.changed.acquire(blocking=False)
                if is_free:
                    answer.changed.release()
                return is_free

            has_begun = begin(answer)
            with ThreadPoolExecutor(1) as other:
                if other.submit(may_grow).result():
                    until(lambda: bool(answer.own.answer), "the first token")
            return has_begun

        monkeypatch.setattr(both.placement, "answer", chosen_at_once)
        scheduler.add(request(cases[4][0]))
        for _ in events(scheduler):
            pass
        assert scheduler.slots.away.migrations == 0


def test_who_waits_hears_of_every_answer(counting: Any, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, prefill = counting(), counting()
    with phases(decode, prefill) as both, Scheduler(both.engine, keep=True) as scheduler:
        with_paces(both, scheduler, 1.0, 1.0)
        fill(scheduler, cases)
        prefill.gate.clear()
        away = scheduler.slots.away
        for prompt, _ in cases[3:]:
            running = scheduler.prepare(request(prompt))
            until(partial(away.begin, running), "room there, once the one before is admitted")
        second = list(away._answers.values())[1]
        with second.changed:
            second.add([Event(second.own.number, 5, "", None)])
        for answer in away._answers.values():
            monkeypatch.setattr(answer.changed, "wait", lambda timeout_s: pytest.fail("it waits though there is news"))
        away.wait()
        monkeypatch.undo()
        prefill.gate.set()


class NotedPace(Pace):
    """A pace that counts its gaps, and those before it was cleared."""

    def __init__(self) -> None:
        super().__init__()
        self.noted = self.since_clear = 0

    def add(self, gap_s: float) -> None:
        super().add(gap_s)
        self.noted += 1
        self.since_clear += 1

    def clear(self) -> None:
        super().clear()
        self.since_clear = 0


def test_a_loss_is_no_gap_and_another_engine_has_another_pace(counting: Any, cases: Cases) -> None:
    lives = LEAST_TOKENS
    decode = counting(lives)
    replacements = Replacements(decode, lambda error: counting())
    with Scheduler(ReplaceableEngine(decode, decode.model, replacements), keep=True) as scheduler:
        scheduler._in_flight.pace = pace = NotedPace()
        scheduler.add(request(cases[0][0]))
        while not replacements.recoveries:
            assert len(scheduler.step()) <= 1
        assert pace.noted == lives - 1
        assert (pace.since_clear, pace.token_s) == (0, None)
        for _ in events(scheduler):
            pass
        assert pace.noted == LONG - 2  # none before the first token of either engine


def test_a_preemption_is_no_gap_and_fewer_have_another_pace(counting: Any, cases: Cases) -> None:
    decode = counting(options=replace(OPTIONS, context=256))
    with Scheduler(decode, keep=True) as scheduler:
        scheduler._in_flight.pace = pace = NotedPace()
        numbers = [scheduler.add(request(prompt)) for prompt, _ in cases[: OPTIONS.sequences]]
        while not scheduler.preemptions["foreground"]:
            scheduler.step()
        assert pace.since_clear <= len(scheduler.running) < len(numbers)
        for _ in events(scheduler):
            pass
        assert pace.noted == len(numbers) * (LONG - 1) - scheduler.preemptions["foreground"]


def test_who_has_no_more_room_there_leaves_no_pace(
    counting: Any, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, prefill = counting(), counting()
    with phases(decode, prefill) as both, Scheduler(both.engine, keep=True) as scheduler:
        with_paces(both, scheduler, 1.0, 1.0)
        fill(scheduler, cases)
        both.placement._answering.in_flight.pace = pace = NotedPace()
        scheduler.add(request(cases[4][0]))
        while not pace.since_clear:
            scheduler.step()
        monkeypatch.setattr(both.placement._slots, "make_room", lambda n_tokens: False)
        while scheduler.slots.away.requests:
            scheduler.step()
        assert pace.since_clear == 0
        monkeypatch.undo()
        for _ in events(scheduler):
            pass
