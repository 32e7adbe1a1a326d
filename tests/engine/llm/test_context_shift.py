"""Test a context shift: which part of a history is removed, what is unchanged, and what must not be used or saved."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.errors import EngineError
from edge.llm.continuation import Request
from edge.llm.engine import Engine
from edge.llm.generate import Response, generate
from edge.llm.options import EngineOptions, PrefixOptions
from edge.llm.sampler import SamplingParams
from edge.llm.slot import Slot, dropped_stretch, matches
from edge.llm.states import BLOCK_TOKENS
from edge.models.demo import MODEL_PATH
from partition.plan.plan import Range
from tests.conftest import OPTIONS, Synthetic
from tests.support.drafting import one_slot

GREEDY = SamplingParams(temperature=0)
ENDLESS = SamplingParams(temperature=0, grammar="root ::= [a-z] root")
PROMPT = [10 + (7 * i * i + 3 * i) % 400 for i in range(100)]
SHORTER = [*PROMPT[:20], *PROMPT[50:], 5, 6, 7]  # without a stretch, and with three tokens more


@pytest.fixture
def decoded(demo: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of tokens that the decodes of the bundled model computed."""
    sizes: list[int] = []
    decode = demo.decode_rows

    def counting(rows: object, n: int) -> None:
        sizes.append(n)
        decode(rows, n)  # type: ignore[arg-type]

    monkeypatch.setattr(demo, "decode_rows", counting)
    return sizes


def shifted(engine: Engine) -> Slot:
    """A slot that holds SHORTER, of which all but the first 20 tokens were shifted."""
    slot = Slot(engine)
    slot.prefill(PROMPT)
    slot.prefill(SHORTER, in_place=True)
    return slot


def test_a_dropped_stretch_costs_no_prefill(demo: Engine, decoded: list[int]) -> None:
    slot = shifted(demo)
    assert slot.tokens == SHORTER
    assert (slot.dropped, slot.computed, slot.exact) == (30, 3, 20)
    assert decoded[-1] == 3
    assert demo.kv_last(0) == len(SHORTER) - 1


def test_without_in_place_it_is_computed(demo: Engine, decoded: list[int]) -> None:
    slot = Slot(demo)
    slot.prefill(PROMPT)
    slot.prefill(SHORTER)
    assert (slot.dropped, slot.computed, slot.exact) == (0, len(SHORTER) - 20, None)


def test_shifted_keys_are_those_of_their_new_positions(demo: Engine) -> None:
    """In the first layer keys and values depend on a token and its position alone: there a shift is exact."""
    positions = Range(0, len(SHORTER))
    slot = shifted(demo)
    by_shift = demo.states.read(0, positions).layers
    slot.cut(0)
    slot.prefill(SHORTER)
    computed = demo.states.read(0, positions).layers
    keys, expected = (rows[0].keys.view(np.float16).astype(np.float32) for rows in (by_shift, computed))
    np.testing.assert_allclose(keys, expected, atol=0.01 * expected.std())
    np.testing.assert_array_equal(by_shift[0].values[:20], computed[0].values[:20])
    assert np.any(by_shift[-1].values != computed[-1].values)  # above, what was dropped has left its mark


def test_the_next_token_after_a_shift_is_one_decode(demo: Engine, decoded: list[int]) -> None:
    scheduler = one_slot(demo)
    responses = list(generate(scheduler, Request(PROMPT, 300, ENDLESS, stays=lambda: 10)))
    [slot] = scheduler.slots.all
    prompt_chunks = -(-len(PROMPT) // demo.batch)
    assert decoded[prompt_chunks:] == [1] * 299
    last = responses[-1]
    assert (last.finish_reason, last.usage.completion_tokens) == ("length", 300)
    drops = sorted({response.usage.dropped_tokens for response in responses})
    assert drops == [0, (demo.context - 10) // 2, 2 * ((demo.context - 10) // 2)]
    assert slot.tokens[:10] == PROMPT[:10]
    assert slot.exact == 10
    said = [response.token_id for response in responses if response.token_id is not None]
    rest = slot.tokens[10:]
    assert rest == (PROMPT + said)[-len(rest) - 1 : -1]  # the latest tokens; the very last was not computed


def test_a_beginning_that_leaves_nothing_to_drop_ends_the_answer(demo: Engine) -> None:
    responses = list(generate(one_slot(demo), Request(PROMPT, None, ENDLESS, stays=lambda: demo.context - 1)))
    assert responses[-1].finish_reason == "length"
    assert responses[-1].usage.dropped_tokens == 0


def test_an_answer_that_lost_its_slot_drops_nothing(demo: Engine) -> None:
    """Another scheduler took the engine before the context was full."""
    responses = generate(one_slot(demo), Request(PROMPT, 300, ENDLESS, stays=lambda: 10))
    next(responses)
    list(generate(one_slot(demo), Request(PROMPT, 1, ENDLESS)))
    with pytest.raises(EngineError, match="something else used this model"):
        list(responses)
    assert demo.kv_last(0) == len(PROMPT) - 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), EngineError("x")], ids=lambda error: type(error).__name__)
