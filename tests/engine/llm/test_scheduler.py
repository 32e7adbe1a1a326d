"""Many requests at once are answered as each alone is, on one device and on stages."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.errors import ContextFull, EngineError, SamplingError
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.generate import generate
from edge.llm.interface import TextEngine
from edge.llm.model import Model
from edge.llm.options import EngineOptions, PrefixOptions
from edge.llm.sampler import MAX_SEED, PENALTY_LAST_N, SamplingParams, TokenSampler, _needs
from edge.llm.scheduler import Scheduler
from edge.llm.slot import Slot
from edge.llm.slots import Slots
from edge.models.demo import MODEL_PATH
from edge.parallel.logits import largest
from partition.plan.plan import Range
from tests.conftest import Synthetic
from tests.support.deployments import EXACT, Grouped, deployed, pipeline, stages, tensor
from tests.support.drafting import one_slot
from tests.support.thorough import some, thorough
from tests.support.workers import Worker

GREEDY = SamplingParams(temperature=0)
WORDS = 'root ::= [a-z ]+ "."'
# Every way to choose, each with a seed of its own.
MIXED = (
    GREEDY,
    SamplingParams(temperature=0.9, top_k=5, seed=1),
    SamplingParams(temperature=0, grammar=WORDS),
    SamplingParams(temperature=0, repeat_penalty=1.2),
    SamplingParams(temperature=1.1, top_k=0, top_p=1, min_p=0, seed=2),
    SamplingParams(temperature=0.8, top_k=12, repeat_penalty=1.2, seed=3),
    SamplingParams(temperature=0.8, grammar=WORDS, seed=4),
    SamplingParams(temperature=1.5, top_k=3, min_p=0.2, seed=5),
)


def alone(engine: TextEngine, requests: Sequence[Request]) -> list[list[int]]:
    """Return what `generate` answers to each request by itself."""
    answers = []
    for request in requests:
        engine.kv_clear()
        responses = generate(one_slot(engine), request)
        answers.append([response.token_id for response in responses if response.token_id is not None])
    return answers


def random_requests(n: int, longest: int, seed: int, sampling: Sequence[SamplingParams] = MIXED) -> list[Request]:
    """Prompts of random tokens of a model of 512, that are to be continued for a while."""
    rng = np.random.default_rng(seed)
    return [
        Request(
            rng.integers(3, 512, rng.integers(1, longest)).tolist(),
            int(rng.integers(1, 12)),
            sampling[i % len(sampling)],
        )
        for i in range(n)
    ]


def test_many_requests_are_answered_as_each_alone(synthetic: Synthetic) -> None:
    """More than there are sequences, prompts longer than a chunk."""
    requests = random_requests(50, 70, seed=5)
    options = replace(EXACT, context=200, batch=16, outputs=5, sequences=5)
    with Engine(synthetic("llama", "f32"), options) as engine:
        answers = Scheduler(engine).run(requests)
        assert engine.uncollected == 0
        assert [engine.kv_last(sequence) for sequence in range(5)] == [-1] * 5
        assert answers == alone(engine, requests)


OPTIONS = {
    "greedy": {},
    "temperature": {"temperature": 1.4, "seed": 1},
    "another seed": {"temperature": 1.4, "seed": 2},
    "top-k": {"temperature": 2.0, "top_k": 3, "seed": 3},
    "top-p": {"temperature": 2.0, "top_p": 0.2, "seed": 4},
    "min-p": {"temperature": 2.0, "min_p": 0.7, "seed": 5},
    "typical-p": {"temperature": 2.0, "typical_p": 0.2, "seed": 8},
    "dry": {"dry_multiplier": 4.0, "dry_allowed_length": 1},
    "xtc": {"temperature": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.01, "seed": 9},
    "penalty": {"repeat_penalty": 1.5},
    "penalty, drawn": {"temperature": 1.0, "repeat_penalty": 1.5, "seed": 6},
    "reward": {"repeat_penalty": 0.6},
    "grammar": {"grammar": WORDS},
    "grammar, drawn, penalty": {"temperature": 1.0, "grammar": WORDS, "repeat_penalty": 1.5, "seed": 7},
    "schema": {"json_schema": '{"type": "array", "items": {"type": "integer"}, "minItems": 2}'},
}


def test_every_option_means_what_it_means_to_generate(synthetic: Synthetic) -> None:
    """Several at once, of every option; some end at a stop string. Prompts repeat what the model likes to say."""
    rng = np.random.default_rng(8)
    with Engine(synthetic("llama", "f32"), replace(EXACT, context=1024, batch=32, outputs=8, sequences=4)) as engine:
        requests = []
        for options in OPTIONS.values():
            prompt = rng.integers(3, 512, 20).tolist()
            [said] = alone(engine, [Request(prompt, 8)])
            request = Request(prompt + said * 3, 12, SamplingParams(**{"temperature": 0, **options}))  # type: ignore[dict-item]
            [answer] = alone(engine, [request])
            text = "".join(engine.model.piece(token).decode(errors="replace") for token in answer[:3])
            requests += [request, replace(request, stop=("never said", text))]
        expected = alone(engine, requests)
        assert Scheduler(engine).run(requests) == expected
    assert sum(len(stopped) < len(whole) for whole, stopped in batched(expected)) >= len(OPTIONS) - 2
    by_name = dict(zip(OPTIONS, expected[::2], strict=True))
    assert by_name["temperature"] != by_name["another seed"]


def batched(answers: Sequence[list[int]]) -> Iterator[tuple[list[int], list[int]]]:
    """Answers in pairs."""
    return zip(answers[::2], answers[1::2], strict=True)


def test_the_penalty_looks_back_into_the_prompt(synthetic: Synthetic) -> None:
    """The likeliest token is in the prompt: with the penalty another one is chosen."""
    with Engine(synthetic("llama", "f32"), replace(EXACT, sequences=2)) as engine:
        prompt = [5, 6, 7]
        while (first := Scheduler(engine).run([Request(prompt, 1)])[0])[0] not in prompt:
            prompt = [*first, *prompt]
        changed = Scheduler(engine).run([Request(prompt, 1, SamplingParams(temperature=0, repeat_penalty=50.0))])
        assert changed != [first]


def test_measuring_goes_on_after_the_end_of_a_text(synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(synthetic("llama", "f32"), replace(EXACT, sequences=2)) as engine:
        monkeypatch.setattr(type(engine.model), "is_end", lambda model, token: True)
        ending, going = Scheduler(engine).run([Request([5, 6], 4), Request([5, 6], 4, ends=False)])
    assert (ending, len(going)) == ([], 4)


@pytest.mark.parametrize("arch", [*thorough("llama"), "gemma3", "qwen3moe"])
def test_stages_answer_as_one_device_whatever_is_asked(one_worker: Worker, synthetic: Synthetic, arch: str) -> None:
    """With exact sums stages give the same bits, so that every choice is the same, drawn or not."""
    path = synthetic(arch, "f32")
    options = replace(EXACT, context=160, batch=64, sequences=6)
    requests = random_requests(40, 70, seed=11)
    with deployed(one_worker, path, pipeline(1, 1), options) as deployment, Grouped(path, options, 2) as single:
        expected = Scheduler(single).run(requests)
        assert Scheduler(deployment.engine).run(requests) == expected
        assert Scheduler(deployment.engine).run(requests[::-1]) == Scheduler(single).run(requests[::-1])
    assert len({tuple(answer) for answer in expected}) > 30


@pytest.mark.parametrize("how", [tensor(1, 1, 1), pipeline(1, 1), stages(2, 2)], ids=lambda how: str(how.values()))
def test_ranks_answer_as_each_alone(one_worker: Worker, synthetic: Synthetic, how: dict[str, object]) -> None:
    path = synthetic("llama", "f32")
    requests = random_requests(40, 70, seed=7)
    options = replace(EXACT, context=256, sequences=7)
    with deployed(one_worker, path, how, options) as deployment, Engine(path, options) as single:
        assert Scheduler(deployment.engine).run(requests) == alone(single, requests)


def test_the_context_is_shared_and_never_overrun(synthetic: Synthetic) -> None:
    options = replace(EXACT, context=64, batch=16, outputs=8, sequences=8)
    greedy = random_requests(30, 50, seed=3, sampling=(GREEDY,))
    with Engine(synthetic("llama", "f32"), options) as engine:
        longest = 0
        for answer, request, by_itself in zip(
            Scheduler(engine).run(greedy), greedy, alone(engine, greedy), strict=True
        ):
            assert answer == by_itself
            longest = max(longest, len(request.prompt) + request.max_tokens)
        assert 32 < longest <= 64
        exactly = Request(list(range(10, 64)), 10, ends=False)
        assert len(Scheduler(engine).run([exactly, exactly])[1]) == 10


def test_a_request_that_was_preempted_goes_before_those_that_wait(
    synthetic: Synthetic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has waited for longer, and what it is told of its prompt does not change where it is restored from disk."""
    prefixes = PrefixOptions(folder=tmp_path / "kept", key_folder=tmp_path / "own")
    options = replace(EXACT, context=128, batch=16, outputs=8, sequences=2, prefixes=prefixes)
    cached: dict[int, set[int]] = {}
    admitted: list[int] = []
    restored: list[int] = []
    admit = Slots.admit

    def noted_admit(slots: Slots, *args: Any, **how: Any) -> Slot:
        slot = admit(slots, *args, **how)
        restored.extend([len(slot.tokens)] if slot.tokens else [])
        return slot

    monkeypatch.setattr(Slots, "admit", noted_admit)
    with (
        Engine(synthetic("llama", "f32"), options) as engine,
        Scheduler(engine, keep=True, admitted=admitted.append) as scheduler,
    ):
        for first in (10, 60, 110):
            scheduler.add(Request([*range(first, first + 10)], 90, ends=False))
        while scheduler.busy:
            for event in scheduler.step():
                cached.setdefault(event.request, set()).add(event.cached_tokens)
        assert scheduler.queues.preemptions["foreground"] > 0
    assert admitted[:3] == [0, 1, 1]
    assert restored == [56]  # of its answer, too
    assert admitted[-1] == 2
    assert set(cached) == {0, 1, 2}
    assert all(tokens == {0} for tokens in cached.values())


