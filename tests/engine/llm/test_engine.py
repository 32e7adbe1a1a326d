"""Test the engine: its results do not depend on the order of requests, and operations on its KV cache are exact."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge.errors import ContextFull, EngineError
from edge.llama import ggml, library
from edge.llama.hooks import Hook
from edge.llama.llama import Batch
from edge.llm.engine import Engine
from edge.llm.options import DEFAULT_CONTEXT, EngineOptions
from edge.llm.resolve import worth_threads
from edge.models import shapes, synth
from edge.models.demo import MODEL_PATH
from partition.model.file import ModelFile
from quant.errors import UnknownTypeError
from tests.conftest import OPTIONS, Synthetic
from tests.support import ROOT

TOKENS = [5, 300, 17, 401, 88, 260, 33, 499]


def final_logits(engine: Engine, tokens: list[int], chunk: int, sequence: int = 0) -> np.ndarray:
    for start in range(0, len(tokens), chunk):
        logits = engine.decode(tokens[start : start + chunk], start, sequence=sequence)
    return logits.copy()


def test_logits_do_not_depend_on_how_a_prompt_is_chunked(llama: Engine) -> None:
    whole = final_logits(llama, TOKENS, 8)
    for chunk in (1, 3, 7):
        llama.kv_clear()
        np.testing.assert_array_equal(final_logits(llama, TOKENS, chunk), whole)


def test_all_outputs_are_those_of_each_prefix(llama: Engine, synthetic: Synthetic) -> None:
    with Engine(synthetic("llama", "q8_0"), replace(OPTIONS, outputs=len(TOKENS))) as engine:
        every = engine.decode(TOKENS, 0, outputs="all").copy()
    assert every.shape == (len(TOKENS), 512)
    for i in range(len(TOKENS)):
        llama.kv_clear()
        np.testing.assert_array_equal(llama.decode(TOKENS[: i + 1], 0), every[i])


def test_more_outputs_than_the_engine_was_made_for_are_refused(llama: Engine) -> None:
    with pytest.raises(EngineError, match="8 rows should produce logits, but the engine was made for 1"):
        llama.decode(TOKENS, 0, outputs="all")


def test_embeddings_in_place_of_tokens_give_the_same_logits(synthetic: Synthetic) -> None:
    """A later pipeline stage or a worker's shard gets its input this way."""
    embedded: list[np.ndarray] = []
    hook = Hook(lambda node: node.name == "embd", lambda node: embedded.append(node.read()))
    path = synthetic("llama", "q8_0")
    with Engine(path, OPTIONS, hooks=[hook]) as engine:
        expected = engine.decode(TOKENS, 0).copy()
    with Engine(path, OPTIONS) as engine:
        rows, n = Batch(OPTIONS.batch, engine.shape.n_embd), len(TOKENS)
        rows.embeddings[:n] = embedded[0]
        rows.positions[:n] = range(n)
        rows.outputs[n - 1] = 1
        engine.decode_rows(rows, n)
        np.testing.assert_array_equal(engine.logits(-1), expected)


def test_positions_are_shifted_under_hooks_as_without(synthetic: Synthetic) -> None:
    """The shift is a graph of its own, before that of the next decode: hooks must not take one for the other."""
    ran: list[str] = []
    hook = Hook(lambda node: node.weight.endswith("ffn_down.weight"), lambda node: ran.append(node.weight))
    results = []
    for hooks in ((), (hook,)):
        with Engine(synthetic("llama", "q8_0"), OPTIONS, hooks=hooks) as engine:
            logits = [engine.decode(TOKENS, 0).copy(), engine.decode([3], 8).copy()]
            for delta in (-4, -1, 2):
                assert engine.kv_remove(0, 0, max(0, -delta))
                engine.kv_shift(0, 0, -1, delta)
                logits += [engine.decode([7], engine.kv_last(0) + 1).copy() for _ in range(3)]
            results.append(np.stack(logits))
    np.testing.assert_array_equal(results[0], results[1])
    assert ran == ["blk.0.ffn_down.weight", "blk.1.ffn_down.weight"] * len(results[0])


