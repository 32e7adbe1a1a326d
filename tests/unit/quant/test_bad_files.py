"""No damaged model file may kill the process: our checks refuse it, or llama.cpp does, or it runs.

Each case is a small model with something wrong in it. What passes our checks is loaded by llama.cpp in a process of its
own (`load_natively.py`); dying there is the failure. EDGE_BAD_FILES=20000 in the environment tries many more.
"""

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from partition.model.check import check_loadable
from quant.errors import ModelFileError
from quant.gguf.file import GgufFile
from quant.types import TYPES
from tests.support import TESTS
from tests.support.tiny_gguf import EXPERTS, VOCAB, Gguf, Tensor, model

CASES = int(os.environ.get("EDGE_BAD_FILES", "600"))
ARCHITECTURES = ("llama", "llama+moe", "qwen2", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "phi3")

INTEGERS = (0, 1, 2, 3, 5, 8, 15, 16, 17, 31, 64, 65, 96, 128, 256, 272, 1000, 2**20, 2**30, 2**31, 2**32 - 1, -1)
LARGE = (2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1)
FLOATS = (0.0, -1.0, 1.0, 1e-5, 1e30, float("nan"), float("inf"), -float("inf"))
STRINGS = (
    b"",
    b"x",
    b"\xff\xfe",
    b"llama",
    b"gpt2",
    b"bert",
    b"t5",
    b"rwkv",
    b"none",
    b"no_vocab",
    b"yarn",
    b"longrope",
)
RANGES = {"u8": (0, 2**8), "i8": (-(2**7), 2**7), "u16": (0, 2**16), "i16": (-(2**15), 2**15), "u32": (0, 2**32),
          "i32": (-(2**31), 2**31), "u64": (0, 2**64), "i64": (-(2**63), 2**63)}  # fmt: skip
KINDS = (*RANGES, "f32", "f64", "bool", "str")

# Keys that a model may have and the tiny ones do not.
OPTIONAL = (
    "attention.key_length", "attention.value_length", "attention.head_count_kv", "attention.sliding_window",
    "attention.sliding_window_pattern", "attention.layer_norm_epsilon", "attention.causal", "attention.scale",
    "rope.dimension_count", "rope.dimension_sections", "rope.scaling.type", "rope.scaling.factor", "vocab_size",
    "rope.scaling.original_context_length", "expert_count", "expert_used_count", "expert_group_count", "pooling_type",
    "expert_group_used_count", "expert_weights_scale", "expert_gating_func", "nextn_predict_layers", "logit_scale",
    "leading_dense_block_count", "embedding_length_out", "final_logit_softcapping",
)  # fmt: skip
TOKENIZER = (
    "model", "pre", "merges", "scores", "token_type", "precompiled_charsmap", "add_bos_token", "unknown_token_id",
    "padding_token_id", "eot_token_id", "mask_token_id", "token_type_count", "add_space_prefix",
)  # fmt: skip
GENERAL = ("general.alignment", "general.file_type", "general.name", "split.count", "split.no", "general.type")
NEW_TENSORS = ("blk.0.attn_q.bias", "rope_freqs.weight", "output.weight", "blk.0.attn_q_norm.weight", "output.bias",
               "blk.1.ffn_down.bias", "blk.0.attn_qkv.weight", "blk.0.ffn_gate_inp.weight", "blk.0.ffn_up.scale",
               "blk.7.attn_norm.weight", "x" * 64, "")  # fmt: skip


def base(name: str, weights: str = "f32") -> Gguf:
    moe = name.endswith("moe")
    return model(name.removesuffix("+moe"), weights, experts=EXPERTS if moe else 0)


def random_value(noise: random.Random, kind: str) -> Any:
    if kind in RANGES:
        low, high = RANGES[kind]
        return noise.choice([n for n in INTEGERS if low <= n < high])
    return noise.choice({"f32": FLOATS, "f64": FLOATS, "bool": (True, False), "str": STRINGS}[kind])


def random_pair(noise: random.Random) -> tuple[str, Any]:
    kind = noise.choice(("u32", "u32", "u32", *KINDS))
    if noise.random() < 0.7:
        return kind, random_value(noise, kind)
    return f"arr[{kind}]", [random_value(noise, kind) for _ in range(noise.choice((0, 1, 2, 2, 2, 5, VOCAB)))]


def change_value(file: Gguf, noise: random.Random) -> None:
    key = noise.choice([key for key, (kind, _) in file.pairs.items() if not kind.startswith("arr")])
    kind, _ = file.pairs[key]
    file.pairs[key] = kind, random_value(noise, kind)


