"""A slice is a GGUF that holds exactly the rank's part of the model, compared with a cut made by numpy."""

import hashlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from edge.models import slice_cutting as cutting
from partition.model.check import check_loadable
from partition.model.model import ModelShape
from partition.plan.plan import NOTHING, Range, Slice
from partition.plan.tensor import kv_heads
from partition.slices.gguf_slice import blank_recipe, check_tensor, limits, slice_recipe
from partition.slices.recipe import Copy, Literal, Zeros
from quant.gguf.file import GgufFile
from tests.support.slices import DIGEST, FIGURES, SMALL, ranges, synthetic, whole, write
from tests.support.thorough import each_once

Bytes = NDArray[np.uint8]

# Heads, columns and rows that fill the blocks of K-quants.
WIDE: dict[str, Any] = {"embd": 512, "ff": 768, "kv": 2, "head_size": 128}
TYPES = ("f16", "q8_0", "q4_0", "q4_k")
SHARED = [arch for arch in FIGURES if arch != "olmo2"]
COLUMNS = ("attn_output.weight", "ffn_down.weight", "ffn_down_exps.weight")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models are."""
    return tmp_path_factory.mktemp("models")


def small(folder: Path, arch: str, type_name: str, layers: int = 3) -> Path:
    """A model whose heads and columns can be cut with this type."""
    figures: dict[str, Any] = {"layers": layers}
    if type_name == "q4_k":
        figures |= WIDE | ({"expert_ff": 768} if "experts" in FIGURES[arch] else {})
    elif "head_size" in FIGURES[arch]:
        figures["head_size"] = 32
    return synthetic(folder / f"{arch}-{type_name}.gguf", arch, type_name, **figures)


def shards(file: GgufFile) -> list[Slice]:
    """Three ranks that cut through KV groups where the quantization's blocks allow, else two."""
    result = limits(file)
    heads = ranges(1, 2, 1) if result.head_unit == 1 else ranges(2, 2)
    third = result.sizes.ff // 3
    columns = ranges(third, third, third) if len(heads) == 3 else ranges(2 * third, third)
    rows = ranges(100, 12, 400) if len(heads) == 3 else ranges(500, 12)
    layers = Range(0, result.sizes.layers)
    return [Slice(layers, *part, first=i == 0) for i, part in enumerate(zip(heads, columns, rows, strict=True))]


class Read:
    """A file as the `gguf` package reads it."""

    def __init__(self, path: Path) -> None:
        self.reader = gguf.GGUFReader(path)
        self.arch = self.value("general.architecture")
        self.tensors = {t.name: t for t in self.reader.tensors}

    def value(self, key: str) -> Any:
        return self.reader.fields[key].contents()

    def number(self, key: str) -> Any:
        return self.value(f"{self.arch}.{key}")

    def rows(self, name: str) -> Bytes:
        """A tensor's bytes: [matrices, rows, bytes of a row]; of a vector or a table of them, values as rows."""
        t = self.tensors[name]
        shape = [int(n) for n in reversed(t.shape)]
        if name.endswith(".bias") or len(shape) == 1:
            shape.append(1)
        raw = np.frombuffer(t.data.tobytes(), np.uint8)
        return raw.reshape(int(np.prod(shape[:-2])), shape[-2], -1)