def test_sequences_that_are_none_are_refused(synthetic: Synthetic) -> None:
    """llama.cpp would end the process."""
    with Engine(synthetic("llama"), replace(OPTIONS, sequences=2)) as engine:
        for sequence in (-1, 2, 256, 1 << 30):
            for call in (
                lambda: engine.kv_remove(sequence, 0),  # noqa: B023
                lambda: engine.kv_copy(0, sequence),  # noqa: B023
                lambda: engine.kv_copy(sequence, 0),  # noqa: B023
                lambda: engine.kv_shift(sequence, 0, -1, 1),  # noqa: B023
                lambda: engine.kv_last(sequence),  # noqa: B023
            ):
                with pytest.raises(EngineError, match="sequences are from 0 to 1, not"):
                    call()


@pytest.mark.parametrize("arch", ["gemma2", "gemma3", "gpt-oss"])
def test_models_with_a_window_are_not_shifted(synthetic: Synthetic, arch: str) -> None:
    """Where all their layers are of one kind, llama.cpp would end the process."""
    with Engine(synthetic(arch), OPTIONS) as engine:
        engine.decode(TOKENS, 0)
        with pytest.raises(EngineError, match="window"):
            engine.kv_shift(0, 0, -1, 1)
        engine.decode([5], 8)


def test_decoding_after_close_is_refused(synthetic: Synthetic) -> None:
    engine = Engine(synthetic("llama"), OPTIONS)
    engine.decode(TOKENS, 0)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.decode(TOKENS, 0)


def test_submitted_steps_are_collected_in_order(synthetic: Synthetic) -> None:
    with Engine(synthetic("llama", "q8_0"), replace(OPTIONS, sequences=2)) as engine:
        expected = engine.decode(TOKENS, 0).copy()
        other = engine.decode(TOKENS[::-1], 0, sequence=1).copy()
        engine.kv_clear()
        n, last = len(TOKENS), np.array([0] * 7 + [1], np.int8)
        engine.submit(TOKENS[:4], np.arange(4), np.zeros(4), np.zeros(4, np.int8))
        engine.submit(TOKENS[4:], np.arange(4, n), np.zeros(4), last[4:])
        engine.submit(TOKENS[::-1], np.arange(n), np.ones(n), last)
        assert engine.uncollected == 2
        first, second = engine.collect(), engine.collect()
        assert first.shape == second.shape == (1, 512)
        assert engine.uncollected == 0
        np.testing.assert_allclose(first[0], expected, atol=1e-4 * expected.std())
        np.testing.assert_allclose(second[0], other, atol=1e-4 * other.std())


def test_no_outputs_still_fills_the_cache(llama: Engine) -> None:
    expected = final_logits(llama, TOKENS, 8)
    llama.kv_clear()
    assert llama.decode(TOKENS[:-1], 0, outputs="none").size == 0
    np.testing.assert_array_equal(llama.decode(TOKENS[-1:], 7), expected)


def test_removed_positions_are_forgotten(llama: Engine) -> None:
    expected = final_logits(llama, TOKENS, 8)
    llama.kv_clear()
    llama.decode([*TOKENS[:4], 9, 9, 9, 9], 0)
    assert llama.kv_last(0) == 7
    assert llama.kv_remove(0, 4)
    assert llama.kv_last(0) == 3
    np.testing.assert_array_equal(llama.decode(TOKENS[4:], 4), expected)


def test_a_copied_sequence_continues_on_its_own(synthetic: Synthetic) -> None:
    with Engine(synthetic("llama"), replace(OPTIONS, sequences=2)) as engine:
        expected = final_logits(engine, TOKENS, 8)
        engine.kv_clear()
        engine.decode(TOKENS[:4], 0, sequence=0)
        engine.kv_copy(0, 1)
        engine.decode([9, 9], 4, sequence=0)
        np.testing.assert_array_equal(engine.decode(TOKENS[4:], 4, sequence=1), expected)
        assert engine.kv_last(0) == 5