def change_type(file: Gguf, noise: random.Random) -> None:
    file.pairs[noise.choice(list(file.pairs))] = random_pair(noise)


def remove_key(file: Gguf, noise: random.Random) -> None:
    del file.pairs[noise.choice(list(file.pairs))]


def add_key(file: Gguf, noise: random.Random) -> None:
    architecture = file.pairs["general.architecture"][1]
    family = [f"{architecture}.{key}" for key in OPTIONAL]
    keys = noise.choice((family, family, [f"tokenizer.ggml.{key}" for key in TOKENIZER], list(GENERAL)))
    file.pairs[noise.choice(keys)] = random_pair(noise)


def change_array(file: Gguf, noise: random.Random) -> None:
    key = noise.choice([key for key, (kind, _) in file.pairs.items() if kind.startswith("arr")])
    kind, items = file.pairs[key]
    items = list(items)
    match noise.randrange(3):
        case 0:
            del items[noise.choice((0, 1, len(items) // 2, len(items) - 1)) :]
        case 1:
            items += items[-1:] * noise.choice((1, 10, 1000))
        case 2:
            items[noise.randrange(len(items))] = random_value(noise, kind[4:-1])
    file.pairs[key] = kind, items


def other_tokenizer(file: Gguf, noise: random.Random) -> None:
    file.pairs["tokenizer.ggml.model"] = "str", noise.choice(("gpt2", "bert", "t5", "rwkv", "plamo2", "none", "?"))
    if noise.random() < 0.5:
        file.pairs["tokenizer.ggml.merges"] = "arr[str]", noise.choices(("a b", "ab", "", " ", "a b c"), k=4)
    if noise.random() < 0.3:
        file.pairs["tokenizer.ggml.precompiled_charsmap"] = "arr[u8]", list(noise.randbytes(noise.choice((1, 4, 99))))


def change_shape(file: Gguf, noise: random.Random) -> None:
    name, tensor = noise.choice(list(file.tensors.items()))
    shape = list(tensor.shape)
    at = noise.randrange(len(shape))
    match noise.randrange(4):
        case 0:
            shape.reverse()
        case 1:
            shape[at] = noise.choice((0, 1, 2, 31, 32, 64, 128, 2**31, 2**62, -1))
        case 2:
            shape[at] += noise.choice((-1, 1, 32, shape[at]))
        case 3:
            shape.append(noise.choice((1, 2)))
    file.tensors[name] = Tensor(tuple(shape), tensor.type)


def change_tensor_type(file: Gguf, noise: random.Random) -> None:
    name, tensor = noise.choice(list(file.tensors.items()))
    file.tensors[name] = Tensor(tensor.shape, noise.choice(list(TYPES)))


def remove_tensor(file: Gguf, noise: random.Random) -> None:
    del file.tensors[noise.choice(list(file.tensors))]


def add_tensor(file: Gguf, noise: random.Random) -> None:
    shape = noise.choice(((1,), (8,), (16,), (32,), (64,), (64, 64), (64, 128), (64, 4), (64, VOCAB)))
    file.tensors[noise.choice(NEW_TENSORS)] = Tensor(shape, noise.choice(("f32", "f32", "f16", "i32", "q8_0", "bf16")))


CHANGES: tuple[Callable[[Gguf, random.Random], None], ...] = (
    change_value, change_value, change_type, remove_key, add_key, add_key, change_array, other_tokenizer,
    change_shape, change_tensor_type, remove_tensor, add_tensor,
)  # fmt: skip


def damaged_bytes(file: Gguf, noise: random.Random) -> bytes:
    """The file with bytes of its header changed, or cut off somewhere."""
    header, data = file.encode()
    whole = bytearray(header + data)
    at = noise.randrange(len(header))
    match noise.randrange(4):
        case 0:
            whole[at] ^= 1 << noise.randrange(8)
        case 1:
            whole[at : at + 4] = (noise.choice((*INTEGERS, *LARGE)) % 2**32).to_bytes(4, "little")
        case 2:
            whole[at : at + 8] = (noise.choice((*INTEGERS, *LARGE)) % 2**64).to_bytes(8, "little")
        case 3:
            del whole[noise.choice((at, len(header), noise.randrange(len(whole)))) :]
    return bytes(whole)


def damaged(noise: random.Random) -> tuple[str, bytes]:
    """One bad file, and in words what was done to it."""
    name = noise.choice(ARCHITECTURES)
    file = base(name, noise.choice(("f32", "q8_0")))
    if noise.random() < 0.25:
        return f"{name}: bytes", damaged_bytes(file, noise)
    change = noise.choice(CHANGES)
    change(file, noise)
    return f"{name}: {change.__name__}", b"".join(file.encode())


def refusal(path: Path) -> str:
    """Return what our checks say against a file, "" if nothing."""
    try:
        check_loadable(GgufFile.open(path))
    except ModelFileError as exc:
        return f"refused by us: {exc}"
    return ""


@pytest.fixture(scope="module")
def load_natively() -> Iterator[Callable[[Path], str]]:
    """Yield a function that says how llama.cpp takes a file: "ran", "refused: ..." or "died: ..."."""
    quiet = {"OPENBLAS_NUM_THREADS": "1", "GGML_NO_BACKTRACE": "1"}
    script = TESTS / "support" / ("load_natively.py")
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | quiet
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None

        def load(path: Path) -> str:
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write(f"{path}\n")
            worker.stdin.flush()
            return worker.stdout.readline().rstrip("\n")

        yield load
        worker.stdin.close()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_good_models_pass_and_run(tmp_path: Path, load_natively: Callable[[Path], str], name: str) -> None:
    for weights in ("f32", "q8_0"):
        path = base(name, weights).write(tmp_path / "good.gguf")
        check_loadable(GgufFile.open(path))
        assert load_natively(path) == "ran"


def test_architecture_nobody_knows_is_left_to_llama_cpp(tmp_path: Path, load_natively: Callable[[Path], str]) -> None:
    path = model("nosucharch").write(tmp_path / "new.gguf")
    check_loadable(GgufFile.open(path))
    assert "unknown model architecture: 'nosucharch'" in load_natively(path)


def test_no_damage_kills_the_process(tmp_path: Path, load_natively: Callable[[Path], str]) -> None:
    outcomes: Counter[str] = Counter()
    path = tmp_path / "damaged.gguf"
    for seed in range(CASES):
        what, data = damaged(random.Random(seed))
        path.write_bytes(data)
        outcome = refusal(path) or load_natively(path)
        assert outcome.startswith(("ran", "refused")), f"seed {seed}, {what}: {outcome}"
        outcomes[outcome.partition(":")[0]] += 1
    assert sum(outcomes.values()) == CASES
    assert min(outcomes["ran"], outcomes["refused"], outcomes["refused by us"]) > CASES // 20, outcomes


def set_pair(key: str, kind: str, value: Any) -> Callable[[Gguf], None]:
    return lambda file: file.pairs.update({key: (kind, value)})


def set_tensor(name: str, shape: tuple[int, ...], kind: str = "f32") -> Callable[[Gguf], None]:
    return lambda file: file.tensors.update({name: Tensor(shape, kind)})


TOKENS = model().pairs["tokenizer.ggml.tokens"][1]

# Everything known to abort or crash llama.cpp, or to run into nonsense, and what we say about it.
REFUSED: list[tuple[str, Callable[[Gguf], Any], str]] = [
    ("llama", lambda f: f.pairs.pop("general.architecture"), "general.architecture is missing"),
    ("llama", lambda f: f.tensors.clear(), "no tensors"),
    ("llama", set_pair("general.architecture", "str", "clip"), "mmproj"),
    ("llama", set_pair("general.alignment", "u32", 4), "not a multiple of 32"),
    ("llama", set_pair("llama.block_count", "u32", 0), "from 1 to 512"),
    ("llama", set_pair("llama.block_count", "u32", 513), "from 1 to 512"),
    ("llama", set_pair("llama.block_count", "u32", 1), "there is a tensor of blk.1"),
    ("llama", set_pair("llama.embedding_length", "u32", 0), "embedding_length is 0"),
    ("llama", set_pair("llama.nextn_predict_layers", "u32", 3), "nextn_predict_layers is 3"),
    ("llama", set_pair("llama.attention.head_count", "u32", 3), "not a multiple of its 2 key-value heads"),
    ("llama", set_pair("llama.attention.head_count", "u32", 6), "does not divide into 6 heads"),
    ("llama", set_pair("llama.rope.dimension_count", "u32", 18), "expected an even number up to 16"),
    ("qwen3", set_pair("qwen3.rope.dimension_count", "u32", 8), "needs all three equal"),
    ("llama", set_pair("llama.rope.scaling.type", "str", "su"), "known are none, linear"),
    ("llama", set_pair("llama.attention.layer_norm_rms_epsilon", "f32", -1.0), "epsilon is -1.0"),
    ("llama", set_pair("llama.attention.layer_norm_rms_epsilon", "f32", float("nan")), "epsilon is nan"),
    ("llama+moe", lambda f: f.pairs.pop("llama.expert_used_count"), "is 0 for layer 0"),
    ("llama+moe", set_pair("llama.expert_used_count", "u32", 5), "is 5 of 4 experts"),
    ("llama", set_pair("llama.expert_used_count", "u32", 1), "is 1 of 0 experts"),
    ("qwen3moe", set_pair("qwen3moe.expert_used_count", "arr[u32]", [2, 0]), "layer 1"),
    ("llama+moe", set_pair("llama.expert_count", "u32", 2**31), "expert_count is"),
    ("llama+moe", set_pair("llama.expert_group_count", "u32", 4), "less than the 4 experts"),
    ("llama+moe", set_pair("llama.expert_group_count", "u32", 3), "expert_group_used_count is missing"),
    ("gemma3", set_pair("gemma3.attention.sliding_window_pattern", "u32", 1), "gives it to no layer"),
    ("gemma3", set_pair("gemma3.attention.sliding_window", "u32", 2**31), "sliding_window is"),
    ("gemma2", set_pair("gemma2.attention.sliding_window_pattern", "arr[bool]", [False, False]), "no layer"),
    ("gemma3", set_pair("gemma3.rope.dimension_count_swa", "u32", 0), "dimension_count_swa is 0"),
    ("phi3", set_pair("phi3.rope.dimension_count", "u32", 0), "RoPE turns 0 values"),
    ("phi3", set_pair("phi3.attention.head_count", "u32", 0), "head_count is missing or 0"),
    ("qwen3moe", set_pair("qwen3moe.expert_gating_func", "u32", 9), "expert_gating_func is 9"),
    ("llama", set_pair("llama.rope.dimension_sections", "arr[i32]", [0, 0, 0, 0]), "expected one above 0"),
    ("llama", set_pair("general.architecture", "str", "a\nb"), "which is not a name"),
    ("phi3", lambda f: f.tensors.pop("blk.0.attn_qkv.weight"), "'blk.0.attn_q.weight' is missing"),
    ("llama", set_tensor("blk.0.attn_norm.weight", (64,), "f16"), "is f16, llama.cpp needs f32"),
    ("qwen2", set_tensor("blk.0.attn_q.bias", (64,), "bf16"), "is bf16, llama.cpp needs f32"),
    ("llama", set_tensor("blk.0.ffn_up.weight", (64, 96), "i16"), "cannot multiply"),
    ("llama", set_tensor("token_embd.weight", (64, VOCAB), "q8_1"), "cannot multiply"),
    ("llama", set_tensor("token_embd.weight", (64, 100)), "the metadata need [64, 272]"),
    ("llama", set_tensor("blk.0.attn_k.weight", (64, 64)), "the metadata need [64, 32]"),
    ("llama", lambda f: f.pairs.pop("tokenizer.ggml.model"), "tokenizer.ggml.model is missing"),
    ("llama", set_pair("tokenizer.ggml.tokens", "arr[str]", ["a", *TOKENS[1:-1], "a"]), "token 'a' occurs twice"),
    ("llama", set_pair("tokenizer.ggml.tokens", "arr[str]", [f"t{i}" for i in range(VOCAB)]), "256 of the 256 bytes"),
    ("llama", set_pair("tokenizer.ggml.tokens", "arr[u32]", [1] * VOCAB), "stored as arr[u32], expected arr[str]"),
    ("llama", set_pair("tokenizer.ggml.scores", "arr[f32]", [0.0]), "1 items for 272 tokens"),
    ("llama", set_pair("tokenizer.ggml.token_type", "arr[u8]", [1] * VOCAB), "expected arr[i32]"),
    ("llama", set_pair("tokenizer.ggml.eos_token_id", "u32", VOCAB), "there are 272 tokens"),
    ("llama", set_pair("tokenizer.ggml.model", "str", "bert"), "byte tokens"),
    ("llama", set_pair("tokenizer.ggml.precompiled_charsmap", "arr[str]", ["a"]), "expected bytes"),
]


@pytest.mark.parametrize(("name", "change", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_refused_with_the_reason(tmp_path: Path, name: str, change: Callable[[Gguf], Any], message: str) -> None:
    file = base(name)
    change(file)
    path = file.write(tmp_path / "bad.gguf")
    with pytest.raises(ModelFileError) as caught:
        check_loadable(GgufFile.open(path))
    assert message in str(caught.value)
    assert str(caught.value).startswith("bad.gguf: ")
