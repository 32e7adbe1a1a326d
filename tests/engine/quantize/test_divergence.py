"""Chunks, log-probabilities and divergences: against what the definitions give, and llama.cpp's own logits."""

import math
import random
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.errors import EngineError, TextError
from edge.llm.engine import Engine
from edge.llm.options import EngineOptions
from edge.quantization.divergence import Chunks, divergence, log_probabilities, log_softmax, options_for, summarize
from quant.gguf.file import GgufFile
from tests.conftest import Synthetic
from tests.support import TESTS
from tools.demo_model.grammar import statements

F16 = TESTS / "data" / "edge-demo-f16.gguf"
TEXT = " ".join(islice(statements(random.Random(7)), 80))

Floats = np.ndarray[Any, np.dtype[np.float32]]
Doubles = np.ndarray[Any, np.dtype[np.float64]]


def logs(*rows: list[float]) -> Floats:
    """Log-probabilities, from probabilities."""
    with np.errstate(divide="ignore"):
        return np.log(np.array(rows, np.float32))


def exactly(logits: Floats) -> Doubles:
    """log(softmax) in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    result: Doubles = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return result


def test_log_softmax_of_known_rows() -> None:
    out = log_softmax(np.array([[0, 0], [math.log(3), 0], [1000, 0], [0, -np.inf]], np.float32))
    np.testing.assert_allclose(np.exp(out), [[0.5, 0.5], [0.75, 0.25], [1, 0], [1, 0]], rtol=1e-6)
    assert np.isnan(log_softmax(np.array([[0, np.nan], [np.inf, 0]], np.float32))).all(axis=1)[0]  # type: ignore[index]


def test_divergence_of_known_distributions() -> None:
    p, q = logs([0.5, 0.5], [0.9, 0.1], [1, 0], [0.5, 0.5]), logs([0.25, 0.75], [0.1, 0.9], [0.5, 0.5], [0.5, 0.5])
    expected = [0.5 * math.log(4 / 3), 0.8 * math.log(9), math.log(2), 0]
    np.testing.assert_allclose(divergence(p, q), expected, rtol=1e-6)
    np.testing.assert_array_equal(divergence(p, p), 0)
    assert divergence(logs([0.5, 0.5]), logs([1, 0])).tolist() == [math.inf]


def test_divergence_of_distributions_that_hardly_overlap() -> None:
    p = log_softmax(np.array([[200, 0, 0], [90, 0, -400], [0, 60, 0]], np.float32))
    q = log_softmax(np.array([[0, 200, 0], [0, 90, 0], [60, 0, 0]], np.float32))
    np.testing.assert_allclose(divergence(p, q), [200, 90, 60], rtol=1e-6)


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 20), st.floats(1e-4, 20))
def test_divergence_is_that_of_the_definition(seed: int, spread: float, distance: float) -> None:
    rng = np.random.default_rng(seed)
    a = (spread * rng.standard_normal((3, 300))).astype(np.float32)
    b = a + (distance * rng.standard_normal((3, 300))).astype(np.float32)
    p, q = exactly(a), exactly(b)
    result = divergence(log_softmax(a), log_softmax(b))
    np.testing.assert_allclose(result, (np.exp(p) * (p - q)).sum(axis=1), rtol=2e-3, atol=1e-11)
    assert (result >= 0).all()


def test_large_vocabularies_are_computed_in_parts() -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((40, 100_000), np.float32) for _ in range(2))
    p, q = exactly(a[-3:]), exactly(b[-3:])
    result = divergence(log_softmax(a), log_softmax(b))
    np.testing.assert_allclose(result[-3:], (np.exp(p) * (p - q)).sum(axis=1), rtol=1e-5)


def test_a_summary_of_known_predictions() -> None:
    nll = np.log(np.array([2.0, 8.0, 2.0, 8.0]))
    s = summarize(nll, np.array([0.0, 0.1, 0.2, 0.7]), np.array([True, True, True, False]))
    assert s.tokens == 4
    assert s.perplexity == pytest.approx(4)
    assert s.perplexity_error == pytest.approx(4 * math.log(2) / math.sqrt(3))  # deviation over sqrt(n - 1)
    assert (s.mean_divergence, s.median_divergence, s.max_divergence) == pytest.approx((0.25, 0.15, 0.7))
    assert s.divergence_99 == pytest.approx(0.2 + 0.97 * 0.5)
    assert s.top_1_agreement == 0.75


def test_chunks_follow_each_other_and_begin_with_bos(llama: Engine) -> None:
    chunks = Chunks.cut(llama.model, TEXT, 64)
    tokens = llama.model.tokenize(TEXT, add_special=True, parse_special=False)
    assert len(chunks) == len(tokens) // 64
    assert chunks.tokens.reshape(-1).tolist() == tokens[: 64 * len(chunks)]
    bos = llama.model.special_token("bos")
    assert tokens[0] == bos
    for i in (0, 1):
        assert chunks.inputs(i).tolist() == [bos, *tokens[64 * i + 1 : 64 * (i + 1)]]
    assert chunks.targets(1).tolist() == tokens[64 + 33 : 128]
    assert (chunks.size, chunks.scored) == (64, 31)
    assert len(Chunks.cut(llama.model, TEXT, 64, 2)) == 2
    assert len(Chunks.cut(llama.model, TEXT, 64, 10**6)) == len(chunks)
    assert chunks.same(Chunks.cut(llama.model, TEXT, 64))
    assert not chunks.same(Chunks.cut(llama.model, TEXT, 64, 2))
    assert not chunks.same(Chunks(chunks.tokens, None))


def test_texts_and_chunks_that_are_too_short(demo: Engine) -> None:
    with pytest.raises(TextError, match=r"at least 512 tokens is needed, this one has \d+; use a longer"):
        Chunks.cut(demo.model, "Hello!")
    with pytest.raises(TextError, match="16 tokens or more, 4 were requested"):
        Chunks.cut(demo.model, TEXT, 4)


def test_a_vocabulary_without_bos_keeps_the_first_token(demo: Engine) -> None:
    chunks = Chunks.cut(demo.model, TEXT, 64)
    assert demo.model.special_token("bos") is not None  # it has one, and does not want it before a text
    assert chunks.bos is None
    np.testing.assert_array_equal(chunks.inputs(1), chunks.tokens[1])


LOGITS = """
import sys, llama_cpp, numpy
path, out, *tokens = sys.argv[1:]
model = llama_cpp.Llama(path, n_ctx=128, n_threads=1, logits_all=True, verbose=False)
model.eval([int(token) for token in tokens])
numpy.save(out, numpy.array(model.scores[: len(tokens)], numpy.float64))
"""


def test_predictions_are_those_of_llama_cpp(tmp_path: Path) -> None:
    options = EngineOptions(threads=1)
    with Engine(F16, options_for(options, 128, 2048)) as engine:
        chunks = Chunks.cut(engine.model, TEXT, 128)
        inputs = chunks.inputs(1)
        result = log_probabilities(engine, inputs)
        again = log_probabilities(engine, inputs)
    np.testing.assert_array_equal(result, again)
    command = [sys.executable, "-c", LOGITS, str(F16), str(tmp_path / "l.npy"), *map(str, inputs)]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    logits = np.load(tmp_path / "l.npy")[64:127]
    expected = logits - logits.max(axis=1, keepdims=True)
    expected -= np.log(np.exp(expected).sum(axis=1, keepdims=True))
    assert result.shape == (chunks.scored, 2048) == expected.shape
    # Keys and values of 16 bits: on some processors one of 129,024 values is off by 0.025, on others none by 0.02.
    off = np.abs(result - expected)
    assert np.mean(off > 0.02) < 1e-4
    assert off.max() < 0.05
    assert np.sqrt(np.mean(off**2)) < 0.004
    nll = [-expected[i, inputs[65 + i]] for i in range(63)]
    np.testing.assert_allclose(-result[np.arange(63), chunks.targets(1)].mean(), np.mean(nll), rtol=1e-3)
    assert np.mean(nll) < 5  # it knows such sentences


def test_how_a_chunk_is_divided_makes_no_difference(synthetic: Synthetic) -> None:
    path = synthetic("llama", "f32")
    exact = EngineOptions(threads=1, kv_type="f32", flash_attention="off")
    all_at_once = options_for(exact, 128, 512)
    assert (all_at_once.context, all_at_once.batch, all_at_once.outputs) == (128, 128, 128)
    results = []
    for options in (all_at_once, options_for(replace(exact, batch=24), 128, 512)):
        with Engine(path, options) as engine:
            results.append(log_probabilities(engine, Chunks.cut(engine.model, TEXT, 128).inputs(0)))
    np.testing.assert_allclose(results[0], results[1], atol=1e-4)


def test_large_vocabularies_take_less_output_at_a_time() -> None:
    assert options_for(EngineOptions(), 512, 150_000).outputs == 111
    assert options_for(EngineOptions(), 512, 10**8).outputs == 16
    assert options_for(EngineOptions(batch=8), 512, 10**8).outputs == 8


def test_logits_that_are_no_numbers_are_refused(tmp_path: Path, synthetic: Synthetic) -> None:
    source = synthetic("llama", "f32")
    raw = bytearray(source.read_bytes())
    at = GgufFile.open(source).tensors["output_norm.weight"].offset
    raw[at : at + 4] = np.float32(np.nan).tobytes()
    (tmp_path / "broken.gguf").write_bytes(raw)
    with Engine(tmp_path / "broken.gguf", options_for(EngineOptions(threads=1), 32, 512)) as engine:
        inputs = Chunks.cut(engine.model, TEXT, 32).inputs(0)
        with pytest.raises(EngineError, match=r"broken.gguf computes logits that are not numbers"):
            log_probabilities(engine, inputs)
