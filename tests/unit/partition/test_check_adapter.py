"""Test the checks of LoRA adapters before llama.cpp reads them: it would end the process, or ignore wrong parts."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge.llama import llama
from partition.errors import CannotSlice
from partition.model.check_adapter import adapter_pairs
from partition.plan.plan import NOTHING, Range, Slice
from partition.slices.adapter_slice import adapter_recipe
from quant.errors import ModelFileError
from quant.gguf.file import GgufFile
from tests.support.adapters import write_adapter
from tests.support.slices import DIGEST, synthetic, whole
from tests.support.thorough import some

Q, NORM = "blk.0.attn_q.weight", "blk.0.attn_norm.weight"
LONG = "adapter.alora.invocation_tokens"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic(tmp_path_factory.mktemp("m") / "model.gguf", "llama", layers=2)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic(tmp_path_factory.mktemp("m") / "experts.gguf", "qwen3moe", layers=2)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"values": {"general.type": ("str", "model")}}, "general.type is 'model', expected 'adapter'"),
        ({"drop": ["general.type"]}, "general.type is None, expected 'adapter'"),
        ({"values": {"adapter.type": ("str", "control_vector")}}, "adapter.type is 'control_vector', expected 'lora'"),
        ({"values": {"adapter.type": ("u32", 7)}}, "adapter.type is 7, expected 'lora'"),
        ({"values": {"general.architecture": ("str", "qwen2")}}, "it is an adapter of a 'qwen2' model, and model.gguf"),
        ({"values": {"general.architecture": ("u32", 1)}}, "it is an adapter of a '' model"),
        ({"values": {"adapter.lora.alpha": ("f64", 8.0)}}, r"alpha is 8.0 \(f64\), expected a finite f32"),
        ({"values": {"adapter.lora.alpha": ("f32", float("nan"))}}, "alpha is nan"),
        ({"values": {"adapter.lora.alpha": ("u32", 8)}}, r"alpha is 8 \(u32\)"),
        ({"values": {LONG: ("arr[u32]", [1, 2])}}, "it is an activated LoRA, which acts only behind its invocation"),
        ({"drop": [f"{Q}.lora_a"]}, f"'{Q}' has one of .lora_a and .lora_b, both are needed"),
        ({"drop": [f"{Q}.lora_b"]}, f"'{Q}' has one of .lora_a and .lora_b, both are needed"),
        ({"shapes": {f"{Q}.lora_a": (64, 4)}}, rf"'{Q}' is \[128, 128\] and its .lora_a and .lora_b are \[64, 4\]"),
        ({"shapes": {f"{Q}.lora_a": (128, 8)}}, r"\[128, 8\] and \[4, 128\]; expected \[128, 4\]"),
        ({"shapes": {f"{Q}.lora_b": (4, 64)}}, r"and \[4, 64\]; expected \[128, 4\] and \[4, 128\]"),
        ({"shapes": {f"{Q}.lora_a": (4, 128), f"{Q}.lora_b": (128, 4)}}, "use an adapter of this very model"),
        ({"shapes": {f"{Q}.lora_a": (128, 4, 3), f"{Q}.lora_b": (4, 128, 3)}}, "expected"),
        ({"type_name": "f32", "weights": ["attn_norm.weight"]}, f"it changes '{NORM}', which is not a matrix"),
    ],
)
def test_what_is_refused(how: dict[str, Any], words: str, model: Path, tmp_path: Path) -> None:
    adapter = write_vector_adapter(tmp_path, model) if "attn_norm" in words else None
    how = {"weights": ["attn_q.weight"], **how}
    path = adapter or write_adapter(tmp_path / "adapter.gguf", model, **how)
    with pytest.raises(ModelFileError, match=f"^adapter.gguf: .*{words}"):
        adapter_pairs(GgufFile.open(path), GgufFile.open(model))


def write_vector_adapter(folder: Path, model: Path) -> Path:
    """An adapter of a vector, as a file can have it."""
    other = synthetic(folder / "other.gguf", "llama", layers=2)
    data = write_adapter(folder / "adapter.gguf", other, ["attn_q.weight"]).read_bytes()
    path = folder / "adapter.gguf"
    path.write_bytes(renamed(renamed(data, Q, NORM), "blk.1.attn_q.weight", "blk.1.attn_norm.weight") + bytes(64))
    return path


def renamed(data: bytes, before: str, after: str) -> bytes:
    """A file with tensors of another name. Its header becomes longer, and so does the padding behind it."""
    for suffix in (".lora_a", ".lora_b"):
        old, new = (before + suffix).encode(), (after + suffix).encode()
        data = data.replace(len(old).to_bytes(8, "little") + old, len(new).to_bytes(8, "little") + new)
    return data


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("blk.0.attn_x.weight", "it changes 'blk.0.attn_x.weight', which model.gguf does not have"),
        ("blk.9.attn_q.weight", "it changes 'blk.9.attn_q.weight', which model.gguf does not have"),
    ],
)
def test_weights_that_are_not_there(name: str, words: str, model: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "adapter.gguf", model, ["attn_q.weight"])
    path.write_bytes(renamed(path.read_bytes(), Q, name))
    with pytest.raises(ModelFileError, match=words):
        adapter_pairs(GgufFile.open(path), GgufFile.open(model))


@pytest.mark.parametrize("suffix", [".lora_c", ".lora_a.lora_b", ""])
def test_tensors_that_are_none(suffix: str, model: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "adapter.gguf", model, ["attn_q.weight"])
    old, new = f"{Q}.lora_a".encode(), f"{Q}{suffix}".encode()
    data = path.read_bytes().replace(len(old).to_bytes(8, "little") + old, len(new).to_bytes(8, "little") + new)
    path.write_bytes(data + bytes(64))
    with pytest.raises(
        ModelFileError, match=r"is not the \.lora_a or \.lora_b of a weight|which model\.gguf does not have"
    ):
        adapter_pairs(GgufFile.open(path), GgufFile.open(model))


def test_experts_have_as_many_matrices_as_the_weight(experts: Path, tmp_path: Path) -> None:
    """llama.cpp looks at two dimensions, and would read past the end of fewer matrices."""
    name = "blk.0.ffn_down_exps.weight"
    shape = GgufFile.open(experts).tensors[name].shape
    shapes = {f"{name}.lora_a": (shape[0], 4, shape[2] - 1), f"{name}.lora_b": (4, shape[1], shape[2] - 1)}
    path = write_adapter(tmp_path / "adapter.gguf", experts, ["ffn_down_exps.weight"], shapes=shapes)
    with pytest.raises(ModelFileError, match=rf"expected \[{shape[0]}, 4, {shape[2]}\]"):
        adapter_pairs(GgufFile.open(path), GgufFile.open(experts))


def test_damaged_headers_never_end_the_process(model: Path, tmp_path: Path) -> None:
    """Files that the check lets pass are loaded by llama.cpp, or refused: a process of its own must not die."""
    whole_file = write_adapter(tmp_path / "adapter.gguf", model, rank=2).read_bytes()
    n_header = GgufFile.open(tmp_path / "adapter.gguf").header_bytes(tmp_path / "adapter.gguf")
    noise, path, passed = random.Random(3), tmp_path / "damaged.gguf", []
    for turn in range(some(400, 8000)):
        data = bytearray(whole_file)
        for _ in range(noise.choice((1, 1, 2, 8))):
            data[noise.randrange(n_header)] = noise.randrange(256)
        if turn % 10 == 0:
            data = data[: noise.randrange(len(data))]
        path.write_bytes(data)
        try:
            adapter_pairs(GgufFile.open(path), GgufFile.open(model))
        except ModelFileError:
            continue
        passed.append(bytes(data))
    assert passed
    assert ends_well(lambda: load_all(model, passed, path))


def load_all(model: Path, files: list[bytes], path: Path) -> None:
    loaded = llama.Model(model)
    for data in files:
        path.write_bytes(data)
        loaded.load_adapter(path)
    loaded.close()


def ends_well(work: Callable[[], None]) -> bool:
    """Return whether a child process does this and ends by itself."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("arch", ["llama", "phi3", "qwen3moe"])
