"""Paged weights compute what resident ones do, bit for bit: every architecture, and whatever is done with the
engine."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge.errors import EngineError, Interrupted
from edge.llama.hooks import Hook
from edge.llama.llama import Batch
from edge.llm.engine import Engine, ModelRunner
from edge.weights import token_rows
from tests.engine.paging.conftest import MakeModel
from tests.support import paging
from tests.support.paging import ALL_FITS, EXPERTS, FIGURES, OPTIONS, PROMPT, answer, paged, resident, resident_answer
from tests.support.thorough import each_once, thorough

TYPES = [
    *((arch, "q4_0") for arch in FIGURES),
    ("llama", "q8_0"),
    ("llama", "f16"),
    ("llama", "q4_k"),
    ("gpt-oss", "mxfp4"),
]
BUDGETS: dict[str, Callable[[Path], int]] = {
    "all fits": lambda path: ALL_FITS,
    "halfway": paging.halfway,
    "least": paging.least,
}


# Architectures, types and budgets.


@pytest.mark.parametrize(("kind", "which"), each_once(TYPES, BUDGETS))
def test_logits_and_tokens_are_those_of_resident_weights(
    make_model: MakeModel, kind: tuple[str, str], which: str
) -> None:
    path = make_model(*kind)
    memory = BUDGETS[which](path)
    with paged(path, memory) as engine:
        assert paging.streams(engine) == (which != "all fits")
        result = answer(engine)
        chunk = min(16, engine.batch)
        assert engine.memory.total <= memory
    np.testing.assert_array_equal(result, resident_answer(path, True, chunk))


@pytest.mark.parametrize("arch", [arch for arch in FIGURES if arch not in ("gemma2", "gpt-oss")])  # keys before values
def test_the_first_pass_asks_in_the_order_that_is_read_ahead(make_model: MakeModel, arch: str) -> None:
    """In another order, much would be read twice."""
    path = make_model(arch)
    with paged(path, paging.least(path)) as engine:
        pager = engine.paging._pager  # type: ignore[union-attr]
        assert pager is not None
        order = list(pager._order)
        engine.decode(PROMPT[:1], 0)
        assert [piece.name for piece in pager._order] == [piece.name for piece in order]


@pytest.mark.parametrize("which", BUDGETS)
def test_a_tied_head_that_is_laid_out_for_products_but_not_for_tokens(make_model: MakeModel, which: str) -> None:
    path = make_model("gemma", "q4_0", head_type="q4_0")
    with paged(path, BUDGETS[which](path)) as engine:
        roles = engine.paging._roles  # type: ignore[union-attr]
        assert roles.tied
        assert roles.head is not None
        assert roles.head.repacked == roles.head.weight.repacks
        np.testing.assert_array_equal(answer(engine), resident_answer(path))


@pytest.mark.parametrize(
    "arch", ["llama", "qwen3moe", *thorough(*(arch for arch in FIGURES if arch not in ("llama", "qwen3moe")))]
)
def test_plain_layouts_compute_as_plain_resident_weights_do(make_model: MakeModel, arch: str) -> None:
    path = make_model(arch)
    with paged(path, BUDGETS["halfway"](path), repack=False) as engine:
        assert paging.streams(engine)
        result = answer(engine)
        chunk = min(16, engine.batch)
    np.testing.assert_array_equal(result, resident_answer(path, False, chunk))


def test_the_comparison_sees_which_kernels_computed(make_model: MakeModel) -> None:
    """Repacked and plain weights round differently: a test that could not tell them apart would compare nothing.

    llama.cpp has kernels for repacked weights from AVX2 on. Where this CPU has none, there is nothing to tell apart.
    """
    path = make_model()
    with paged(path, paging.halfway(path)) as engine:
        repacks = any(piece.weight.repacks for piece in engine.paging._roles.factors)  # type: ignore[union-attr]
    assert (resident_answer(path, True, 16) != resident_answer(path, False, 16)).any() == repacks


# What is done with an engine.


@pytest.fixture(params=["llama", "gemma3", *EXPERTS])
def pair(request: pytest.FixtureRequest, make_model: MakeModel):  # type: ignore[no-untyped-def]
    """The same model with little memory and resident, with room for two sequences and four rows that give logits."""
    path = make_model(request.param)
    options = replace(OPTIONS, sequences=2, outputs=4)
    with paged(path, paging.halfway(path, options), options) as first, resident(path, options) as other:
        assert paging.streams(first)
        assert first.batch >= 4
        yield first, other


Pair = tuple[Engine, Engine]


def both(pair: Pair, do: Callable[[Engine], np.ndarray]) -> None:
    """Require that `do` gives the same for both."""
    first, other = (do(engine).copy() for engine in pair)
    assert first.size
    np.testing.assert_array_equal(first, other)


def test_all_rows_of_a_batch(pair: Pair) -> None:
    both(pair, lambda engine: engine.decode(PROMPT[:4], 0, outputs="all"))
    both(pair, lambda engine: engine.decode(PROMPT[4:7], 4, outputs="all"))


def test_rows_that_give_no_logits(pair: Pair) -> None:
    for engine in pair:
        assert engine.decode(PROMPT[:4], 0, outputs="none").size == 0
    both(pair, lambda engine: engine.decode(PROMPT[4:6], 4))


def test_two_sequences_in_turn_and_in_one_batch(pair: Pair) -> None:
    def together(engine: Engine) -> np.ndarray:
        rows = engine.rows
        rows.tokens[:4], rows.positions[:4] = PROMPT[8:12], [7, 8, 5, 6]
        rows.sequences[:4], rows.outputs[:4] = [0, 0, 1, 1], [0, 1, 1, 1]
        engine.decode_rows(rows, 4)
        return np.stack([engine.logits(i) for i in (1, 2, 3)])

    both(pair, lambda engine: answer(engine, PROMPT[:5], 3, sequence=0, chunk=4))
    both(pair, lambda engine: answer(engine, PROMPT[9:12], 3, sequence=1, chunk=4))
    both(pair, together)


def test_positions_forgotten_copied_and_cleared(pair: Pair) -> None:
    for engine in pair:
        engine.decode(PROMPT[:4], 0)
        engine.kv_copy(0, 1)
        engine.kv_remove(0, 2)
    both(pair, lambda engine: engine.decode(PROMPT[20:22], 2))
    both(pair, lambda engine: engine.decode(PROMPT[4:6], 4, sequence=1))
    for engine in pair:
        engine.kv_clear()
    both(pair, lambda engine: answer(engine, PROMPT[:7], 3, chunk=4))


def test_shifted_positions(make_model: MakeModel) -> None:
    path = make_model()
    with paged(path, paging.least(path)) as first, resident(path) as other:
        for engine in (first, other):
            answer(engine, PROMPT[:10], 3)
            engine.kv_remove(0, 0, 4)
            engine.kv_shift(0, 4, -1, -4)
        both((first, other), lambda engine: answer(engine, PROMPT[:4], 3, start=engine.kv_last(0) + 1))


def test_hidden_states_in_place_of_tokens(make_model: MakeModel) -> None:
    path = make_model("qwen2")
    embedded: list[np.ndarray] = []
    hook = Hook(lambda node: node.name == "embd", lambda node: embedded.append(node.read()))
    with Engine(path, paging.unpaged(), hooks=[hook]) as engine:
        expected = engine.decode(PROMPT[:9], 0).copy()
    with (
        paging.steady_runtime(),
        ModelRunner(path, replace(OPTIONS, memory=paging.least(path) + paging.MIB), embeddings=True) as runner,
    ):
        assert paging.streams(runner)
        rows = Batch(runner.batch, runner.shape.n_embd)
        rows.embeddings[:9] = embedded[0]
        rows.positions[:9], rows.sequences[:9], rows.outputs[:9] = range(9), 0, 0
        rows.outputs[8] = 1
        runner.decode_rows(rows, 9)
        np.testing.assert_array_equal(runner.logits(-1), expected)


def test_hooks_of_others_see_the_same_states(make_model: MakeModel) -> None:
    path = make_model()
    seen: list[np.ndarray] = []
    hook = Hook(lambda node: node.name == "l_out-2", lambda node: seen.append(node.read()))
    with Engine(path, paging.unpaged(), hooks=[hook]) as engine:
        answer(engine, PROMPT[:5], 3)
    states, seen[:] = list(seen), []
    with paging.steady_runtime(), Engine(path, replace(OPTIONS, memory=paging.least(path)), hooks=[hook]) as engine:
        answer(engine, PROMPT[:5], 3)
    assert len(seen) == len(states) == 3
    for result, expected in zip(seen, states, strict=True):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("arch", ["llama", "gemma", "qwen3moe"])
def test_token_rows_that_come_and_go(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """With room for few of them: those of other decodes are given back, and read again."""
    path = make_model(arch)
    monkeypatch.setattr(token_rows, "MOST_BYTES", 20 * 8192)
    prompt = [*PROMPT[:16], *PROMPT[8:16], *PROMPT[16:24]]  # some of those given back are used on
    with paged(path, paging.least(path)) as engine:
        chunk = min(16, engine.batch)
        result = answer(engine, prompt, chunk=chunk)
        rows = engine.paging._rows  # type: ignore[union-attr]
        assert rows is not None
        assert 0 < len(rows._there) < len(set(prompt))
    with resident(path) as engine:
        np.testing.assert_array_equal(result, answer(engine, prompt, chunk=chunk))


# Interruptions.


@pytest.mark.parametrize(("arch", "at"), each_once(["llama", "gemma3", "qwen3moe"], [0, 5, 12]))
def test_an_interrupted_decode_leaves_nothing_wrong_behind(make_model: MakeModel, arch: str, at: int) -> None:
    """A stop that comes in the middle of a pass, before its node number `at` of some."""
    path = make_model(arch)
    count = 0

    def stop(_: object) -> None:
        nonlocal count
        count += 1
        if count == at + 1:
            thread = threading.Thread(target=engine.stop)
            thread.start()
            thread.join()

    nodes = Hook(lambda node: node.name.startswith(("attn_norm-", "l_out-", "result_norm", "ffn_norm-")), stop)
    with (
        paging.steady_runtime(),
        Engine(path, replace(OPTIONS, memory=paging.least(path)), hooks=[nodes]) as engine,
    ):
        chunk = min(engine.batch, 16)
        with pytest.raises(Interrupted):
            answer(engine, n=8)
        engine.resume()
        for _ in range(2):
            engine.kv_clear()
            np.testing.assert_array_equal(answer(engine, n=3), resident_answer(path, True, chunk)[:3])


def test_a_decode_stopped_before_it_begins(make_model: MakeModel) -> None:
    path = make_model()
    with paged(path, paging.least(path)) as engine:
        engine.stop()
        with pytest.raises(Interrupted):
            engine.decode(PROMPT[:4], 0)
        engine.resume()
        engine.kv_clear()
        np.testing.assert_array_equal(answer(engine), resident_answer(path))


def test_decodes_that_are_refused_change_nothing(make_model: MakeModel) -> None:
    path = make_model()
    with paged(path, paging.least(path)) as engine:
        with pytest.raises(EngineError):
            engine.decode([5000], 0)  # no such token
        with pytest.raises(EngineError):
            engine.decode([-1], 0)
        engine.kv_clear()
        np.testing.assert_array_equal(answer(engine), resident_answer(path))
