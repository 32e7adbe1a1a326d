"""Test the replacement of an engine that fails at any moment: each request gets the answer of one engine."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge.errors import EngineError, Interrupted
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions
from edge.llm.sampler import SamplingParams
from edge.llm.scheduler import Scheduler
from edge.llm.slot import Slot
from edge.models.demo import MODEL_PATH
from edge.parallel import moving, replacements
from edge.parallel.replaceable import ReplaceableEngine
from edge.parallel.replacements import MOST_IN_A_ROW
from tests.conftest import Synthetic
from tests.support.deployments import pipeline
from tests.support.ranks_here import ranks_here
from tests.support.replaceable import replaceable
from tests.support.thorough import some

# All in F32: what is computed in other portions, or with cells in another order, is then nearly the same.
OPTIONS = EngineOptions(threads=1, context=96, batch=5, sequences=3, kv_type="f32", flash_attention="off")
LONGEST = 15  # tokens of an answer
CLEAR = 1e-3  # logarithm of a probability by which each token leads: other portions change less
ROW = np.array([0]), np.array([0]), np.ones(1, np.int8)


class Mortal(Engine):
    """An engine that is lost after so many calls, and then for good."""

    def __init__(self, lives: int, path: Path = MODEL_PATH, options: EngineOptions = OPTIONS) -> None:
        super().__init__(path, options)
        self.lives, self._lost = lives, False

    @property
    def failed(self) -> Exception | None:
        return EngineError("lost") if self._lost else None

    def _live(self) -> None:
        self.lives -= 1
        self._lost = self._lost or self.lives < 0
        if self._lost:
            raise EngineError("lost")


def mortal(name: str) -> Callable[..., Any]:
    def call(self: Mortal, *args: Any, **how: Any) -> Any:
        self._live()
        return getattr(Engine, name)(self, *args, **how)

    return call


for _name in ("submit", "collect", "kv_remove", "kv_copy", "kv_shift", "kv_clear"):
    setattr(Mortal, _name, mortal(_name))


class Lives:
    """Engines that are lost one after the other, at calls that `lives` has the numbers of; then one that is not."""

    def __init__(self, lives: Iterator[int], path: Path = MODEL_PATH, options: EngineOptions = OPTIONS) -> None:
        self._lives, self._path, self._options = lives, path, options
        self._stack = ExitStack()
        self.engine = replaceable(self.another(), self.another)

    def another(self, _: Exception | None = None) -> Mortal:
        engine = Mortal(next(self._lives, 1 << 30), self._path, self._options)
        self._stack.callback(engine.close)
        return engine

    def __enter__(self) -> ReplaceableEngine:
        return self.engine

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class Case(SimpleNamespace):
    """A request and its answer on one device, each token of which leads clearly."""

    request: Request
    tokens: list[int]


@pytest.fixture(scope="module")
def cases(synthetic: Synthetic) -> list[Case]:
    """Prompts of which some begin alike."""
    rng, result = random.Random(0), list[Case]()
    with Engine(synthetic("llama", "f32"), OPTIONS) as whole:
        while len(result) < 8:
            prompt = [rng.randrange(3, 512) for _ in range(rng.choice((1, 4, 5, 6, 11, 23)))]
            if result and rng.random() < 0.5:
                prompt = [*rng.choice(result).request.prompt, *prompt][:30]
            request = Request(prompt, LONGEST, ends=False, logprobs=2)
            scheduler = Scheduler(whole)
            scheduler.add(request)
            tokens, lead = list[int](), 1.0
            while scheduler.busy:
                for event in scheduler.step():
                    if event.token_id is not None and event.logprobs is not None:
                        tokens.append(event.token_id)
                        (_, best), (_, second) = event.logprobs.alternatives
                        lead = min(lead, best - second)
            if lead > CLEAR:
                result.append(Case(request=replace(request, logprobs=None), tokens=tokens))
    return result


def answered(scheduler: Scheduler, requests: list[Case], between: Callable[[], None], rng: random.Random) -> None:
    """Ask in random order, and cancel some: what comes of each is the beginning of what one device answers, or all."""
    waiting, answers = rng.sample(requests, len(requests)), dict[int, tuple[Case, list[int], list[str]]]()
    while waiting or scheduler.busy:
        if waiting and rng.random() < 0.3:
            first = waiting.pop()
            answers[scheduler.add(first.request)] = first, [], []
        if answers and rng.random() < 0.01:
            scheduler.cancel(rng.choice(list(answers)))
        between()
        for event in scheduler.step():
            first, tokens, ends = answers[event.request]
            assert not ends, "more came after the end"
            tokens += [event.token_id] if event.token_id is not None else []
            ends += [event.finish_reason] if event.finish_reason is not None else []
    for first, tokens, ends in answers.values():
        assert tokens == (first.tokens if ends == ["length"] else first.tokens[: len(tokens)])
    assert sum(ends == ["length"] for _, _, ends in answers.values()) > 1


@pytest.mark.parametrize("seed", range(some(6, 200)))
def test_whoever_asks_notices_nothing(seed: int, synthetic: Synthetic, cases: list[Case]) -> None:
    rng = random.Random(seed)
    lives = (rng.randrange(2, 40) + 30 * bool(i) for i in range(7))  # enough for a token between two losses
    with Lives(lives, synthetic("llama", "f32")) as engine:
        with Scheduler(engine, keep=bool(seed % 2)) as scheduler:
            answered(scheduler, cases, lambda: None, rng)
            assert engine.uncollected == 0
        assert engine.replacements.recoveries > 0
        assert engine.replacements.computed_again > 0


@pytest.mark.parametrize("shifts", [False, True])
@pytest.mark.parametrize("lives", range(2, 60, some(5, 1)))
def test_a_full_context_is_as_full_after_a_loss(lives: int, shifts: bool) -> None:
    """Also where the last token of an answer has no room, and where the engine is lost as the context is shifted."""
    with Lives(iter([lives]), options=FULL) as engine:
        assert filled(engine, shifts) == filled_by_one(shifts)


FULL = replace(OPTIONS, context=24, sequences=1)


def filled(engine: TextEngine, shifts: bool) -> tuple[int, int, str | None]:
    """Fill the context; return tokens of the answer, tokens that were dropped, and why it ended."""
    scheduler = Scheduler(engine, slots=1, keep=True)
    stays = (lambda: 2) if shifts else None
    request = Request([5, 6, 7, 8], 40 if shifts else None, ends=False, stays=stays)
    running = scheduler.prepare(request)
    scheduler.enqueue(running)
    reasons = [event.finish_reason for _ in range(500) if scheduler.busy for event in scheduler.step()]
    assert not scheduler.busy
    return len(running.answer), running.dropped_tokens, reasons[-1]


@cache
def filled_by_one(shifts: bool) -> tuple[int, int, str | None]:
    """Return the same of an engine that is not lost."""
    with Engine(MODEL_PATH, FULL) as engine:
        return filled(engine, shifts)


def test_an_error_of_what_was_asked_is_raised() -> None:
    with Lives(iter([])) as engine:
        with pytest.raises(EngineError, match="takes 1 to 5 tokens"):
            engine.decode([1, 2, 3, 4, 5, 6], 0)
        assert engine.replacements.recoveries == 0


def test_who_takes_over_is_asked_for_the_same_logits() -> None:
    """The logits that a schema needs are requested again."""
    requests: list[tuple[int, list[np.ndarray]]] = []

    class Reported(Mortal):
        logits_cross = True

        def submit(self, *args: Any, top: int = 0, masks: Any = (), **how: Any) -> None:
            requests.append((top, [np.array(mask) for mask in masks]))
            super().submit(*args, top=top, masks=masks, **how)

    with ExitStack() as stack:
        first, second = (Reported(99), Reported(99))
        stack.callback(first.close)
        stack.callback(second.close)
        engine = replaceable(first, lambda error: second)
        scheduler = Scheduler(engine)
        scheduler.add(Request([5], 3, SamplingParams(temperature=0, regex="[ab]{3}")))
        assert len(scheduler.step()) == 1
        first.lives = 1  # a step is submitted, and its logits never come
        assert len(scheduler.step()) == 1
        assert engine.replacements.recoveries == 1
        (top, [mask]), (top_again, [mask_again]) = requests[1:3]
        assert top == top_again > 0
        assert (mask == mask_again).all()
        scheduler.close()


def test_who_is_lost_again_and_again_is_given_up() -> None:
    for ask in (lambda engine: engine.kv_clear(), lambda engine: Scheduler(engine).run([Request([5], 1)])):
        with Lives(iter([0] * 9)) as engine:
            for n_errors in (1, 2):  # after an error losses count from the start
                with pytest.raises(EngineError, match="lost"):
                    ask(engine)
                assert engine.replacements.recoveries == n_errors * MOST_IN_A_ROW


def test_losses_in_a_row_are_those_without_a_token_between_them() -> None:
    """Not those within one step: a device may be killed again and again by the same part of a long prompt."""
    request = Request(list(range(5, 65)), 20, ends=False)
    with Lives(iter([10] * 9)) as engine:
        with pytest.raises(EngineError, match="lost"):
            Scheduler(engine).run([request])
        assert engine.replacements.recoveries == MOST_IN_A_ROW
    with Lives(iter([20] * 9)) as engine, Engine(MODEL_PATH, OPTIONS) as whole:
        assert Scheduler(engine).run([request]) == Scheduler(whole).run([request])
        assert engine.replacements.recoveries > MOST_IN_A_ROW


def test_who_is_stopped_waits_for_no_other_engine() -> None:
    with Lives(iter([0])) as engine:
        engine.stop()
        with pytest.raises(Interrupted):
            engine.kv_clear()
        engine.resume()
        engine.kv_clear()
        assert engine.replacements.recoveries == 1


@pytest.mark.parametrize("how", ["nobody is left", "stopped before", "stopped meanwhile"])
def test_who_asks_after_a_loss_gets_no_logits_of_steps_before_it(how: str) -> None:
    """A step was under way when nobody was left, or nobody waited: whoever asked for it was told so."""
    with ExitStack() as stack:
        engines = [Mortal(100) for _ in range(2)]
        for item in engines:
            stack.callback(item.close)
        left = [how != "nobody is left"]  # whether another engine can take over

        def another(_: Exception) -> Mortal:
            if how == "stopped meanwhile":
                engine.stop()
            if not left[0]:
                raise EngineError("nobody is left")
            return engines[1]

        engine = replaceable(engines[0], another)
        scheduler = Scheduler(engine, keep=True)
        scheduler.add(Request([5, 6, 7], 9, ends=False))
        scheduler.step()
        engines[0].lives = 1  # a step is submitted, and its logits never come
        if how == "stopped before":
            engine.stop()
        with pytest.raises((EngineError, Interrupted)):
            scheduler.step()
        scheduler.close()
        engine.resume()
        assert engine.uncollected == 0
        left[0] = True
        prompt = [9, 10, 11, 12]
        with Engine(MODEL_PATH, OPTIONS) as whole:
            assert Scheduler(engine).run([Request(prompt, 6)]) == Scheduler(whole).run([Request(prompt, 6)])
        assert engine.uncollected == 0
        assert engine.replacements.recoveries == 1


def test_what_was_chosen_is_told_also_where_the_engine_is_lost_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where drafts that were wrong are to be forgotten."""
    with Engine(MODEL_PATH, OPTIONS) as whole:
        [expected] = Scheduler(whole).run([Request([5, 6], 4, ends=False)])
    with Lives(iter([])) as engine:
        scheduler = Scheduler(engine)
        scheduler.add(Request([5, 6], 4, ends=False))
        reported = [event.token_id for event in scheduler.step()]
        in_flight, verify = scheduler._in_flight, scheduler._in_flight.verify

        def lost(*arguments: Any) -> Any:
            verify(*arguments)
            monkeypatch.undo()
            engine.replacements.engine.lives = 0  # type: ignore[attr-defined]
            engine.kv_remove(0, 3)

        monkeypatch.setattr(in_flight, "verify", lost)
        while scheduler.busy:
            reported += [event.token_id for event in scheduler.step() if event.token_id is not None]
        assert reported == expected
        assert engine.replacements.recoveries == 1


