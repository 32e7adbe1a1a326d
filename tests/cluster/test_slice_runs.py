"""Slices compute what the whole model computes: stages to the bit, shards up to the order of sums."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from edge.models import slice_cutting as cutting
from partition.errors import CannotSlice
from partition.plan.plan import Range, Slice
from partition.slices.gguf_slice import blank_recipe, check_tensor, limits
from partition.slices.source import Source
from quant.gguf.file import GgufFile
from tests.support.slices import (  # fmt: skip
    DIGEST,
    FIGURES,
    SMALL,
    Floats,
    Part,
    ranges,
    rewritten,
    run_local,
    run_shards,
    run_stages,
    synthetic,
    whole,
)
from tests.support.thorough import each_once, some, thorough

LAYERS = SMALL["layers"]
# A prompt longer than the windows, a token, and some more.
CALLS = [(list(range(270, 300)), 0), ([300], 30), ([301, 302, 303], 31)]
# Of the logits' standard deviation. Gemma's GELU is read from a table for 16-bit numbers: what is nearly equal may be
# rounded to neighbouring ones.
CLOSE, CLOSE_GELU = 1e-5, 1e-3

# Heads, FFN columns and vocabulary rows of each rank: even; uneven and cut through KV groups; one with most of it.
CUTS = {
    "2 ranks": ((2, 2), (32, 64), (256, 256)),
    "3 ranks": ((1, 2, 1), (32, 32, 32), (100, 12, 400)),
    "uneven": ((3, 1), (64, 32), (500, 12)),
}
SHARED = [arch for arch in FIGURES if arch != "olmo2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models are."""
    return tmp_path_factory.mktemp("runs")


def shards(name: str, layers: int = LAYERS) -> list[Slice]:
    """The cuts of all layers that `CUTS` names."""
    heads, columns, rows = (ranges(*sizes) for sizes in CUTS[name])
    parts = zip(heads, columns, rows, strict=True)
    return [Slice(Range(0, layers), *part, first=rank == 0) for rank, part in enumerate(parts)]


def difference(results: list[Floats], expected: list[Floats]) -> float:
    """The largest, in standard deviations of what was expected."""
    assert all(np.isfinite(e).all() for e in expected)
    return max(float(np.abs(f - e).max() / e.std()) for f, e in zip(results, expected, strict=True))


def tolerance(arch: str) -> float:
    return CLOSE_GELU if arch.startswith("gemma") else CLOSE


@pytest.mark.parametrize("arch", FIGURES)
def test_stages_compute_the_same_bits(arch: str, folder: Path, tmp_path: Path) -> None:
    model = synthetic(folder / f"{arch}.gguf", arch)
    expected = run_local(model, CALLS)
    # Among these are layers with a window alone, and layers without one alone.
    for sizes in ((5, 1, 1), (3, 1, 3), (1, 1, 5), (7,))[: some(1, 4)]:
        assert difference(run_stages(model, ranges(*sizes), CALLS, tmp_path), expected) == 0.0, sizes


@pytest.mark.parametrize(("arch", "type_name"), each_once(["llama", "gemma2", "gpt-oss"], ["q8_0", "q4_0"]))
def test_stages_of_quantized_models_compute_the_same_bits(
    arch: str, type_name: str, folder: Path, tmp_path: Path
) -> None:
    model = synthetic(folder / f"{arch}-{type_name}.gguf", arch, type_name, head_size=32)
    expected = run_local(model, CALLS)
    assert difference(run_stages(model, ranges(2, 1, 4), CALLS, tmp_path), expected) == 0.0


@pytest.mark.parametrize(("arch", "type_name"), each_once(["llama", "qwen2", "gemma3", "phi3"], ["q8_0", "q4_k"]))
def test_shards_of_quantized_models_compute_nearly_the_same(
    arch: str, type_name: str, folder: Path, tmp_path: Path
) -> None:
    """llama.cpp rounds what it multiplies with quantized weights, so that the smallest difference can grow."""
    wide: dict[str, Any] = {"embd": 512, "ff": 768, "head_size": 128, "layers": 3}
    model = synthetic(folder / f"{arch}-{type_name}-wide.gguf", arch, type_name, **wide)
    cuts = [
        Slice(Range(0, 3), *part, first=rank == 0)
        for rank, part in enumerate(zip(ranges(2, 2), ranges(256, 512), ranges(200, 312), strict=True))
    ]
    assert difference(run_shards(model, cuts, CALLS, tmp_path), run_local(model, CALLS)) < 0.3


