"""Test `edge imatrix`: the sums equal numpy's, llama.cpp quantizes with the file, and bad input is refused."""

import json
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge.errors import EngineError, TextError
from edge.llama.llama import Model
from edge.llm.options import EngineOptions
from edge.models import synth
from edge.quantization.divergence import Chunks
from edge.quantization.imatrix import collect
from partition.model.file import ModelFile
from partition.model.model import ModelShape
from quant.gguf.imatrix import read_imatrix
from tests.conftest import FIGURES, SMALL, Synthetic
from tests.support import ROOT, TESTS
from tests.support.commands import Run, assert_refused, runner, said

F16 = TESTS / "data" / "edge-demo-f16.gguf"
TEXT = "The quick brown fox jumps over the lazy dog, 17 times a day; nobody knows why. " * 12
EXACT = EngineOptions(threads=1, kv_type="f32", flash_attention="off")

Doubles = np.ndarray[Any, np.dtype[np.float64]]


def numpy_sums(path: Path, chunks: Chunks) -> dict[str, tuple[Doubles, list[int]]]:
    """The same by numpy, for a Llama in F32, with experts or without: name to (sums [experts, columns], counts)."""
    file = ModelFile.open(path)
    shape = ModelShape.from_gguf(file)
    heads, kv, size = shape.n_heads[0], shape.n_heads_kv[0], shape.head_k
    eps = float(file.metadata["llama.attention.layer_norm_rms_epsilon"])  # type: ignore[arg-type]
    base = float(file.metadata.get("llama.rope.freq_base", 10000.0))  # type: ignore[arg-type]
    results: dict[str, tuple[Doubles, list[int]]] = {}

    def weight(name: str) -> Doubles:
        tensor = file.tensors[name]
        return np.frombuffer(file.data(name), np.float32).reshape(tensor.shape[::-1]).astype(np.float64)

    def add(name: str, x: Doubles, expert: int = 0, experts: int = 1) -> None:
        sums, counts = results.setdefault(name, (np.zeros((experts, x.shape[1])), [0] * experts))
        sums[expert] += (x**2).sum(axis=0)
        counts[expert] += len(x)

    def product(name: str, x: Doubles) -> Doubles:
        add(name, x)
        return x @ weight(name).T

    def norm(name: str, x: Doubles) -> Doubles:
        return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + eps) * weight(name)

    def rope(x: Doubles) -> Doubles:  # [tokens, heads, size]
        angle = np.arange(len(x))[:, None, None] * base ** (-np.arange(0, size, 2) / size)
        even, odd = x[..., ::2], x[..., 1::2]
        turned = np.stack([even * np.cos(angle) - odd * np.sin(angle), even * np.sin(angle) + odd * np.cos(angle)], -1)
        return turned.reshape(x.shape)

    def silu(x: Doubles) -> Doubles:
        return x / (1 + np.exp(-x))

    def attention(at: str, x: Doubles) -> Doubles:
        n = len(x)
        q, k, v = (product(f"{at}.attn_{item}.weight", x) for item in "qkv")
        q, k = rope(q.reshape(n, heads, size)), rope(k.reshape(n, kv, size))
        k, v = (np.repeat(item.reshape(n, kv, size), heads // kv, axis=1) for item in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) / size**0.5 + np.triu(np.full((n, n), -np.inf), 1)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = np.einsum("hij,jhd->ihd", p / p.sum(axis=-1, keepdims=True), v).reshape(n, -1)
        return product(f"{at}.attn_output.weight", mixed)

    def experts(at: str, x: Doubles) -> Doubles:
        gates = np.exp(product(f"{at}.ffn_gate_inp.weight", x))
        gates /= gates.sum(axis=1, keepdims=True)
        best = np.argsort(-gates, axis=1)[:, : shape.n_experts_used]
        out = np.zeros_like(x)
        up, gate, down = (f"{at}.ffn_{item}_exps.weight" for item in ("up", "gate", "down"))
        for expert in range(shape.n_experts):
            rows = np.flatnonzero((best == expert).any(axis=1))
            for name in (up, gate):
                add(name, x[rows], expert, shape.n_experts)
            inner = silu(x[rows] @ weight(gate)[expert].T) * (x[rows] @ weight(up)[expert].T)
            add(down, inner, expert, shape.n_experts)
            share = gates[rows, expert] / np.take_along_axis(gates, best, 1)[rows].sum(axis=1)
            out[rows] += share[:, None] * (inner @ weight(down)[expert].T)
        return out

    for i in range(len(chunks)):
        x = weight("token_embd.weight")[chunks.inputs(i)]
        for at in (f"blk.{layer}" for layer in range(shape.n_layers)):
            x = x + attention(at, norm(f"{at}.attn_norm.weight", x))
            y = norm(f"{at}.ffn_norm.weight", x)
            if shape.n_experts:
                x = x + experts(at, y)
            else:
                inner = silu(product(f"{at}.ffn_gate.weight", y)) * product(f"{at}.ffn_up.weight", y)
                x = x + product(f"{at}.ffn_down.weight", inner)
        add("output.weight", norm("output_norm.weight", x))
    return results


@pytest.mark.parametrize("experts", [{}, {"experts": 4, "experts_used": 2}], ids=["dense", "experts"])
def test_it_is_what_numpy_computes(tmp_path: Path, experts: dict[str, int]) -> None:
    path = tmp_path / "model.gguf"
    synth.synthesize(path, synth.shape("llama", **{**SMALL, **FIGURES["llama"], **experts}), "f32")
    model = Model(path, vocabulary_only=True)
    chunks = Chunks.cut(model, TEXT, 64, 3)
    model.close()
    assert len(chunks) == 3
    expected = numpy_sums(path, chunks)
    matrix = collect(path, TEXT, EXACT, chunk_tokens=64, most=3, output=True)
    assert matrix.entries.keys() == expected.keys()
    for name, (sums, counts) in expected.items():
        np.testing.assert_allclose(matrix.entries[name].sums, sums, rtol=1e-4, atol=1e-6, err_msg=name)
        assert matrix.entries[name].counts.tolist() == counts, name


@pytest.mark.parametrize("arch", FIGURES)
def test_all_weights_of_the_layers_are_covered(synthetic: Synthetic, arch: str) -> None:
    file = ModelFile.open(synthetic(arch, "f32"))
    shape = ModelShape.from_gguf(file)
    matrix = collect(file.path, TEXT, EXACT, chunk_tokens=32, most=2, output=True)
    head = "token_embd.weight" if shape.head_is_tied else "output.weight"
    weights = {
        n for n, t in file.tensors.items() if n.startswith("blk.") and n.endswith(".weight") and len(t.shape) > 1
    }
    assert matrix.entries.keys() == weights | {head}
    for name, entry in matrix.entries.items():
        tensor = file.tensors[name]
        assert entry.sums.size == tensor.shape[0] * int(np.prod(tensor.shape[2:], dtype=int))
        assert entry.counts.sum() == 64 * (shape.n_experts_used if "_exps" in name else 1), name
        values = matrix.weights(name, len(entry.counts), tensor.shape[0])
        assert values is not None
        assert (values > 0).all()
    layers = collect(file.path, TEXT, EXACT, chunk_tokens=32, most=2)
    assert layers.entries.keys() == weights
    for name in weights:
        np.testing.assert_array_equal(layers.entries[name].sums, matrix.entries[name].sums)


@pytest.mark.parametrize(("type_name", "tolerance"), [("f32", 1e-5), ("f16", 1e-2)])
def test_threads_and_batches_make_no_difference(synthetic: Synthetic, type_name: str, tolerance: float) -> None:
    path = synthetic("llama", type_name)
    first = collect(path, TEXT, EXACT, chunk_tokens=128, most=2)
    for options in (replace(EXACT, threads=2), replace(EXACT, batch=24)):
        other = collect(path, TEXT, options, chunk_tokens=128, most=2)
        for name, entry in first.entries.items():
            np.testing.assert_allclose(other.entries[name].sums, entry.sums, rtol=tolerance, err_msg=name)
            np.testing.assert_array_equal(other.entries[name].counts, entry.counts)


def test_time_is_kept_to_after_the_first_chunk(synthetic: Synthetic) -> None:
    path = synthetic("llama")
    short = collect(path, TEXT, EXACT, chunk_tokens=32, most=5, within_s=0)
    first = collect(path, TEXT, EXACT, chunk_tokens=32, most=1)
    assert short.chunk_count == first.chunk_count == 1
    for name, entry in first.entries.items():
        np.testing.assert_array_equal(short.entries[name].sums, entry.sums)
    assert collect(path, TEXT, EXACT, chunk_tokens=32, most=5, within_s=60).chunk_count == 5


def test_a_text_must_fill_a_chunk(synthetic: Synthetic) -> None:
    with pytest.raises(TextError, match="a text of at least 512 tokens is needed, this one has"):
        collect(synthetic("llama"), "Too short.", EXACT)
    with pytest.raises(TextError, match="16 tokens or more, 15"):
        collect(synthetic("llama"), TEXT, EXACT, chunk_tokens=15)


def test_a_model_that_computes_no_numbers_is_refused(tmp_path: Path, synthetic: Synthetic) -> None:
    path = tmp_path / "broken.gguf"
    raw = bytearray(synthetic("llama", "f32").read_bytes())
    at = ModelFile.open(synthetic("llama", "f32")).tensors["blk.0.attn_norm.weight"].offset
    raw[at : at + 4] = struct.pack("<f", np.nan)
    path.write_bytes(raw)
    with pytest.raises(EngineError, match="not numbers"):
        collect(path, TEXT, EXACT, chunk_tokens=32, most=1)


QUANTIZE = """
import ctypes, sys, llama_cpp as L
from partition.model.file import ModelFile
from quant.gguf.imatrix import read_imatrix
source, target, matrix = sys.argv[1:]
params = L.llama_model_quantize_default_params()
params.ftype, params.nthread = L.LLAMA_FTYPE_MOSTLY_IQ2_XXS, 1
if matrix:
    flat = {name.encode(): values for name, values in read_imatrix(matrix).weights_of(ModelFile.open(source)).items()}
    array = (L.llama_model_imatrix_data * (len(flat) + 1))()
    for at, (name, values) in zip(array, flat.items()):
        at.name, at.size = name, values.size
        at.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    params.imatrix = ctypes.cast(array, type(params.imatrix))
sys.exit(L.llama_model_quantize(source.encode(), target.encode(), params))
"""


def test_llama_cpp_quantizes_with_it(tmp_path: Path) -> None:
    source, matrix, target = tmp_path / "model.gguf", tmp_path / "m.gguf", tmp_path / "small.gguf"
    synth.synthesize(source, synth.shape("llama", layers=1, embd=256, ff=256, heads=4, vocab=512), "f16")
    collect(source, TEXT, EngineOptions(threads=1), chunk_tokens=64, most=2).write(matrix)

    def quantize(imatrix: Path | str) -> int:
        command = [sys.executable, "-c", QUANTIZE, str(source), str(target), str(imatrix)]
        return subprocess.run(command, capture_output=True, timeout=120, cwd=ROOT).returncode

    assert quantize("") != 0  # this type needs one
    assert quantize(matrix) == 0
    tensors = ModelFile.open(target).tensors
    assert tensors["blk.0.ffn_up.weight"].type.name == "iq2_xxs"


# The command.


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`edge imatrix` with these arguments: exit code, standard output, standard error."""
    return runner(capsys, "imatrix")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_the_command_writes_a_file(run: Run, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(text.parent)
    values = said(run, F16, text, "--chunk-tokens", "64", "--chunks", "2")
    assert values.pop("duration_s") > 0
    path = text.parent / "edge-demo-f16.imatrix.gguf"
    assert values == {
        "output": path.name,
        "model": str(F16),
        "text": str(text),
        "tensors": 56,
        "chunks": 2,
        "chunk_tokens": 64,
        "unseen_experts": {},
        "size_bytes": path.stat().st_size,
    }
    matrix = read_imatrix(path)
    assert (matrix.datasets, matrix.chunk_count, matrix.chunk_size) == ((str(text),), 2, 64)
    assert_refused(run(F16, text), 2, "edge-demo-f16.imatrix.gguf exists", "--force")
    code, out, _ = run(F16, text, "--force", "--chunk-tokens", "64", "--process-output")
    assert (code, out.count("\n")) == (0, 1)
    assert "57 tensors" in out
    assert read_imatrix(path).chunk_count > 2


def test_experts_that_nobody_used_are_told(run: Run, text: Path, tmp_path: Path) -> None:
    path = tmp_path / "experts.gguf"
    shape = synth.shape("qwen3moe", **{**SMALL, **FIGURES["qwen3moe"], "experts": 128})
    synth.synthesize(path, shape, "f32")
    code, out, error = run(
        path, text, "--output", tmp_path / "o.gguf", "--chunk-tokens", "16", "--chunks", "1", "--json"
    )
    unseen = json.loads(out)["unseen_experts"]
    assert code == 0
    assert 0 < unseen["blk.0.ffn_up_exps.weight"] < 128
    assert f"{sum(unseen.values())} experts in 6 tensors (blk." in error


def test_what_is_read_is_never_written_over(run: Run, text: Path, tmp_path: Path, synthetic: Synthetic) -> None:
    model, link = tmp_path / "model.gguf", tmp_path / "link.gguf"
    model.write_bytes(synthetic("llama").read_bytes())
    link.symlink_to(model)
    before = model.read_bytes()
    for source, output in ((model, model), (link, model), (model, link), (model, text)):
        answer = run(source, text, "--output", output, "--force", "--chunk-tokens", "16", "--chunks", "1")
        assert_refused(answer, 2, f"{output.name} is read by this command and cannot be overwritten; give another name")
    assert (model.read_bytes(), text.read_text()) == (before, TEXT)


def test_bad_input_to_the_command(run: Run, text: Path, tmp_path: Path) -> None:
    out = ("--output", tmp_path / "o.gguf")
    assert_refused(run(F16, text, *out, "--chunk-tokens", "5000"), 3, "5000 tokens is needed, this one has")
    assert_refused(run(F16, tmp_path / "none.txt", *out), 3, "none.txt: cannot be read: No such file")
    assert_refused(run(F16, tmp_path, *out), 3, "cannot be read: Is a directory")
    assert_refused(run(tmp_path / "none.gguf", text, *out), 3, "none.gguf")
    assert_refused(run(F16, text, "--output", tmp_path), 2, "is a folder")
    assert_refused(
        run(F16, text, "--output", text, "--force"), 2, "text.txt is read by this command and cannot be overwritten"
    )
    assert_refused(run(F16, text, "--output", tmp_path / "none" / "o.gguf"), 2, "no folder")
    assert_refused(run(F16, text, *out, "--context", "64"), 2, "use --chunk-tokens instead")
    text.write_bytes(b"caf\xe9 au lait")
    assert_refused(run(F16, text, *out), 3, "text.txt: not UTF-8, byte 3 is 0xe9")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]
