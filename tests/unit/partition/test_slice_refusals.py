"""Test that models that cannot be cut are refused before anything is sent, with the reason and the remedy."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partition.errors import CannotSlice
from partition.plan.plan import NOTHING, Range, Slice
from partition.slices.gguf_slice import blank_recipe, check_tensor, limits, slice_recipe
from quant.gguf.file import GgufFile
from tests.support import tiny_gguf
from tests.support.slices import DIGEST, SMALL, rewritten, synthetic, whole, write

LAYERS, ROWS = SMALL["layers"], SMALL["vocab"]
EVERYTHING = Slice(Range(0, LAYERS), Range(0, 4), Range(0, 96), Range(0, ROWS), True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models are."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def llama(folder: Path) -> Path:
    """A small model that can be cut in all ways."""
    return synthetic(folder / "llama.gguf", "llama", "q8_0")


def refusal(path: Path, cut: Slice | None = None) -> str:
    """Why nothing can be cut from a file, or not `cut`."""
    file = GgufFile.open(path)
    with pytest.raises(CannotSlice) as caught:
        limits(file) if cut is None else slice_recipe(file, DIGEST, cut)
    if cut is not None:
        with pytest.raises(CannotSlice):
            blank_recipe(file, DIGEST, cut)
    text = str(caught.value)
    assert "\n" not in text
    return text


def no_shards(path: Path) -> str:
    """Return why the layers of a file cannot be divided. Also check that stages of whole layers are possible."""
    file = GgufFile.open(path)
    with pytest.raises(CannotSlice) as caught:
        check_tensor(file)
    text = str(caught.value)
    assert "--parallel pipeline" in text
    assert "\n" not in text
    cut = Slice(Range(0, 1), Range(0, 2), Range(0, 32), NOTHING, True)
    with pytest.raises(CannotSlice):
        slice_recipe(file, DIGEST, cut)
    slice_recipe(file, DIGEST, whole(file, Range(0, 1)))
    return text


def test_an_architecture_nobody_checked(tmp_path: Path) -> None:
    path = tiny_gguf.model("gpt5").write(tmp_path / "gpt5.gguf")
    text = refusal(path)
    assert "'gpt5' has not been checked" in text
    assert "llama, qwen2" in text
    assert "run it on one device" in text


def test_a_model_in_several_files(llama: Path, tmp_path: Path) -> None:
    names = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for i, name in enumerate(names):
        values: dict[str, tuple[str, Any]] = {
            "split.no": ("u16", i),
            "split.count": ("u16", 2),
            "split.tensors.count": ("i32", len(GgufFile.open(llama).tensors)),
        }
        last = [f"blk.{LAYERS - 1}.ffn_up.weight"]
        dropped = last if i == 0 else [t for t in GgufFile.open(llama).tensors if t not in last]
        rewritten(llama, name, values, drop=dropped)
    assert "split over 2 files; make it one with llama-gguf-split --merge" in refusal(names[0])


def test_a_tensor_outside_of_layers_that_nobody_knows(llama: Path, tmp_path: Path) -> None:
    path = rewritten(llama, tmp_path / "cls.gguf", add={"cls.output.weight": np.ones((2, 128), np.float32)})
    assert "'cls.output.weight'" in refusal(path)


def test_a_layer_that_lacks_a_matrix(llama: Path, tmp_path: Path) -> None:
    path = rewritten(llama, tmp_path / "less.gguf", drop=["blk.3.ffn_down.weight"])
    assert "layer 3 has no ffn_down.weight" in refusal(path)
    path = rewritten(llama, tmp_path / "normless.gguf", drop=["output_norm.weight"])
    assert "'output_norm.weight' is missing" in refusal(path)


def test_gemma2_of_46_layers(folder: Path, tmp_path: Path) -> None:
    """Its attention is scaled by a number that llama.cpp takes from the count of layers."""
    path = synthetic(folder / "gemma2-46.gguf", "gemma2", layers=46, head_size=16)
    assert "follows from its 46 layers and 4 heads" in refusal(path)
    # Where both numbers are the same, it can be cut.
    path = synthetic(folder / "gemma2-46-even.gguf", "gemma2", layers=46, head_size=32)
    assert "follows from its 4 heads" in no_shards(path)


def test_a_scale_for_a_matrix(llama: Path, tmp_path: Path) -> None:
    add = {f"blk.{i}.ffn_down.scale": np.ones(1, np.float32) for i in range(LAYERS)}
    assert "'ffn_down.scale'" in no_shards(rewritten(llama, tmp_path / "scale.gguf", add=add))


def test_layers_of_different_sizes(llama: Path, tmp_path: Path) -> None:
    heads = {"llama.attention.head_count_kv": ("arr[u32]", [2] * (LAYERS - 1) + [1])}
    add = {f"blk.{LAYERS - 1}.attn_{n}.weight": np.ones((32, 128), np.float32) for n in "kv"}
    path = rewritten(llama, tmp_path / "uneven.gguf", heads, add)
    assert "different numbers of heads" in no_shards(path)
    tail = GgufFile.open(write(path, whole(GgufFile.open(path), Range(5, 7)), tmp_path / "tail.gguf"))
    assert list(tail.metadata["llama.attention.head_count_kv"]) == [2, 1]  # type: ignore[arg-type]


def test_widths_of_three_kinds(llama: Path, tmp_path: Path) -> None:
    """One for layers with experts and one for those without can be shared out, more cannot."""
    widths = {"llama.feed_forward_length": ("arr[u32]", [96] * (LAYERS - 1) + [64])}
    sizes = {"gate": (64, 128), "up": (64, 128), "down": (128, 64)}
    add = {f"blk.{LAYERS - 1}.ffn_{name}.weight": np.ones(size, np.float32) for name, size in sizes.items()}
    path = rewritten(llama, tmp_path / "uneven.gguf", widths, add)
    assert "different numbers of FFN columns" in no_shards(path)


def test_ranks_that_have_all_heads(folder: Path, llama: Path) -> None:
    """Where attention cannot be shared, each has all of them, and elsewhere none has, or they would be summed twice."""
    olmo = synthetic(folder / "olmo2.gguf", "olmo2")
    columns, rows = Range(0, 32), Range(0, ROWS)
    some, every = Slice(Range(0, LAYERS), Range(0, 2), columns, rows, True), Range(0, 4)
    slice_recipe(GgufFile.open(olmo), DIGEST, Slice(Range(0, LAYERS), every, columns, rows, True))
    assert "heads 0-1 of 4 beside FFN columns 0-31 of 96; ranks share the columns alone" in refusal(olmo, some)
    slice_recipe(GgufFile.open(llama), DIGEST, some)
    assert "ranks share both" in refusal(llama, Slice(Range(0, LAYERS), every, columns, rows, True))


def test_heads_of_two_sizes(llama: Path, tmp_path: Path) -> None:
    path = rewritten(llama, tmp_path / "swa.gguf", {"llama.attention.key_length_swa": ("u32", 16)})
    assert "a size of their own" in no_shards(path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layers": Range(0, LAYERS + 1)}, "layers 0-7 of a model that has 7"),
        ({"layers": NOTHING}, "layers none of a model"),
        ({"heads": Range(0, 5)}, "heads 0-4 of a model that has 4"),
        ({"heads": NOTHING}, "heads none"),
        ({"ff": Range(0, 128)}, "FFN columns 0-127 of a model that has 96"),
        ({"heads": Range(0, 2), "ff": Range(0, 48)}, "multiples of 1 and 32"),
        ({"heads": Range(0, 2), "ff": Range(48, 80)}, "'blk.0.ffn_down.weight' is stored in blocks of 32 values"),
        ({"vocab": Range(0, ROWS + 1)}, "vocabulary rows 0-512"),
    ],
)
def test_a_cut_that_does_not_fit_the_model(changed: dict[str, Range], message: str, llama: Path) -> None:
    values = {name: changed.get(name, getattr(EVERYTHING, name)) for name in ("layers", "heads", "ff", "vocab")}
    assert message in refusal(llama, Slice(**values, first=True))


def test_heads_within_a_block(folder: Path) -> None:
    path = synthetic(folder / "wide.gguf", "llama", "q4_k", embd=512, ff=512, layers=1)
    cut = Slice(Range(0, 1), Range(0, 1), Range(0, 256), NOTHING, True)
    assert "multiples of 2 and 256, the quantization's blocks" in refusal(path, cut)


def test_a_refusal_leaves_the_model_alone(llama: Path, tmp_path: Path) -> None:
    before = llama.read_bytes()
    copy = shutil.copy(llama, tmp_path / "copy.gguf")
    refusal(Path(copy), Slice(Range(0, 9), Range(0, 4), Range(0, 96), NOTHING, True))
    assert Path(copy).read_bytes() == before


def test_what_llama_cpp_takes_from_the_number_of_layers(folder: Path, tmp_path: Path) -> None:
    """A part would be read as another kind of model."""
    lite = synthetic(folder / "deepseek2.gguf", "deepseek2", layers=30, embd=64, ff=64)
    file = GgufFile.open(lite)
    assert "a stage of 27 layers" in refusal(lite, whole(file, Range(0, 27)))
    slice_recipe(file, DIGEST, whole(file, Range(0, 25)))
    guessed = synthetic(folder / "deepseek2-47.gguf", "deepseek2", layers=47, embd=64, ff=64)
    unsaid = rewritten(guessed, tmp_path / "unsaid.gguf", drop=["deepseek2.expert_gating_func"])
    assert "expert_gating_func is missing, which llama.cpp guesses from the 47 layers" in refusal(unsaid)
    exaone = synthetic(folder / "exaone4.gguf", "exaone4", layers=64, embd=64, ff=64)
    assert "takes exaone4 models of 64 layers for another kind" in refusal(exaone)


def test_stages_that_begin_where_they_cannot(folder: Path) -> None:
    smollm = synthetic(folder / "smollm3.gguf", "smollm3", layers=9, embd=64, ff=64)
    assert limits(GgufFile.open(smollm)).starts == (0, 4, 8)
    assert "whose stages must begin with layers 0, 4, 8" in refusal(smollm, whole(GgufFile.open(smollm), Range(0, 3)))
    hybrid = synthetic(folder / "lfm2.gguf", "lfm2", layers=8, embd=64, ff=64)  # the third and the sixth have attention
    assert limits(GgufFile.open(hybrid)).starts == (0, 3)
    assert "because its layers are of several kinds" in refusal(hybrid, whole(GgufFile.open(hybrid), Range(0, 2)))


def test_architectures_that_are_known_and_cannot_be_cut(tmp_path: Path) -> None:
    path = tiny_gguf.model("baichuan").write(tmp_path / "baichuan.gguf")
    assert "baichuan models cannot be cut: llama.cpp recognizes the variant by the number of layers" in refusal(path)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("embedding_length_per_layer_input", "each layer reads a part of `inp_per_layer`"),
        ("attention.shared_kv_layers", "its last layers read the keys and values of earlier ones"),
    ],
)
def test_layers_that_read_more_than_the_one_before_gives(key: str, message: str, folder: Path, tmp_path: Path) -> None:
    """In small models of Gemma 4, and not in larger ones."""
    gemma = synthetic(folder / "gemma4.gguf", "gemma4", layers=12, embd=64, ff=64)
    assert limits(GgufFile.open(gemma)).starts == (0, 6)
    path = rewritten(gemma, tmp_path / "small.gguf", {f"gemma4.{key}": ("u32", 4)})
    assert f"this gemma4 model cannot be cut: {message}" in refusal(path)


def test_layers_of_three_kinds(folder: Path) -> None:
    """Each stage of Nemotron H has a recurrent layer and one with attention, whatever feed-forward layers it has."""
    # Of eight layers the fourth and the last have attention, every second of the others a feed-forward part.
    file = GgufFile.open(synthetic(folder / "nemotron_h.gguf", "nemotron_h", layers=8, embd=64, ff=64))
    assert limits(file).starts == (0, 4)
