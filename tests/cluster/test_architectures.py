"""Test stages and shards of every architecture: stages compute the bits of the whole model, shards nearly so."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partition.architectures.table import ARCHITECTURES
from partition.errors import CannotSlice
from partition.plan.plan import Range, Slice
from partition.slices.gguf_slice import check_tensor, limits
from partition.slices.source import Source
from partition.state.shape import StateShape
from quant.gguf.file import GgufFile
from quant.types import cache_type
from tests.support.architectures import CLOSE, PAGE, SHARDED, page_with, table
from tests.support.slices import ranges, rewritten, run_local, run_shards, run_stages, synthetic
from tests.support.thorough import some, thorough

CALLS = [(list(range(270, 300)), 0), ([300], 30), ([301, 302], 31)]

# Each of what a stage may have to say of layers: windows, periods, what comes in, leading layers, recurrent layers.
USUALLY = (
    "qwen35", "lfm2", "jamba", "deepseek2", "glm4moe", "llama4", "smallthinker", "cohere2", "granite", "gpt2", "bloom",
    "phi2", "qwen3vl", "minicpm", "apertus", "olmo", "falcon-h1", "mamba2", "step35", "granite_swa",
    "nemotron_h_moe", "kimi-linear",
)  # fmt: skip
# Each of what a shard may have to share: experts beside others, gates, halves of one matrix, another architecture,
# layers of two widths, a shared expert that is cut, attention that is not.
USUALLY_SHARED = (
    "hunyuan-moe", "muse-glimmer", "glm4", "plamo3", "internlm2", "jais2", "smollm3", "granitemoe", "glm4moe", "llama4",
    "smallthinker", "qwen2moe", "deepseek2", "qwen35", "qwen",
)  # fmt: skip


def usually(few: tuple[str, ...], every: tuple[str, ...]) -> list[Any]:
    """A few of these, and all with EDGE_THOROUGH=1."""
    return [*few, *thorough(*(arch for arch in every if arch not in few))]


def small(arch: str, folder: Path, **figures: Any) -> Path:
    """A model of several periods of layers."""
    rules = ARCHITECTURES[arch].rules
    layers = 17 if rules.no_stage_of else 3 * rules.window.period if rules.window and rules.window.both else 9
    return synthetic(folder / f"{arch}.gguf", arch, **{"layers": layers, "vocab": 320, **figures})


@pytest.mark.parametrize("arch", usually(USUALLY, tuple(ARCHITECTURES)))
def test_stages_compute_the_bits_of_the_whole(arch: str, tmp_path: Path) -> None:
    model = small(arch, tmp_path, embd=64, ff=64)
    source = Source.from_file(GgufFile.open(model))
    expected = run_local(model, CALLS)
    assert all(np.isfinite(logits).all() and logits.std() > 0 for logits in expected)
    starts = source.starts
    assert len(starts) > 1
    for chosen in ({0, starts[1], starts[-1]}, {0, starts[len(starts) // 2]})[: some(1, 2)]:
        stages = [Range(start, stop) for start, stop in pairwise([*sorted(chosen), source.shape.n_layers])]
        result = run_stages(model, stages, CALLS, tmp_path)
        assert all((f == e).all() for f, e in zip(result, expected, strict=True)), stages


def test_experts_beside_a_feed_forward_part(tmp_path: Path) -> None:
    """In each layer of Gemma 4 that has experts, whose loader finds them by their tensors."""
    model = small("gemma4", tmp_path, embd=64, ff=64, layers=12, experts=4, experts_used=2, expert_ff=32)
    assert limits(GgufFile.open(model)).starts == (0, 6)
    result = run_stages(model, [Range(0, 6), Range(6, 12)], CALLS, tmp_path)
    assert all((f == e).all() for f, e in zip(result, run_local(model, CALLS), strict=True))


def test_layers_that_share_an_index(tmp_path: Path) -> None:
    """In GLM 5.2. Each stage begins with a layer that makes one, and `top_k` of it is less than the tokens here."""
    shares = [1, 1, 1, 0, 0, 0, 1, 0, 0]
    plain = small("glm-dsa", tmp_path, embd=64, ff=64)
    assert limits(GgufFile.open(plain)).starts == tuple(range(9))
    model = rewritten(plain, tmp_path / "shared.gguf", {"glm-dsa.attention.indexer.types": ("arr[u32]", shares)})
    assert limits(GgufFile.open(model)).starts == (0, 1, 2, 6)
    expected = run_local(model, CALLS)
    assert (expected[0] != run_local(plain, CALLS)[0]).any()
    result = run_stages(model, [Range(0, 2), Range(2, 6), Range(6, 9)], CALLS, tmp_path)
    assert all((f == e).all() for f, e in zip(result, expected, strict=True))
    # Without the list llama.cpp knows these layers by their number, where the context is as long as GLM 5.2's.
    longer = {"glm-dsa.context_length": ("u32", 1 << 20)}
    numbered = rewritten(plain, tmp_path / "numbered.gguf", longer)
    assert limits(GgufFile.open(numbered)).starts == (0, 1, 2, 6)


@pytest.mark.parametrize("arch", usually(USUALLY_SHARED, SHARDED))
def test_shards_compute_the_same_up_to_rounding(arch: str, tmp_path: Path) -> None:
    model = small(arch, tmp_path)
    sizes = limits(GgufFile.open(model)).sizes
    expected = run_local(model, CALLS)
    whole = bool(ARCHITECTURES[arch].rules.whole_attention)
    heads = [Range(0, sizes.heads)] * 2 if whole else ranges(1, sizes.heads - 1)
    parts = zip(heads, ranges(32, sizes.ff - 32), ranges(288, 32), strict=True)
    cuts = [Slice(Range(0, sizes.layers), *part, first=rank == 0) for rank, part in enumerate(parts)]
    result = run_shards(model, cuts, CALLS, tmp_path)
    largest = max(float(np.abs(f - e).max() / e.std()) for f, e in zip(result, expected, strict=True))
    assert largest < CLOSE[arch]


@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch not in SHARDED])
def test_others_say_why_they_have_no_shards(arch: str, tmp_path: Path) -> None:
    file = GgufFile.open(small(arch, tmp_path, embd=64, ff=64))
    with pytest.raises(CannotSlice, match=r"cannot be divided, but each device .*: use --parallel pipeline"):
        check_tensor(file)


@pytest.mark.parametrize("arch", ["glm4moe", *thorough("exaone4")])
def test_layers_that_predict_several_tokens_are_left_out(arch: str, tmp_path: Path) -> None:
    plain = small(arch, tmp_path, embd=64, ff=64)
    sizes = {"eh_proj": (64, 128), "enorm": (64,), "hnorm": (64,)}
    add = {f"blk.8.nextn.{name}.weight": np.ones(size, np.float32) for name, size in sizes.items()}
    model = rewritten(plain, tmp_path / "nextn.gguf", {f"{arch}.nextn_predict_layers": ("u32", 1)}, add)
    expected = run_local(model, CALLS)
    assert (expected[0] != run_local(plain, CALLS)[0]).any()
    source = Source.from_file(GgufFile.open(model))
    assert source.shape.n_layers == 8
    result = run_stages(model, [Range(0, 4), Range(4, 8)], CALLS, tmp_path)
    assert all((f == e).all() for f, e in zip(result, expected, strict=True))


@pytest.mark.parametrize("arch", ["deepseek2", "kimi-linear"])
def test_states_that_cannot_be_told_apart(arch: str, tmp_path: Path) -> None:
    """Nothing of their prompts is kept, or moved to other devices."""
    source = Source.from_file(GgufFile.open(small(arch, tmp_path, embd=64, ff=64)))
    with pytest.raises(CannotSlice, match="keys and values are one latent state"):
        StateShape.of_model(source, cache_type("f16"))


def test_the_page_says_what_the_tables_say() -> None:
    """`python -m tests.support.architectures` writes it."""
    assert PAGE.read_text() == page_with(table())
    assert len(ARCHITECTURES) >= 40
    assert len(SHARDED) >= 20