def test_slices_of_an_adapter_are_its_parts(arch: str, tmp_path: Path) -> None:
    """Both ranks of both stages together have each value of each matrix that is cut once, and of others twice."""
    path = synthetic(tmp_path / "model.gguf", arch, layers=2)
    file = GgufFile.open(path)
    adapter = GgufFile.open(write_adapter(tmp_path / "adapter.gguf", path, rank=4))
    all_of_it = whole(file)
    n_bytes = sum(tensor.n_bytes for tensor in adapter.tensors.values())
    total = 0
    for layer in range(2):
        for rank in range(2):
            heads, ff = (
                Range(rank * len(part) // 2, (rank + 1) * len(part) // 2) for part in (all_of_it.heads, all_of_it.ff)
            )
            cut = Slice(Range(layer, layer + 1), heads, ff, NOTHING, rank == 0)
            recipe = adapter_recipe(adapter, DIGEST, file, cut)
            assert recipe.n_bytes < n_bytes // 2
            total += recipe.n_bytes
    assert n_bytes < total < 2 * n_bytes


def test_an_empty_slice_has_no_tensors(model: Path, tmp_path: Path) -> None:
    path = write_adapter(
        tmp_path / "adapter.gguf",
        model,
        ["attn_q.weight"],
        drop=[f"blk.1.attn_q.weight{x}" for x in (".lora_a", ".lora_b")],
    )
    file = GgufFile.open(model)
    recipe = adapter_recipe(GgufFile.open(path), DIGEST, file, whole(file, Range(1, 2)))
    assert not recipe.copies
    head = GgufFile.open(write_adapter(tmp_path / "head.gguf", model, ["output.weight"]))
    with pytest.raises(CannotSlice, match="slices have the output matrix of llama models as their token table"):
        adapter_recipe(head, DIGEST, file, whole(file, Range(1, 2)))