def test_a_shift_that_is_interrupted_is_not_done_twice(
    demo: Engine, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """After an interrupted decode nobody knows which layers' keys have moved, so all is computed again."""
    slot = Slot(demo)
    expected = slot.prefill(SHORTER).copy()
    slot.prefill(PROMPT)
    with monkeypatch.context() as patch:
        patch.setattr(demo, "decode_rows", failing(error))
        with pytest.raises(type(error)):
            slot.prefill(SHORTER, in_place=True)
    result = slot.prefill(SHORTER)
    assert slot.computed == len(SHORTER)
    np.testing.assert_allclose(result, expected, atol=1e-3 * expected.std())


def test_a_conversation_whose_shift_is_interrupted_is_computed_again(
    demo: Engine, monkeypatch: pytest.MonkeyPatch, decoded: list[int]
) -> None:
    scheduler = one_slot(demo)
    [slot] = scheduler.slots.all
    list(generate(scheduler, Request(PROMPT, 1, ends=False)))
    again = Request(SHORTER, 1, ends=False, in_place=True)
    with monkeypatch.context() as patch:
        patch.setattr(demo, "decode_rows", failing(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            list(generate(scheduler, again))
    decoded.clear()
    list(generate(scheduler, again))
    assert slot.tokens == SHORTER
    assert (sum(decoded), slot.exact) == (len(SHORTER), None)


def failing(error: BaseException) -> Callable[..., None]:
    """Return a function that raises an error in place of a decode."""

    def fail(*_: object) -> None:
        raise error

    return fail


def test_what_is_still_to_be_shifted_is_not_read(llama: Engine) -> None:
    llama.decode(PROMPT[:16], 0)
    before = llama.states.read(0, Range(8, 16))
    llama.kv_remove(0, 0, 8)
    llama.kv_shift(0, 8, -1, -8)
    with pytest.raises(EngineError, match="decode a token before they are read"):
        llama.states.read(0, Range(0, 8))
    llama.decode([7], 8)
    after = llama.states.read(0, Range(0, 8))
    assert np.any(after.layers[0].keys != before.layers[0].keys)
    np.testing.assert_array_equal(after.layers[0].values, before.layers[0].values)
    llama.kv_shift(0, 0, -1, 1)
    llama.kv_clear()
    llama.decode(PROMPT[:16], 0)
    llama.states.read(0, Range(0, 16))


@pytest.mark.parametrize(("arch", "can"), [("llama", True), ("qwen3moe", True), ("gemma2", False), ("gpt-oss", False)])
def test_which_models_can_shift(synthetic: Synthetic, arch: str, can: bool) -> None:
    with Engine(synthetic(arch), OPTIONS) as engine:
        assert engine.can_shift is can


# What is kept on disk.


@pytest.fixture
def options(tmp_path: Path) -> EngineOptions:
    saved = PrefixOptions(folder=tmp_path / "kept", key_folder=tmp_path / "own")
    return EngineOptions(threads=1, context=256, batch=1, prefixes=saved)


def kept_of(options: EngineOptions, prompt: list[int]) -> int:
    """Return how many tokens of a prompt an engine that begins anew finds on disk."""
    with Engine(MODEL_PATH, options) as engine:
        slot = Slot(engine)
        slot.prefill(prompt)
        return slot.restored


def test_shifted_tokens_are_not_kept(options: EngineOptions) -> None:
    with Engine(MODEL_PATH, options) as engine:
        shifted(engine).keep()
    assert kept_of(options, SHORTER) == 20 // BLOCK_TOKENS * BLOCK_TOKENS


def test_what_is_computed_again_is_kept(options: EngineOptions) -> None:
    with Engine(MODEL_PATH, options) as engine:
        slot = shifted(engine)
        slot.prefill([*SHORTER[:19], *PROMPT[:40]])
        slot.keep()
    whole = 59 // BLOCK_TOKENS * BLOCK_TOKENS
    assert kept_of(options, [*SHORTER[:19], *PROMPT[:40]]) == whole


def test_what_follows_shifted_tokens_is_not_read_from_disk(options: EngineOptions) -> None:
    """It belongs to the same tokens, but not to what is held of them."""
    longer = [*SHORTER, *PROMPT[:40]]
    with Engine(MODEL_PATH, options) as engine:
        slot = Slot(engine)
        slot.prefill(longer)
        slot.keep()
    with Engine(MODEL_PATH, options) as engine:
        slot = shifted(engine)
        slot.prefill(longer)
        assert (slot.restored, slot.computed) == (0, 40)


# Finding the stretch.


@given(text=st.lists(st.integers(0, 2), max_size=30), pattern=st.lists(st.integers(0, 2), max_size=12))
def test_matches_are_those_of_the_definition(text: list[int], pattern: list[int]) -> None:
    def common(rest: list[int]) -> int:
        return next(
            (i for i, (a, b) in enumerate(zip(rest, pattern, strict=False)) if a != b), min(len(rest), len(pattern))
        )

    assert matches(pattern, text) == [common(text[i:]) for i in range(len(text))]


def test_the_stretch_is_dropped_that_leaves_most() -> None:
    current = [1, 2, 7, 7, 3, 4, 9, 8, 3, 4, 5, 6, 9]
    assert dropped_stretch(current, [1, 2, 3, 4, 5, 6, 0], 2, 4) == 6
    assert dropped_stretch(current, [1, 2, 3, 4, 5, 6, 0], 2, 5) == 0  # no more than four tokens would be saved
    assert dropped_stretch(current, [1, 2], 2, 1) == 0
    assert dropped_stretch(current, [*current, 5], len(current), 1) == 0


def test_responses_say_what_was_dropped(demo: Engine) -> None:
    scheduler = one_slot(demo)
    list(generate(scheduler, Request(PROMPT, 1, ENDLESS)))
    last: Response = list(generate(scheduler, Request(SHORTER, 1, ENDLESS, in_place=True)))[-1]
    assert (last.usage.cached_tokens, last.usage.dropped_tokens) == (len(SHORTER) - 3, 30)
