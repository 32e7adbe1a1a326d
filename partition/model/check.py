"""Check for model files on which llama.cpp aborts or crashes instead of returning an error.

`GgufFile.open` has checked the container. This module compares the metadata with each other and with the tensors. The
rules are the assertions of llama.cpp's loader and graph builders. They were found by loading thousands of damaged files
(`tests/unit/quant/test_bad_files.py`). Files that llama.cpp refuses with an error are not checked here, in particular
files of unknown architectures.
"""

from __future__ import annotations

import math

from partition.architectures.table import ASSERTED
from partition.model.check_architecture import check_architecture
from partition.model.metadata import Metadata
from partition.model.model import ModelShape, block_of, vocabulary_size
from quant.gguf.elastic import elastic_sizes
from quant.gguf.file import GgufFile, TensorInfo
from quant.gguf.header import GgufArray

_MAX_EXPERTS = 1024  # limit of llama.cpp
_GATES = 4  # number of functions that score experts: softmax, sigmoid, softmax of the chosen, square root of softplus
_MAX_WIDTH = 1 << 20  # limit of the width of a hidden state; eight times the widest known
_TENSOR_ALIGNMENT = 32  # ggml asserts this for mapped buffers
_ROPE_SCALING = ("none", "linear", "yarn", "longrope")

# Types that files may contain but that no matrix product of ggml accepts.
_NOT_WEIGHTS = frozenset(("i8", "i16", "i32", "i64", "f64", "q8_1", "q8_k"))
_BYTE = 6  # token type of a token for a single byte
_NO_TOKEN = 2**32 - 1  # -1, for "no token", as u32
_ARRAYS = {"tokens": "arr[str]", "scores": "arr[f32]", "token_type": "arr[i32]", "merges": "arr[str]"}


def check_loadable(file: GgufFile) -> ModelShape:
    """Return the shape of the model in `file`, which llama.cpp can load or refuse.

    Raises ModelFileError if loading the file would crash llama.cpp.
    """
    meta = Metadata(file)
    if not file.tensors:
        raise meta.error("it has no tensors, only metadata; get the file with the weights")
    if meta.architecture == "clip":
        raise meta.error(
            "this is a projector of pictures or sounds (mmproj): use it with --mmproj, and give the language model's"
            " file"
        )
    shape = ModelShape.from_gguf(file)
    _check_layers(meta)
    _check_experts(meta, shape)
    _check_heads(meta, shape)
    _check_numbers(meta)
    check_vocabulary(meta)
    for size in elastic_sizes(file):
        for tensor in size.tensors.values():
            _check_tensor(meta, tensor)
    check_architecture(meta, shape)
    return shape


def _check_layers(meta: Metadata) -> None:
    meta.count("embedding_length", least=1, most=_MAX_WIDTH)
    n_all = meta.count("block_count")
    blocks = {b for name in meta.file.tensors if (b := block_of(name)) is not None}
    if blocks and max(blocks) >= n_all:
        raise meta.error(
            f"{meta.key('block_count')} is {n_all}, but there is a tensor of blk.{max(blocks)}; "
            f"expected blk.0 to blk.{n_all - 1}"
        )


def _check_experts(meta: Metadata, shape: ModelShape) -> None:
    count = meta.count("expert_count", 0, most=_MAX_EXPERTS)
    if meta.architecture in ASSERTED and ASSERTED[meta.architecture].one_expert_is_dense and count <= 1:
        return  # llama.cpp reads this as a dense model
    meta.count("expert_gating_func", 1, least=1, most=_GATES)
    used, groups = shape.n_experts_used, meta.count("expert_group_count", 0)
    for layer, used_here in enumerate(meta.per_layer("expert_used_count", meta.count("block_count"), 0)):
        if count and not used_here and f"blk.{layer}.ffn_down_exps.weight" in meta.file.tensors:
            raise meta.error(f"{meta.key('expert_used_count')} is 0 for layer {layer}, which has {count} experts")
    if used > count or (count and not used):
        raise meta.error(
            f"{meta.key('expert_used_count')} is {used} of {count} experts, expected {min(count, 1)} to {count}"
        )
    if groups and groups >= count:
        raise meta.error(f"{meta.key('expert_group_count')} is {groups}, expected less than the {count} experts")
    if groups > 1:
        meta.count("expert_group_used_count", least=1, most=groups - 1)
        if count % groups:
            raise meta.error(f"{count} experts do not divide into {groups} groups")


def _check_heads(meta: Metadata, shape: ModelShape) -> None:
    for layer, (heads, heads_kv) in enumerate(zip(shape.n_heads, shape.n_heads_kv, strict=True)):
        if heads_kv and heads % heads_kv:
            raise meta.error(f"layer {layer} has {heads} heads, not a multiple of its {heads_kv} key-value heads")
    if not shape.n_heads[0]:
        return
    if "attention.key_length" not in meta and shape.n_embd % shape.n_heads[0]:
        raise meta.error(f"embedding_length {shape.n_embd} does not divide into {shape.n_heads[0]} heads")
    for suffix in ("", "_swa"):
        head_k = meta.count("attention.key_length" + suffix, shape.head_k, least=1, most=_MAX_WIDTH)
        meta.count("attention.value_length" + suffix, shape.head_v, least=1, most=_MAX_WIDTH)
        turned = meta.count("rope.dimension_count" + suffix, 0)
        if turned > head_k or turned % 2:
            raise meta.error(
                f"{meta.key('rope.dimension_count' + suffix)} is {turned}, expected an even number up to {head_k}"
            )