@pytest.mark.parametrize("exact", [False, True])
def test_progress_of_a_prompt_stays_between_nothing_and_all_after_a_loss(exact: bool) -> None:
    """Most of the prompt was cached on the engine, which is lost before it has computed the rest."""
    reports: list[tuple[int, int]] = []
    with Lives(iter([])) as engine:
        engine.replacements.exact = exact

        def report(n_done: int, n_all: int) -> None:
            if not reports:
                engine.replacements.engine.lives = 0  # type: ignore[attr-defined]
            reports.append((n_done, n_all))

        with Scheduler(engine, slots=1, keep=True) as scheduler:
            first = list(range(5, 25))
            for request in (
                Request(first, 1, ends=False),
                Request([*first, *range(30, 39)], 2, ends=False, on_prefill=report),
            ):
                scheduler.add(request)
                while scheduler.busy:
                    scheduler.step()
        assert engine.replacements.recoveries == 1
    assert all(0 <= n_done <= n_all for n_done, n_all in reports)
    assert reports[0][1] < len(first)
    assert reports[-1][0] == reports[-1][1]


def test_what_idle_slots_held_is_told_once_and_within_its_namespace() -> None:
    """Another user must not notice by speed what was asked, also after a loss."""
    with Lives(iter([])) as engine:
        scheduler = Scheduler(engine, keep=True)
        scheduler.add(Request([5, 6, 7, 8, 9], 1, ends=False, namespace="one"))
        while scheduler.busy:
            scheduler.step()
        scheduler.preempt_all()
        assert scheduler.slots.former([5, 6, 7], "two") is None
        assert scheduler.slots.former([6, 7], "one") is None
        former = scheduler.slots.former([5, 6, 7], "one")
        assert former is not None
        assert former.tokens == [5, 6, 7, 8, 9]
        assert scheduler.slots.former([5, 6, 7], "one") is None