def test_the_sequence_that_was_left_first_is_forgotten_first(synthetic: Synthetic) -> None:
    options = replace(EXACT, context=64, batch=16, outputs=8, sequences=3)
    with Engine(synthetic("llama", "f32"), options) as engine:
        slots = Slots(engine, keep=True)
        for used, slot in zip((2, 1, 3), slots.all, strict=True):
            slot.tokens, slot.used = [5] * 20, used
        assert slots.make_room(24)
        assert [len(slot.tokens) for slot in slots.all] == [20, 0, 20]


def test_keys_and_values_from_elsewhere_take_the_room_of_what_nobody_uses(
    synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, options = list(range(5, 45)), replace(EXACT, context=64, batch=16, outputs=8, sequences=2)
    with Engine(synthetic("llama", "f32"), options) as engine:
        slots = Slots(engine, keep=True)
        idle, slot = slots.all
        idle.prefill(tokens)
        block = engine.states.read(idle.sequence, Range(0, 40))
        slot.busy = True
        assert slots.write(slot, tokens, [block])
        assert (idle.tokens, slot.tokens) == ([], tokens)

        def refuse(*_: object) -> None:
            raise EngineError("this block is of another kind")

        removed: list[tuple[int, ...]] = []
        monkeypatch.setattr(engine.states, "write", refuse)
        monkeypatch.setattr(engine, "kv_remove", lambda *cells: removed.append(cells) or True)
        assert not slots.write(idle, tokens, [replace(block, positions=Range(0, 8))])
        assert removed == [(idle.sequence, 0, -1)]  # what was written of it; a lost engine says there that it is


@pytest.mark.parametrize("beginning", [[], [1]], ids=["nothing shared", "one token shared"])
def test_another_conversation_gets_the_slot_that_was_left_first(synthetic: Synthetic, beginning: list[int]) -> None:
    """Not that of the conversation in use, also where all begin with the same token."""
    options = replace(EXACT, context=64, batch=16, outputs=8, sequences=3)
    with Engine(synthetic("llama", "f32"), options) as engine:
        slots = Slots(engine, keep=True)
        for used, slot in zip((3, 1, 2), slots.all, strict=True):
            slot.tokens, slot.used = [*beginning, *[5 + used] * 12], used
        placement = slots.place([*beginning, *[20] * 8], 4)
        assert placement is not None
        assert placement.slot is slots.all[1]


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (Request([5] * 60, 5), "request 1 has 60 prompt tokens and may generate 5; the context holds 64"),
        (Request([], 5), "request 1 has 0 prompt tokens"),
    ],
)
def test_requests_that_cannot_be(synthetic: Synthetic, request_: Request, why: str) -> None:
    fine = Request([5, 6], 3, ends=False)
    with Engine(synthetic("llama", "f32"), replace(EXACT, context=64, batch=16, outputs=2, sequences=2)) as engine:
        with pytest.raises(ContextFull, match=why):
            Scheduler(engine).run([fine, request_])
        with pytest.raises(SamplingError):
            Scheduler(engine).run([Request([5], 2, SamplingParams(temperature=0, grammar="nonsense"))])
        assert len(Scheduler(engine).run([fine])[0]) == 3
        assert Scheduler(engine).run([]) == []


