"""Test the columns of feed-forward parts if layers with and without experts have different widths."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partition.plan.plan import Range, Slice
from partition.slices.gguf_slice import limits, slice_recipe
from partition.slices.source import Source
from quant.gguf.file import GgufFile
from tests.support.slices import DIGEST, synthetic, write

WIDTHS = {"ff": 2048, "expert_ff": 96}  # in blocks of 32: 64, and 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic(tmp_path_factory.mktemp("model") / "glm4moe.gguf", "glm4moe", "q8_0", layers=3, **WIDTHS)


def test_what_is_shared_out_are_the_columns_with_the_fewest_units(model: Path) -> None:
    can = limits(GgufFile.open(model))
    assert (can.sizes.ff, can.ff_unit) == (96, 32)
    per_layer = [sum(t.n_bytes for t in Source.from_file(GgufFile.open(model)).block(n).values()) for n in range(3)]
    assert can.layer_bytes[0] == per_layer[0]
    assert can.ff_bytes * 96 < sum(can.layer_bytes) / 3


@given(columns=st.integers(1, 4000), units=st.integers(1, 9), edges=st.sets(st.integers(1, 8)))
def test_each_rank_has_some_of_every_layer(columns: int, units: int, edges: set[int]) -> None:
    """And nobody's are another's, whatever the widths."""
    wide = max(columns // 32, units) * 32
    source = Source.__new__(Source)
    source.__dict__.update(ff=units, _ff_units={units: 1, wide: 32}, columns=lambda _: wide)
    cuts = [0, *sorted(edge for edge in edges if edge < units), units]
    parts = [source.part(Range(*ends), 0) for ends in pairwise(cuts)]
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == wide
    assert all(len(part) % 32 == 0 and part for part in parts)


def test_a_shard_says_both_widths(model: Path, tmp_path: Path) -> None:
    """A shard has a third of an expert, and a third of the rest in whole blocks, as of the expert that all tokens
    use."""
    can = limits(GgufFile.open(model))
    cut = Slice(Range(0, 3), Range(0, 2), Range(0, 32), Range(0, can.sizes.vocab), True)
    result = GgufFile.open(write(model, cut, tmp_path / "shard.gguf"))
    assert result.metadata["glm4moe.feed_forward_length"] == 672
    assert result.metadata["glm4moe.expert_feed_forward_length"] == 32
    shapes = {name: tensor.shape for name, tensor in result.tensors.items()}
    assert shapes["blk.0.ffn_up.weight"] == (128, 672)
    assert shapes["blk.1.ffn_down_exps.weight"] == (32, 128, 4)
    whole = GgufFile.open(model).tensors["blk.1.ffn_down_shexp.weight"].shape[0]
    assert shapes["blk.1.ffn_down_shexp.weight"] == (whole // 3, 128)
    assert slice_recipe(GgufFile.open(model), DIGEST, cut).n_bytes == result.size_bytes