@pytest.mark.parametrize("n_losses", [1, 2, 3])
def test_what_idle_slots_held_is_known_after_several_losses(n_losses: int) -> None:
    """Whoever comes again after the first loss, or only after the last one."""
    with Lives(iter([])) as engine:
        scheduler = Scheduler(engine, keep=True)
        prompts = [[5 + 20 * n, 6, 7, 8] for n in range(n_losses)]
        for prompt in prompts:
            scheduler.add(Request(prompt, 1, ends=False))
            while scheduler.busy:
                scheduler.step()
            scheduler.preempt_all()
        known = [scheduler.slots.former(prompt, "") for prompt in prompts]
        assert [former and former.tokens for former in known] == prompts
        assert [scheduler.slots.former(prompt, "") for prompt in prompts] == [None] * n_losses


def test_steps_are_those_of_the_engine_that_took_over() -> None:
    """After a loss, and after a move that takes keys and values along."""

    class Grouped(Engine):
        microbatches = 2

    with Engine(MODEL_PATH, OPTIONS) as third, Grouped(MODEL_PATH, OPTIONS) as second, Mortal(2) as first:
        engine = replaceable(first, lambda error: second)
        with Scheduler(engine) as scheduler:
            scheduler.add(Request([5, 6], 8, ends=False))
            while not engine.replacements.recoveries:
                scheduler.step()
            assert scheduler._in_flight._budget.microbatches == 2
            engine.replacements.switch_to(lambda: third)
            scheduler.step()
            assert (engine.replacements.moves, scheduler._in_flight._budget.microbatches) == (1, 1)