def test_one_batch_holds_rows_of_several_sequences(synthetic: Synthetic) -> None:
    with Engine(synthetic("llama"), replace(OPTIONS, sequences=2)) as engine:
        a = engine.decode(TOKENS[:3], 0).copy()
        engine.kv_clear()
        b = engine.decode(TOKENS[3:6], 0).copy()
        engine.kv_clear()
        rows = engine.rows
        rows.tokens[:6] = TOKENS[:6]
        rows.positions[:6] = [0, 1, 2, 0, 1, 2]
        rows.sequences[:6] = [0, 0, 0, 1, 1, 1]
        rows.outputs[:6] = [0, 0, 1, 0, 0, 1]
        engine.decode_rows(rows, 6)
        # Keys of the other sequence are masked but summed over, so the order of float additions differs.
        np.testing.assert_allclose(engine.logits(2), a, atol=1e-4 * a.std())
        np.testing.assert_allclose(engine.logits(5), b, atol=1e-4 * b.std())


def test_shifted_positions_make_room(llama: Engine) -> None:
    llama.decode(TOKENS, 0)
    llama.kv_remove(0, 0, 4)
    llama.kv_shift(0, 4, -1, -4)
    assert llama.kv_last(0) == 3
    llama.decode([7], 4)
    assert llama.kv_last(0) == 4


@pytest.mark.parametrize(
    "options",
    [
        replace(OPTIONS, kv_type="q8_0"),
        replace(OPTIONS, kv_type="f16/q8_0"),
        replace(OPTIONS, kv_type="q4_0"),
        replace(OPTIONS, kv_type="bf16"),
        replace(OPTIONS, flash_attention="off"),
    ],
    ids=lambda o: f"{o.kv_type} {o.flash_attention}",
)
def test_options_that_round_change_the_logits_a_little(
    llama: Engine, synthetic: Synthetic, options: EngineOptions
) -> None:
    expected = final_logits(llama, TOKENS, 8)
    with Engine(synthetic("llama", "q8_0"), options) as engine:
        got = final_logits(engine, TOKENS, 8)
    error = np.abs(got - expected).max() / expected.std()
    assert 0 < error < (1.5 if options.kv_type == "q4_0" else 0.1)


def test_repacked_weights_compute_the_same_and_are_used_by_default(synthetic: Synthetic) -> None:
    path = synthetic("llama", "q4_0")
    logits = {}
    for repack in (True, False, None):
        with Engine(path, replace(OPTIONS, repack=repack)) as engine:
            logits[repack] = final_logits(engine, TOKENS, 8)
    np.testing.assert_array_equal(logits[None], logits[True])
    np.testing.assert_allclose(logits[False], logits[True], atol=0.02 * logits[True].std())


def test_context_defaults_to_the_trained_one_within_bounds(synthetic: Synthetic) -> None:
    with Engine(synthetic("llama"), replace(OPTIONS, context=None)) as engine:
        assert engine.context == 512 < DEFAULT_CONTEXT


def test_too_many_tokens_are_refused_with_both_numbers(llama: Engine) -> None:
    with pytest.raises(EngineError, match=r"1 to 32 tokens, got 33"):
        llama.decode([1] * 33, 0)
    with pytest.raises(ContextFull, match=r"260 tokens .* context of 256"):
        llama.decode([1] * 8, 252)
    llama.decode(TOKENS, 0)  # still fine


def test_a_kv_type_nobody_can_store_is_refused(synthetic: Synthetic) -> None:
    with pytest.raises(UnknownTypeError, match=r"'q2_k' .* f16"):
        Engine(synthetic("llama"), replace(OPTIONS, kv_type="q2_k"))


