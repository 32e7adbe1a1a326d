"""Test the conversion of checkpoints of each family: logits and tokens equal those of their original library."""

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from edge.llm.engine import Engine
from quant.checkpoint.convert import convert
from quant.checkpoint.tokens import NORMAL, AddedToken, Vocabulary
from quant.gguf.file import GgufFile
from tests.support import ROOT
from tests.support.checkpoints import DATA, EXACT, FAMILIES, change_tensors, copy, edit, floats, read_folder

CLOSE = 1e-3  # of logits that deviate by 0.4 or more. Gemma: ggml looks GELU up in a table of 16-bit floats
CLOSE_ELSE = 3e-5


def converted(folder: Path, out: Path, type_name: str | None = None) -> GgufFile:
    assert convert(folder, out, None, type_name) == out.stat().st_size
    return GgufFile.open(out)


def values(file: GgufFile, name: str) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    """A tensor of an F32 file, slowest first."""
    return np.frombuffer(file.data(name), "<f4").reshape(file.tensors[name].shape[::-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_tokens(tmp_path: Path, family: str) -> None:
    expected = json.loads((DATA / family / "expected.json").read_text())
    logits = np.load(DATA / family / "logits.npy")
    assert logits.std() > 0.4
    converted(DATA / family, tmp_path / "model.gguf", "f32")
    with Engine(tmp_path / "model.gguf", EXACT) as engine:
        result = engine.decode(expected["input_ids"], 0, outputs="all")[-len(logits) :]
        assert np.abs(result - logits).max() < (CLOSE if "gemma" in family else CLOSE_ELSE)
        assert len(expected["texts"]) > 9
        for text, tokens in expected["texts"]:
            assert engine.model.tokenize(text, add_special=True, parse_special=True) == tokens, text
    file = GgufFile.open(tmp_path / "model.gguf")
    assert file.metadata["general.name"] == family
    assert file.metadata["general.file_type"] == 0
    assert "m['content']" in str(file.metadata["tokenizer.chat_template"])


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_keep_their_type(tmp_path: Path, family: str) -> None:
    stored = read_folder(DATA / family)
    file = converted(DATA / family, tmp_path / "model.gguf")
    kind = "f16" if family == "llama" else "bf16"
    assert file.metadata["general.file_type"] == {"f16": 1, "bf16": 32}[kind]
    for name, tensor in file.tensors.items():
        assert tensor.type.name == ("f32" if len(tensor.shape) == 1 or "gate_inp" in name else kind)
    prefix = "language_model." if family == "gemma3-vision" else ""
    for name, source in {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.1.attn_v.weight": "model.layers.1.self_attn.v_proj.weight",
        "blk.1.attn_output.weight": "model.layers.1.self_attn.o_proj.weight",
    }.items():
        assert bytes(file.data(name)) == stored[prefix + source][2]
    with Engine(tmp_path / "model.gguf", EXACT) as engine:
        assert np.isfinite(engine.decode([5, 6, 7], 0)).all()


def test_rows_of_queries_and_keys_take_turns(tmp_path: Path) -> None:
    stored = read_folder(DATA / "llama3")
    file = converted(DATA / "llama3", tmp_path / "model.gguf")
    for name, source, heads in (("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)):
        rows = np.frombuffer(stored[f"model.layers.0.self_attn.{source}.weight"][2], "<u2").reshape(heads, 16, -1)
        result = np.frombuffer(file.data(f"blk.0.{name}.weight"), "<u2").reshape(heads, 16, -1)
        for i in range(8):
            assert (result[:, 2 * i] == rows[:, i]).all()
            assert (result[:, 2 * i + 1] == rows[:, i + 8]).all()


def test_experts_are_stacked_from_either_layout(tmp_path: Path) -> None:
    stored = read_folder(DATA / "qwen3moe")
    file = converted(DATA / "qwen3moe", tmp_path / "model.gguf")
    for part in ("gate", "up", "down"):
        alone = [stored[f"model.layers.1.mlp.experts.{e}.{part}_proj.weight"][2] for e in range(4)]
        assert bytes(file.data(f"blk.1.ffn_{part}_exps.weight")) == b"".join(alone)
    folder = copy("qwen3moe", tmp_path)

    def stack(tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
        for layer in range(2):
            base = f"model.layers.{layer}.mlp.experts"
            both, down = b"", b""
            for e in range(4):
                both += tensors.pop(f"{base}.{e}.gate_proj.weight")[2] + tensors.pop(f"{base}.{e}.up_proj.weight")[2]
                down += tensors.pop(f"{base}.{e}.down_proj.weight")[2]
            tensors[f"{base}.gate_up_proj"] = "BF16", (4, 32, 32), both
            tensors[f"{base}.down_proj"] = "BF16", (4, 32, 16), down

    change_tensors(folder, stack)
    other = converted(folder, tmp_path / "stacked.gguf")
    assert list(other.tensors) == list(file.tensors)
    assert all(bytes(other.data(name)) == bytes(file.data(name)) for name in file.tensors)


@pytest.mark.parametrize("stored", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("target", ["f32", "f16", "bf16"])
def test_every_type_becomes_every_other(tmp_path: Path, stored: str, target: str) -> None:
    folder = copy("qwen3", tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    provided = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
    provided[0, :6] = 0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 6e-8, -3e4  # ties of both roundings, a subnormal half

    def put(tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
        raw = {
            "F32": provided.tobytes(),
            "F16": provided.astype("<f2").tobytes(),
            "BF16": gguf.quants.quantize(provided, gguf.GGMLQuantizationType.BF16).tobytes(),
        }[stored]
        tensors[name] = stored, (32, 32), raw

    change_tensors(folder, put)
    file = converted(folder, tmp_path / "model.gguf", target)
    need = gguf.quants.quantize(floats(read_folder(folder)[name]), gguf.GGMLQuantizationType[target.upper()])
    assert bytes(file.data("blk.0.ffn_up.weight")) == need.tobytes()


def test_nan_and_infinity_stay_what_they_are(tmp_path: Path) -> None:
    folder = copy("qwen3", tmp_path)
    provided = np.zeros((32, 32), np.float32)
    provided.view(np.uint32)[0, :4] = 0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000

    def put(tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"] = "F32", (32, 32), provided.tobytes()

    change_tensors(folder, put)
    for kind in ("f16", "bf16"):
        file = converted(folder, tmp_path / "model.gguf", kind)
        raw = np.frombuffer(file.data("blk.0.ffn_up.weight"), "<u2")[:4]
        result = raw.view("<f2").astype(np.float32) if kind == "f16" else (raw.astype(np.uint32) << 16).view(np.float32)
        assert np.isnan(result[:2]).all()
        assert result[2:].tolist() == [np.inf, -np.inf]


def test_special_tokens_and_what_is_put_around_a_text(tmp_path: Path) -> None:
    def read_back(family: str) -> dict[str, object]:
        meta = converted(DATA / family, tmp_path / f"{family}.gguf").metadata
        return {key.removeprefix("tokenizer.ggml."): meta[key] for key in meta if "token_id" in key or "add_" in key}

    ends = json.loads((DATA / "qwen3" / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in ends}
    assert read_back("qwen3") == {
        "eos_token_id": ids["<|im_end|>"], "eot_token_id": ids["<|im_end|>"], "padding_token_id": ids["<|endoftext|>"],
        "add_bos_token": False, "add_eos_token": False,
    }  # fmt: skip
    assert read_back("gemma") == {
        "bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "padding_token_id": 0, "eot_token_id": 5,
        "add_bos_token": True, "add_eos_token": False, "add_space_prefix": False,
    }  # fmt: skip
    assert read_back("llama")["add_space_prefix"] is True


@pytest.mark.parametrize(
    ("number", "expected"), [(7, 7), ([7, 9], 7), ([9, 7], 9), ([], None), ([10**6], None), (True, None)]
)
def test_special_token_that_only_config_json_has_is_its_first_number(
    tmp_path: Path, number: object, expected: int | None
) -> None:
    folder = copy("qwen3", tmp_path)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).exists():
            edit(folder / name, lambda settings: settings.pop("eos_token", None))
    edit(folder / "config.json", lambda config: config.update(eos_token_id=number))
    meta = converted(folder, tmp_path / "model.gguf").metadata
    assert meta.get("tokenizer.ggml.eos_token_id") == expected


@pytest.mark.parametrize("newer", [None, "<|im_end|>", {"content": "<|im_end|>"}, "of no token"])
@pytest.mark.parametrize("older", [None, "<|endoftext|>", {"content": "<|endoftext|>"}])
def test_special_token_of_the_newer_file_comes_first(tmp_path: Path, newer: object, older: object) -> None:
    folder = copy("qwen3", tmp_path)
    edit(folder / "config.json", lambda config: config.pop("eos_token_id", None))
    edit(folder / "tokenizer_config.json", lambda settings: settings.update(eos_token=newer))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": older}))
    meta = converted(folder, tmp_path / "model.gguf").metadata
    tokens = meta["tokenizer.ggml.tokens"]
    expected = "<|im_end|>" if newer not in (None, "of no token") else older and "<|endoftext|>"
    number = meta.get("tokenizer.ggml.eos_token_id")
    assert (None if number is None else tokens[number]) == expected  # type: ignore[index]


@pytest.mark.parametrize("missing", ["tokenizer.model", "tokenizer.json"])
def test_scores_come_from_either_file(tmp_path: Path, missing: str) -> None:
    folder = copy("gemma", tmp_path)
    (folder / missing).unlink()
    converted(folder, tmp_path / "model.gguf")
    with Engine(tmp_path / "model.gguf", EXACT) as engine:
        for text, tokens in json.loads((folder / "expected.json").read_text())["texts"]:
            assert engine.model.tokenize(text, add_special=True, parse_special=True) == tokens, text


def test_a_vocabulary_is_filled_up_and_cut(tmp_path: Path) -> None:
    file = converted(DATA / "qwen3", tmp_path / "model.gguf")
    tokens = list(file.metadata["tokenizer.ggml.tokens"])  # type: ignore[call-overload]
    assert len(tokens) == 336
    assert tokens[-1] == "[PAD335]"
    assert list(file.metadata["tokenizer.ggml.token_type"])[-1] == 5  # type: ignore[call-overload]
    folder = copy("gemma2", tmp_path)
    edit(folder / "tokenizer.json", lambda t: t["added_tokens"].append({"id": 336, "content": "<image>"}))
    tokens = list(converted(folder, tmp_path / "model.gguf").metadata["tokenizer.ggml.tokens"])  # type: ignore[call-overload]
    assert len(tokens) == 336
    assert "<image>" not in tokens


@pytest.mark.parametrize("model", ["llama", "gpt2"])
@pytest.mark.parametrize("n_vocab", [2, 3, 4, 6])
def test_each_row_of_a_model_has_a_token_a_type_and_a_score(model: str, n_vocab: int) -> None:
    scores = [0.0, -1.0, -2.0, -3.0] if model == "llama" else []
    vocabulary = Vocabulary(model, "default", list("abcd"), [NORMAL] * 4, scores, [], space_prefix=False)
    vocabulary.fit({i: AddedToken(f"<{i}>", special=False) for i in (2, 3, 5)}, n_vocab)
    assert len(vocabulary.tokens) == len(vocabulary.types) == n_vocab
    assert len(vocabulary.scores) == (n_vocab if model == "llama" else 0)
    assert vocabulary.tokens[:2] == ["a", "b"]


def test_added_tokens_are_found_in_three_files(tmp_path: Path) -> None:
    folder = copy("llama", tmp_path)
    (folder / "added_tokens.json").write_text(json.dumps({"<one>": 331, "<|two|>": 332, "<three>": 333}))
    decoder = {"333": {"content": "<four>", "special": False}, "334": {"content": "<five>", "special": True}}
    edit(folder / "tokenizer_config.json", lambda settings: settings.update(added_tokens_decoder=decoder))
    meta = converted(folder, tmp_path / "model.gguf").metadata
    tokens, types = (list(meta[f"tokenizer.ggml.{key}"])[331:335] for key in ("tokens", "token_type"))  # type: ignore[call-overload]
    assert tokens == ["<one>", "<|two|>", "<four>", "<five>"]
    assert types == [4, 3, 4, 3]  # user-defined or control; <|two|> looks like one
    with Engine(tmp_path / "model.gguf", EXACT) as engine:
        assert engine.model.tokenize("a<four>", add_special=False, parse_special=False)[-1] == 333


@pytest.mark.parametrize("family", ["gemma", "mistral", "mistral-nemo"])  # the text does not show which are special
def test_older_file_that_repeats_added_tokens_changes_no_token(tmp_path: Path, family: str) -> None:
    folder = copy(family, tmp_path)

    def read_back() -> list[object]:
        meta = converted(folder, tmp_path / "model.gguf").metadata
        return [list(meta[f"tokenizer.ggml.{key}"]) for key in ("tokens", "token_type")]  # type: ignore[call-overload]

    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    assert any(token["special"] for token in added)
    before = read_back()
    (folder / "added_tokens.json").write_text(json.dumps({token["content"]: token["id"] for token in added}))
    assert read_back() == before


def test_the_chat_template_is_found_wherever_it_is(tmp_path: Path) -> None:
    folder = copy("llama", tmp_path)

    def read_back() -> object:
        return converted(folder, tmp_path / "model.gguf").metadata.get("tokenizer.chat_template")

    several = [{"name": "tools", "template": "{{ 1 }}"}, {"name": "default", "template": "{{ 2 }}"}]
    edit(folder / "tokenizer_config.json", lambda settings: settings.update(chat_template=several))
    assert read_back() == "{{ 2 }}"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ 3 }}"}))
    assert read_back() == "{{ 3 }}"
    (folder / "chat_template.jinja").write_text("{{ 4 }}")
    assert read_back() == "{{ 4 }}"
    for name in ("chat_template.json", "chat_template.jinja"):
        (folder / name).unlink()
    edit(folder / "tokenizer_config.json", lambda settings: settings.pop("chat_template"))
    assert read_back() is None


def test_a_window_that_llama_cpp_lacks_bounds_the_context(tmp_path: Path) -> None:
    for family, values, context in (
        ("mistral", {"sliding_window": 40}, 40),
        ("mistral", {"sliding_window": None}, 128),
        ("mistral", {"max_position_embeddings": 9000}, 9000),
        ("qwen2", {"sliding_window": 40}, 128),
        ("qwen2", {"sliding_window": 40, "use_sliding_window": True}, 40),
    ):
        folder = copy(family, tmp_path / str(values))
        edit(folder / "config.json", lambda config, values=values: config.update(values))  # type: ignore[misc]
        meta = converted(folder, tmp_path / "model.gguf").metadata
        assert meta[f"{meta['general.architecture']}.context_length"] == context


def test_progress_ends_at_the_size_of_the_file(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    n_bytes = convert(DATA / "llama", tmp_path / "model.gguf", lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {total for _, total in seen} == {n_bytes}
    assert 0 <= n_bytes - seen[-1][0] < 32  # what is left is padding


def test_memory_stays_small(tmp_path: Path) -> None:
    # 200 MB of matrices, 67 MB each; a file of zeros takes no room on the disk. The growth is the same for any size.
    folder = copy("mistral", tmp_path)
    code = f"""
import json, struct
from pathlib import Path
import numpy
from devices.probe import peak_rss
from quant.checkpoint.convert import convert
folder = Path({str(folder)!r})
config = json.loads((folder / "config.json").read_text())
config |= {{"num_hidden_layers": 1, "hidden_size": 1024, "intermediate_size": 32768, "head_dim": 256}}
(folder / "config.json").write_text(json.dumps(config))
layer = {{"input_layernorm": [1024], "post_attention_layernorm": [1024], "self_attn.q_proj": [1024, 1024],
    "self_attn.k_proj": [512, 1024], "self_attn.v_proj": [512, 1024], "self_attn.o_proj": [1024, 1024],
    "mlp.gate_proj": [32768, 1024], "mlp.up_proj": [32768, 1024], "mlp.down_proj": [1024, 32768]}}
shapes = {{"model.layers.0." + name: shape for name, shape in layer.items()}}
shapes |= {{"model.norm": [1024], "model.embed_tokens": [336, 1024]}}
header, at = {{}}, 0
for name, shape in shapes.items():
    end = at + 2 * numpy.prod(shape).item()
    header[name + ".weight"] = {{"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}}
    at = end
text = json.dumps(header).encode()
with (folder / "model.safetensors").open("wb") as file:
    file.write(struct.pack("<Q", len(text)) + text)
    file.truncate(8 + len(text) + at)
before = peak_rss()
for kind in (None, "f16"):
    n_bytes = convert(folder, Path({str(tmp_path / "big.gguf")!r}), None, kind)
    assert n_bytes > 200_000_000, n_bytes
grown = peak_rss() - before
assert grown < 40_000_000, grown
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