# --- without a scheduler ---


def test_what_is_computed_without_a_scheduler_stays_on_its_engine() -> None:
    with Engine(MODEL_PATH, OPTIONS) as first, Engine(MODEL_PATH, OPTIONS) as other:
        engine = replaceable(first, lambda error: other)
        engine.decode([5, 6], 0)
        engine.replacements.switch_to(lambda: other)
        engine.replacements.switch_now()
        assert engine.replacements.engine is first
        other.decode([5, 6], 0)
        np.testing.assert_array_equal(engine.decode([7], 2), other.decode([7], 2))
        engine.kv_clear()
        assert (engine.replacements.engine, engine.replacements.moves) == (other, 1)


def test_a_loss_is_an_error_without_a_scheduler_and_the_next_clear_goes_on() -> None:
    with Lives(iter([5])) as engine:
        engine.kv_clear()
        engine.decode([5, 6], 0)
        engine.decode([7], 2)
        for token in (8, 9):
            with pytest.raises(EngineError, match="lost"):
                engine.decode([token], 3)
        with pytest.raises(EngineError, match="lost"):
            engine.replacements.between_steps(lambda engine: engine.kv_clear())
        assert engine.replacements.recoveries == 0
        engine.kv_clear()
        assert engine.decode([5, 6], 0).size
        assert engine.replacements.recoveries == 1