@pytest.mark.parametrize(("arch", "cut"), each_once(SHARED, CUTS))
def test_shards_compute_the_same_up_to_rounding(arch: str, cut: str, folder: Path, tmp_path: Path) -> None:
    model = synthetic(folder / f"{arch}.gguf", arch)
    expected = run_local(model, CALLS)
    assert difference(run_shards(model, shards(cut), CALLS, tmp_path), expected) < tolerance(arch)


def test_shards_of_llama_with_experts(folder: Path, tmp_path: Path) -> None:
    for used in (1, 2):
        model = synthetic(folder / f"experts-{used}.gguf", "llama", experts=4, experts_used=used)
        expected = run_local(model, CALLS)
        assert difference(run_shards(model, shards("3 ranks"), CALLS, tmp_path), expected) < CLOSE


def test_biases_and_fused_attention_of_llama(folder: Path, tmp_path: Path) -> None:
    model = synthetic(folder / "llama.gguf", "llama")
    embd, q, kv, ff = 128, 128, 64, 96
    rng = np.random.default_rng(7)
    add: dict[str, Floats] = {}
    drop: set[str] = set()
    for i in range(LAYERS):
        sizes = {"attn_qkv.bias": q + 2 * kv, "attn_output.bias": embd}
        sizes |= {"ffn_gate.bias": ff, "ffn_up.bias": ff, "ffn_down.bias": embd}
        add |= {f"blk.{i}.{name}": rng.normal(0, 0.2, size).astype(np.float32) for name, size in sizes.items()}
        add[f"blk.{i}.attn_qkv.weight"] = rng.normal(0, embd**-0.5, (q + 2 * kv, embd)).astype(np.float32)
        drop |= {f"blk.{i}.attn_{part}.weight" for part in "qkv"}
    changed = rewritten(model, tmp_path / "biased.gguf", add=add, drop=drop)
    expected = run_local(changed, CALLS)
    for cut in list(CUTS)[-some(1, 3) :]:
        assert difference(run_shards(changed, shards(cut), CALLS, tmp_path), expected) < CLOSE
    assert difference(run_stages(changed, ranges(2, 5), CALLS, tmp_path), expected) == 0.0


def test_mistral3_that_sharpens_attention_with_the_position(folder: Path, tmp_path: Path) -> None:
    values: dict[str, tuple[str, Any]] = {
        "mistral3.attention.temperature_scale": ("f32", 0.5),
        "mistral3.rope.scaling.original_context_length": ("u32", 8),
    }
    plain = synthetic(folder / "mistral3.gguf", "mistral3")
    model = rewritten(plain, tmp_path / "sharp.gguf", values)
    expected = run_local(model, CALLS)
    assert difference(run_local(plain, CALLS), expected) > 0.01
    assert difference(run_stages(model, ranges(2, 5), CALLS, tmp_path), expected) == 0.0
    assert difference(run_shards(model, shards("uneven"), CALLS, tmp_path), expected) < CLOSE


def test_phi3_with_factors_or_partial_rotation_can_only_be_cut_into_stages(folder: Path, tmp_path: Path) -> None:
    model = synthetic(folder / "phi3.gguf", "phi3")
    factors = {
        f"rope_factors_{n}.weight": np.linspace(1, f, 16, dtype=np.float32) for n, f in (("long", 8), ("short", 2))
    }
    turned: dict[str, tuple[str, Any]] = {"phi3.rope.dimension_count": ("u32", 16)}
    original: dict[str, tuple[str, Any]] = {"phi3.rope.scaling.original_context_length": ("u32", 256)}
    for changed, reason in (
        (rewritten(model, tmp_path / "factors.gguf", original, factors), "factors that change with the length"),
        (rewritten(model, tmp_path / "turned.gguf", turned), "only 16 of 32 values"),
    ):
        with pytest.raises(CannotSlice, match=f"{reason}.*--parallel pipeline"):
            check_tensor(GgufFile.open(changed))
        expected = run_local(changed, CALLS)
        assert difference(run_stages(changed, ranges(2, 5), CALLS, tmp_path), expected) == 0.0


