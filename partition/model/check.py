"""Check of model files on which llama.cpp aborts or crashes instead of returning an error.

The container itself was checked by `GgufFile.open`. Here the metadata are compared with each other and with the
tensors. The rules are the assertions of llama.cpp's loader and graph builders, found by loading thousands of damaged
files (`tests/unit/quant/test_bad_files.py`). What llama.cpp refuses cleanly is left to it, above all architectures not
known here.
"""

import math

from partition.architectures.table import ASSERTED
from partition.model.check_architecture import check_architecture
from partition.model.check_vocabulary import check_vocabulary
from partition.model.metadata import Metadata
from partition.model.model import ModelShape, block_of
from quant.gguf.elastic import elastic_sizes
from quant.gguf.file import GgufFile, TensorInfo
from quant.gguf.header import GgufArray

_MAX_EXPERTS = 1024  # of llama.cpp
_GATES = 4  # functions that score experts: softmax, sigmoid, softmax of the chosen, square root of softplus
_MAX_WIDTH = 1 << 20  # of a hidden state; eight times the widest known
_TENSOR_ALIGNMENT = 32  # ggml asserts it for buffers it maps
_ROPE_SCALING = ("none", "linear", "yarn", "longrope")

# Types that are stored in files but that no matrix product of ggml takes.
_NOT_WEIGHTS = frozenset(("i8", "i16", "i32", "i64", "f64", "q8_1", "q8_k"))


def check_loadable(file: GgufFile) -> None:
    """Return where llama.cpp can be given `file`: it runs, or is refused with an error. ModelFileError otherwise."""
    meta = Metadata(file)
    if not file.tensors:
        raise meta.error("it has no tensors, only metadata; get the file with the weights")
    if meta.architecture == "clip":
        raise meta.error("this is the image part of a model (mmproj); give the language model's file")
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


def _check_layers(meta: Metadata) -> None:
    meta.count("embedding_length", least=1, most=_MAX_WIDTH)
    n_all = meta.count("block_count")
    blocks = {b for name in meta.file.tensors if (b := block_of(name)) is not None}
    if blocks and max(blocks) >= n_all:
        raise meta.error(
            f"{meta.key('block_count')} is {n_all}, but there is a tensor of blk.{max(blocks)}; "
            f"needed are blk.0 to blk.{n_all - 1}"
        )


def _check_experts(meta: Metadata, shape: ModelShape) -> None:
    count = meta.count("expert_count", 0, most=_MAX_EXPERTS)
    if meta.architecture in ASSERTED and ASSERTED[meta.architecture].one_expert_is_dense and count <= 1:
        return  # llama.cpp reads that as a dense model
    meta.count("expert_gating_func", 1, least=1, most=_GATES)
    used, groups = shape.n_experts_used, meta.count("expert_group_count", 0)
    for layer, used_here in enumerate(meta.per_layer("expert_used_count", meta.count("block_count"), 0)):
        if count and not used_here and f"blk.{layer}.ffn_down_exps.weight" in meta.file.tensors:
            raise meta.error(f"{meta.key('expert_used_count')} is 0 for layer {layer}, which has {count} experts")
    if used > count or (count and not used):
        raise meta.error(
            f"{meta.key('expert_used_count')} is {used} of {count} experts, needed is {min(count, 1)} to {count}"
        )
    if groups and groups >= count:
        raise meta.error(f"{meta.key('expert_group_count')} is {groups}, needed is less than the {count} experts")
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
            raise meta.error(f"{meta.key('rope.dimension_count' + suffix)} is {turned}, needed: even, up to {head_k}")


def _check_numbers(meta: Metadata) -> None:
    for name in ("layer_norm_rms_epsilon", "layer_norm_epsilon", "group_norm_epsilon"):
        value = meta.file.metadata.get(meta.key("attention." + name), 0.0)
        if isinstance(value, float) and not 0 <= value < math.inf:
            raise meta.error(f"{meta.key('attention.' + name)} is {value}, needed is a small number above 0")
    sections = meta.file.metadata.get(meta.key("rope.dimension_sections"))
    if isinstance(sections, GgufArray) and not any(sections[:3]):
        raise meta.error(f"{meta.key('rope.dimension_sections')} is {list(sections[:4])}, needed is one above 0")
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
    is_vector = len(tensor.shape) == 1 and kind not in ("i32", "i64")  # those are tables of numbers
    if kind != "f32" and (is_vector or "norm" in name or name.endswith((".bias", ".scale"))):
        raise meta.error(f"tensor {name!r} is {kind}, llama.cpp needs f32 there; convert the model again")
    if kind in _NOT_WEIGHTS and name.endswith(".weight") and "tid2eid" not in name:  # a table from tokens to experts
        raise meta.error(f"tensor {name!r} is {kind}, which llama.cpp cannot multiply; convert the model again")
