"""Models with random weights: every architecture runs, seeds and options count, and no half files are left."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edge.models import synth
from edge.models.shapes import MIN_VOCAB
from edge.models.synth import ARCHITECTURES, Shape, ShapeError
from partition.model.check import check_loadable
from partition.model.model import ModelShape
from quant.errors import UnknownTypeError
from quant.gguf.file import GgufFile
from quant.types import TYPES
from tests.conftest import FIGURES
from tests.support.helpers import ROOT, until

# Each file in a process of its own, which llama.cpp may abort: a fork of one that has imported it.
DECODE = """
import os, sys, traceback
import llama_cpp, numpy
from edge.llama import llama
llama.initialise()  # without kernels for AMX, which some compilers get wrong

def decode(path):
    model = llama_cpp.Llama(path, n_ctx=64, n_threads=1, logits_all=True, verbose=False)
    text = "Hello world, \u00e9\u20ac!".encode()
    tokens = model.tokenize(text, add_bos=True)
    assert model.detokenize(tokens) == text, model.detokenize(tokens)
    model.eval(tokens)
    logits = numpy.array(model.scores[: len(tokens)])
    assert numpy.isfinite(logits).all()
    assert 0.5 < logits.std() < 2, logits.std()
    assert (logits[1:] != logits[:-1]).any(axis=1).all()

for path in sys.stdin:
    pid = os.fork()
    if not pid:
        try:
            decode(path.rstrip())
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def small(arch: str = "llama", **figures: Any) -> Shape:
    """A shape of a few hundred thousand parameters."""
    base = {"layers": 2, "embd": 128, "ff": 256, "heads": 4, "kv": 2, "vocab": 400, "context": 128}
    if ARCHITECTURES[arch].experts and not ARCHITECTURES[arch].dense:
        base |= {"experts": 4, "experts_used": 2, "expert_ff": 64}
    return synth.shape(arch, **(base | figures))


def write(folder: Path, shape: Shape, *args: Any, **kwargs: Any) -> Path:
    path = folder / "model.gguf"
    n_bytes = synth.synthesize(path, shape, *args, **kwargs)
    assert path.stat().st_size == n_bytes
    return path


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], None]]:
    """Loads and runs a model in a process of its own."""
    log = tmp_path_factory.mktemp("decode") / "log"
    alone = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # its threads would be lost in a fork
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-c", DECODE],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, env=alone,
        ) as process,
    ):  # fmt: skip

        def decode(path: Path) -> None:
            assert process.stdin
            assert process.stdout
            print(path, file=process.stdin, flush=True)
            assert process.stdout.readline() == "0\n", log.read_text()[-2000:]

        yield decode
        process.kill()


@pytest.mark.parametrize(
    "shape",
    [
        *(pytest.param(small(arch), id=arch) for arch in FIGURES),
        pytest.param(small(experts=4, experts_used=2), id="llama with experts"),
        pytest.param(small(rope_freqs=True, tied=True), id="llama 3"),
        pytest.param(small("qwen3", head_size=64), id="heads wider than embd"),
        pytest.param(small("gemma3", layers=7, tied=False, rope_scaling="linear", rope_factor=8.0), id="gemma3 untied"),
        pytest.param(small("phi3", kv=4), id="phi3 without groups"),
    ],
)
def test_it_runs(tmp_path: Path, shape: Shape, decode: Callable[[Path], None]) -> None:
    path = write(tmp_path, shape, "q8_0")
    file = GgufFile.open(path)
    check_loadable(file)
    read = ModelShape.from_gguf(file)
    assert (read.n_params, read.n_layers, read.n_embd) == (shape.parameters, shape.layers, shape.embd)
    assert (read.n_vocab, read.context_length, read.head_is_tied) == (shape.vocab, shape.context, shape.tied)
    assert set(read.n_heads_kv) == {shape.kv}
    assert read.n_experts == shape.experts
    decode(path)


# Without the two types for which llama.cpp first computes tables for many seconds.
@pytest.mark.parametrize("type_name", sorted(set(synth.WEIGHT_TYPES) - {"iq1_m", "iq2_s"}))
def test_every_type_is_written(tmp_path: Path, type_name: str) -> None:
    # Without a pool, some types take minutes and others take a second.
    path = write(tmp_path, small(layers=1, embd=256, vocab=MIN_VOCAB), type_name, pool_bytes=1 << 12)
    tensors = GgufFile.open(path).tensors
    assert tensors["blk.0.ffn_down.weight"].type.name == type_name
    assert tensors["blk.0.ffn_norm.weight"].type.name == "f32"


def test_the_smallest_vocabulary_spells_any_text(tmp_path: Path, decode: Callable[[Path], None]) -> None:
    decode(write(tmp_path, small(vocab=MIN_VOCAB), "f32"))


def test_rows_that_fill_no_block_get_another_type() -> None:
    def types(shape: Shape, *args: Any) -> dict[str, str]:
        return {t.name: t.type.name for t in synth.layout(shape, *args)}

    result = types(small(embd=96, ff=256, heads=4, kv=4), "q4_k")
    assert result["blk.0.attn_q.weight"] == "q5_0"
    assert result["blk.0.ffn_down.weight"] == "q4_k"
    assert result["output.weight"] == "q8_0"
    assert types(small(ff=8), "q4_0")["blk.0.ffn_down.weight"] == "f16"
    assert types(small(), "q8_0")["output.weight"] == "q8_0"
    assert types(small(tied=True), "q4_0", "f16")["token_embd.weight"] == "f16"


def test_all_fallbacks_are_types_and_smaller_blocks() -> None:
    for name in synth.WEIGHT_TYPES:
        for tensor in synth.layout(small(embd=96), name):
            assert tensor.shape[0] % tensor.type.block == 0


