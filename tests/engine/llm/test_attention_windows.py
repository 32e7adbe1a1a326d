"""Models with attention windows: what a prompt shares with an earlier one is not computed again, whatever other
requests computed meanwhile, and after a restart. All is as computed at once, on a device that knows nothing else."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions, PrefixOptions
from edge.llm.requests import Event
from edge.llm.scheduler import Scheduler
from edge.llm.slot import Slot, common_prefix
from partition.architectures.table import ARCHITECTURES
from tests.support.architectures import CLOSE
from tests.support.drafting import GREEDY
from tests.support.nine_layers import engine_of, model_of
from tests.support.slices import rewritten, synthetic
from tests.support.thorough import some, thorough

OPTIONS = EngineOptions(
    threads=1, context=400, batch=64, kv_type="f32", flash_attention="off", repack=False, sequences=3
)
USUALLY = ("gemma2", "gemma3", "gemma4", "gpt-oss", "cohere2")
OF_LLAMA_CPP = {"llama4": 8192, "smallthinker": 4096}  # tokens of a window, whatever the file says
WINDOWED = [
    arch
    for arch, row in ARCHITECTURES.items()
    if row.rules.window and not row.rules.no_states and arch not in OF_LLAMA_CPP
]
ARCHS = [*USUALLY, *thorough(*(arch for arch in WINDOWED if arch not in USUALLY))]
FIRST = [270 + 3 * i % 40 for i in range(100)]
OTHER = [271 + 7 * i % 40 for i in range(100)]
NEW = list(range(300, 311))


def apart(logits: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float(np.abs(logits - expected).max() / expected.std())


def at_once(engine: Engine, prompt: Sequence[int]) -> NDArray[np.float32]:
    engine.kv_clear()
    return Slot(engine).prefill(prompt).copy()


@pytest.mark.parametrize("arch", ARCHS)
def test_what_a_window_has_passed_stays_beside_other_requests(arch: str, tmp_path: Path) -> None:
    """A prompt of another sequence begins at cells before those of the second one, and needs more than are free there:
    llama.cpp alone would go on over cells that the second one's window has passed."""
    goes_on(arch, "alone", tmp_path)


@pytest.mark.parametrize(("arch", "how"), [("gemma3", "stages"), ("gpt-oss", "thin"), ("cohere2", "tensor")])
def test_likewise_on_several_devices(arch: str, how: str, tmp_path: Path) -> None:
    goes_on(arch, how, tmp_path)


def goes_on(arch: str, how: str, folder: Path) -> None:
    model = model_of(arch, folder)
    longer, prompt = [*FIRST[:50], *(300 + i % 12 for i in range(100))], [*OTHER[:60], *NEW]
    with Engine(model, OPTIONS) as reference, engine_of(model, how, OPTIONS, folder) as engine:
        assert reference.model.window == 16
        first, second = Slot(engine, 0), Slot(engine, 1)
        first.prefill(FIRST)
        second.prefill(OTHER)
        assert apart(first.prefill(longer), at_once(reference, longer)) < CLOSE.get(arch, 1e-5)
        assert apart(second.prefill(prompt), at_once(reference, prompt)) < CLOSE.get(arch, 1e-5)
        assert second.computed == len(prompt) - common_prefix(OTHER, prompt) <= len(NEW)


@pytest.mark.parametrize("arch", ARCHS)
def test_whatever_is_computed_in_turns_only_new_tokens_are(arch: str, tmp_path: Path) -> None:
    model, chance = model_of(arch, tmp_path), random.Random(arch)
    with Engine(model, OPTIONS) as reference, Engine(model, OPTIONS) as engine:
        slots = [Slot(engine, sequence) for sequence in range(OPTIONS.sequences)]
        for _ in range(some(16, 100)):
            slot = chance.choice(slots)
            if chance.random() < 0.1:
                slot.copy_from(chance.choice([other for other in slots if other is not slot]))
            room = 380 - sum(len(other.tokens) for other in slots if other is not slot)
            saved = slot.tokens[: chance.randint(0, min(len(slot.tokens), room - 12))]
            prompt = [
                *saved,
                *(270 + chance.randrange(40) for _ in range(chance.randint(1, min(90, room - len(saved))))),
            ]
            shared = min(common_prefix(slot.tokens, prompt), len(prompt) - 1)
            logits = slot.prefill(prompt)
            assert slot.computed == len(prompt) - shared
            assert apart(logits, at_once(reference, prompt)) < 3 * CLOSE.get(arch, 1e-5)


