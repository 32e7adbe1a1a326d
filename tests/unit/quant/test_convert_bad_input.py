"""Test folders that cannot be converted: one line with the reason, nothing written, and the source unchanged."""

import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quant.checkpoint.checkpoint import MAX_JSON_BYTES
from quant.checkpoint.convert import convert
from quant.errors import ModelFileError, UnknownTypeError
from tests.support import ROOT
from tests.support.checkpoints import DATA, Raw, change_tensors, copy, edit, read_safetensors, write_safetensors

UP = "model.layers.0.mlp.up_proj.weight"


def state(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def refused(folder: Path, message: str, **how: Any) -> None:
    """Not converted, with this in the message; no file is left."""
    before = state(folder) if folder.is_dir() else {}
    out = folder.parent / "out" / "model.gguf"
    out.parent.mkdir(exist_ok=True)
    with pytest.raises(ModelFileError, match=message) as caught:
        convert(folder, out, **how)
    assert "\n" not in str(caught.value)
    assert list(out.parent.iterdir()) == []
    assert before == (state(folder) if folder.is_dir() else {})


def test_not_a_folder(tmp_path: Path) -> None:
    refused(tmp_path / "none", "not a folder")
    (tmp_path / "file").touch()
    refused(tmp_path / "file", "not a folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no config.json")
    (tmp_path / "empty" / "config.json").write_text("{}")
    refused(tmp_path / "empty", "neither model.safetensors nor model.safetensors.index.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "config.json: not valid JSON"),
        (b"{", "config.json: not valid JSON"),
        (b"[]", "it needs a JSON object, but has a list"),
        (b'{"a": 1, "a": 2}', "a key occurs twice"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b"[" * 200_000, "not valid JSON"),
        (b"{}", "no architecture cannot be converted; supported are LlamaForCausalLM"),
        (b'{"architectures": ["Phi3ForCausalLM"]}', "'Phi3ForCausalLM' cannot be converted; supported are Llama"),
        (b'{"architectures": [{}]}', "cannot be converted"),
        (b'{"architectures": 1}', "architectures is 1, but must be a list"),
    ],
)
def test_broken_config(tmp_path: Path, content: bytes, message: str) -> None:
    folder = copy("llama", tmp_path)
    (folder / "config.json").write_bytes(content)
    refused(folder, message)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", {"hidden_size": None}, "hidden_size is missing, but must be a whole number from 1 to 1048576"),
        ("llama", {"hidden_size": 32.0}, "hidden_size is 32.0"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers is True"),
        ("llama", {"num_hidden_layers": 10**30}, "from 1 to 512"),
        ("llama", {"num_hidden_layers": 3}, "'model.layers.2.input_layernorm.weight' is missing"),
        ("llama", {"num_hidden_layers": 1}, "'model.layers.1.* has no place in llama"),
        ("llama", {"intermediate_size": 33}, r"shape \[32, 32\], but config.json needs \[33, 32\]"),
        ("llama", {"vocab_size": 337}, r"embed_tokens.*config.json needs \[337, 32\]"),
        ("llama", {"head_dim": 7}, "heads have 7 values, but rotation needs an even number"),
        ("llama", {"num_key_value_heads": 3}, "4 heads do not divide into 3"),
        ("llama", {"head_dim": None, "num_attention_heads": 5}, "hidden_size 32 does not divide into 5 heads"),
        ("llama", {"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', but llama needs silu"),
        ("llama", {"attention_bias": True}, "q_proj.bias' is missing"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, r"quantized \(fp8\); get the original"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantized"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type is 'dynamic', but supported are",
        ),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
        ("llama", {"rope_parameters": 5}, "rope_parameters is 5, but must be an object"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1"),
        ("llama3", {"mlp_bias": False}, "mlp.*bias' has no place in llama"),
        (
            "qwen2",
            {"rope_parameters": {"rope_type": "llama3"}},
            "which llama.cpp supports only for Llama, not for qwen2",
        ),
        ("qwen2", {"head_dim": 16}, "qwen2 needs heads x head_dim = hidden_size, got 64 and 32"),
        ("qwen2", {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', but must be true or false"),
        ("qwen3moe", {"norm_topk_prob": False}, "norm_topk_prob is false"),
        ("qwen3moe", {"mlp_only_layers": [1]}, "some layers have no experts"),
        ("qwen3moe", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, but there are only 4 experts"),
        ("gemma", {"tie_word_embeddings": False}, "gemma has no output matrix"),
        ("gemma2", {"query_pre_attn_scalar": 8}, "query_pre_attn_scalar is 8, but llama.cpp computes with 16"),
        ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping is null"),
        ("gemma2", {"layer_types": ["full_attention"] * 2}, "no layer has sliding_attention"),
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types has 1 entries, but needs 3"),
        ("gemma3", {"use_bidirectional_attention": True}, "only models with causal attention"),
        ("gemma3-vision", {"text_config": 3}, "text_config is 3, but must be an object"),
    ],
)
def test_figures_that_do_not_fit(tmp_path: Path, family: str, change: dict[str, Any], message: str) -> None:
    folder = copy(family, tmp_path)
    edit(folder / "config.json", lambda config: config.update(change))
    refused(folder, message)


def _cut(content: bytes) -> bytes:
    return content[:-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_cut, "download it again"),
        (lambda content: content[:100], "complete safetensors file: download it again"),
        (lambda content: content[:5], "it has 5 bytes and is not safetensors"),
        (lambda content: b"", "it has 0 bytes and is not safetensors"),
        (lambda content: b"\xff" * 8 + content, "its header claims 18446744073709551615 bytes"),
        (lambda content: b"GGUF" + content, "it is not a complete safetensors file"),
    ],
)
def test_a_damaged_file(tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    folder = copy("llama", tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    refused(folder, message)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F16", "shape": [4], "data_offsets": [0, 6]}, "'a' needs 8 bytes but has 6"),
        ({"dtype": "F16", "shape": [4], "data_offsets": [8, 0]}, "'a' needs 8 bytes"),
        ({"dtype": "F16", "shape": [4], "data_offsets": [-8, 0]}, "'a' has no dtype, shape and data_offsets"),
        ({"dtype": "F16", "shape": [4], "data_offsets": [4, 12]}, "tensors 'a' and 'b' overlap"),
        ({"dtype": "F16", "shape": [2.0], "data_offsets": [0, 4]}, "'a' has no dtype"),
        ({"dtype": "F16", "shape": [2**61, 4], "data_offsets": [0, 8]}, "'a' needs 18446744073709551616 bytes"),
        ({"dtype": "F16", "shape": [4], "data_offsets": [1 << 40, (1 << 40) + 8]}, "download it again"),
        ({"dtype": "F16", "shape": [1] * 9, "data_offsets": [0, 2]}, "'a' has no dtype"),
        ({"dtype": 3, "shape": [4], "data_offsets": [0, 8]}, "'a' has no dtype"),
        (None, "'a' has no dtype"),
    ],
)
def test_a_header_that_lies(tmp_path: Path, entry: Any, message: str) -> None:
    folder = copy("llama", tmp_path)
    other = {"dtype": "F16", "shape": [4], "data_offsets": [8, 16]}
    text = json.dumps({"a": entry, "b": other}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    refused(folder, message)


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        (UP, ("F8_E4M3", (32, 32), bytes(1024)), "is stored as F8_E4M3, but must be BF16, F16 or F32"),
        (UP, ("NEW", (32, 32), bytes(9)), "is stored as NEW"),
        ("model.layers.0.mlp.up_proj.qweight", ("I32", (4, 32), bytes(512)), "qweight' has no place in qwen3"),
        (UP, ("F32", (32, 32), struct.pack("<f", 1e5) * 1024), "beyond the range of f16; convert to bf16 or f32"),
    ],
)
def test_tensors_that_cannot_be_converted(tmp_path: Path, name: str, raw: Raw, message: str) -> None:
    folder = copy("qwen3", tmp_path)
    change_tensors(folder, lambda tensors: tensors.__setitem__(name, raw))
    refused(folder, message, type_name="f16")


# Several files.


def test_files_of_an_index(tmp_path: Path) -> None:
    folder = copy("llama3", tmp_path)
    index = folder / "model.safetensors.index.json"
    first, second = sorted(folder.glob("model-*.safetensors"))
    names = json.loads(index.read_text())["weight_map"]

    def renamed(name: Any) -> None:
        index.write_text(json.dumps({"weight_map": names | {next(iter(names)): name}}))

    for name in ("../model.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "a.bin", 3, "a\0.safetensors"):
        renamed(name)
        refused(folder, "is not the name of a .safetensors file in this folder")
    renamed("other.safetensors")
    refused(folder, "other.safetensors is missing, but model.safetensors.index.json names it")
    index.write_text(json.dumps({"weight_map": names | {"extra": first.name}}))
    refused(folder, f"{first.name}: it has no tensor 'extra'")
    index.write_text("{}")
    refused(folder, "it has no weight_map")
    index.write_text(json.dumps({"weight_map": names}))
    write_safetensors(second, read_safetensors(second) | dict(list(read_safetensors(first).items())[:1]))
    refused(folder, "is also in")
    second.unlink()
    refused(folder, f"{second.name} is missing")


def test_links_lead_out_of_the_folder_as_in_the_hubs_cache(tmp_path: Path) -> None:
    blobs = copy("llama3", tmp_path)
    snapshot = tmp_path / "models--org--tiny-llama" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    n_bytes = convert(snapshot, tmp_path / "linked.gguf")
    convert(blobs, tmp_path / "direct.gguf")
    linked, direct = (tmp_path / "linked.gguf").read_bytes(), (tmp_path / "direct.gguf").read_bytes()
    assert linked[-n_bytes // 2 :] == direct[-n_bytes // 2 :]
    assert b"tiny-llama" in linked[:500]


def test_what_is_no_file(tmp_path: Path) -> None:
    folder = copy("llama", tmp_path)
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(ModelFileError, match="not a regular file"):
        convert(folder, tmp_path / "model.gguf")
    folder = copy("gemma", tmp_path)
    with (folder / "tokenizer.json").open("r+b") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(ModelFileError, match="more than the limit of 209715200"):
        convert(folder, tmp_path / "model.gguf")


# Vocabularies.


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("qwen3", lambda t: t["pre_tokenizer"]["pretokenizers"].pop(0), "its pre_tokenizer is not known"),
        ("qwen3", lambda t: t["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="a+"), r"not known \(a\+"),
        ("qwen3", lambda t: t["model"].update(type="Unigram"), "its model is 'Unigram', but llama.cpp needs BPE"),
        ("qwen3", lambda t: t["model"].update(merges=[]), "it has no merges"),
        ("qwen3", lambda t: t["model"].update(merges=["a b c"]), "merge 'a b c' is not a pair"),
        ("qwen3", lambda t: t["model"].update(merges=[["a", 1]]), "is not a pair"),
        ("qwen3", lambda t: t["model"]["vocab"].update(x="1"), "token 'x' has the id '1'"),
        ("qwen3", lambda t: t["model"]["vocab"].update(x=400), "token 400 is beyond config.json's vocab_size, 336"),
        ("qwen3", lambda t: t["model"]["vocab"].update({"\ud800": 335}), "is half a character"),
        ("qwen3", lambda t: t["added_tokens"].append({"id": 335, "content": "a"}), "2 tokens 'a'"),
        ("qwen3", lambda t: t["added_tokens"].append({"id": 335, "content": "a\0b"}), "2 tokens 'a'"),
        ("qwen3", lambda t: t["added_tokens"].append({"id": -1, "content": "q"}), "-1 is not a token id"),
        ("qwen3", lambda t: t["added_tokens"].append("q"), "an added token is 'q'"),
        ("qwen3", lambda t: t.update(added_tokens=3), "it needs a list"),
        ("qwen3", lambda t: t.update(model=3), "its model is None"),
        ("gemma2", lambda t: t["model"].update(byte_fallback=False), "neither byte-level BPE nor"),
        ("gemma2", lambda t: t["model"]["vocab"].pop("<0x41>"), "no token <0x41>"),
        ("gemma2", lambda t: t.update(pre_tokenizer={"type": "Whitespace"}), "not that of a sentencepiece model"),
    ],
)
def test_tokenizers_that_llama_cpp_does_not_have(
    tmp_path: Path, family: str, change: Callable[[Any], Any], message: str
) -> None:
    folder = copy(family, tmp_path)
    edit(folder / "tokenizer.json", change)
    refused(folder, message)


def test_sentencepiece_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sentencepiece import sentencepiece_model_pb2

    folder = copy("llama", tmp_path)
    path = folder / "tokenizer.model"
    raw = path.read_bytes()
    path.write_bytes(raw[:-1])
    refused(folder, "tokenizer.model: ")
    path.write_bytes(b"")
    refused(folder, "it has no pieces")
    path.write_bytes(raw.replace(b"<unk>", b"<\xffnk>", 1))
    refused(folder, "tokenizer.model: b'<.xffnk>' is not a string")
    proto = sentencepiece_model_pb2.ModelProto.FromString(raw)
    proto.trainer_spec.model_type = 1
    path.write_bytes(proto.SerializeToString())
    refused(folder, "its type is 1, but llama.cpp's tokenizer needs BPE")
    edit(folder / "tokenizer_config.json", lambda settings: settings.update(bos_token=None))
    path.write_bytes(raw)
    edit(folder / "config.json", lambda config: config.update(bos_token_id=None))
    refused(folder, "every text gets a bos token, but no file states which")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    refused(folder, r'pip install "edge-runtime\[quantize\]"')
    path.unlink()
    refused(folder, "neither tokenizer.json nor tokenizer.model")


# Writing.


def test_types_and_places_that_are_refused(tmp_path: Path) -> None:
    folder = copy("llama", tmp_path)
    before = state(folder)
    with pytest.raises(UnknownTypeError, match="converted to f32, f16, bf16, not to 'q4_0'"):
        convert(folder, tmp_path / "model.gguf", None, "q4_0")
    for name in ("model.safetensors", "config.json", "tokenizer.model"):
        with pytest.raises(ModelFileError, match="this is a file of the checkpoint"):
            convert(folder, folder / name)
    with pytest.raises(ModelFileError, match="this is a folder"):
        convert(folder, tmp_path)
    with pytest.raises(FileNotFoundError):
        convert(folder, tmp_path / "none" / "model.gguf")
    assert state(folder) == before
    convert(folder, folder / "model.gguf")
    convert(folder, folder / "model.gguf")  # over the one before
    assert state(folder).keys() - before.keys() == {"model.gguf"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interruption_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def interrupt(done: int, total: int) -> None:
        if 2 * done > total:
            raise error

    with pytest.raises(error):
        convert(DATA / "llama", tmp_path / "model.gguf", interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "model.gguf"
    out.write_bytes(b"the one before")
    code = f"""
import errno, resource, signal
from pathlib import Path
from quant.checkpoint.convert import convert
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
try:
    convert(Path({str(DATA / "llama")!r}), Path({str(out)!r}))
except OSError as exc:
    assert exc.errno == errno.EFBIG, exc
else:
    raise SystemExit("it was written")
"""
    subprocess.run([sys.executable, "-B", "-c", code], cwd=ROOT, check=True, timeout=60)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    assert out.read_bytes() == b"the one before"