def expected(model: Read, name: str, cut: Slice, part: Read) -> Bytes:
    """Return what a slice must hold as `name`: rows and columns taken out of the whole model."""
    _, number, kind = name.split(".", 2)
    source = f"blk.{int(number) + cut.layers.start}.{kind}"
    fused = kind.startswith(("ffn_gate.", "ffn_up.")) and model.arch == "phi3" and part.arch != "phi3"
    if fused:
        source = source.replace("ffn_gate", "ffn_up")
    rows = model.rows(source)
    n_heads, n_kv = model.number("attention.head_count"), model.number("attention.head_count_kv")
    head = part.number("attention.key_length")
    queries = [h * head + i for h in range(cut.heads.start, cut.heads.stop) for i in range(head)]
    # Each query head's KV head, and of those each that llama.cpp gives a place of its own.
    own = [h // (n_heads // n_kv) for h in range(cut.heads.start, cut.heads.stop)]
    each = len(own) // part.number("attention.head_count_kv")
    assert all(len(set(own[i : i + each])) == 1 for i in range(0, len(own), each))
    keys = [h * head + i for h in own[::each] for i in range(head)]
    columns = range(cut.ff.start, cut.ff.stop)
    if kind.startswith("attn_qkv."):
        after_q, after_k = n_heads * head, (n_heads + n_kv) * head
        return rows[:, queries + [after_q + i for i in keys] + [after_k + i for i in keys]]
    if kind.startswith("attn_q."):
        return rows[:, queries]
    if kind.startswith(("attn_k.", "attn_v.")):
        return rows[:, keys]
    if kind.startswith("attn_sinks"):
        return rows[:, cut.heads.start : cut.heads.stop]
    if model.arch == part.arch == "phi3" and kind.startswith("ffn_up."):
        return rows  # gate and up, in a stage that no rank shares
    if fused and kind.startswith("ffn_up."):
        return rows[:, [i + limits_ff(model) for i in columns]]
    if kind.startswith(("ffn_gate.", "ffn_up.", "ffn_gate_exps.", "ffn_up_exps.")):
        return rows[:, list(columns)]
    if kind in COLUMNS:
        first, last = (
            (cut.heads.start * head, cut.heads.stop * head) if "attn" in kind else (columns[0], columns[-1] + 1)
        )
        block, size = gguf.GGML_QUANT_SIZES[model.tensors[source].tensor_type]
        return rows[:, :, first // block * size : last // block * size]
    if kind == "ffn_down_exps.bias" and not cut.first:
        return np.zeros_like(rows)
    return rows


def limits_ff(model: Read) -> int:
    return int(model.number("feed_forward_length"))


def check_slice(model_path: Path, cut: Slice, path: Path) -> Read:
    """Compare every tensor of a slice with the model's; the slice, read."""
    opened = GgufFile.open(path)
    check_loadable(opened)
    model, part = Read(model_path), Read(path)
    names = set(part.tensors)
    layers = {name for name in names if name.startswith("blk.")}
    assert {int(name.split(".")[1]) for name in layers} == set(range(len(cut.layers))) if layers else True
    for name in layers:
        assert (part.rows(name) == expected(model, name, cut, part)).all(), name
    for name in names - layers - {"token_embd.weight", "output.weight"}:
        assert (part.rows(name) == model.rows(name)).all(), name
    head = "output.weight" if "output.weight" in model.tensors else "token_embd.weight"
    own = "output.weight" if "output.weight" in names else "token_embd.weight"
    if cut.vocab:
        assert (part.rows(own) == model.rows(head)[:, cut.vocab.start : cut.vocab.stop]).all()
        names.discard(own)
    for name in names & {"token_embd.weight", "output.weight"}:
        assert not part.rows(name).any()  # nothing reads it
    assert part.number("vocab_size") == part.tensors["token_embd.weight"].shape[1] == (len(cut.vocab) or 32)
    assert part.number("block_count") == len(cut.layers)
    assert [key for key in opened.metadata if key.startswith("tokenizer.")] == ["tokenizer.ggml.model"]
    assert part.value("tokenizer.ggml.model") == "none"
    return part


@pytest.mark.parametrize(("arch", "type_name"), each_once(SHARED, TYPES))
def test_shards_hold_their_part_of_every_tensor(arch: str, type_name: str, folder: Path, tmp_path: Path) -> None:
    model = small(folder, arch, type_name)
    file = GgufFile.open(model)
    check_tensor(file)
    sizes = limits(file).sizes
    for cut in shards(file):
        part = check_slice(model, cut, write(model, cut, tmp_path / "slice.gguf"))
        assert part.arch == ("exaone" if arch in ("qwen2", "phi3") else arch)
        assert part.number("attention.head_count") == len(cut.heads)
        assert part.number("attention.head_count_kv") == len(kv_heads(cut.heads, sizes.heads, sizes.heads_kv))
        shape = ModelShape.from_gguf(GgufFile.open(tmp_path / "slice.gguf"))
        assert shape.n_embd == ModelShape.from_gguf(file).n_embd
        assert shape.n_vocab == len(cut.vocab)


@pytest.mark.parametrize(("arch", "type_name"), each_once(FIGURES, TYPES))
def test_stages_hold_their_layers(arch: str, type_name: str, folder: Path, tmp_path: Path) -> None:
    model = small(folder, arch, type_name)
    file = GgufFile.open(model)
    for layers in ranges(1, 2):
        cut = whole(file, layers)
        part = check_slice(model, cut, write(model, cut, tmp_path / "slice.gguf"))
        assert part.arch == arch
        names = {name.split(".", 2)[2] for name in part.tensors if name.startswith("blk.")}
        assert names == {name.split(".", 2)[2] for name in file.tensors if name.startswith("blk.")}


def test_gpt_oss_in_its_own_type(folder: Path, tmp_path: Path) -> None:
    model = small(folder, "gpt-oss", "mxfp4")
    file = GgufFile.open(model)
    assert limits(file).ff_unit == 32
    for cut in shards(file):
        check_slice(model, cut, write(model, cut, tmp_path / "slice.gguf"))


@pytest.mark.parametrize("arch", FIGURES)
def test_a_blank_slice_is_one_without_weights(arch: str, folder: Path, tmp_path: Path) -> None:
    model = small(folder, arch, "q4_0")
    file = GgufFile.open(model)
    cuts = [whole(file), whole(file, Range(0, 1)), *(shards(file) if arch in SHARED else [])]
    for cut in cuts:
        real, blank = slice_recipe(file, DIGEST, cut), blank_recipe(file, DIGEST, cut)
        assert blank.n_bytes == real.n_bytes
        assert not any(isinstance(s, Copy) for s in blank.segments)
        path = tmp_path / "blank.gguf"
        path.write_bytes(b"".join(cutting.chunks(blank, model)))
        result, full = GgufFile.open(path), GgufFile.open(write(model, cut, tmp_path / "full.gguf"))
        assert {k: result.raw_value(k) for k in result.metadata} == {k: full.raw_value(k) for k in full.metadata}
        assert [(t.name, t.shape, t.type) for t in result.tensors.values()] == [
            (t.name, t.shape, t.type) for t in full.tensors.values()
        ]
        for name, tensor in result.tensors.items():
            first, scales = tensor.type.scales
            if name.startswith("rope_f"):
                assert any(result.data(name)), name
            elif not scales:
                assert not any(result.data(name)), name
            else:
                blocks = np.frombuffer(result.data(name), np.uint8).reshape(-1, tensor.type.block_bytes)
                assert blocks[:, first : first + 2 * scales].any(axis=1).all(), name
                assert not np.delete(blocks, range(first, first + 2 * scales), axis=1).any(), name


def test_rotation_factors_stay_in_a_blank_slice(folder: Path, tmp_path: Path) -> None:
    """Nothing may become infinite: rotation divides by them."""
    model = small(folder, "exaone", "f16")
    file = GgufFile.open(model)
    path = tmp_path / "blank.gguf"
    path.write_bytes(b"".join(cutting.chunks(blank_recipe(file, DIGEST, whole(file)), model)))
    assert bytes(GgufFile.open(path).data("rope_freqs.weight")) == bytes(file.data("rope_freqs.weight"))


def test_ranks_together_hold_every_weight_once(folder: Path) -> None:
    """But for what all have: norms, and KV heads that were repeated."""
    file = GgufFile.open(small(folder, "llama", "q4_0"))
    sizes = limits(file).sizes
    cuts = [
        Slice(Range(0, sizes.layers), heads, ff, vocab, first=rank == 0)
        for rank, (heads, ff, vocab) in enumerate(zip(ranges(2, 2), ranges(32, 64), ranges(256, 256), strict=True))
    ]
    copied = sum(s.n_bytes for cut in cuts for s in slice_recipe(file, DIGEST, cut).segments if isinstance(s, Copy))
    norms = sum(t.n_bytes for name, t in file.tensors.items() if "norm" in name)
    table = file.tensors["token_embd.weight"].n_bytes
    assert copied == sum(t.n_bytes for t in file.tensors.values()) - table + norms


def test_the_same_slice_has_the_same_recipe(folder: Path) -> None:
    model = small(folder, "qwen3", "q8_0")
    keys = {slice_recipe(GgufFile.open(model), DIGEST, shards(GgufFile.open(model))[1]).key for _ in range(2)}
    assert len(keys) == 1


def test_a_recipe_of_many_layers_is_short(folder: Path) -> None:
    model = synthetic(folder / "deep.gguf", "llama", "q4_0", layers=80)
    file = GgufFile.open(model)
    layers = Range(0, 80)
    cut = Slice(layers, Range(1, 4), Range(32, 96), Range(0, 100), first=False)
    recipe = slice_recipe(file, hashlib.sha256(model.read_bytes()).hexdigest(), cut)
    assert len(recipe.segments) < 80 * 12
    stage = slice_recipe(file, DIGEST, whole(file, Range(20, 60)))
    assert len(stage.segments) < 8  # layers follow each other in the file, and so they do in the slice
    assert isinstance(stage.segments[0], Literal)
    assert sum(s.n_bytes for s in stage.segments if isinstance(s, Zeros)) < 32 * 128 + 64


def test_limits_say_what_things_weigh(folder: Path) -> None:
    file = GgufFile.open(small(folder, "qwen3moe", "q8_0"))
    result = limits(file)
    row, per_value = 128 * 34 / 32, 34 / 32
    assert result.head_unit == 1
    assert result.ff_unit == 32
    assert (result.sizes.layers, result.sizes.heads, result.sizes.heads_kv) == (3, 4, 2)
    assert (result.sizes.ff, result.sizes.vocab) == (96, SMALL["vocab"])
    assert result.head_bytes == 32 * row + 128 * 32 * per_value
    assert result.kv_head_bytes == 2 * 32 * row
    assert result.ff_bytes == pytest.approx(2 * (2 * row + 128 * per_value))  # of two experts
    assert result.vocab_bytes == row
    rest = 4 * (2 * 128 + 2 * 32 + 4 * 128)  # norms and the router
    layer = 4 * result.head_bytes + 2 * result.kv_head_bytes + 96 * result.ff_bytes + rest
    assert result.layer_bytes == pytest.approx((layer,) * 3)
    wide = limits(GgufFile.open(small(folder, "qwen3", "q4_k")))
    assert (wide.head_unit, wide.ff_unit) == (2, 256)


def test_a_middle_stage_needs_no_head(folder: Path) -> None:
    file = GgufFile.open(small(folder, "llama", "f16"))
    first, second = (slice_recipe(file, DIGEST, whole(file, layers)) for layers in ranges(1, 2))
    assert first.n_bytes < sum(t.n_bytes for n, t in file.tensors.items() if n.startswith("blk.0.")) + 8192
    assert whole(file, Range(0, 1)).vocab == NOTHING
    assert second.n_bytes > first.n_bytes