def _check_numbers(meta: Metadata) -> None:
    for name in ("layer_norm_rms_epsilon", "layer_norm_epsilon", "group_norm_epsilon"):
        value = meta.file.metadata.get(meta.key("attention." + name), 0.0)
        if isinstance(value, float) and not 0 <= value < math.inf:
            raise meta.error(f"{meta.key('attention.' + name)} is {value}, expected a small number above 0")
    sections = meta.file.metadata.get(meta.key("rope.dimension_sections"))
    if isinstance(sections, GgufArray) and not any(sections[:3]):
        raise meta.error(f"{meta.key('rope.dimension_sections')} is {list(sections[:4])}, expected one above 0")
    scaling = meta.file.metadata.get(meta.key("rope.scaling.type"), "none")
    if isinstance(scaling, str) and scaling not in _ROPE_SCALING:
        raise meta.error(f"{meta.key('rope.scaling.type')} is {scaling[:80]!r}, known are {', '.join(_ROPE_SCALING)}")


def _check_tensor(meta: Metadata, tensor: TensorInfo) -> None:
    if tensor.offset % _TENSOR_ALIGNMENT:
        raise meta.error(
            f"tensor {tensor.name!r} starts at byte {tensor.offset}, not a multiple of {_TENSOR_ALIGNMENT}; "
            "write the file again with general.alignment = 32"
        )
    name, kind = tensor.name, tensor.type.name
    is_vector = len(tensor.shape) == 1 and kind not in ("i32", "i64")  # integer tensors are tables
    if kind != "f32" and (is_vector or "norm" in name or name.endswith((".bias", ".scale"))):
        raise meta.error(f"tensor {name!r} is {kind}, llama.cpp needs f32 there; convert the model again")
    # "tid2eid" is a table from tokens to experts.
    if kind in _NOT_WEIGHTS and name.endswith(".weight") and "tid2eid" not in name:
        raise meta.error(f"tensor {name!r} is {kind}, which llama.cpp cannot multiply; convert the model again")


def check_vocabulary(meta: Metadata) -> None:
    """Raise ModelFileError if the tokenizer's metadata would crash llama.cpp during loading or use."""
    model = meta.file.metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str):
        raise meta.error("tokenizer.ggml.model is missing or not a string; convert the model again")
    _check_arrays(meta)
    n_vocab = vocabulary_size(meta)
    for name in ("bos", "eos"):  # other special tokens, such as padding, are out of range in files that work
        value = meta.file.metadata.get(f"tokenizer.ggml.{name}_token_id", 0)
        if isinstance(value, int) and value >= n_vocab and value != _NO_TOKEN and n_vocab:
            raise meta.error(f"tokenizer.ggml.{name}_token_id is {value}, but there are {n_vocab} tokens")
    tokens = meta.file.metadata.get("tokenizer.ggml.tokens")
    if model in ("none", "no_vocab") or not isinstance(tokens, GgufArray):
        return
    _check_tokens(meta, model, tokens)


def _check_arrays(meta: Metadata) -> None:
    """Check arrays that llama.cpp reads from the address of their first item, one item for each token."""
    metadata = meta.file.metadata
    n_tokens = vocabulary_size(meta)
    for name, needed in _ARRAYS.items():
        key = f"tokenizer.ggml.{name}"
        value = metadata.get(key)
        if value is None:
            continue
        if meta.file.value_type(key) != needed:
            raise meta.error(f"{key} is stored as {meta.file.value_type(key)}, expected {needed}")
        if name in ("scores", "token_type") and isinstance(value, GgufArray) and len(value) != n_tokens:
            raise meta.error(f"{key} has {len(value)} items for {n_tokens} tokens; convert the model again")
    charsmap = "tokenizer.ggml.precompiled_charsmap"
    if charsmap in metadata and meta.file.value_type(charsmap) not in ("arr[i8]", "arr[u8]"):
        raise meta.error(f"{charsmap} is stored as {meta.file.value_type(charsmap)}, expected bytes")


def _check_tokens(meta: Metadata, model: str, tokens: GgufArray) -> None:
    seen: set[bytes] = set()
    for text in tokens.raw_strings():
        if text in seen and text:  # llama.cpp gives empty tokens unique names
            raise meta.error(f"token {text.decode('utf-8', 'replace')!r} occurs twice; convert the model again")
        seen.add(text)
    types = meta.file.metadata.get("tokenizer.ggml.token_type")
    if model == "bert" and isinstance(types, GgufArray) and _BYTE in types[:]:
        raise meta.error("tokenizer.ggml.token_type marks byte tokens, which a bert tokenizer does not have")
    if model == "llama":
        missing = [b for b in range(256) if b"<0x%02X>" % b not in seen and bytes([b]) not in seen]
        if missing:
            raise meta.error(f"there is no token for {len(missing)} of the 256 bytes; convert the model again")