# --- moves ---


@pytest.mark.parametrize("seed", range(some(4, 100)))
def test_an_engine_is_left_between_any_two_steps(
    seed: int, synthetic: Synthetic, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rng = synthetic("llama", "f32"), random.Random(seed)
    if seed % 2:  # as where this device has no memory for keys and values on their way
        monkeypatch.setattr(moving, "available_memory", lambda: 0)
    engines = [Engine(path, OPTIONS)]

    def another() -> Engine:
        engines[-1].close()  # as where both have no room beside each other
        engines.append(Engine(path, OPTIONS))
        return engines[-1]

    with Engine(path, OPTIONS) as vocabulary:
        engine = replaceable(engines[0], lambda error: engines[0])
        engine.model = vocabulary.model

        def between() -> None:
            if rng.random() < 0.1:
                engine.replacements.switch_to(another)
                assert engine.replacements.is_moving
                if rng.random() < 0.5:
                    engine.replacements.switch_now()
                    assert not engine.replacements.is_moving

        with Scheduler(engine, keep=seed % 4 < 2) as scheduler:
            answered(scheduler, cases, between, rng)
        assert engine.replacements.moves == len(engines) - 1 > 0
        assert engine.replacements.recoveries == 0
        assert (engine.replacements.computed_again > 0) == bool(seed % 2)
        engines[-1].close()


def test_where_the_next_engine_cannot_be_another_takes_over() -> None:
    with Engine(MODEL_PATH, OPTIONS) as first, Engine(MODEL_PATH, OPTIONS) as other:
        errors: list[str] = []

        def recovered(error: Exception) -> Engine:
            errors.append(str(error))
            return other

        def fails() -> Engine:
            raise EngineError("no room")

        engine = replaceable(first, recovered)
        now = engine.replacements
        scheduler = Scheduler(engine, keep=True)
        scheduler.add(Request([5, 6], 3, ends=False))
        tokens = [event.token_id for event in scheduler.step()]
        now.switch_to(lambda: None)  # it came too late
        now.switch_now()
        assert (now.engine, now.moves, now.recoveries) == (first, 0, 0)
        now.switch_to(fails)
        while scheduler.busy:
            tokens += [event.token_id for event in scheduler.step() if event.token_id is not None]
        assert (now.engine, now.moves, now.recoveries, errors) == (other, 0, 1, ["no room"])
        assert [tokens] == Scheduler(first).run([Request([5, 6], 3, ends=False)])


def test_where_no_engine_is_left_every_call_says_so() -> None:
    with Engine(MODEL_PATH, OPTIONS) as first, Engine(MODEL_PATH, OPTIONS) as other:
        left = list[Engine]()

        def recovered(error: Exception) -> Engine:
            if not left:
                raise EngineError("nobody is left")
            return left[0]

        def fails() -> Engine:
            raise EngineError("no room")

        engine = replaceable(first, recovered)
        scheduler = Scheduler(engine)
        scheduler.add(Request([5, 6], 3))
        scheduler.step()
        engine.replacements.switch_to(fails)
        with pytest.raises(EngineError, match="nobody is left"):
            scheduler.step()
        scheduler.close()
        for call in (lambda: engine.decode([5], 0), lambda: engine.submit([5], *ROW), lambda: engine.kv_remove(0, 0)):
            with pytest.raises(EngineError, match="was cancelled"):
                call()
        assert engine.uncollected == 0
        left.append(other)
        assert len(Scheduler(engine).run([Request([5, 6], 3, ends=False)])[0]) == 3


def test_logits_hold_while_somebody_looks_between_two_steps(tmp_path: Path) -> None:
    """As the watch for slow devices does in a thread of its own, while tokens are chosen by what was collected."""

    def nobody(error: Exception) -> TextEngine:
        raise error

    with ranks_here(MODEL_PATH, pipeline(1, 1), OPTIONS, tmp_path) as ranks:
        engine = replaceable(ranks, nobody)
        for sequence in (0, 1):
            engine.submit([5 + sequence], np.array([0]), np.array([sequence]), np.ones(1, np.int8))
        first = engine.collect()
        current = first.copy()
        engine.replacements.between_steps(lambda engine: None)
        assert (first == current).all()
        assert (engine.collect() != current).any()


def test_a_model_is_not_quiet_while_logits_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(MODEL_PATH, OPTIONS) as engine:
        survivor = replaceable(engine, lambda error: engine)
        survivor.submit([5], *ROW)
        now_s = replacements.time.monotonic() + 60.0  # type: ignore[attr-defined]
        monkeypatch.setattr(replacements.time, "monotonic", lambda: now_s)  # type: ignore[attr-defined]
        assert survivor.replacements.quiet_s == 0.0
        survivor.collect()
        asked_s = now_s
        monkeypatch.setattr(replacements.time, "monotonic", lambda: asked_s + 30.0)  # type: ignore[attr-defined]
        assert survivor.replacements.quiet_s == pytest.approx(30.0)


class WrittenTo:
    """An engine that is given keys and values: it takes so many blocks, and then none."""

    def __init__(self, factors: str, takes: int, failed: Exception | None = None) -> None:
        self.factors, self.takes, self.failed = factors, takes, failed
        self.blocks: list[Any] = []
        self.states = self

    def write(self, sequence: int, block: Any) -> None:
        if len(self.blocks) == self.takes:
            raise EngineError("no room")
        self.blocks.append((sequence, block))

    def kv_copy(self, *_: int) -> None:
        pass

    def kv_clear(self) -> None:
        self.blocks.clear()


def test_keys_that_were_turned_by_other_factors_are_not_taken() -> None:
    current: Any = moving.HeldStates("yarn 2", [(moving.Beginning(0, 2, 0, 0), ["a", "b"])])  # type: ignore[list-item]
    engine: Any = WrittenTo("yarn 2", 9)
    assert moving.write_states(engine, current)
    assert engine.blocks == [(0, "a"), (0, "b")]
    other: Any = WrittenTo("yarn 4", 9)
    assert not moving.write_states(other, current)
    assert other.blocks == []


def test_an_engine_that_refused_a_block_is_left_empty() -> None:
    """Half of a cache would be computed on."""
    current: Any = moving.HeldStates("", [(moving.Beginning(0, 2, 0, 0), ["a", "b"])])  # type: ignore[list-item]
    engine: Any = WrittenTo("", 1)
    assert not moving.write_states(engine, current)
    assert engine.blocks == []
    lost: Any = WrittenTo("", 1, EngineError("lost"))
    with pytest.raises(EngineError, match="no room"):
        moving.write_states(lost, current)


def test_what_slots_share_is_moved_once_and_nothing_beside_it() -> None:
    with Engine(MODEL_PATH, OPTIONS) as first, Engine(MODEL_PATH, OPTIONS) as second:
        item, other = Slot(first, 0), Slot(first, 1)
        for token in range(5, 25):
            item.decode([token])
        other.copy_from(item)
        other.cut(7)
        for token in range(60, 70):
            other.decode([token])
        current = moving.read_states(first, [item, other])
        assert current is not None
        assert [(part.start, len(blocks)) for part, blocks in current.parts] == [(0, 2), (7, 1)]
        assert moving.write_states(second, current)
        for slot in (item, other):
            at = len(slot.tokens)
            expected = first.decode([9], at, sequence=slot.sequence).copy()
            np.testing.assert_allclose(second.decode([9], at, sequence=slot.sequence), expected, atol=1e-4)


def test_what_was_shifted_shares_no_keys_with_what_was_computed() -> None:
    with Engine(MODEL_PATH, OPTIONS) as engine:
        first, other = Slot(engine, 0), Slot(engine, 1)
        for token in range(5, 13):
            first.decode([token])
        first.drop(2, 3)
        for token in first.tokens:
            other.decode([token])
        assert [(beginning.sequence, beginning.start) for beginning in moving.beginnings([first, other])] == [
            (0, 0),
            (1, 2),
        ]
        assert [(beginning.sequence, beginning.start) for beginning in moving.beginnings([other, first])] == [
            (1, 0),
            (0, 2),
        ]