def test_a_seed_gives_the_same_file_and_another_seed_another(tmp_path: Path) -> None:
    first, again, other = (write(tmp_path, small(), seed=seed).read_bytes() for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert len(first) == len(other)


def test_every_figure_changes_the_file(tmp_path: Path) -> None:
    base = small("qwen3moe", head_size=32)
    plain = write(tmp_path, base).read_bytes()
    changes: dict[str, Any] = {
        "arch": "llama", "layers": 3, "embd": 160, "ff": 288, "heads": 8, "vocab": 401, "kv": 4, "head_size": 64,
        "experts": 5, "experts_used": 3, "expert_ff": 96, "context": 129, "tied": True, "rms_eps": 1e-4,
        "rope_base": 2e4, "rope_freqs": True, "rope_scaling": "linear", "rope_factor": 2.0, "rope_context": 64,
        "window": 64, "attn_softcap": 1.0, "final_softcap": 1.0,
        "dense_layers": 1, "expert_every": 2, "attention_every": 2,
    }  # fmt: skip
    of_others = {"shared_ff", "conv", "predictors"}  # which this architecture does not have
    assert set(changes) | of_others == {field.name for field in dataclasses.fields(Shape)}
    for name, value in changes.items():
        assert write(tmp_path, dataclasses.replace(base, **{name: value})).read_bytes() != plain, name
    assert write(tmp_path, base, "q4_1").read_bytes() != plain
    assert write(tmp_path, base, "q4_0", "q4_0").read_bytes() != plain


def test_no_two_tensors_hold_the_same(tmp_path: Path) -> None:
    for pool_bytes in (None, 16 << 20):
        file = GgufFile.open(write(tmp_path, small("gpt-oss"), pool_bytes=pool_bytes))
        contents = [bytes(file.data(name)) for name in file.tensors]
        assert len(set(contents)) == len(contents)


def test_a_pooled_model_runs(tmp_path: Path, decode: Callable[[Path], None]) -> None:
    decode(write(tmp_path, small("qwen3moe"), pool_bytes=1 << 12))


@pytest.mark.parametrize(
    ("arch", "figures", "message"),
    [
        ("gpt5", {}, "unknown architecture 'gpt5'; known: llama"),
        ("llama", {"layers": 0}, "layers is 0"),
        ("llama", {"vocab": MIN_VOCAB - 1}, f"{MIN_VOCAB} tokens are needed"),
        ("llama", {"heads": 3}, "does not divide into 3 heads"),
        ("llama", {"kv": 3}, "4 heads do not divide into 3 KV heads"),
        ("llama", {"head_size": 33}, "must be even"),
        ("llama", {"kv": -1}, "kv is -1"),
        ("qwen2", {"head_size": 64}, "needs heads x head size = embd, got 256 and 128"),
        ("gemma2", {"tied": False}, "always tied"),
        ("qwen3", {"experts": 4}, "has no experts; these have: llama"),
        ("qwen3moe", {}, "needs experts"),
        ("deepseek2", {}, "needs experts"),  # it begins with layers without
        ("qwen3moe", {"experts": 4, "experts_used": 5, "expert_ff": 64}, "must be 1 to 4"),
        ("qwen3moe", {"experts": 4, "experts_used": 2}, "needs the width of an expert"),
    ],
)
def test_bad_figures_are_refused(arch: str, figures: dict[str, Any], message: str) -> None:
    base = {"layers": 2, "embd": 128, "ff": 256, "heads": 4, "vocab": 400}
    with pytest.raises(ShapeError, match=message):
        synth.shape(arch, **(base | figures))


def test_bad_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownTypeError, match="q4_x"):
        write(tmp_path, small(), "q4_x")
    for name in set(TYPES) - set(synth.WEIGHT_TYPES):
        with pytest.raises(ShapeError, match=name):
            write(tmp_path, small(), name)
    assert list(tmp_path.iterdir()) == []


def test_no_room_is_said_before_writing(tmp_path: Path) -> None:
    huge = small(vocab=10**12)
    with pytest.raises(OSError, match=r"no room for .*: [\d.,]+ \wiB needed, [\d.,]+ \w*B free"):
        synth.synthesize(tmp_path / "huge.gguf", huge)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interruption_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def interrupt(done: int, total: int) -> None:
        if 2 * done > total:
            raise error

    with pytest.raises(error):
        write(tmp_path, small(), progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_kill_leaves_no_file_under_the_name(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    code = f"from edge.models import synth; synth.synthesize({str(path)!r}, synth.SHAPES['tinyllama-1.1b'])"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as process:
        until(lambda: any(part.stat().st_size > 1 << 20 for part in tmp_path.iterdir()), "some of it is written")
        assert process.poll() is None
        process.kill()
    assert not path.exists()


@pytest.mark.parametrize("limit", ["2_000_000_000", "0"], ids=["random", "pooled"])
def test_memory_stays_small(tmp_path: Path, limit: str) -> None:
    # 167 MB are written, and two thirds of that may be used. The growth is the same for any size.
    code = f"""
from edge.llama import llama
from edge.models import shapes, synth
from devices.probe import peak_rss
synth._RANDOM_VALUES = {limit}
shape = shapes.shape("llama", layers=1, embd=4096, ff=2048, heads=32, kv=8, vocab=2000)
before = peak_rss()
n_bytes = synth.synthesize({str(tmp_path / "big.gguf")!r}, shape, "f16")
assert n_bytes > 160_000_000, n_bytes
grown = peak_rss() - before
assert grown < 110_000_000, grown
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)