def test_a_run_that_failed_leaves_nothing_to_the_next(
    one_worker: Worker, synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of its other requests were under way on the stages."""
    choose, chosen = TokenSampler.choose, itertools.count(1)

    def failing(sampler: TokenSampler, logits: Any, **more: Any) -> int:
        if sampler._constraint is not None and next(chosen) % 2 == 0:
            raise SamplingError("nothing can follow")
        return choose(sampler, logits, **more)

    monkeypatch.setattr(TokenSampler, "choose", failing)
    path = synthetic("llama", "f32")
    options = replace(EXACT, sequences=2)
    good = random_requests(4, 20, seed=9, sampling=(GREEDY,))
    bad = [
        Request([5, 6, 7], 1, ends=False),
        Request([8, 9], 12, ends=False),
        Request([5], 9, SamplingParams(temperature=0, grammar=WORDS)),
    ]
    with deployed(one_worker, path, pipeline(1, 1), options) as deployment, Engine(path, options) as single:
        expected = alone(single, good)
        with pytest.raises(SamplingError):
            Scheduler(deployment.engine).run(bad)
        assert Scheduler(deployment.engine).run(good) == expected
        with pytest.raises(SamplingError):
            Scheduler(deployment.engine).run(bad)
        assert alone(deployment.engine, good) == expected


# What of the logits a choice needs.

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.0, 0.3, 1.0, 2.5)),
    top_k=st.integers(0, 60),
    top_p=st.sampled_from((0.3, 0.95, 1.0)),
    min_p=st.sampled_from((0.0, 0.05, 0.5)),
    repeat_penalty=st.sampled_from((0.8, 1.0, 1.05, 1.2, 3.0)),
    seed=st.integers(0, MAX_SEED),
    regex=st.sampled_from((None, "[a-z ]+[.]", "[^e]*")),
)


@pytest.fixture(scope="module")
def vocabulary() -> Iterator[Engine]:
    with Engine(MODEL_PATH, EngineOptions(threads=1, context=64, batch=16)) as engine:
        yield engine


@settings(max_examples=some(60, 500))
@given(
    params=PARAMS,
    seed=st.integers(0, 10_000),
    spread=st.sampled_from((0.5, 3.0, 20.0)),
    offset=st.sampled_from((-30.0, 0.0, 30.0)),
    accepted=st.sampled_from((0, 3, PENALTY_LAST_N, 90)),
    more=st.sampled_from((0, 0, 0, 20)),
    ranks=st.sampled_from((1, 1, 3)),
)
def test_the_largest_logits_decide_as_all_would(
    vocabulary: Engine,
    params: SamplingParams,
    seed: int,
    spread: float,
    offset: float,
    accepted: int,
    more: int,
    ranks: int,
) -> None:
    rng = np.random.default_rng(seed)
    n = vocabulary.model.n_vocab
    first, second = (TokenSampler(vocabulary.model, params) for _ in range(2))
    logits = (offset + spread * rng.standard_normal(n)).astype(np.float32)
    history = np.argsort(logits)[n - accepted :]  # the likeliest, or it would be easy
    for step in range(3):
        for token in history:
            first.accept(int(token), generated=step > 0)
            second.accept(int(token), generated=step > 0)
        top, masks = first.logits_request()
        if not top:
            break  # all are asked for
        mask = masks[0] if masks else None
        part = np.full(n, -np.inf, np.float32)
        for share in np.array_split(np.arange(n), ranks):
            where, bits = largest(logits[share], top + more, None if mask is None else mask[share])
            part[share[where]] = bits.view(np.float32)
        chosen = first.choose(logits.copy())
        assert second.choose(part) == chosen
        logits = (offset + spread * rng.standard_normal(n)).astype(np.float32)
        history = [chosen]  # type: ignore[assignment]
    first.close()
    second.close()


def test_needs_of_some() -> None:
    for params, needs in (
        (GREEDY, 1),
        (SamplingParams(temperature=0, repeat_penalty=1.2), 1 + PENALTY_LAST_N),
        (SamplingParams(top_k=40), 40),
        (SamplingParams(top_k=0), 0),
        (SamplingParams(top_k=0, repeat_penalty=1.2), 0),
        (SamplingParams(top_k=7, repeat_penalty=0.9), 0),
        (SamplingParams(top_k=0, json_schema="{}"), 0),
        (SamplingParams(temperature=0, json_schema="{}"), 1),
    ):
        assert _needs(params) == needs, params


def test_requests_come_and_go_and_none_changes_another(synthetic: Synthetic) -> None:
    """Some are added while others run, one is cancelled while it waits, one while it is computed."""
    requests = random_requests(12, 40, seed=9)
    options = replace(EXACT, context=400, batch=16, outputs=3, sequences=3)
    with Engine(synthetic("llama", "f32"), options) as engine:
        expected = alone(engine, requests)
        answers: dict[int, list[int]] = {}
        ends: dict[int, str | None] = {}
        with Model(engine, lambda: None).stream() as stream:

            def add(request: Request) -> int:
                return stream.add(request.prompt, request.sampling, max_tokens=request.max_tokens, stop=request.stop)

            later = list(requests[4:])
            for request in requests[:4]:
                add(request)
            waits = add(Request([5, 6, 7], 5))  # all sequences are taken
            runs: int | None = None
            stream.cancel(waits)
            for event in stream:
                if event.token_id is not None:
                    answers.setdefault(event.request, []).append(event.token_id)
                    if event.request == runs:
                        stream.cancel(event.request)
                if event.finish_reason:
                    assert event.request not in ends, "it ended before"
                    ends[event.request] = event.finish_reason
                    if runs is None:
                        runs = add(Request([5, 6, 7], 30, ends=False))
                    if later:
                        add(later.pop(0))
        assert engine.uncollected == 0
        assert ends.pop(waits) == "cancelled"
        assert runs is not None
        assert ends.pop(runs) in ("cancelled", "stop")
        answers.pop(runs, None)
        assert set(ends.values()) <= {"stop", "length"}
        assert [answers.get(number, []) for number in sorted(ends)] == expected


def test_an_engine_that_failed_raises_its_own_error_and_the_scheduler_ends(
    synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache cannot be cut any more, which is no second error."""

    def lost(*_: object, **__: object) -> None:
        raise EngineError("a device is lost")

    with Engine(synthetic("llama", "f32"), EXACT) as engine:
        scheduler = Scheduler(engine)
        running = scheduler.prepare(Request([5, 6, 7], 9, ends=False))
        scheduler.enqueue(running)
        scheduler.step()
        monkeypatch.setattr(engine, "submit", lost)
        monkeypatch.setattr(engine, "kv_remove", lost)
        with pytest.raises(EngineError, match="a device is lost"):
            scheduler.step()
        scheduler.close()
        assert running.ended
        assert not scheduler.busy


def test_each_step_of_one_device_has_its_tokens(synthetic: Synthetic) -> None:
    with Engine(synthetic("llama", "f32"), EXACT) as engine, Scheduler(engine) as scheduler:
        scheduler.add(Request([5, 6, 7], 4, ends=False))
        assert [len(scheduler.step()) for _ in range(4)] == [1] * 4
        assert (scheduler.passes, scheduler.busy) == (4, False)