def test_quantized_values_without_flash_attention_are_an_error_not_an_abort(synthetic: Synthetic) -> None:
    with pytest.raises(EngineError, match="quantized V cache requires flash_attn"):
        Engine(synthetic("llama"), replace(OPTIONS, kv_type="q8_0", flash_attention="off"))


def test_flash_attention_is_left_out_where_llama_cpp_would_stop(tmp_path: Path) -> None:
    path = tmp_path / "plm.gguf"
    synth.synthesize(path, shapes.shape("plm", layers=2, embd=64, ff=64, heads=4, vocab=512), "f16")
    logits = []
    for request in ("auto", "off"):
        with Engine(path, replace(OPTIONS, flash_attention=request)) as engine:
            logits.append(final_logits(engine, TOKENS, 8))
    np.testing.assert_array_equal(*logits)
    with pytest.raises(EngineError, match="no flash attention for plm models; choose auto or off"):
        Engine(path, replace(OPTIONS, flash_attention="on"))


def test_a_head_too_small_for_the_kv_type_is_an_error_with_llama_cpps_reason(tmp_path: Path) -> None:
    path = tmp_path / "narrow.gguf"
    synth.synthesize(path, shapes.shape("llama", layers=1, embd=64, ff=64, heads=4, vocab=300), "f16")
    with pytest.raises(EngineError, match="block size 32 does not divide n_embd_head_k=16"):
        Engine(path, replace(OPTIONS, kv_type="q8_0"))


def test_load_progress_ends_at_the_whole(synthetic: Synthetic) -> None:
    seen: list[float] = []
    Engine(synthetic("llama"), OPTIONS, progress=seen.append).close()
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_a_foreign_tensor_layout_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [field for field in ggml._Tensor._fields_ if field[0] != "buffer"]
    moved = type("Moved", (ggml.C.Structure,), {"_fields_": fields})  # type: ignore[attr-defined]
    monkeypatch.setattr(ggml, "_Tensor", moved)
    with pytest.raises(EngineError, match=r"9\.9\.9 .* 0\.3\.36"):
        ggml.check_layout("9.9.9")


def test_the_pinned_version_is_the_one_in_pyproject() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert f'"llama-cpp-python=={library.PINNED_VERSION}"' in pyproject


def test_when_ggml_aborts_there_is_one_line_and_a_documented_code() -> None:
    code = (
        "import ctypes as C; from edge.llama import ggml, llama; llama.initialise();"
        "ggml._ggml('ggml_abort', None, C.c_char_p, C.c_int, C.c_char_p)(b'ggml.c', 7, b'the invariant')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == library.EXIT_NATIVE_ABORT
    assert done.stdout == ""
    assert done.stderr.splitlines() == ["edge: llama.cpp stopped the process: ggml.c:7: the invariant"]


def test_an_interrupted_decode_leaves_nothing_to_the_next_one(
    synthetic: Synthetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(synthetic("llama", "q8_0"), OPTIONS) as engine:
        expected = engine.decode([3, 4], 0).copy()
        collect, interrupts = engine.collect, [KeyboardInterrupt]

        def interrupted() -> np.ndarray:
            if interrupts:
                raise interrupts.pop()
            return collect()

        monkeypatch.setattr(engine, "collect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.decode([5, 6], 2)
        engine.kv_clear()
        assert (engine.decode([3, 4], 0) == expected).all()


def test_tiny_model_is_worth_one_thread_and_wide_model_many(tmp_path: Path) -> None:
    demo = ModelFile.open(MODEL_PATH)
    assert worth_threads(demo) == 1
    path = tmp_path / "wide.gguf"
    synth.synthesize(path, shapes.shape("llama", layers=1, embd=2048, ff=8192, heads=8, kv=8, vocab=512), "q8_0")
    wide = ModelFile.open(path)
    assert worth_threads(wide) >= 16
