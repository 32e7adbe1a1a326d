"""Test prompts that another placement computes: answers are those of one device, also after any loss."""

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.errors import EngineError, Interrupted
from edge.llm.bench import measure
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions, PrefixOptions
from edge.llm.scheduler import Scheduler
from edge.parallel.prefiller import PrefillPlacement
from edge.speculate.ngrams import NgramDrafts
from edge.speculate.speculation import Speculation
from partition.plan.plan import Range
from tests.support.cases import Cases, clear_case, come_and_go, greedy, random_tokens
from tests.support.deployments import pipeline, stages, tensor
from tests.support.drafting import always
from tests.support.helpers import TIMEOUT_S
from tests.support.phases import Counting, phases
from tests.support.ranks_here import ranks_here
from tests.support.slices import synthetic
from tests.support.thorough import some
from transport.errors import LinkClosed

OPTIONS = EngineOptions(threads=1, context=256, batch=8, sequences=3, outputs=8, kv_type="f32", flash_attention="off")
LONGEST = 10  # tokens of an answer
THIN = pipeline(0, 1)  # the other device computes all of a prompt
PLACEMENTS = [pipeline(1, 1), pipeline(1, 1, 1), tensor(1, 1), stages(2, 1), stages(1, 2), THIN, tensor(0, 1, 1)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic(tmp_path_factory.mktemp("model") / "llama.gguf", "llama", layers=4)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def counting(model: Path, stack: ExitStack) -> Any:
    """Makes engines that are closed at the end."""
    return lambda lives=1 << 30, options=OPTIONS: stack.enter_context(Counting(model, options, lives))


@pytest.fixture(scope="module")
def cases(model: Path) -> Cases:
    rng = random.Random(3)
    with Engine(model, OPTIONS) as whole:
        lengths = (2, 3, 9, 17, 40, 41, 64)
        return [clear_case(whole, partial(random_tokens, rng, length), LONGEST) for length in lengths]


def request(prompt: Sequence[int], n: int = LONGEST, namespace: str = "") -> Request:
    return Request(list(prompt), n, ends=False, namespace=namespace)


def answers(engine: TextEngine, prompts: Sequence[Sequence[int]], **how: Any) -> list[list[int]]:
    return Scheduler(engine, **how).run([request(prompt) for prompt in prompts])


def folder(parent: Path, name: str) -> Path:
    (parent / name).mkdir()
    return parent / name


# --- where a prompt is computed ---


def test_another_engine_computes_all_of_a_prompt_but_its_last_token(counting: Any, cases: Cases) -> None:
    decode, prefill = counting(), counting()
    with phases(decode, prefill) as both:
        for prompt, answer in cases:
            decode.computed.clear()
            prefill.computed.clear()
            assert answers(both.engine, [prompt]) == [answer]
            assert decode.computed == [1] * LONGEST
            assert sum(prefill.computed) == len(prompt) - 1
        assert not both.lost


def test_nothing_moves_below_the_break_even_length(counting: Any, cases: Cases) -> None:
    decode, prefill = counting(), counting()
    with phases(decode, prefill, least=41) as both:
        for prompt, answer in cases:
            prefill.computed.clear()
            assert answers(both.engine, [prompt]) == [answer]
            assert sum(prefill.computed) == (len(prompt) - 1 if len(prompt) >= 41 else 0)


@pytest.mark.parametrize("how", PLACEMENTS, ids=str)
def test_ranks_compute_prompts_for_one_device(
    how: dict[str, Any], model: Path, cases: Cases, counting: Any, tmp_path: Path
) -> None:
    with ranks_here(model, how, OPTIONS, tmp_path) as prefill:
        decode = counting()
        with phases(decode, prefill) as both:
            assert answers(both.engine, [prompt for prompt, _ in cases]) == [answer for _, answer in cases]
            assert max(decode.computed) <= OPTIONS.sequences  # of answers alone
            assert not both.lost


@pytest.mark.parametrize("how", [pipeline(1, 1), tensor(1, 1), stages(2, 1), THIN], ids=str)
def test_one_device_computes_prompts_for_ranks(
    how: dict[str, Any], model: Path, cases: Cases, counting: Any, tmp_path: Path
) -> None:
    with ranks_here(model, how, OPTIONS, tmp_path) as decode, phases(decode, counting()) as both:
        for keep in (False, True):
            result = answers(both.engine, [prompt for prompt, _ in cases], keep=keep)
            assert result == [answer for _, answer in cases]
        assert not both.lost


def test_ranks_of_two_placements(model: Path, cases: Cases, tmp_path: Path) -> None:
    with (
        ranks_here(model, tensor(1, 1), OPTIONS, folder(tmp_path, "decode")) as decode,
        ranks_here(model, pipeline(1, 2), OPTIONS, folder(tmp_path, "prefill")) as prefill,
        phases(decode, prefill) as both,
    ):
        assert answers(both.engine, [prompt for prompt, _ in cases]) == [answer for _, answer in cases]
        assert not both.lost


@pytest.mark.parametrize("how", PLACEMENTS, ids=str)
def test_keys_and_values_are_read_behind_steps_that_are_under_way(
    how: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    """And what comes is what a read in between gives."""
    tokens = list(range(5, 45))
    with ranks_here(model, how, OPTIONS, tmp_path) as engine:
        reads = []
        for start in range(0, 40, 8):
            engine.decode(tokens[start : start + 8], start, outputs="none")
            reads.append(engine.states.begin_read(0, Range(start, start + 8)))
        blocks = [block for read in reads for block in read()]
        for block, start in zip(blocks, range(0, 40, 8), strict=True):
            again = engine.states.read(0, Range(start, start + 8))
            assert block.positions == again.positions
            for layer, other in zip(block.layers, again.layers, strict=True):
                np.testing.assert_array_equal(layer.keys, other.keys)
                np.testing.assert_array_equal(layer.values, other.values)


def test_who_is_lost_while_it_sends_keys_and_values_is_lost_for_the_next_step_too(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ranks_here(model, pipeline(1, 1), OPTIONS, tmp_path) as engine:
        engine.decode(list(range(5, 13)), 0, outputs="none")
        receive, read = engine.states._receive, engine.states.begin_read(0, Range(0, 8))

        def lost(*which: Any) -> None:
            receive(*which)
            raise LinkClosed("rank 1 went away")

        monkeypatch.setattr(engine.states, "_receive", lost)
        for work in (read, partial(engine.decode, [5], 8)):
            with pytest.raises(LinkClosed, match="rank 1 went away"):
                work()
        engine.failed = None  # it is there


# --- what is there already ---


def test_a_second_turn_computes_what_neither_has(counting: Any, cases: Cases, model: Path) -> None:
    decode, prefill = counting(), counting()
    (prompt, answer), (more, _) = cases[5], cases[4]
    turn = [*prompt, *answer, *more]
    with Engine(model, OPTIONS) as whole:
        target, lead = greedy(whole, turn, LONGEST)
    assert lead > 1e-4  # all in F32, by one kernel
    with phases(decode, prefill, least=len(more)) as both, Scheduler(both.engine, keep=True) as scheduler:
        for text, expected in ((prompt, answer), (turn, target)):
            prefill.computed.clear()
            number = scheduler.add(request(text))
            messages = [event.token_id for _ in range(500) if scheduler.busy for event in scheduler.step()]
            assert (number, messages) in ((0, expected), (1, expected))
        # The first turn's answer lacks its last token in both, and counts against the second.
        assert sum(prefill.computed) == 0
        assert max(decode.computed) > 1
    decode, prefill = counting(), counting()
    with phases(decode, prefill, least=len(more) - LONGEST) as both, Scheduler(both.engine, keep=True) as scheduler:
        for text in (prompt, turn):
            prefill.computed.clear()
            scheduler.add(request(text))
            while scheduler.busy:
                scheduler.step()
        assert sum(prefill.computed) == len(turn) - 1 - (len(prompt) - 1)
        assert max(decode.computed) == 1


def test_others_notice_nothing_of_a_prompt(counting: Any, cases: Cases) -> None:
    decode, prefill = counting(), counting()
    prompt = cases[4][0]
    with phases(decode, prefill) as both, Scheduler(both.engine, keep=True) as scheduler:
        computed = []
        for namespace in ("one", "other", "one"):
            prefill.computed.clear()
            scheduler.add(request(prompt, namespace=namespace))
            while scheduler.busy:
                scheduler.step()
            computed.append(sum(prefill.computed))
        assert computed[:2] == [len(prompt) - 1] * 2
        assert computed[2] == 0


def test_what_no_later_prompt_may_use_is_forgotten(counting: Any, cases: Cases) -> None:
    decode, prefill = counting(), counting()
    prompt, answer = cases[4]
    with phases(decode, prefill) as both:
        for _ in range(2):
            prefill.computed.clear()
            assert answers(both.engine, [prompt]) == [answer]
            assert sum(prefill.computed) == len(prompt) - 1


def test_kept_prompts_and_drafts_beside_phases(model: Path, stack: ExitStack, tmp_path: Path, cases: Cases) -> None:
    saved = replace(OPTIONS, prefixes=PrefixOptions(folder=tmp_path / "kept", key_folder=tmp_path / "own"))
    computed, restored = [], []
    for _ in range(2):  # another process would begin so
        prefill = stack.enter_context(Counting(model, OPTIONS))
        with Counting(model, saved) as decode, phases(decode, prefill) as both:
            drafter = Speculation(NgramDrafts, "text", choice=always())
            with Scheduler(both.engine, keep=True, drafter=drafter) as scheduler:
                for prompt, answer in cases:
                    running = scheduler.prepare(request(prompt))
                    scheduler.enqueue(running)
                    while scheduler.busy:
                        scheduler.step()
                    assert list(running.answer) == answer
                    restored.append(running.restored_tokens)
            computed.append(sum(prefill.computed))
            assert not both.lost
    assert computed[0] == sum(len(prompt) - 1 for prompt, _ in cases)
    assert computed[1] == sum(len(prompt) - 1 for prompt, _ in cases if len(prompt) < 9)  # the others lie on disk
    assert sum(restored[: len(cases)]) == 0 < sum(restored[len(cases) :])


# --- several at once ---


def test_answers_go_on_while_a_prompt_is_computed_elsewhere(counting: Any, cases: Cases) -> None:
    decode, prefill = counting(), counting()
    (short, short_answer), (long, long_answer) = cases[1], cases[6]
    with phases(decode, prefill, least=10) as both, Scheduler(both.engine) as scheduler:
        prefill.gate.clear()
        first, second = scheduler.add(request(long)), scheduler.add(request(short))
        message: dict[int, list[int | None]] = {first: [], second: []}
        while len(message[second]) < LONGEST:
            for event in scheduler.step():
                message[event.request].append(event.token_id)
        assert message[first] == []
        prefill.gate.set()
        while scheduler.busy:
            for event in scheduler.step():
                message[event.request].append(event.token_id)
        assert message == {first: long_answer, second: short_answer}


def test_stages_take_keys_and_values_between_their_steps(
    model: Path, counting: Any, cases: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though some are under way when they come."""
    prefill, rows = counting(), list[int]()
    with ranks_here(model, pipeline(1, 1), OPTIONS, tmp_path) as decode, phases(decode, prefill, least=10) as both:
        submit = decode.submit

        def counted(tokens: Any, *arguments: Any, **how: Any) -> None:
            rows.append(len(tokens))
            submit(tokens, *arguments, **how)

        monkeypatch.setattr(decode, "submit", counted)
        prefill.gate.clear()
        with Scheduler(both.engine) as scheduler:
            long, *short = cases[6], cases[1], cases[0]
            message = {scheduler.add(request(prompt)): (answer, list[int]()) for prompt, answer in (long, *short)}
            while not scheduler._in_flight.steps or any(len(tokens) < 2 for _, tokens in list(message.values())[1:]):
                for event in scheduler.step():
                    message[event.request][1].append(event.token_id or 0)
            prefill.gate.set()
            [remote] = [item.remote for item in scheduler.queues.remote]
            assert remote is not None
            assert remote.wait(TIMEOUT_S)
            while scheduler.busy:
                for event in scheduler.step():
                    message[event.request][1].append(event.token_id or 0)
        assert all(tokens == answer for answer, tokens in message.values())
        assert sum(rows) == 1 + sum(len(prompt) for prompt, _ in short) + 3 * (LONGEST - 1)


@pytest.mark.parametrize("seed", range(some(3, 60)))
def test_requests_come_and_go(seed: int, model: Path, counting: Any, cases: Cases, tmp_path: Path) -> None:
    rng = random.Random(seed)
    with ExitStack() as stack:
        decode: TextEngine = counting()
        if seed % 3 == 1:
            decode = stack.enter_context(ranks_here(model, pipeline(1, 1), OPTIONS, folder(tmp_path, "decode")))
        prefill: TextEngine = counting()
        if seed % 3 != 2:
            prefill = stack.enter_context(ranks_here(model, pipeline(2, 1), OPTIONS, folder(tmp_path, "prefill")))
        both = stack.enter_context(phases(decode, prefill, rng.choice((1, 20))))
        scheduler = stack.enter_context(Scheduler(both.engine, keep=bool(seed % 2)))
        come_and_go(scheduler, cases, request, rng, 0.03)
        assert not both.lost


def test_who_gives_up_a_prompt_leaves_its_place_to_others(counting: Any, cases: Cases) -> None:
    """Prompts that were cancelled fill no slot of either placement."""
    decode, prefill = counting(), counting()
    prompt, answer = cases[6]
    with phases(decode, prefill) as both, Scheduler(both.engine) as scheduler:
        for _ in range(2 * OPTIONS.sequences):
            prefill.gate.clear()
            number = scheduler.add(request(prompt))
            scheduler.step()
            scheduler.cancel(number)
            prefill.gate.set()
            assert [event.finish_reason for event in scheduler.step()] == ["cancelled"]
        assert not scheduler.busy
        scheduler.close()
        prefill.computed.clear()
        assert answers(both.engine, [prompt]) == [answer]
        assert sum(prefill.computed) > 1


def test_who_is_stopped_waits_for_no_prompt(counting: Any, cases: Cases) -> None:
    decode, prefill = counting(), counting()
    with phases(decode, prefill) as both, Scheduler(both.engine) as scheduler:
        prefill.gate.clear()
        scheduler.add(request(cases[6][0]))
        scheduler.step()
        both.engine.stop()
        with pytest.raises(Interrupted):
            scheduler.step()
        prefill.gate.set()


# --- losses ---


@pytest.mark.parametrize("lives", range(0, 9, some(2, 1)))
def test_where_the_placement_of_prompts_is_lost_the_rest_is_computed_here(
    lives: int, counting: Any, cases: Cases
) -> None:
    decode, prefill = counting(), counting(lives)
    prompt, answer = cases[6]
    with phases(decode, prefill) as both:
        assert answers(both.engine, [prompt]) == [answer]
        is_lost = lives < len(prompt) // OPTIONS.rows
        assert [str(error) for error in both.lost] == ["it was lost"] * is_lost
        moved = len(prompt) - 1 - (sum(decode.computed) - LONGEST)
        assert moved == min(len(prompt) - 1, lives * OPTIONS.rows)
        decode.computed.clear()
        assert answers(both.engine, [prompt]) == [answer]
        assert (sum(decode.computed) == len(prompt) + LONGEST - 1) or not is_lost


@pytest.mark.parametrize("lives", range(some(4, 10)))
def test_where_the_engine_that_generates_is_lost_nothing_is_computed_again(
    lives: int, counting: Any, cases: Cases
) -> None:
    """The placement of prompts has the sequence until logits came from behind it."""
    first, second, prefill = counting(lives), counting(), counting()
    prompt, answer = cases[6]
    with phases(first, prefill, recovered=lambda error: second) as both:
        assert answers(both.engine, [prompt], keep=True) == [answer]
        assert both.engine.replacements.recoveries == 1
        assert sum(prefill.computed) == len(prompt) - 1 + lives  # those of the answer


def test_where_blocks_are_refused_the_rest_is_computed_here(
    counting: Any, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, prefill = counting(), counting()
    prompt, answer = cases[6]
    write, used = decode.states.write, []

    def refuses(sequence: int, block: Any) -> None:
        if len(used) == 3:
            raise EngineError("no room")
        used.append(block)
        write(sequence, block)

    monkeypatch.setattr(decode.states, "write", refuses)
    with phases(decode, prefill) as both:
        assert answers(both.engine, [prompt]) == [answer]
        assert sum(decode.computed) == len(prompt) + LONGEST - 1 - 3 * OPTIONS.rows
        assert not both.lost


def test_closing_ends_what_is_under_way(counting: Any, cases: Cases) -> None:
    """Also a prompt that waits for somebody who will never answer."""
    decode, prefill = counting(), counting()
    prefill.gate.clear()
    with phases(decode, prefill, break_off=prefill.gate.set) as both, Scheduler(both.engine) as scheduler:
        scheduler.add(request(cases[6][0]))
        scheduler.step()
        both.placement.close()
        assert prefill.gate.is_set()
        assert not both.placement._thread.is_alive()
        while scheduler.busy:
            scheduler.step()
        assert not both.lost


def test_a_prompt_that_comes_too_late_is_not_taken(counting: Any) -> None:
    with PrefillPlacement(counting(), 1) as placement:
        placement.close()
        assert placement.begin([5, 6, 7], 0, "", (), keep=False) is None


# --- figures ---


def test_prefill_of_a_benchmark_is_that_of_answers(counting: Any) -> None:
    decode, prefill = counting(), counting()
    with phases(decode, prefill) as both:
        measure(both.engine, prompt_tokens=33, gen_tokens=4, repeats=2)
        assert sum(prefill.computed) == 3 * 32
        assert decode.computed == [1] * 3 * 5


def test_a_prompt_that_the_other_placement_holds_completely_is_always_handed_over(counting: Any) -> None:
    """The number of new tokens does not matter. A prompt with one more token, or of another namespace, stays here."""
    tokens = list(range(5, 55))
    with PrefillPlacement(counting(), 40) as placement:
        first = placement.begin(tokens, 0, "", (), keep=True)
        assert first is not None
        while not first.take()[1]:
            assert first.wait(TIMEOUT_S)
        first.release()
        assert placement.begin([*tokens, 5], 45, "", (), keep=True) is None
        assert placement.begin(tokens, 45, "other", (), keep=True) is None
        assert placement.begin(tokens, 45, "", (), keep=True) is not None