def test_the_head_has_its_own_bias(folder: Path, tmp_path: Path) -> None:
    bias = np.linspace(-1, 1, SMALL["vocab"], dtype=np.float32)
    model = rewritten(synthetic(folder / "qwen2.gguf", "qwen2"), tmp_path / "bias.gguf", add={"output.bias": bias})
    assert difference(run_stages(model, ranges(2, 5), CALLS, tmp_path), run_local(model, CALLS)) == 0.0
    with pytest.raises(CannotSlice, match=r"output\.bias"):
        check_tensor(GgufFile.open(model))


@pytest.mark.parametrize("arch", ["llama", "gemma3", *thorough("qwen2", "qwen3", "phi3")])
def test_a_tied_head(arch: str, folder: Path, tmp_path: Path) -> None:
    model = synthetic(folder / f"{arch}-tied.gguf", arch, tied=True)
    expected = run_local(model, CALLS)
    assert difference(run_stages(model, ranges(2, 5), CALLS, tmp_path), expected) == 0.0
    assert difference(run_shards(model, shards("3 ranks"), CALLS, tmp_path), expected) < tolerance(arch)


def test_gemma3_of_62_layers_keeps_its_scale_of_attention(folder: Path, tmp_path: Path) -> None:
    """llama.cpp takes another scale for this number of layers; parts of such a model have another number."""
    model = synthetic(folder / "gemma3-62.gguf", "gemma3", layers=62, head_size=16, kv=2)
    expected = run_local(model, CALLS)
    cuts = shards("uneven", layers=62)
    assert difference(run_stages(model, ranges(30, 32), CALLS, tmp_path), expected) < 4 * CLOSE_GELU
    assert difference(run_shards(model, cuts, CALLS, tmp_path), expected) < 4 * CLOSE_GELU
    assert run_stages(model, ranges(62), CALLS, tmp_path)[0].tobytes() == expected[0].tobytes()
    with mock.patch.object(Source, "query_scale", return_value=1.0):
        assert difference(run_stages(model, ranges(30, 32), CALLS, tmp_path), expected) > 0.2
        assert difference(run_shards(model, cuts, CALLS, tmp_path), expected) > 0.2


@pytest.mark.parametrize("arch", FIGURES)
def test_a_blank_slice_runs(arch: str, folder: Path, tmp_path: Path) -> None:
    """Nothing becomes infinite on the way, so that its time is that of the real one."""
    model = synthetic(folder / f"{arch}.gguf", arch)
    file = GgufFile.open(model)
    for cut in (whole(file), *(shards("3 ranks") if arch in SHARED else [])):
        path = tmp_path / "blank.gguf"
        path.write_bytes(b"".join(cutting.chunks(blank_recipe(file, DIGEST, cut), model)))
        part = Part(path)
        assert not part.decode(np.ones((4, SMALL["embd"]), np.float32), 0).any()
        part.close()


def test_a_stage_of_shards(folder: Path, tmp_path: Path) -> None:
    """Both at once: the shards of the last layers take what the first layers give."""
    model = synthetic(folder / "qwen3.gguf", "qwen3")
    sizes = limits(GgufFile.open(model)).sizes
    expected = run_local(model, CALLS[:1])
    # With all rows of the head on both ranks, their logits are the same.
    vocab = Range(0, sizes.vocab)
    cuts = [
        Slice(Range(0, LAYERS), heads, ff, vocab, first=rank == 0)
        for rank, (heads, ff) in enumerate(zip(ranges(1, 3), ranges(64, 32), strict=True))
    ]
    result = run_shards(model, cuts, CALLS[:1], tmp_path)[0]
    assert (result[:, : sizes.vocab] == result[:, sizes.vocab :]).all()
    assert difference([result[:, : sizes.vocab]], expected) < CLOSE
