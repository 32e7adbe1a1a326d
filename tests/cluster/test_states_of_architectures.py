"""Keys and values of each architecture that can be cut: stages hold the bits of the whole, and a conversation that
moves between any two plans goes on as if it had not moved."""

import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.llm.engine import Engine
from edge.llm.interface import TextEngine
from edge.llm.options import EngineOptions, PrefixOptions
from edge.llm.slot import Slot
from edge.llm.states import BLOCK_TOKENS
from edge.parallel.moving import read_states, write_states
from edge.parallel.shard import Shard
from partition.architectures.table import RULES
from partition.errors import CannotSlice
from partition.plan.plan import Range, Slice
from partition.slices.source import Source
from partition.state.sequence import KVBlock
from partition.state.shape import StateShape
from quant.gguf.file import GgufFile
from quant.types import cache_type
from tests.support.deployments import pipeline, stages, tensor
from tests.support.helpers import TIMEOUT_S
from tests.support.links import start
from tests.support.moved_slots import move
from tests.support.ranks_here import ranks_here
from tests.support.slices import FIGURES, rewritten, synthetic
from tests.support.thorough import THOROUGH, some, thorough

# As exact as llama.cpp can: where shards make other last bits, they do not make other tokens.
EXACT = EngineOptions(threads=1, context=256, batch=32, outputs=32, kv_type="f32", flash_attention="off", repack=False)
EVERY_PAIR = ["llama", "gemma3", "olmo2"]
EVERY_PAIR += thorough(*(arch for arch in FIGURES if arch not in EVERY_PAIR))
NO_SHARDS = [arch for arch in FIGURES if RULES[arch].no_shards]
ONE = "one device"
PLANS: dict[str, dict[str, Any]] = {
    "2 stages": pipeline(1, 1),
    "3 uneven stages": pipeline(4, 1, 2),
    "2 uneven shards": tensor(3, 1),
    "3 uneven shards": tensor(2, 1, 1),
    "2 x 2": stages(2, 2),
}
# Longer than the windows of all models here, and not whole blocks.
PROMPT = [260 + 7 * i % 240 for i in range(45)]
TOKENS = some(24, 64)  # that a conversation goes on for


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models are."""
    return tmp_path_factory.mktemp("states")


@contextmanager
def engines(model: Path, plans: list[str], folder: Path) -> Iterator[dict[str, TextEngine]]:
    """One device, and the model spread by these plans."""
    with ExitStack() as stack:
        started: dict[str, TextEngine] = {ONE: stack.enter_context(Engine(model, EXACT))}
        for plan in plans:
            started[plan] = stack.enter_context(ranks_here(model, PLANS[plan], EXACT, folder))
        yield started


def plans_of(arch: str) -> list[str]:
    """Those that its layers can be spread by."""
    return [plan for plan in PLANS if arch not in NO_SHARDS or plan.endswith("stages")]


def computed(engine: TextEngine, tokens: list[int]) -> None:
    """Compute tokens from position 0 on, in chunks that all engines take alike, whatever they would choose."""
    engine.kv_clear()
    for at in range(0, len(tokens), 16):
        engine.decode(tokens[at : at + 16], at)


def identical(a: KVBlock, b: KVBlock) -> bool:
    """Return whether no bit differs."""
    return a.positions == b.positions and all(
        np.array_equal(x.keys, y.keys) and np.array_equal(x.values, y.values)
        for x, y in zip(a.layers, b.layers, strict=True)
    )


def further(slot: Slot, tokens: list[int], n: int) -> list[int]:
    """The `n` likeliest tokens after these, one after another. All but the last are in the slot then."""
    chosen = []
    logits = slot.prefill([*slot.tokens, *tokens])
    for _ in range(n - 1):
        chosen.append(int(logits.argmax()))
        logits = slot.decode([chosen[-1]])
    return [*chosen, int(logits.argmax())]


@pytest.mark.parametrize("arch", FIGURES)
def test_stages_hold_the_bits_of_the_whole(arch: str, folder: Path, tmp_path: Path) -> None:
    model = synthetic(folder / f"{arch}.gguf", arch)
    plans = [plan for plan in plans_of(arch) if plan.endswith("stages")]
    with engines(model, plans, tmp_path) as started:
        for engine in started.values():
            computed(engine, PROMPT)
        for block in (Range(len(PROMPT) - 16, len(PROMPT)), Range(0, 16), Range(7, 8)):
            whole = started[ONE].states.read(0, block)
            assert any(rows.keys.any() and rows.values.any() for rows in whole.layers)
            for plan in plans:
                assert identical(started[plan].states.read(0, block), whole)


@pytest.mark.parametrize("arch", [arch for arch in FIGURES if arch not in NO_SHARDS])
def test_shards_hold_nearly_the_numbers_of_the_whole(arch: str, folder: Path, tmp_path: Path) -> None:
    """Each head where the whole has it, so that a swap of two would show."""
    model = synthetic(folder / f"{arch}.gguf", arch)
    plans = [plan for plan in plans_of(arch) if not plan.endswith("stages")]
    with engines(model, plans if THOROUGH else plans[1:2], tmp_path) as started:
        for engine in started.values():
            computed(engine, PROMPT)
        whole = started.pop(ONE).states.read(0, Range(20, 36))
        for engine in started.values():
            for rows, expected in zip(engine.states.read(0, Range(20, 36)).layers, whole.layers, strict=True):
                for ours, theirs in ((rows.keys, expected.keys), (rows.values, expected.values)):
                    a, b = (np.ascontiguousarray(array).view(np.float32) for array in (ours, theirs))
                    assert np.abs(a - b).max() < 1e-2 * b.std()


@pytest.mark.parametrize("arch", ["gemma4", *thorough("plm", "deepseek2-ocr")])
def test_heads_of_several_sizes(arch: str, tmp_path: Path) -> None:
    """Keys of layers with a window can be smaller than those without, and keys than values."""
    model = synthetic(tmp_path / f"{arch}.gguf", arch, layers=12, embd=64, ff=64)
    with Engine(model, EXACT) as first, ranks_here(model, pipeline(6, 6), EXACT, tmp_path) as spread:
        saved, undisturbed = Slot(spread), Slot(first)
        before = further(saved, PROMPT, 8)
        assert further(undisturbed, PROMPT, 8) == before
        assert identical(spread.states.read(0, Range(30, 46)), first.states.read(0, Range(30, 46)))
        expected = further(undisturbed, before[-1:], 16)
        assert further(move(saved, first), before[-1:], 16) == expected


@pytest.mark.parametrize("arch", EVERY_PAIR)
def test_between_any_two_plans(arch: str, folder: Path, tmp_path: Path) -> None:
    """All that are moved to start with the same history; what they say further is what one that never moved says.

    Without EDGE_THOROUGH=1 each plan is left once and moved to once."""
    model = synthetic(folder / f"{arch}.gguf", arch)
    plans = [ONE, *plans_of(arch)]
    with engines(model, plans[1:], tmp_path) as started, Engine(model, EXACT) as undisturbed:
        slot = Slot(undisturbed)
        before = further(slot, PROMPT, 8)
        expected = further(slot, before[-1:], TOKENS)
        for i, source in enumerate(plans):
            saved = Slot(started[source])
            assert further(saved, PROMPT, 8) == before
            history, state = list(saved.tokens), started[source].states.read(0, Range(30, 46))
            others = plans[i + 1 :] + plans[:i]
            for target in others if THOROUGH else others[:1]:
                moved = move(saved, started[target])
                assert moved.tokens == history
                assert identical(started[target].states.read(0, Range(30, 46)), state)
                assert further(moved, before[-1:], TOKENS) == expected
                assert moved.computed == 1, (source, target)


@pytest.mark.parametrize(
    ("kv_type", "flash_attention"),
    [("q8_0", "on"), ("f16", "on"), ("f16", "off"), ("q8_0/q4_0", "on"), ("q8_0/f16", "off")],
)
def test_types_of_keys_and_values(kv_type: str, flash_attention: str, folder: Path, tmp_path: Path) -> None:
    """Not a bit changes on the way through all plans; flash attention of a target may be another one than a source's
    where the type allows it."""
    model = synthetic(folder / "llama.gguf", "llama")
    kinds = replace(EXACT, kv_type=kv_type, flash_attention=flash_attention)
    others = replace(kinds, flash_attention="on")
    with ExitStack() as stack:
        slot = Slot(stack.enter_context(Engine(model, kinds)))
        slot.prefill(PROMPT)
        expected = slot.engine.states.read(0, Range(16, 32))
        for how in PLANS.values():
            slot = move(slot, stack.enter_context(ranks_here(model, how, others, tmp_path)))
            assert identical(slot.engine.states.read(0, Range(16, 32)), expected)


def test_heads_that_share_a_quantized_block_cannot_be_told_apart(folder: Path) -> None:
    """llama.cpp makes no such cache; who asks for the shape of one is told."""
    source = Source.from_file(GgufFile.open(synthetic(folder / "qwen3.gguf", "qwen3")))  # heads of 48, blocks of 32
    shard = Slice(Range(0, 7), Range(0, 2), Range(0, 32), Range(0, 8), first=True)
    assert len(StateShape.of_slice(source, shard, cache_type("f16")).layers) == 7
    with pytest.raises(CannotSlice, match=r"blocks of 32 .* use f16"):
        StateShape.of_slice(source, shard, cache_type("q8_0"))


def test_positions_turned_by_other_factors_are_not_mixed(folder: Path, tmp_path: Path) -> None:
    """A model with factors for short and for long contexts: keys of one are neither moved to nor kept for the other."""
    factors = {
        f"rope_factors_{name}.weight": np.linspace(1, most, 16, dtype=np.float32)
        for name, most in (("long", 8), ("short", 2))
    }
    values: dict[str, tuple[str, Any]] = {"phi3.rope.scaling.original_context_length": ("u32", 256)}
    model = rewritten(synthetic(folder / "phi3.gguf", "phi3"), tmp_path / "phi3.gguf", values, factors)
    saved = PrefixOptions(folder=tmp_path / "kept", key_folder=tmp_path / "own")
    short, long = (replace(EXACT, context=context, prefixes=saved) for context in (256, 512))
    with Engine(model, short) as first, Engine(model, long) as second:
        slot = Slot(first)
        slot.prefill(PROMPT)
        slot.keep()
        states = read_states(first, [slot])
        assert states is not None
        assert not write_states(second, states)
    for options, restored in ((long, 0), (short, (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS)):
        with Engine(model, options) as again:
            slot = Slot(again)
            slot.prefill(PROMPT)
            assert slot.restored == restored
        with (
            Engine(model, options) as single,
            ranks_here(model, PLANS["2 stages"], replace(options, prefixes=None), tmp_path) as staged,
        ):
            slot = Slot(single)
            slot.prefill(PROMPT)
            moved = move(slot, staged)
            assert further(moved, [5], 8) == further(slot, [5], 8)


def test_all_ranks_have_read_what_they_keep_before_the_last_step(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a deployment that ends after an answer would take away what a slower rank was still to keep."""
    model = synthetic(folder / "llama.gguf", "llama")
    saved = PrefixOptions(folder=tmp_path / "kept", key_folder=tmp_path / "own")
    shards: list[Shard] = []
    with ranks_here(model, PLANS["2 stages"], replace(EXACT, prefixes=saved), tmp_path, shards) as engine:
        slot = Slot(engine)
        slot.prefill(PROMPT)
        slow = shards[1].engine.states
        usual = slow.keep
        ended: list[bool] = []
        begun = threading.Event()

        def slowly(*arguments: Any) -> None:
            assert begun.wait(TIMEOUT_S)
            ended.append(bool(wait([keeping], 0.3).done))  # it waits for this rank
            usual(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(slow, "keep", slowly)
            keeping = start(slot.keep)
            begun.set()
            assert keeping.exception(TIMEOUT_S) is None
        assert ended == [False]
        assert slow.n_cached(engine.states.block_hashes(PROMPT)) == len(PROMPT) // BLOCK_TOKENS


def test_a_window_that_another_sequence_has_taken_is_not_gone_back_to(folder: Path) -> None:
    """llama.cpp fills gaps with cells that the window of another sequence has passed, where they are too many to be
    protected."""
    model = synthetic(folder / "gemma2.gguf", "gemma2")
    with Engine(model, replace(EXACT, sequences=128, outputs=128, batch=128)) as engine:
        first, second = (Slot(engine, n) for n in range(2))
        first.prefill([300 + i for i in range(100)])
        expected = second.prefill(PROMPT[:22]).copy()
        second.prefill([*PROMPT, *PROMPT])
        first.prefill([*first.tokens[:50], *(400 + i for i in range(100))])
        second.prefill([*PROMPT, *PROMPT, 5])
        assert second.computed == 1  # what it goes on with is all there
        np.testing.assert_allclose(second.prefill(PROMPT[:22]), expected, rtol=1e-3, atol=1e-3)
        assert second.computed == 22


def test_kept_blocks_are_read_from_the_beginning_where_a_window_was_taken(folder: Path, tmp_path: Path) -> None:
    """A slot that cannot go back to where the blocks of a file begin."""
    model = synthetic(folder / "gemma2.gguf", "gemma2")
    saved = PrefixOptions(folder=tmp_path / "kept", key_folder=tmp_path / "own")
    options = replace(EXACT, context=512, sequences=2, batch=128, prefixes=saved)
    prompt = [10 + (7 * i * i + 3 * i) % 400 for i in range(220)]
    with Engine(model, options) as engine:
        slot = Slot(engine)
        expected = slot.prefill(prompt).copy()
        slot.keep()
    with Engine(model, options) as engine:
        first, second = (Slot(engine, n) for n in range(2))
        first.prefill([300 + i for i in range(100)])
        second.prefill(prompt[:150])
        first.prefill([*first.tokens[:50], *(400 + i % 100 for i in range(170))])
        got = second.prefill(prompt)
        whole = len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS
        assert (second.tokens, second.restored, second.computed) == (prompt, whole - 150, 220 - whole)
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("arch", FIGURES)
def test_from_plan_to_plan_and_on(arch: str, folder: Path, tmp_path: Path) -> None:
    """One conversation goes around, a few tokens on each, so that what several plans computed is moved on by others."""
    model = synthetic(folder / f"{arch}.gguf", arch)
    available = plans_of(arch)
    plans = available if THOROUGH else available[-1:]
    tour = [ONE, *(plan for pair in permutations([*plans, ONE], 2) for plan in pair)]
    with engines(model, plans, tmp_path) as started, Engine(model, EXACT) as undisturbed:
        tokens_each = -(-TOKENS // len(tour))
        expected = further(Slot(undisturbed), PROMPT, tokens_each * len(tour))
        slot = Slot(started[ONE])
        said = further(slot, PROMPT, tokens_each)
        for plan in tour[1:]:
            if started[plan] is not slot.engine:
                slot = move(slot, started[plan])
            said += further(slot, said[-1:], tokens_each)
            assert slot.computed == 1
        assert said == expected