@pytest.mark.parametrize(("arch", "sequences"), [("llama4", 2), ("smallthinker", 2), ("smallthinker", 128)])
def test_what_is_left_of_windows_that_llama_cpp_has_of_its_own(arch: str, sequences: int, tmp_path: Path) -> None:
    """The file says another one, or none. A chunk is passed at once, and more than 127 sequences have no doubles:
    where others have taken cells a prompt is computed from its beginning, and is not answered wrongly."""
    window, layers = OF_LLAMA_CPP[arch], 4 if arch == "llama4" else 2  # the least that has both kinds of layers
    whole = synthetic(tmp_path / "whole.gguf", arch, layers=layers, vocab=320, embd=32, ff=32, heads=1, kv=1)
    model = rewritten(whole, tmp_path / "model.gguf", drop=["llama4.attention.sliding_window"])
    history = [270 + 3 * i % 40 + i % 7 for i in range(window + 300)]
    n_same = window + 50 if arch == "smallthinker" else window - 200
    options = replace(OPTIONS, context=window + 1000, batch=512, sequences=sequences)
    with Engine(model, options) as engine:
        assert engine.model.window == window
        slot, other = Slot(engine, 0), Slot(engine, 1)
        other.prefill(FIRST)
        slot.prefill(history)
        other.prefill([*FIRST[:50], *OTHER, *OTHER])
        if arch == "llama4":
            slot.cut(window + 100)
            assert len(slot.tokens) == window + 100  # within its last chunk
        slot.cut(n_same)
        if arch == "llama4" or sequences > 127:
            assert slot.tokens == []
        else:
            prompt = [*history[:n_same], *NEW]
            logits = slot.prefill(prompt).copy()
            assert slot.computed == len(NEW)
            assert apart(logits, at_once(engine, prompt)) < 1e-4


@pytest.mark.parametrize("how", ["alone", "stages"])
def test_answers_beside_each_other_are_those_of_one_alone(how: str, tmp_path: Path) -> None:
    """Requests of three conversations come in turns, each with the answer before: their tokens are those of a device
    that computes each prompt from its beginning."""
    model = model_of("gpt-oss", tmp_path)
    histories = [[270 + (7 + n) * i % 40 for i in range(50)] for n in range(3)]
    with engine_of(model, how, OPTIONS, tmp_path) as engine, Engine(model, OPTIONS) as plain:
        scheduler, alone = Scheduler(engine, keep=True), Scheduler(plain, slots=1)
        for turn in range(3):
            prompts = [[*history, *(300 + turn for _ in range(9))] for history in histories]
            answers, cached = answers_of(scheduler, prompts)
            assert answers == answers_of(alone, prompts)[0]
            if turn:  # the last token of an answer was never computed
                assert all(n >= len(history) - 1 for n, history in zip(cached, histories, strict=True))
            histories = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]


def answers_of(scheduler: Scheduler, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Return the tokens of the answers, and how many of each prompt were there."""
    numbers, events = [scheduler.add(Request(prompt, 12, GREEDY)) for prompt in prompts], list[Event]()
    while scheduler.busy:
        events += scheduler.step()
    own = [[event for event in events if event.request == number] for number in numbers]
    tokens = [[event.token_id for event in some if event.token_id is not None] for some in own]
    return tokens, [some[-1].cached_tokens for some in own]


@pytest.mark.parametrize(("arch", "how"), [("gemma3", "alone"), ("gpt-oss", "alone"), ("gemma3", "stages")])
def test_a_prompt_is_kept_over_a_restart(arch: str, how: str, tmp_path: Path) -> None:
    model, prefixes = model_of(arch, tmp_path), PrefixOptions(1 << 30, tmp_path / "kept", tmp_path / "key")
    prompt = [*FIRST[:90], *NEW]
    with engine_of(model, how, replace(OPTIONS, prefixes=prefixes), tmp_path) as engine:
        slot = Slot(engine)
        slot.prefill(FIRST)
        slot.keep()
    with (
        Engine(model, OPTIONS) as reference,
        engine_of(model, how, replace(OPTIONS, prefixes=prefixes), tmp_path) as engine,
    ):
        slot = Slot(engine)
        assert apart(slot.prefill(prompt), at_once(reference, prompt)) < CLOSE.get(arch, 1e-5)
        assert (slot.restored, slot.computed) == (88, len(prompt) - 88)
